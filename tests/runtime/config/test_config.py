"""Configuration: merging, checking, round trips, and flags derived from the fields."""

from __future__ import annotations

import argparse
import importlib.util
import json
from dataclasses import MISSING, FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pages import command_parser
from support.runs import here, succeeds

from export.config.export import ExportConfig
from export.config.fuse import AdapterConfig
from harness.config.bench import ReportConfig
from ondevice.cli.commands import COMMANDS, Command
from ondevice.cli.parser import whole_parser
from runtime.config import arguments
from runtime.config import base as config
from runtime.config.base import LEAST, load, to_toml
from runtime.config.methods import METHODS
from runtime.config.train import PlanConfig, TrainConfig
from runtime.core.errors import UsageError
from runtime.core.units import format_bytes, parse_bytes

ALL = [command.config for command in COMMANDS]
TRAIN = {"bundle": "b", "data": "d"}


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("300MB", 300_000_000),
        ("300 mb", 300_000_000),
        ("1.5GB", 1_500_000_000),
        ("512MiB", 512 * 2**20),
        ("1GiB", 2**30),
        ("0.1k", 100),
        ("4096", 4096),
        (4096, 4096),
        ("12 B", 12),
    ],
)
def test_sizes_are_read(text: str | int, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "MB", "-1MB", "1 XB", "1e9", "0", "0.5", "1,5GB", 0, -5, True]
)
def test_what_is_not_a_size_is_refused(text: str | int) -> None:
    with pytest.raises(UsageError, match="write for example 300MB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (1, "1 byte"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (300_000_000, "300 MB"),
        (118_400_000, "118 MB"),
        (1_250_000_000, "1.25 GB"),
        (20_300_000, "20.3 MB"),
        (999_999_999, "1 GB"),
        (-5_000_000, "-5 MB"),
    ],
)
def test_sizes_are_written(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@given(st.integers(1, 10**15))
def test_a_written_size_reads_back_close_and_never_below_when_rounded_up(size_bytes: int) -> None:
    assert abs(parse_bytes(format_bytes(size_bytes)) - size_bytes) <= size_bytes / 100
    assert 0 <= parse_bytes(format_bytes(size_bytes, up=True)) - size_bytes <= size_bytes / 100


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text('bundle = "b"\ndata = "d"\nsteps = 7\nlearning_rate = 1\nseed = 3\n')
    merged = load(TrainConfig, file, {"steps": "9", "bundle": "c"})
    assert (merged.steps, merged.bundle, merged.seed, merged.batch_size) == (9, "c", 3, 1)
    assert isinstance(merged.learning_rate, float)
    assert merged.budget_bytes == 10**9


def test_every_problem_is_listed_at_once() -> None:
    wrong: dict[str, Any] = {
        "stepz": 3,
        "max-seq-lenght": 5,
        "steps": "-3",
        "budget": "1XB",
        "learning_rate": "fast",
        "eval_every": True,
        "lr_schedule": "sine",
        "weight_decay": float("nan"),
    }
    with pytest.raises(UsageError) as caught:
        load(TrainConfig, None, wrong)
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert "unknown key 'stepz'; did you mean steps?" in message
    assert "did you mean max_seq_length?" in message
    assert "lr_schedule is 'sine'; it must be constant, linear or cosine" in message
    assert "steps is -3; it must be 1 or more" in message
    for name in (
        "BUNDLE is missing",
        "--data DATA is missing",
        "budget",
        "learning_rate",
        "eval_every",
    ):
        assert name in message
    assert len(message.splitlines()) == 1 + len(wrong) + 2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bits", 3),
        ("embedding_bits", 12),
        ("group_size", 48),
        ("lora_rank", 0),
        ("lora_alpha", 0.0),
        ("lora_alpha", float("inf")),
        ("lora_alpha", 10**400),
        ("lora_targets", "q_proj,,v_proj"),
        ("seq_lens", ()),
        ("seq_lens", (0, 64)),
        ("seq_lens", (64, 64)),
        ("seq_lens", "256,128"),
        ("seq_lens", "64,x"),
        ("seq_lens", 64),
        ("device", "tpu"),
        ("force", "maybe"),
        ("seed", 1.0),
        ("source", " "),
    ],
)
def test_wrong_values_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"\n  {key} is "):
        load(ExportConfig, None, {"source": "s", "output": "o", key: value})


@pytest.mark.parametrize("cls", ALL)
def test_numbers_that_compute_nothing_are_refused(cls: type[config.Config]) -> None:
    """In every field of a number, with the number and what is allowed."""

    def is_refused(name: str, text: str) -> bool:
        try:
            load(cls, None, {name: text})
        except UsageError as refusal:
            return f"\n  {name} is {float(text) if '.' in text or 'e' in text else text}" in str(
                refusal
            ) or f"\n  {name} is '{text}'" in str(refusal)
        return False

    for field in fields(cls):
        if str(field.type).startswith("float"):
            allowed = {text for text in FLOATS if not is_refused(field.name, text)}
            assert not allowed, field.name
        elif str(field.type).startswith("int"):
            allowed = {text for text in INTS if not is_refused(field.name, text)}
            known = {"seed": {str(2**62)}, "lora_layers": {"-1"}}
            assert allowed == known.get(field.name, set()), field.name


FLOATS = ("nan", "inf", "-inf", "1e300", "1e-320", "-1.0", "-1e-09")
INTS = ("-1", str(-(2**62)), str(2**62), str(2**70), "nan", "1e3")


def test_a_refusal_says_what_is_usual() -> None:
    with pytest.raises(UsageError) as refusal:
        load(TrainConfig, None, {**TRAIN, "learning_rate": "1e10", "warmup_steps": 9, "steps": 5})
    assert "learning_rate is 10000000000.0; it must be from 1e-12 to 10,000; usual are " in (
        str(refusal.value)
    )
    with pytest.raises(UsageError, match=r"warmup_steps 9 > steps 5: .* usual is a tenth"):
        load(TrainConfig, None, {**TRAIN, "warmup_steps": 9, "steps": 5})


def test_a_tilde_that_the_shell_leaves_is_the_user_s_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.toml").write_text("steps = 3\noutput = '~/run'\n")
    typed = ["train", "~/b", "--data=~/d", "--config=~/c.toml", "--adapter=~user/a"]
    typed += ["--eval-data=~root/v"]
    typed += ["--also-evaluate=~/e", "--also-evaluate=f", "--mix=~/m:5%", "--parallel=join=~/j"]
    namespace = whole_parser("train").parse_args(typed)
    made = load(TrainConfig, namespace.config, arguments.given(namespace, TrainConfig))
    assert (made.bundle, made.data) == (f"{tmp_path}/b", f"{tmp_path}/d")
    assert (made.output, made.adapter) == (f"{tmp_path}/run", "~user/a")
    assert made.eval_data == str(Path("~root/v").expanduser())
    assert AdapterConfig(run="r", to="peft", output="o", base_model="~/m").base_model == "~/m"
    assert made.also_evaluate == (f"{tmp_path}/e", "f")
    assert (made.mix, made.parallel) == (f"{tmp_path}/m:5%", f"join={tmp_path}/j")
    report = ReportConfig(runs=("~", "r"), output="~/r.html")
    assert (*report.runs, report.output) == (f"{tmp_path}", "r", f"{tmp_path}/r.html")


def test_text_in_a_file_is_not_taken_for_a_number(tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text('bundle = "b"\ndata = "d"\nsteps = "9"\n')
    with pytest.raises(UsageError, match="steps is '9'; it must be a whole number"):
        load(TrainConfig, file, {})


def test_fields_are_checked_together_and_on_direct_construction() -> None:
    with pytest.raises(UsageError, match="warmup_steps 101 > steps 100"):
        load(TrainConfig, None, {**TRAIN, "steps": 100, "warmup_steps": 101})
    with pytest.raises(UsageError, match="epochs 2 and steps 3 both say how long a run is"):
        load(TrainConfig, None, {**TRAIN, "steps": "3", "epochs": "2"})
    with pytest.raises(UsageError, match="steps is 0"):
        TrainConfig(bundle="b", data="d", steps=0)
    with pytest.raises(FrozenInstanceError):
        TrainConfig(bundle="b", data="d").steps = 5  # type: ignore[misc]


def test_a_missing_or_broken_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read --config"):
        load(TrainConfig, tmp_path / "none.toml", {})
    broken = tmp_path / "broken.toml"
    for content in (b"steps = ", b"\xff\xfe"):
        broken.write_bytes(content)
        with pytest.raises(
            UsageError, match=r"is not TOML.*; its lines are such as: learning_rate"
        ):
            load(TrainConfig, broken, {})


def test_numbers_of_numpy_are_numbers() -> None:
    given = {"steps": np.int64(3), "learning_rate": np.float32(0.5), "seed": np.uint8(7)}
    config = TrainConfig(bundle="b", data="d", **given)  # type: ignore[arg-type]
    assert [type(getattr(config, name)) for name in given] == [int, float, int]
    assert (config.steps, config.learning_rate, config.seed) == (3, 0.5, 7)
    assert TrainConfig(bundle="b", data="d", pack=np.bool_(True)).pack is True
    assert TrainConfig(bundle="b", data="d", keep_best=np.arange(3).any() > 1).keep_best is False
    with pytest.raises(UsageError, match="steps is True; it must be a whole number"):
        TrainConfig(bundle="b", data="d", steps=np.bool_(True))
    export = ExportConfig(source="s", output="o", seq_lens=tuple(np.array([16, 32])))
    assert export.seq_lens == (16, 32) and json.dumps(export.seq_lens) == "[16, 32]"
    with pytest.raises(UsageError, match=r"steps is .*3\.0.*; it must be a whole number"):
        TrainConfig(bundle="b", data="d", steps=np.float64(3))


def test_layer_names_are_split() -> None:
    base = {"source": "s", "output": "o"}
    assert load(ExportConfig, None, base).lora.targets == "all-linear"
    some = load(ExportConfig, None, {**base, "lora_targets": "q_proj, v_proj"})
    assert some.lora.targets == ("q_proj", "v_proj")


NAMES = st.text(min_size=1).filter(lambda text: bool(text.strip()) and "\0" not in text)


@settings(max_examples=50)
@given(
    st.fixed_dictionaries(
        {"bundle": NAMES, "data": NAMES},
        optional={
            "output": NAMES,
            "eval_data": NAMES,
            "steps": st.integers(1, 10**9),
            "learning_rate": st.floats(1e-12, 1e4),
            "weight_decay": st.just(0.0) | st.floats(LEAST, 10),
            "seed": st.integers(0, 2**63 - 1),
        },
    )
)
def test_a_written_configuration_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]
) -> None:
    made = TrainConfig(**values)
    file = tmp_path_factory.mktemp("config") / "train.toml"
    file.write_text(to_toml(made), encoding="utf-8")
    assert load(TrainConfig, file, {}) == made


@pytest.mark.parametrize("name", ["~\0", "a\0b", "\ud83d", " "])
def test_no_name_is_taken_that_a_file_cannot_have(name: str) -> None:
    for values in ({"eval_data": name}, {"also_evaluate": (name,)}):
        with pytest.raises(UsageError, match=r"not empty, and that (a file|files) can have"):
            TrainConfig(bundle="b", data="d", **values)


def test_tuples_and_flags_round_trip(tmp_path: Path) -> None:
    made = ExportConfig(source="s", output="o", seq_lens=(8, 16), force=True)
    text = to_toml(made)
    assert "seq_lens = [8, 16]\n" in text
    assert "force = true\n" in text
    (tmp_path / "e.toml").write_text(text)
    assert load(ExportConfig, tmp_path / "e.toml", {}) == made


@pytest.mark.parametrize("cls", ALL)
def test_every_field_has_help_and_a_flag(cls: type[config.Config]) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    arguments.add_arguments(parser, cls)
    assert arguments.given(parser.parse_args([]), cls) == {}
    shown = parser.format_help()
    for one in fields(cls):
        assert one.metadata["help"]
        assert (
            one.metadata["metavar"]
            if one.name == cls.positional
            else "--" + one.name.replace("_", "-")
        ) in shown
        if one.default is not MISSING:
            assert getattr(cls, one.name) == one.default


def test_flags_override_and_reach_the_configuration() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    arguments.add_arguments(parser, ExportConfig)
    typed = ["model", "--output=o", "--seq-lens=32,64", "--bits", "8", "--lora-alpha", "4"]
    namespace = parser.parse_args([*typed, "--force", "--json", "--config", "c.toml"])
    assert (namespace.config, namespace.json) == (Path("c.toml"), True)
    overrides = arguments.given(namespace, ExportConfig)
    assert set(overrides) == {"source", "output", "seq_lens", "bits", "lora_alpha", "force"}
    made = load(ExportConfig, None, overrides)
    assert made == ExportConfig(
        source="model", output="o", seq_lens=(32, 64), bits=8, lora_alpha=4.0, force=True
    )


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_a_flag_that_is_given_twice_is_refused(command: Command) -> None:
    """With both values, and with the way to give several where there can be."""
    parser = command_parser(command)
    known = {"--json", "--verbose", "--help", "-h", "--also-evaluate"}
    for action in parser._actions:
        for word in set(action.option_strings) - known:
            if action.nargs == 0:  # a switch
                other = word.replace("--no-", "--", 1) if "--no-" in word else f"--no-{word[2:]}"
                typed = [word, other] if other in action.option_strings else []
                said = " are given together"
            else:
                typed = [word, "1st", action.option_strings[-1], "2nd"]
                said = f"{action.option_strings[-1]} is given twice, as 1st and as 2nd; give "
            if typed:
                with pytest.raises(UsageError, match=said):
                    parser.parse_args(typed)
            same = [word] if action.nargs == 0 else [word, str((action.choices or ["1"])[0])]
            parser.parse_args(2 * same)  # which says the same


def test_several_values_go_together() -> None:
    export, train = (whole_parser(name).parse_args for name in ("export", "train"))
    with pytest.raises(UsageError, match="as 16 and as 32; give several together, as 16,32; see: "):
        export(["export", "m", "--seq-lens=16", "--seq-lens", "32"])
    with pytest.raises(UsageError, match="as linear and as cosine; give one; what is usual "):
        train(["train", "m", "--lr-schedule=linear", "--lr-schedule=cosine"])


def test_help_is_in_groups_in_their_order() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    arguments.add_arguments(parser, TrainConfig)
    text = parser.format_help()
    used = {one.metadata["group"] for one in fields(TrainConfig)} | {config.Group.OTHER}
    headings = [group for group in config.Group if group in used]
    at = [text.index(f"\n{group}:\n") for group in headings]
    assert at == sorted(at) and len(at) == 9
    mezo, evaluation = (
        headings.index(config.Group.ZEROTH_ORDER),
        headings.index(config.Group.EVALUATION),
    )
    assert at[evaluation] < text.rindex("  --stop-loss") < at[mezo] < text.rindex("  --epsilon")
    short = argparse.ArgumentParser(add_help=False)
    arguments.add_arguments(short, ExportConfig)
    assert "zeroth-order" not in short.format_help()


def test_planning_takes_what_training_takes() -> None:
    plan, train = ({one.name for one in fields(cls)} for cls in (PlanConfig, TrainConfig))
    assert plan < train and "machine" in plan


def test_methods_are_those_of_the_list() -> None:
    *others, last = METHODS
    with pytest.raises(UsageError, match=f"it must be {', '.join(others)} or {last}"):
        load(TrainConfig, None, {**TRAIN, "method": "lomo"})
    for method in METHODS.values():
        assert importlib.util.find_spec(method.module) is not None


def test_every_command_has_help_on_its_own_and_in_the_list() -> None:
    everything = succeeds("--help", by=here)
    for command in COMMANDS:
        names = {one.name for one in fields(command.config)}
        assert not names & {"config", "json", "resume", "handler", "parser"}  # the parser's own
        assert f"  {command.name} " in everything.stdout
        assert len(command.summary) <= 64  # one line of 80 columns
        shown = succeeds(command.name, "--help", by=here)
        assert shown.stdout.startswith(f"usage: ondevice {command.name} ")
