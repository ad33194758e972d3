"""`ondevice fuse` as a user meets it: what it says and refuses, and what a kill leaves."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors import safe_open
from support.bundles import settings
from support.checkpoints import weights_of, write_folder
from support.files import listing
from support.fusing import saved
from support.models import Rng, Tiny, adapters_of
from support.runs import here, json_of, refuses, struck, succeeds
from support.text_bundle import text_bundle

import ondevice
from export.bundle import export_bundle
from export.sources.families import expected_shapes
from runtime.adapters.fused import digest_of
from runtime.bundle.store import Bundle, open_bundle
from runtime.machine.backend import prepare
from runtime.storage.saves import SLOTS

TENSOR = "model.layers.1.mlp.up_proj"  # when it is written, others have been and more will be
RESULT = {"hf": "out", "gguf": "out.gguf", "bundle": "out"}


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle with a tokenizer."""
    return text_bundle(tmp_path_factory.mktemp("text"), "{{ messages[0]['content'] }}")


@pytest.mark.parametrize("form", ["hf", "gguf", "bundle"])
def test_the_loss_is_measured_beside_the_adapters(
    tiny: Tiny, tmp_path: Path, rng: Rng, form: str
) -> None:
    bundle = tiny("qwen2")
    adapter = saved(adapters_of(bundle, rng), tmp_path / "run")
    output = tmp_path / RESULT[form]
    words = ["--adapter", adapter, "-o", output, "--format", form, "--data", "random:1"]
    found = json_of("fuse", bundle.path, *words, "--max-seq-length", 30, "--eval-rows", 2, by=here)
    evaluated = here(
        *("eval", bundle.path, "--adapter", adapter, "--data", "random:1", "--json"),
        *("--max-seq-length", 30, "--eval-rows", 2),
    )
    loss = json.loads(evaluated.stdout)["loss"]
    quality = found["quality"]
    assert quality["source_loss"] == pytest.approx(loss, rel=1e-5)
    assert found["adapted_matrices"] == 14 and found["peak_footprint_bytes"] > 0
    if form == "bundle":
        again = here(
            *("eval", output, "--data", "random:1", "--json", "--max-seq-length", 30),
            *("--eval-rows", 2),
        )
        assert json.loads(again.stdout)["loss"] == pytest.approx(quality["loss"], rel=1e-5)
        assert "tracing" not in again.stderr
        assert open_bundle(output).manifest.quality is not None
    else:
        assert quality["loss"] == pytest.approx(loss, abs=1e-2) and quality["divergence"] < 1e-3


def test_text_of_the_package_is_measured_where_there_is_a_tokenizer(
    reading: Bundle, tmp_path: Path, rng: Rng
) -> None:
    adapter = saved(adapters_of(reading, rng), tmp_path / "run")
    words = ["--adapter", adapter, "-o", tmp_path / "out", "--dtype", "float32"]
    done = succeeds("fuse", reading.path, *words, by=here)
    assert "14 adapted matrices" in done.stdout and "the package's own text" in done.stdout
    loss = done.stdout.split("loss ")[1].split(",")[0].split()[0]
    assert f"loss {loss} with the adapter, {loss} fused" in done.stdout
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(listing(tmp_path / "out"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (
            reading.path / "tokenizer" / name
        ).read_bytes()


def test_the_function_does_what_the_command_does(tiny: Tiny, tmp_path: Path, rng: Rng) -> None:
    bundle = tiny("qwen2")
    adapter = saved(adapters_of(bundle, rng), tmp_path / "run")
    given = {"data": "random:1", "max_seq_length": 30, "eval_rows": 1}
    seen: list[str] = []
    try:
        config = ondevice.FuseConfig(
            bundle=bundle.path, output=tmp_path / "out", adapter=adapter, **given
        )
        found = ondevice.fuse(config, on_progress=lambda *w: seen.append(w[0]))
    finally:
        prepare()  # fusing has the heap kept otherwise
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    done = here("fuse", bundle.path, "--adapter", adapter, "-o", tmp_path / "by", "--json", *flags)
    facts = json.loads(done.stdout)
    assert found.quality is not None and msgspec.to_builtins(found.quality) == facts["quality"]
    assert found.output == str(tmp_path / "out") and found.weights_bytes == facts["weights_bytes"]
    assert f"{TENSOR}.weight" in seen
    written = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "by")]
    assert written[0] == written[1]


@pytest.mark.parametrize("form", ["hf", "gguf", "bundle"])
def test_an_adapter_is_not_fused_twice(tiny: Tiny, tmp_path: Path, rng: Rng, form: str) -> None:
    """Whatever was written in between, and whichever tool's files hold the adapter."""
    bundle = tiny("qwen2")
    first, other = (adapters_of(bundle, rng) for _ in range(2))
    for name, one in (("run", first), ("other", other)):
        saved(one, tmp_path / name)
    peft = ["--bundle", bundle.path, "--to", "peft", "-o", tmp_path / "peft"]
    assert here("adapter", tmp_path / "run", *peft).returncode == 0
    output = tmp_path / RESULT[form]
    words = ["--adapter", tmp_path / "run", "-o", output, "--format", form, "--no-quality"]
    assert here("fuse", bundle.path, *words).returncode == 0
    again = output
    if form != "bundle":
        again = tmp_path / "again"
        export_bundle(settings(output, again, quality=False))
    assert "ondevice_fused" not in open_bundle(again).manifest.config
    words = ["-o", tmp_path / "twice", "--no-quality"]
    done = here("fuse", again, "--adapter", tmp_path / "peft", *words)
    assert done.returncode == 2 and "holds this adapter in its weights already" in done.stderr
    assert not (tmp_path / "twice").exists()
    scored = ["--data", "random:1", "--adapter", tmp_path / "peft"]
    refuses(2, "holds this adapter in its weights already", "eval", again, *scored)
    written = ["--to", "peft", "-o", tmp_path / "theirs", "--bundle", bundle.path]
    assert here("adapter", tmp_path / "other", *written).returncode == 0
    succeeds("fuse", again, "--adapter", tmp_path / "theirs", *words, by=here)
    assert len(json.loads((tmp_path / "twice" / "config.json").read_text())["ondevice_fused"]) == 2


def test_a_digest_outlives_the_way_through_mlx_lms_files(rng: Rng) -> None:
    """They hold the scale times the rank, from which rsLoRA's comes back rounded otherwise."""
    data = [("x.a", rng.bytes(8)), ("x.b", rng.bytes(8))]
    scale = 13.0 / math.sqrt(3)
    assert scale * 3 / 3 != scale
    assert digest_of(data, scale * 3 / 3) == digest_of(data, scale) != digest_of(data, 7.5)


def test_without_a_tokenizer_or_an_adapter(tiny: Tiny, tmp_path: Path) -> None:
    bundle = tiny("gemma3")
    done = succeeds("fuse", bundle.path, "-o", tmp_path / "out", "--shard-size", "200KB", by=here)
    assert "has no tokenizer" in done.stderr and "loss" not in done.stdout
    assert "adapted" not in done.stdout
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    names: set[str] = set()
    for path in files:
        with safe_open(path, framework="numpy") as file:
            names |= set(file.keys())
    assert len(files) > 2 and len(names) == len(bundle.manifest.matrices) + len(
        bundle.manifest.vectors
    )
    assert "lm_head.weight" not in names


@pytest.mark.parametrize("form", ["hf", "gguf", "bundle"])
def test_a_fuse_that_is_killed_leaves_nothing_half(
    tiny: Tiny, tmp_path: Path, rng: Rng, form: str
) -> None:
    bundle = tiny("llama")
    adapter = saved(adapters_of(bundle, rng), tmp_path / "run")
    output = tmp_path / RESULT[form]
    words = ["fuse", bundle.path, "--adapter", adapter, "-o", output, "--format", form]
    moment = TENSOR if form == "bundle" else f"{TENSOR}.weight"
    if form == "gguf":
        before = listing(tmp_path)
        done = struck(signal.SIGTERM, moment, *words)
        assert done.returncode == 130 and listing(tmp_path) == before, done.stderr
    done = struck(signal.SIGKILL, moment, *words)
    assert done.returncode == -signal.SIGKILL and not output.exists(), done.stderr
    succeeds(*words, by=here)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([output.name, "run"])


def test_refusals(tiny: Tiny, reading: Bundle, tmp_path: Path, rng: Rng) -> None:
    bundle = tiny("qwen2")
    adapter = saved(adapters_of(bundle, rng), tmp_path / "run")
    other = saved(adapters_of(tiny("llama"), rng), tmp_path / "other")
    full = tmp_path / "full"
    full.mkdir()
    (full / SLOTS).touch()
    output = tmp_path / "out"
    cases = [
        (["--format", "onnx"], 2, "hf, gguf or bundle"),
        (["--bits", "8"], 2, "bits has no effect with format hf; it is an option of bundle"),
        (["--format", "bundle", "--dtype", "float16"], 2, "dtype has no effect"),
        (["--format", "gguf", "--shard-size", "1GB"], 2, "shard_size has no effect"),
        (["--eval-rows", "3"], 2, "eval_rows has no effect without data"),
        (["--data", "random:1", "--no-quality"], 2, "no effect with --no-quality"),
        (["--adapter", other], 4, "other"),
        (["--adapter", full], 2, "ondevice replay"),
        (["--adapter", adapter, "--data", tmp_path / "none.jsonl"], 4, "none.jsonl"),
        (["--adapter", adapter, "--data", "random:1", "--budget", "20MB"], 3, "budget"),
    ]
    for words, code, said in cases:
        refuses(code, said, "fuse", bundle.path, "-o", output, *words)
        assert not output.exists() and not (tmp_path / ".out.partial").exists(), words
    done = here("fuse", bundle.path, "-o", bundle.path, "--force", "--format", "bundle")
    assert done.returncode == 2 and "is the bundle itself" in done.stderr
    done = here("fuse", reading.path, "-o", output, "--format", "gguf", "--no-quality")
    assert done.returncode == 2 and "the tokenizer cannot be written" in done.stderr, done.stderr
    assert not output.exists()


# the peak of each format for each bundle, above what the process had before
PEAKS = """
import sys
from pathlib import Path

from export.fused.checkpoint import write_checkpoint
from export.fused.gguf import write_gguf
from export.fused.model import FusedCheckpoint
from runtime.bundle.store import open_bundle
from runtime.machine.footprint import Meter

for bundle in sys.argv[1:]:
    with FusedCheckpoint(open_bundle(bundle), {}) as model, Meter() as meter:
        given = (False, lambda *what: None)
        write_checkpoint(model, Path(bundle + "-hf"), "float32", 1 << 40, *given)
        write_gguf(model, Path(bundle + ".gguf"), "float32", *given)
        print(meter.peak_bytes)
"""


def test_no_large_matrix_is_ever_whole_in_memory(tmp_path: Path, rng: Rng) -> None:
    """Of two models, the second's embedding takes 31 MB more as float32, and 15 as bfloat16."""
    config, _ = weights_of("tiny-qwen2")
    bundles = []
    for rows in (3_000, 18_000):
        config |= {"vocab_size": rows, "hidden_size": 512}
        shapes = expected_shapes("qwen2", config)
        drawn = {key: rng.standard_normal(shape, np.float32) for key, shape in shapes.items()}
        source = write_folder(tmp_path / f"source{rows}", config, drawn)
        bundles.append(str(tmp_path / f"bundle{rows}"))
        export_bundle(settings(source, Path(bundles[-1]), bits=16, quality=False))
    command = [sys.executable, "-c", PEAKS, *bundles]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    small, large = map(int, done.stdout.split())
    assert large - small < 13e6, large - small  # beside other processes some pages go late
