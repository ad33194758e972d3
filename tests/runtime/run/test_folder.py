"""A run's directory against kills and second processes; its steps are written as they are read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest
from support.bundles import Tiny
from support.runs import python, step_of

from runtime.core.errors import BundleError, UsageError
from runtime.methods.adapters import Adapters
from runtime.methods.protocol import StepLoss
from runtime.run.evaluate import summarize
from runtime.run.folder import EVALUATIONS, OTHER_EVALUATIONS, RunFolder
from runtime.run.results import final_loss, read_steps

# saves twice, and dies when it has begun to remove a save during the second
SAVE_TWICE = """
import os, shutil, signal, sys
from pathlib import Path
from runtime.machine.backend import prepare
prepare()
from runtime.bundle.store import open_bundle
from runtime.methods.adapters import Adapters
from runtime.run.folder import RunFolder

class NoState:
    def settle(self): ...
    def write(self, path): path.write_bytes(b"")

def dying(path, *arguments, remove=shutil.rmtree, **options):
    if "step-" in Path(path).name:
        next(Path(path).iterdir()).unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    remove(path, *arguments, **options)

folder, manifest = RunFolder(Path(sys.argv[1])), open_bundle(sys.argv[2]).manifest
folder.saves.folder.mkdir(parents=True)
adapters = Adapters.initial(manifest, 7)
folder.save(int(sys.argv[3]), adapters, NoState())
shutil.rmtree = dying
folder.save(int(sys.argv[4]), adapters, NoState())
"""


@pytest.mark.parametrize(("first", "killed"), [(50, True), (100, False)])
def test_a_kill_inside_a_second_save_leaves_a_whole_one(
    tiny: Tiny, tmp_path: Path, first: int, killed: bool
) -> None:
    bundle = tiny("llama")
    done = python(SAVE_TWICE, tmp_path / "run", bundle.path, first, 100)
    assert done.returncode == (-9 if killed else 0), done.stderr
    folder = RunFolder(tmp_path / "run")
    latest = folder.saves.latest()
    assert latest is not None and latest.name == "step-00000100"
    assert folder.check_save(latest).step == 100
    adapters = Adapters.load(bundle.manifest, latest)
    assert adapters.digest() == Adapters.initial(bundle.manifest, 7).digest()


def test_evaluations_are_read_again_as_they_were_made(tmp_path: Path) -> None:
    """A loss that is not finite too, but nothing else that is no number."""
    folder = RunFolder(tmp_path)
    losses = [StepLoss(6.0, 1, 3), StepLoss(math.nan, 1, 3)]
    whole, broken = summarize(losses[:1]), summarize(losses)
    made = {
        "before": whole,
        "2": broken,
        "4": whole,
        "after": msgspec.structs.replace(whole, step=5),
    }
    folder.write_json(EVALUATIONS, made)
    assert folder.evaluations(5, ("before", "2")) == made
    assert list(folder.evaluations(3)) == ["before", "2"]
    with pytest.raises(BundleError, match="lacks the evaluation '6'"):
        folder.evaluations(8, ("6",))
    right = msgspec.to_builtins(whole)
    for odd, said in (
        ({}, r"`\$.4`, which is {}"),
        ({**right, "loss": "low"}, r"`\$.4.loss`, which is 'low'"),
        ({**right, "accuracy": None}, r"`\$.4.accuracy`, which is None"),
        ({**right, "rows": 1.5}, r"`\$.4.rows`, which is 1.5"),
    ):
        folder.write_json(EVALUATIONS, {**made, "4": odd})
        with pytest.raises(BundleError, match=rf"evaluations\.json is damaged: .* - at {said}"):
            folder.evaluations(5)
        folder.write_json(OTHER_EVALUATIONS, {"a": made, "b": {"before": whole, "4": odd}})
        inner = said.replace("4", "b.4", 1)
        with pytest.raises(BundleError, match=rf"evaluated\.json is damaged: .* - at {inner}"):
            folder.other_evaluations()
    folder.write_json(EVALUATIONS, {"before": whole, "soon": whole})
    with pytest.raises(BundleError, match=r"is damaged: .* - at `\$`, which is 'soon'"):
        folder.evaluations(5)


def test_a_second_process_leaves_alone_what_the_first_has_begun(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.created():
        (folder.path / "train.tokens").write_bytes(b"of the first")
        with pytest.raises(UsageError, match="another process"), RunFolder(folder.path).created():
            pytest.fail("two processes in one run")
        assert (folder.path / "train.tokens").read_bytes() == b"of the first"
    with folder.created():  # it never began: what it left is removed
        assert sorted(path.name for path in folder.path.iterdir()) == [".lock", "saves"]


STEP = step_of(1, tokens=8)


def test_a_step_is_read_as_it_was_written(tmp_path: Path) -> None:
    steps = [STEP, msgspec.structs.replace(STEP, number=2, loss=None, skipped=True)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(msgspec.to_builtins(step)) + "\n" for step in steps))
    assert list(read_steps(path, 2, "give up")) == steps


@pytest.mark.parametrize("tokens", ["9" * 5000, "-8", "8.5", '"8"', "null"])
def test_counts_that_are_none_are_refused(tmp_path: Path, tokens: str) -> None:
    line = json.dumps(msgspec.to_builtins(STEP)).replace('"tokens": 8', f'"tokens": {tokens}')
    path = tmp_path / "metrics.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(
        BundleError, match=r"damaged in line 1: .*(tokens`, which is |more than 4,300 dig)"
    ):
        list(read_steps(path, 1, "give up"))


def test_one_step_does_not_decide_the_final_loss() -> None:
    assert final_loss([]) is None
    assert final_loss([3.0, 1.0]) == 2.0
    assert final_loss([90.0] * 5 + [1.0] * 9 + [11.0]) == 2.0
