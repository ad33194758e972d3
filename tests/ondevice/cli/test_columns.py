"""What `plan` and `eval` print for people fits 80 columns."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.bundles import Tiny
from support.plans import LINUX, MAC, PLENTY, plan_of, task_of
from support.runs import here

from ondevice.cli.describe import COLUMNS, describe_plan, folded
from runtime.machine.machine import Machine


def too_long(text: str) -> list[str]:
    return [line for line in text.splitlines() if len(line) > COLUMNS]


@pytest.mark.parametrize("method", ["mebp", "mezo"])
@pytest.mark.parametrize("machine", [LINUX, MAC, msgspec.structs.replace(LINUX, llvm=True)])
def test_plans_of_every_machine_fit(tiny: Tiny, machine: Machine, method: str) -> None:
    manifest, task = tiny("gemma3").manifest, task_of(64, method, rows=16, accumulation=16)
    least = plan_of(manifest, task, PLENTY, machine).minimum_bytes
    for budget in (PLENTY, least):
        plan = plan_of(manifest, task, budget, machine).to_json()
        assert not too_long(describe_plan(plan, per_block=True))
        large = {**plan, "limit_bytes": 10**15, "chunk_rows": 10**9, "slice_columns": 10**6}
        assert not too_long(describe_plan(large))


def test_the_commands_fit(tiny: Tiny, tmp_path: Path) -> None:
    bundle = tiny("gemma3").path
    for command in (["plan", bundle], ["eval", bundle, "--data=random:4"]):
        done = here(*command, "--budget=1GB", "--max-seq-length=24")
        assert done.returncode == 0, done.stderr
        assert done.stdout and not too_long(done.stdout)


def test_words_stay_whole_where_lines_are_folded() -> None:
    words = [f"a/long-path/{n * 'x'}" for n in range(90)]
    assert folded(" ".join(words)).split() == words
    data = "  'a label'" + 90 * " x"
    assert folded(f"labels right\n{data}").splitlines()[1] == data
