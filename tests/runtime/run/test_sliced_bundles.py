"""Bundles that are cut into slices: the workers that hold them make the run of whole bundles."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.bundles import Tiny, settings
from support.estimators import config_of
from support.exchange import NEEDS_MPI, mpirun, on_workers
from support.plans import LINUX, PLENTY
from support.runs import (
    adapter,
    evaluations_of,
    here,
    json_of,
    metrics_of,
    refuses,
    succeeds,
    train_arguments,
)
from support.shared import Shared
from support.text_bundle import text_checkpoint

from export.bundle import export_bundle
from runtime.bundle.manifest import block_range
from runtime.bundle.store import WEIGHTS, open_bundle, write_slices
from runtime.core.errors import BundleError, UsageError
from runtime.core.stripes import STRIPE
from runtime.data.tokenizer_files import TEMPLATES
from runtime.parallel.exchange import Exchange
from runtime.parallel.workers import Workers
from runtime.plan.planner import THREAD_BYTES, Planner
from runtime.run.budget import training
from runtime.run.team import Team

STEPS = 2
EVALUATED = {"eval_data": "random:3", "eval_rows": 3, "eval_every": 1, "batch_size": 2}
UNCOMPILED = {"arithmetic": "packed"}  # compiled code needs whole weights
CASES: dict[str, dict[str, Any]] = {
    "full": {"method": "mezo", "parallel": "data=2"},
    "mezo": {"method": "mezo", "parallel": "perturb=2", **UNCOMPILED},
    "mebp": {"method": "mebp", "parallel": "data=2", **UNCOMPILED},
}


@pytest.fixture(scope="module")
def halves(bundle: Path, shared: Shared) -> list[Path]:
    words = ["slice", bundle, "--count", 2, "-o"]
    folder = shared("halves of a bundle", lambda path: succeeds(*words, path, by=here) and None)
    return [folder / "1-of-2", folder / "2-of-2"]


def train_on(bundles: list[Path], run: Path, **options: object) -> Path:
    words = [train_arguments(each, run, STEPS, **EVALUATED, **options) for each in bundles]
    done = mpirun(*[["-m", "ondevice", *each] for each in words])
    assert done.returncode == 0, done.stderr
    return run


@NEEDS_MPI
@pytest.mark.parametrize(
    "case", ["full", *(pytest.param(case, marks=pytest.mark.slow) for case in ("mezo", "mebp"))]
)
def test_halves_make_the_run_of_whole_bundles(
    bundle: Path, halves: list[Path], tiny: Tiny, tmp_path: Path, case: str
) -> None:
    """Weights that are trained are evaluated in the run, and replayed with a whole bundle."""
    options = CASES[case]
    if case == "full":
        bundle = tiny("gemma3", trainable="full", storage="bfloat16").path
        halves = [each.path for each in write_slices(open_bundle(bundle), 2, tmp_path)]
    run = train_on(halves, tmp_path / "halves", **options)
    if case == "mebp":
        whole = train_on([bundle, bundle], tmp_path / "whole", **options)
    else:  # as workers of whole bundles, so does one make the same bits
        whole = tmp_path / "whole"
        options = {**options, "parallel": "data=1"}
        succeeds(*train_arguments(bundle, whole, STEPS, **EVALUATED, **options))
    assert [line["loss"] for line in metrics_of(run)] == [
        line["loss"] for line in metrics_of(whole)
    ]
    assert evaluations_of(run) == evaluations_of(whole)
    if case == "full":
        words = ["--bundle", bundle, "--output", tmp_path / "trained"]
        assert json_of("replay", run, *words, by=here)["identical"] is None
        refuses(2, "1-of-2 is slice 1 of 2 of a bundle", "replay", run, "-o", tmp_path / "other")
    else:
        assert adapter(run) == adapter(whole)


@pytest.mark.parametrize(
    ("holding", "said"),
    [
        ([1, 1], "slice 1 of 2 on rank 0 on a, slice 1 of 2 on rank 1 on b; slice 2 of 2 is mis"),
        (
            [0, 2],
            "a whole one on rank 0 on a, slice 2 of 2 on rank 1 on b; slice 1 of 2 is missing",
        ),
        (
            [0, 2, 1],
            "a whole one on rank 0 on a, slice 2 of 2 on rank 1 on b, slice 1 of 2 .* c; g",
        ),
        (
            [1, 2, 4],
            "; slice 1, 2, 3 of 4 is missing; .* each of the 4 .mpirun -n 4.*all the whole",
        ),
    ],
)
def test_slices_that_are_no_whole_are_refused(
    bundle: Path, halves: list[Path], tmp_path: Path, holding: list[int], said: str
) -> None:
    def join(exchange: Exchange) -> str:
        number = holding[exchange.rank]
        mine = open_bundle([bundle, *halves, bundle, tmp_path / "4-of-4"][number])
        with pytest.raises(UsageError) as refusal:
            Team(Workers(exchange, len(holding)), ("a", "b", "c")).joined(mine)
        return str(refusal.value)

    if 4 in holding:
        write_slices(open_bundle(bundle), 4, tmp_path)
    messages = on_workers(len(holding), join)
    assert len({*messages}) == 1
    assert re.search(said, messages[0]), messages[0]


def test_a_slice_has_all_files_of_the_tokenizer(tmp_path: Path) -> None:
    """Templates beside the usual one lie in a folder of their own."""
    source = text_checkpoint(tmp_path / "model", "{{ messages }}")
    (source / TEMPLATES).mkdir()
    (source / TEMPLATES / "tool_use.jinja").write_text("{{ tools }}")
    whole = export_bundle(settings(source, tmp_path / "whole", seq_lens=(16,)))
    for part in write_slices(whole, 2, tmp_path):
        for name in whole.manifest.files:
            assert (part.path / name).read_bytes() == (whole.path / name).read_bytes()
    assert any(TEMPLATES in name for name in whole.manifest.files)


def test_a_bundle_is_not_cut_into_slices_without_weights(bundle: Path, tmp_path: Path) -> None:
    nbytes = open_bundle(bundle).manifest.weights_nbytes
    most = -(-nbytes // STRIPE)
    told = f"of {most + 1} slices 1 would have none; give --count {most} or fewer"
    refuses(2, told, "slice", bundle, "-o", tmp_path, "--count", most + 1)
    assert all(
        each.manifest.held_nbytes for each in write_slices(open_bundle(bundle), most, tmp_path)
    )


def test_a_slice_alone_is_refused_or_shown(halves: list[Path], tmp_path: Path) -> None:
    half, data = halves[1], ["--data", "random:1"]
    for words in (
        train_arguments(half, tmp_path / "run", 1),
        ["eval", half, *data],
        ["generate", half, "--prompt", "x"],
        ["fuse", half, "-o", tmp_path / "fused"],
        ["slice", half, "-o", tmp_path / "slices"],
        ["chat", half],
    ):
        done = refuses(
            2, "2-of-2 is slice 2 of 2 of a bundle, and holds 1/2 of its weights", *words
        )
        assert "start `ondevice train` or `eval` with all 2 slices" in done.stderr
    assert [*tmp_path.iterdir()] == []
    succeeds("inspect", half, "--verify", by=here)
    assert "slice 2 of 2, " in succeeds("inspect", half, by=here).stdout


def test_an_altered_slice_is_refused(halves: list[Path], tmp_path: Path) -> None:
    shutil.copytree(halves[0], tmp_path / "half")
    with (tmp_path / "half" / WEIGHTS).open("r+b") as file:
        file.write(b"altered")
    with pytest.raises(
        BundleError, match="altered: its SHA-256 differs; make or copy slice 1 of 2"
    ):
        open_bundle(tmp_path / "half").verify()
    with (tmp_path / "half" / WEIGHTS).open("ab") as file:
        file.write(b"x")
    with pytest.raises(BundleError, match="bytes, expected"):
        open_bundle(tmp_path / "half")


@pytest.mark.parametrize("method", ["mezo", "mebp"])
def test_the_plan_counts_what_is_assembled(bundle: Path, halves: list[Path], method: str) -> None:
    """All vectors, two layers, and two tiles of the largest matrix outside of layers."""
    whole, half = (open_bundle(path).manifest for path in (bundle, halves[0]))
    plans = []
    for manifest in (whole, half):
        task = training(config_of(method, 0), manifest)
        plans.append(Planner(manifest, LINUX).plan(task, PLENTY))
    ranges = [block_range(whole, layer) for layer in whole.layers]
    more = plans[1].process_bytes - plans[0].process_bytes - 2 * THREAD_BYTES
    layers = 2 * max(stop - start for start, stop in ranges)
    layers += sum(extent.nbytes for extent in whole.vectors.values())
    ends = (whole.blocks[0], whole.blocks[-1])
    outside = max(matrix.nbytes for block in ends for matrix in whole.matrices_of(block))
    assert layers < more <= layers + 2 * outside
    assert plans[1].predicted_peak_bytes >= plans[0].predicted_peak_bytes + more
