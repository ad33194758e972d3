"""What people and programs are told of bundles and plans; the help of every command."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields

import pytest
from support.bundles import Tiny
from support.pages import command_parser
from support.plans import LINUX, MAC, PLENTY, plan_of, task_of

from ondevice.cli.commands import COMMANDS, Command
from ondevice.cli.describe import describe_fit, describe_matrices, describe_plan, facts_of
from runtime.config.base import flag
from runtime.core.units import format_bytes
from runtime.machine.machine import Machine
from runtime.plan.planner import READING_BYTES


def test_a_matrix_is_described_as_it_is_stored(tiny: Tiny) -> None:
    bundle = tiny("qwen2", "mixed")
    lines = {line.split()[0]: line.split() for line in describe_matrices(bundle).splitlines()}
    facts = facts_of(bundle)["matrices"]
    for name, matrix in bundle.manifest.matrices.items():
        stored = [str(matrix.bits), str(matrix.group_size)]
        if matrix.is_float:
            stored = [matrix.packed.dtype, "-"]
        size = format_bytes(matrix.nbytes).split()
        assert lines[name][1:6] == [f"{matrix.rows}x{matrix.columns}", *stored, *size]
        told = {key: facts[name][key] for key in ("layout", "bits", "group_size", "dtype")}
        assert told == {
            "layout": matrix.layout,
            "bits": matrix.bits,
            "group_size": matrix.group_size,
            "dtype": matrix.packed.dtype,
        }


@pytest.mark.parametrize(
    ("machine", "weights"),
    [(LINUX, "{} weights in float32"), (MAC, "quantized weights multiplied as they are")],
)
def test_a_plan_says_how_weights_are_multiplied(tiny: Tiny, machine: Machine, weights: str) -> None:
    plan = plan_of(tiny("qwen2", "bfloat16").manifest, task_of(32), PLENTY, machine)
    told = describe_plan(plan.to_json())
    assert f"tiles: {weights.format(plan.tile_values)}, " in told
    kept = "dequantized" if machine is LINUX else "in memory"
    assert f"weights that stay {kept}: {plan.materialized_layers} layers" in told


def test_a_smallest_budget_above_the_peak_is_explained(tiny: Tiny) -> None:
    """A predicted peak leaves a part of the budget free, and readings of a process differ."""
    manifest = tiny("qwen2", "bfloat16").manifest
    smallest = plan_of(manifest, task_of(32), PLENTY, LINUX).minimum_bytes
    for budget_bytes in (smallest, smallest - READING_BYTES // 2):
        plan = plan_of(manifest, task_of(32), budget_bytes, LINUX)
        assert plan.predicted_peak_bytes < plan.minimum_bytes
        named = format_bytes(budget_bytes, up=True)
        said = describe_fit(plan.to_json())
        assert said.endswith(
            f"5% of a budget stays free, and the smallest budget that fits is {named}"
        )
        row = rf"smallest budget that fits, with 5% free +{named}\n"
        assert re.search(row, describe_plan(plan.to_json()))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_fits_80_columns_and_begins_with_what_is_needed(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    told = command_parser(command).format_help()
    assert not [line for line in told.splitlines() if len(line) > 80]
    cut = re.findall(r"\B--[a-z-]*-$", told, re.MULTILINE)
    assert not cut, cut  # an option that ends a line at one of its hyphens
    config = command.config
    needed = [
        flag(setting.name)
        for setting in fields(config)
        if setting.default is MISSING and setting.name != config.positional
    ]
    _, _, main = told.partition("main options:\n")
    listed = re.findall(r"^  (?:-\w.*? )?(--[a-z-]+)", main, re.MULTILINE)
    assert listed[: len(needed)] == needed
    if any(setting.name == "output" for setting in fields(config)):
        assert listed.index("--output") <= len(needed)


def test_settings_stand_in_groups() -> None:
    told = command_parser(next(one for one in COMMANDS if one.name == "train")).format_help()
    main, _, _ = told.partition("main options:\n")[2].partition("\n\n")
    assert re.findall(r"--[a-z-]+(?= [A-Z]+ )", main) == [
        "--data", "--output", "--adapter", "--resume",
    ]  # fmt: skip
