"""The Python API: light to import, checked as the command line, and the page's examples."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.bundles import Tiny
from support.runs import here
from support.text_bundle import text_bundle, text_checkpoint

import ondevice
from ondevice.api.process import hearing
from ondevice.cli.main import main
from runtime.bundle.store import Bundle
from runtime.config.base import load
from runtime.core.errors import BudgetError, BundleError, UsageError
from runtime.core.notes import warning
from runtime.machine.backend import TOO_LATE, prepare

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "python.md"
EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
HEAVY = (
    "mlx",
    "numpy",
    "msgspec",
    "tqdm",
    "matplotlib",
    "transformers",
    "tokenizers",
    "runtime.engine",
)
ROWS = [
    ("lamp on ->", " yes"),
    ("fan off ->", " no"),
    ("fan on ->", " yes"),
    ("lamp off ->", " no"),
]


@pytest.fixture(autouse=True)
def heap_kept() -> Iterator[None]:
    """Exports have the heap kept otherwise than the tests that follow expect."""
    yield
    prepare()


def fresh(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_importing_it_loads_nothing_heavy() -> None:
    done = fresh(
        "import sys, ondevice\n"
        f"heavy = {HEAVY}\n"
        "print([name for name in heavy if name in sys.modules])\n"
        "assert ondevice.errors.UsageError.exit_code == 2\n"
        "print(set(ondevice.__all__) <= set(dir(ondevice)))\n"
    )
    assert done.stdout.splitlines() == ["[]", "True"], done.stderr


def test_every_public_name_is_there() -> None:
    for name in ondevice.__all__:
        assert getattr(ondevice, name) is not None
    with pytest.raises(AttributeError, match="'trian'"):
        _ = ondevice.trian  # type: ignore[attr-defined]
    assert (ROOT / "ondevice" / "py.typed").is_file()


def test_configurations_are_checked_and_in_one_form() -> None:
    source, seq_lens = Path("model"), [16, 32]
    config = ondevice.ExportConfig(source=source, output="b", seq_lens=seq_lens)  # type: ignore[arg-type]
    typed = {"source": "model", "output": "b", "seq_lens": "16,32"}
    assert config == load(ondevice.ExportConfig, None, typed)
    assert (config.source, config.seq_lens) == ("model", (16, 32))
    rate = ondevice.TrainConfig(bundle="b", data="d", learning_rate=1).learning_rate
    assert isinstance(rate, float)
    with pytest.raises(UsageError, match=r"batch_size is 'many'.*\n  steps is 0;"):
        ondevice.TrainConfig(bundle="b", data="d", steps=0, batch_size="many")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint and data, as the page's examples expect it."""
    folder = tmp_path_factory.mktemp("python")
    text_checkpoint(folder / "my-model", "{{ messages[0].content }}")
    lines = [json.dumps({"prompt": a, "completion": b}) + "\n" for a, b in ROWS * 2]
    (folder / "my-data.jsonl").write_text("".join(lines))
    return folder


@pytest.mark.usefixtures("rendered_here")
def test_the_page_s_examples_run(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    examples = EXAMPLE.findall(PAGE.read_text())
    assert len(examples) == 6
    names: dict[str, object] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # random weights are a hurt base
        for example in examples:
            exec(compile(example, str(PAGE), "exec"), names)
    told = capsys.readouterr()
    assert told.err == ""
    assert "6 steps, final loss" in told.out
    assert "the smallest that fits is" in told.out
    assert "steps is 0; it must be 1 or more" in told.out
    assert "batch_size is 'many'; it must be a whole number" in told.out
    result = names["result"]
    assert isinstance(result, ondevice.TrainResult)
    found, answer = names["found"], names["answer"]
    assert isinstance(found, ondevice.EvaluationResult)
    assert found.rows == len(ROWS) * 2
    first, second = names["first"], names["second"]
    assert isinstance(first, ondevice.Generation) and isinstance(second, ondevice.Generation)
    assert second.prompt_tokens > 0 and second.text in told.out and "4 messages" in told.out
    written = names["written"]
    assert isinstance(written, ondevice.AdapterResult)
    assert written.lora.rank == 8 and (Path(written.output) / "adapter_model.safetensors").is_file()
    assert "quantization has cost" in told.out and "nats per token" in told.out
    assert isinstance(answer, ondevice.Generation)
    assert json.loads(Path("run/summary.json").read_text())["steps"] == 6


def test_a_run_is_the_command_s(
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same bits as the command's; nothing is printed."""
    bundle = tiny("qwen2")
    options = {"max_seq_length": 16, "steps": 2, "budget": "500MB", "seed": 3, "method": "mezo"}
    steps: list[ondevice.Step] = []
    config = ondevice.TrainConfig(
        bundle=str(bundle.path),
        data="random:5",
        output=str(tmp_path / "ours"),
        **options,  # type: ignore[arg-type]
    )
    result = ondevice.train(config, on_step=steps.append)
    assert capsys.readouterr() == ("", "")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    done = here("train", bundle.path, "--data=random:5", f"--output={tmp_path / 'theirs'}", *flags)
    assert done.returncode == 0, done.stderr
    theirs = (tmp_path / "theirs" / "adapters.safetensors").read_bytes()
    assert (tmp_path / "ours" / "adapters.safetensors").read_bytes() == theirs
    assert [step.number for step in steps] == [1, 2]
    assert sum(step.loss or 0.0 for step in steps) / 2 == result.final_train_loss
    assert result.predicted_peak_bytes <= result.budget_bytes == 500_000_000
    written = json.loads((tmp_path / "ours" / "summary.json").read_text())
    assert msgspec.to_builtins(result, str_keys=True) == written
    assert (result.method, result.steps, result.stopped) == ("mezo", 2, "steps")
    monkeypatch.setenv("HOME", str(tmp_path))
    further = ondevice.resume("~/ours", bundle=bundle.path, steps=np.int64(3))  # type: ignore[arg-type]
    assert further.steps == 3


def test_a_plan_is_the_command_s(tiny: Tiny) -> None:
    bundle = tiny("qwen2")
    found = ondevice.plan(
        ondevice.PlanConfig(bundle=str(bundle.path), max_seq_length=16, budget="500MB")
    )
    done = here("plan", bundle.path, "--max-seq-length=16", "--budget=500MB", "--json")
    theirs = json.loads(done.stdout)
    assert {*found.to_json()} == {*theirs}
    assert (found.bucket, found.kept_layers) == (theirs["bucket"], theirs["kept_layers"])
    assert isinstance(ondevice.open_bundle(bundle.path), Bundle)


def test_errors_are_the_command_s(tiny: Tiny, tmp_path: Path) -> None:
    path = str(tiny("qwen2").path)
    with pytest.raises(TypeError, match="unexpected keyword argument 'iters'"):
        ondevice.TrainConfig(bundle=path, data="random:0", iters=3)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="a source is for compare_with_source"):
        ondevice.evaluate(ondevice.EvalConfig(bundle=path, data="random:0", source="x"))
    with pytest.raises(UsageError, match="give the checkpoint as source"):
        ondevice.compare_with_source(ondevice.EvalConfig(bundle=path, data="random:0"))
    with pytest.raises(BudgetError, match="smallest that fits"):
        ondevice.plan(ondevice.PlanConfig(bundle=path, budget="1MB", max_seq_length=16))
    with pytest.raises(BundleError):
        ondevice.open_bundle(tmp_path)
    with pytest.raises(UsageError, match="no run to resume"):
        ondevice.resume(tmp_path)


@pytest.mark.usefixtures("rendered_here")
def test_a_conversation_is_the_command_s(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = text_bundle(place / "chat", "{% for m in messages %}{{ m.content }}\n{% endfor %}")
    monkeypatch.chdir(place)
    conversation = ondevice.chat(
        ondevice.ChatConfig(bundle="chat/bundle", max_tokens=5, context=64, system="dog")
    )
    with pytest.raises(UsageError, match="is not open"):
        conversation.say("hello")
    of_hub = ondevice.ChatConfig(bundle="owner/name", adapter="owner/name")
    with pytest.raises(BundleError, match=r"owner/name is no .* a model id of the"):
        ondevice.chat(of_hub).__enter__()
    pieces: list[str] = []

    def stop(piece: str) -> None:
        raise ValueError(piece)

    with conversation:
        monkeypatch.chdir(place.parent)  # the first answer opens the bundle
        answers = [conversation.say("hello", on_text=pieces.append), conversation.say("again")]
        with pytest.raises(UsageError, match="begin again"):
            conversation.say("z" * 100)
        assert [one["role"] for one in conversation.messages] == [
            *("system", "user", "assistant", "user", "assistant")
        ]
        with pytest.raises(ValueError):
            conversation.say("c", on_text=stop)
        assert conversation.messages[-1]["role"] == "assistant"
        for misuse in (conversation.reset, lambda: conversation.say("d")):
            with pytest.raises(UsageError, match="is answering"):
                conversation.say("c", on_text=lambda _, misuse=misuse: misuse())
        with pytest.raises(UsageError, match="open already"):
            conversation.__enter__()
        said, elsewhere = conversation.messages, ThreadPoolExecutor(1)
        with pytest.raises(UsageError, match="in the main thread alone"):
            elsewhere.submit(conversation.say, "d").result()
        assert conversation.messages == said and said[-1]["role"] == "assistant"
        conversation.reset()
        assert conversation.messages == ({"role": "system", "content": "dog"},)
    assert "".join(pieces) == answers[0].text and capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nagain\n"))
    words = ["--max-tokens=5", "--context=64", "--system=dog", "--json"]
    assert main(["chat", str(bundle.path), *words]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["text"] for one in told] == [one.text for one in answers]
    assert [one["prompt_tokens"] for one in told] == [one.prompt_tokens for one in answers]


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        ("export_bundle", "ExportConfig"),
        ("plan", "PlanConfig"),
        ("train", "TrainConfig"),
        ("evaluate", "EvalConfig"),
        ("compare_with_source", "EvalConfig"),
        ("generate", "GenerateConfig"),
        ("chat", "ChatConfig"),
        ("adapter", "AdapterConfig"),
        ("fuse", "FuseConfig"),
    ],
)
def test_another_command_s_configuration_is_refused(function: str, kind: str) -> None:
    for config in ({"bundle": "b"}, "b"):
        said = f"config is of type {type(config).__name__}; it must be an ondevice.{kind}$"
        with pytest.raises(UsageError, match=said):
            getattr(ondevice, function)(config)
    if kind == "TrainConfig":
        with pytest.raises(UsageError, match="config is of type PlanConfig"):
            getattr(ondevice, function)(ondevice.PlanConfig(bundle="b"))


def test_other_threads_are_refused(tiny: Tiny) -> None:
    config = ondevice.PlanConfig(bundle=str(tiny("qwen2").path), max_seq_length=16)
    with ThreadPoolExecutor(1) as pool, pytest.raises(UsageError, match="the main thread alone"):
        pool.submit(ondevice.plan, config).result()


FORKED = """
import os, sys
import mlx.core as mx
import ondevice

ondevice.prepare()
if sys.argv[1:]:
    mx.eval(mx.ones(2) + 1)
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
try:
    ondevice.prepare()
    mx.eval(mx.ones(2) + 1)
except ondevice.errors.UsageError as refused:
    os._exit(refused.exit_code)
os._exit(0)
"""


def test_forks_without_the_threads_of_mlx_are_refused() -> None:
    """Waiting for one of those would never end."""
    assert [fresh(FORKED, *words).returncode for words in ([], ["computed"])] == [0, 2]


def test_warnings_are_python_s() -> None:
    heard: list[str] = []
    note = hearing(heard.append)
    with pytest.warns(RuntimeWarning, match="^hot$"):
        note(warning("hot"))
    note("cold")
    note(warning("hot"))  # said once in a call
    note("cold")
    assert heard == ["ondevice: warning: hot", "cold", "cold"]


def test_mlx_that_came_first_is_warned_of() -> None:
    code = (
        "import warnings; warnings.simplefilter('always')\n"
        "{}import ondevice\n"
        "ondevice.prepare(); import mlx.core; ondevice.prepare(keep_heap=False)"
    )
    late = fresh(code.format("import mlx.core as mx\n"))
    assert late.stderr.count(TOO_LATE) == 2
    assert fresh(code.format("")).stderr == ""


USER = """
import ondevice

config = ondevice.TrainConfig(bundle="b", data="d", steps=3, learning_rate=1e-3)
result: ondevice.TrainResult = ondevice.train(config, on_step=lambda step: print(step.loss))
best: int | None = result.best and result.best.step
plan: ondevice.Plan = ondevice.plan(ondevice.PlanConfig(bundle="b", budget="1GB"))
exported = ondevice.export_bundle(ondevice.ExportConfig(source="m", output="b", seq_lens=(16,)))
bits: float = exported.bits_per_weight
held_out = ondevice.EvalConfig(bundle="b", data="d", adapter=config.output)
loss: float | None = ondevice.evaluate(held_out).loss
text: str = ondevice.generate(ondevice.GenerateConfig(bundle="b", prompt="p")).text
with ondevice.chat(ondevice.ChatConfig(bundle="b", context=64)) as conversation:
    said: str = conversation.say("hello").text
peft = ondevice.AdapterConfig(run="r", to="peft", output="p", bundle="b")
rank: int = ondevice.adapter(peft).lora.rank
lost: float = ondevice.compare_with_source(held_out).divergence
ondevice.TrainConfig(bundle="b", data="d", iters=3)
ondevice.TrainConfig(bundle="b", data="d", steps="3")
"""


@pytest.mark.slow
def test_a_user_s_program_is_checked(tmp_path: Path) -> None:
    """mypy --strict finds the two mistakes in the last lines, and nothing else."""
    (tmp_path / "user.py").write_text(USER)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", str(tmp_path / "user.py")],
        capture_output=True,
        text=True,
        env={"PATH": ""},  # as it is installed
        cwd=tmp_path,
    )
    last = len(USER.splitlines())
    wrong = [line for line in done.stdout.splitlines() if line.startswith("user.py:")]
    assert [line.split(":")[1] for line in wrong if ": error:" in line] == [
        f"{last - 1}",
        f"{last}",
    ]
