"""Runs with `--pack`: what they learn, what they say of it, and kills."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from oracles.dense import run_dense
from support.bundles import Rng
from support.lengths import first_of
from support.runs import (
    NO_OTHERS,
    check_same,
    evaluations_of,
    here,
    json_of,
    killed_and_resumed,
    metrics_of,
    ondevice,
    refuses,
    succeeds,
    summary_of,
)
from support.text_bundle import text_bundle

from runtime.bundle.store import Bundle
from runtime.config.base import load
from runtime.config.train import TrainConfig
from runtime.core.units import parse_bytes
from runtime.data.samples import Samples
from runtime.data.token_rows import TokenRows

LONGEST = "--max-seq-length=32"
WORDS = ("sun", "the rain", "we", "no", "bathe in", "ice")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return text_bundle(tmp_path_factory.mktemp("data"), "")


def texts(rng: Rng, count: int, most: int = 3) -> list[str]:
    return [" ".join(rng.choice(WORDS, int(rng.integers(1, most + 1)))) for _ in range(count)]


def write(folder: Path, rng: Rng, most: int = 3) -> Path:
    """30 rows of up to so many words, and 5 to evaluate."""
    folder.mkdir()
    for name, rows in (("train", texts(rng, 30, most)), ("valid", texts(rng, 5))):
        lines = [json.dumps({"text": row}) for row in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def train(bundle: Bundle, data: Path, run: Path, *more: object, steps: int = 4) -> list[object]:
    given = [f"--steps={steps}", "--budget=300MB", LONGEST, "--learning-rate=0.01", NO_OTHERS]
    return ["train", bundle.path, f"--data={data}", f"--output={run}", *given, *more]


def samples_of(bundle: Bundle, run: Path) -> Samples:
    rows = TokenRows(run / "train.tokens", bundle.manifest.vocab_size)
    return Samples.of(load(TrainConfig, run / "config.toml", {}), bundle.manifest, rows)


def test_a_packed_run_is_the_dense_run_over_the_same_rows(
    bundle: Bundle, rng: Rng, tmp_path: Path
) -> None:
    data, run = write(tmp_path / "data", rng), tmp_path / "run"
    options = ("--batch-size=3", "--grad-accumulation=2")
    succeeds(*train(bundle, data, run, "--pack", *options, steps=3))
    dense = run_dense(load(TrainConfig, run / "config.toml", {}), run, 3)
    assert [one["loss"] for one in metrics_of(run)] == pytest.approx(dense.losses, rel=1e-4)
    found = evaluations_of(run)
    for when, expected in (("before", dense.before), ("after", dense.after)):
        assert found[when]["loss"] == pytest.approx(expected.loss, rel=1e-4)


def test_the_plan_counts_what_packing_keeps_in_memory(bundle: Bundle, tmp_path: Path) -> None:
    """`random:SEED` stands for 65,536 rows, whose places take more than a megabyte."""
    process_bytes = []
    for name, options in (("plain", ()), ("packed", ("--pack",))):
        run = tmp_path / name
        succeeds(*train(bundle, Path("random:1"), run, *options, steps=1))
        process_bytes.append(json.loads((run / "plan.json").read_text())["process_bytes"])
    assert process_bytes[1] - process_bytes[0] > 1_000_000
    small = train(bundle, Path("random:1"), tmp_path / "small", "--pack", "--budget=3MB")
    refused = refuses(3, "the smallest that fits is ", *small, by=ondevice)
    named = refused.stderr.split("the smallest that fits is ")[1].split(",")[0].strip()
    plan = json.loads((tmp_path / "packed" / "plan.json").read_text())
    assert parse_bytes(named) >= plan["minimum_bytes"]  # a refusal counts the packing too


def test_a_packed_run_says_and_keeps_what_was_packed(
    bundle: Bundle, rng: Rng, tmp_path: Path
) -> None:
    """Rows of a word need the bundle's shortest length; packed they get more."""
    data, run = write(tmp_path / "data", rng, most=1), tmp_path / "run"
    given = train(bundle, data, run, "--pack")
    given.remove(LONGEST)
    done = succeeds(*given)
    summary = summary_of(run)
    packing = summary["packing"]
    assert packing["rows"] == summary["data"]["train"]["kept"] == 30
    assert packing["length"] == 32, "the bundle's longest length up to 256"
    assert packing["padding"] < packing["unpacked_padding"]
    held_out = ("eval", bundle.path, f"--data={data / 'valid.jsonl'}", LONGEST)
    unpacked = json_of(*held_out, by=here)  # what is held out is not packed
    assert evaluations_of(run)["before"]["loss"] == pytest.approx(unpacked["loss"], rel=1e-6)
    assert f"packed: 30 rows in {packing['sequences']} sequences of up to 32 tokens" in done.stderr
    samples = samples_of(bundle, run)
    seen = [
        row.tokens.tolist() for at in range(packing["sequences"]) for row in samples.at(at).rows
    ]
    whole = [samples.rows.row(number)[0].tolist() for number in range(30)]
    assert sorted(seen) == sorted(whole)
    for step, entry in enumerate(metrics_of(run)):
        assert entry["tokens"] == len(samples.at(step).inputs) <= 32
        assert entry["scored_tokens"] == len(samples.at(step).targets)
    shown = ("data", data, f"--bundle={bundle.path}")
    assert json_of(*shown, "--pack", by=here)["packing"] == packing
    text = here(*shown, "--pack").stdout
    assert f"packed: 30 rows in {packing['sequences']} sequences" in text
    assert json_of(*shown, by=here)["packing"] is None
    assert json_of("train", "--resume", run)["packing"] == packing


def test_rows_longer_than_the_bundle_are_cut_and_packed(
    bundle: Bundle, rng: Rng, tmp_path: Path
) -> None:
    data, run = tmp_path / "rows.jsonl", tmp_path / "run"
    rows = ["long " * 20, *texts(rng, 5, 1)]
    data.write_text("\n".join(json.dumps({"text": row}) for row in rows))
    summary = json_of(*train(bundle, data, run, "--pack"))
    assert summary["data"]["train"]["cut"] == 1 and summary["packing"]["rows"] == 6
    sizes = [
        len(samples_of(bundle, run).at(at).inputs) for at in range(summary["packing"]["sequences"])
    ]
    assert max(sizes) == 32
    shown = here("data", data, f"--bundle={bundle.path}", "--pack", "--max-seq-length=33")
    assert shown.returncode == 2 and "--max-seq-length 33 > 32" in shown.stderr


@first_of("method", "mebp", "mezo")
def test_killed_and_resumed_is_the_same(
    bundle: Bundle, rng: Rng, tmp_path: Path, method: str
) -> None:
    data, whole, killed = write(tmp_path / "data", rng), tmp_path / "whole", tmp_path / "killed"
    options = ("--pack", f"--method={method}", "--grad-accumulation=2", "--seed=4")
    words = (*options, "--save-every=2", "--eval-every=3")
    succeeds(*train(bundle, data, whole, *words))
    moment = f"step {int(rng.integers(1, 5))}"
    killed_and_resumed(killed, moment, train(bundle, data, killed, *words))
    check_same(killed, whole)


def test_plans_count_what_packing_takes(bundle: Bundle) -> None:
    plans = [
        json_of("plan", bundle.path, how, "--arithmetic=unpacked", by=here)
        for how in ("--pack", "--no-pack")
    ]
    assert plans[0]["bucket"] == plans[1]["bucket"] == 32
    most = [max(max(b["forward_bytes"], b["backward_bytes"]) for b in p["blocks"]) for p in plans]
    assert 0 <= most[0] - most[1] <= 4 * 32 * plans[0]["lanes"]
    layers = [p["blocks"][1]["backward_bytes"] for p in plans]
    assert layers[0] - layers[1] == 4 * 32
