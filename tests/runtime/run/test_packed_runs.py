"""Runs with `--pack`: what they learn, what they say of it, and kills."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.runs import adapter, here, ondevice, struck
from support.text_bundle import text_bundle

from runtime.bundle.store import Bundle
from runtime.config.base import load
from runtime.config.train import TrainConfig
from runtime.data.rows import TokenRows
from runtime.data.samples import Samples
from tests.oracles import whole_model as reference
from tests.oracles.dense import run_dense

WORDS = ("sun", "the rain", "we", "no", "bathe in", "ice")
Rng = np.random.Generator


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return text_bundle(tmp_path_factory.mktemp("data"), "")


def texts(rng: Rng, count: int, most: int = 3) -> list[str]:
    return [" ".join(rng.choice(WORDS, int(rng.integers(1, most + 1)))) for _ in range(count)]


def write(folder: Path, rng: Rng, count: int = 30) -> Path:
    folder.mkdir()
    for name, rows in (("train", texts(rng, count)), ("valid", texts(rng, 5))):
        lines = [json.dumps({"text": row}) for row in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def train(bundle: Bundle, data: Path, run: Path, *more: object, steps: int = 4) -> list[object]:
    given = [f"--steps={steps}", "--budget=300MB", "--max-seq-length=32", "--learning-rate=0.01"]
    return ["train", bundle.path, f"--data={data}", f"--output={run}", *given, *more]


def entries(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def samples_of(bundle: Bundle, run: Path) -> Samples:
    rows = TokenRows(run / "train.tokens", bundle.manifest.vocab_size)
    return Samples.of(load(TrainConfig, run / "config.toml", {}), bundle.manifest, rows)


@pytest.mark.parametrize("options", [(), ("--batch-size=3", "--grad-accumulation=2")])
def test_a_packed_run_is_the_dense_run_over_the_same_rows(
    bundle: Bundle, rng: Rng, tmp_path: Path, options: tuple[str, ...]
) -> None:
    data, run = write(tmp_path / "data", rng), tmp_path / "run"
    done = ondevice(*train(bundle, data, run, "--pack", *options))
    assert done.returncode == 0, done.stderr
    dense = run_dense(load(TrainConfig, run / "config.toml", {}), run, 4)
    assert [one["loss"] for one in entries(run)] == pytest.approx(dense.losses, rel=1e-4)
    found = json.loads((run / "evaluations.json").read_text())
    for when, expected in (("before", dense.before), ("after", dense.after)):
        assert found[when]["loss"] == pytest.approx(expected.loss, rel=1e-4)


def test_the_plan_counts_what_packing_keeps_in_memory(bundle: Bundle, tmp_path: Path) -> None:
    """`random:SEED` stands for 65,536 rows, whose places take more than a megabyte."""
    process_bytes = []
    for name, options in (("plain", ()), ("packed", ("--pack",))):
        run = tmp_path / name
        done = ondevice(*train(bundle, Path("random:1"), run, *options, steps=1))
        assert done.returncode == 0, done.stderr
        process_bytes.append(json.loads((run / "plan.json").read_text())["process_bytes"])
    assert process_bytes[1] - process_bytes[0] > 1_000_000


def test_one_packed_sequence_is_the_batch_of_its_rows(
    bundle: Bundle, rng: Rng, tmp_path: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    rows = texts(rng, 3, 1)
    data.write_text("\n".join(json.dumps({"text": row}) for row in rows))
    learnt, logs = {}, {}
    for name, how in (("packed", "--pack"), ("unpacked", "--batch-size=3")):
        done = ondevice(*train(bundle, data, tmp_path / name, how, "--optimizer=sgd"))
        assert done.returncode == 0, done.stderr
        learnt[name] = dict(mx.load(str(tmp_path / name / "adapters.safetensors")))
        logs[name] = entries(tmp_path / name)
    for one, other in zip(logs["packed"], logs["unpacked"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["scored_tokens"] == other["scored_tokens"]
        assert one["tokens"] == other["tokens"]
    for key, value in learnt["packed"].items():
        assert reference.relative_error(value, learnt["unpacked"][key]) <= 1e-4


def test_what_is_held_out_is_not_packed(bundle: Bundle, rng: Rng, tmp_path: Path) -> None:
    data = write(tmp_path / "data", rng)
    found = []
    for name, how in (("packed", "--pack"), ("unpacked", "--no-pack")):
        done = ondevice(*train(bundle, data, tmp_path / name, how, steps=1))
        assert done.returncode == 0, done.stderr
        found.append(json.loads((tmp_path / name / "evaluations.json").read_text())["before"])
    assert found[0] == found[1]


def test_a_packed_run_says_and_keeps_what_was_packed(
    bundle: Bundle, rng: Rng, tmp_path: Path
) -> None:
    data, run = write(tmp_path / "data", rng), tmp_path / "run"
    given = [
        one for one in train(bundle, data, run, "--pack", "--json") if "max-seq" not in str(one)
    ]
    done = ondevice(*given)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    packing = summary["packing"]
    assert packing["rows"] == summary["data"]["train"]["kept"] == 30
    assert packing["length"] == 32, "the bundle's longest length up to 256"
    assert packing["padding"] < packing["unpacked_padding"]
    assert f"packed: 30 rows in {packing['sequences']} sequences of up to 32 tokens" in done.stderr
    samples = samples_of(bundle, run)
    seen = [
        row.tokens.tolist() for at in range(packing["sequences"]) for row in samples.at(at).rows
    ]
    whole = [samples.rows.row(number)[0].tolist() for number in range(30)]
    assert sorted(seen) == sorted(whole)
    for step, entry in enumerate(entries(run)):
        assert entry["tokens"] == len(samples.at(step).inputs) <= 32
        assert entry["scored_tokens"] == len(samples.at(step).targets)
    shown = here("data", data, f"--bundle={bundle.path}", "--pack", "--json")
    assert json.loads(shown.stdout)["packing"] == packing
    text = here("data", data, f"--bundle={bundle.path}", "--pack").stdout
    assert f"packed: 30 rows in {packing['sequences']} sequences" in text
    plain = here("data", data, f"--bundle={bundle.path}", "--json")
    assert json.loads(plain.stdout)["packing"] is None
    resumed = ondevice("train", "--resume", run, "--json")
    assert json.loads(resumed.stdout)["packing"] == packing


def test_rows_longer_than_the_bundle_are_cut_and_packed(
    bundle: Bundle, rng: Rng, tmp_path: Path
) -> None:
    data, run = tmp_path / "rows.jsonl", tmp_path / "run"
    rows = ["long " * 20, *texts(rng, 5, 1)]
    data.write_text("\n".join(json.dumps({"text": row}) for row in rows))
    done = ondevice(*train(bundle, data, run, "--pack", "--json"))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["data"]["train"]["cut"] == 1 and summary["packing"]["rows"] == 6
    sizes = [
        len(samples_of(bundle, run).at(at).inputs) for at in range(summary["packing"]["sequences"])
    ]
    assert max(sizes) == 32
    shown = here("data", data, f"--bundle={bundle.path}", "--pack", "--max-seq-length=33")
    assert shown.returncode == 2 and "--max-seq-length 33 > 32" in shown.stderr


@pytest.mark.parametrize("method", ["mebp", "mezo"])
def test_killed_and_resumed_is_the_same(
    bundle: Bundle, rng: Rng, tmp_path: Path, method: str
) -> None:
    data, whole, killed = write(tmp_path / "data", rng), tmp_path / "whole", tmp_path / "killed"
    options = ("--pack", f"--method={method}", "--batch-size=2", "--grad-accumulation=2")
    more = ("--save-every=2", "--eval-every=3", "--seed=4")
    done = ondevice(*train(bundle, data, whole, *options, *more, steps=7))
    assert done.returncode == 0, done.stderr
    moment = f"step {int(rng.integers(1, 8))}"
    done = struck(signal.SIGKILL, moment, *train(bundle, data, killed, *options, *more, steps=7))
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert ondevice("train", "--resume", killed).returncode == 0
    assert adapter(killed) == adapter(whole)
    losses = [[one["loss"] for one in entries(run)] for run in (whole, killed)]
    assert losses[0] == losses[1]


def test_plans_count_what_packing_takes(bundle: Bundle) -> None:
    plans = []
    for how in ("--pack", "--no-pack"):
        done = here("plan", bundle.path, how, "--json", "--arithmetic=unpacked")
        assert done.returncode == 0, done.stderr
        plans.append(json.loads(done.stdout))
    assert plans[0]["bucket"] == plans[1]["bucket"] == 32
    most = [max(max(b["forward_bytes"], b["backward_bytes"]) for b in p["blocks"]) for p in plans]
    assert 0 <= most[0] - most[1] <= 4 * 32 * plans[0]["lanes"]
    layers = [p["blocks"][1]["backward_bytes"] for p in plans]
    assert layers[0] - layers[1] == 4 * 32


def test_the_usual_length_is_what_packing_begins_with(
    bundle: Bundle, rng: Rng, tmp_path: Path
) -> None:
    """Rows of a few tokens need the bundle's shortest length; packed they get more."""
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"text": "abc"}))
    lengths = []
    for how in ("--pack", "--no-pack"):
        run = tmp_path / how
        given = [one for one in train(bundle, data, run, how, steps=1) if "max-seq" not in str(one)]
        assert ondevice(*given).returncode == 0
        lengths.append(json.loads((run / "plan.json").read_text())["bucket"])
    assert lengths == [32, 16]
