"""What each stage is told to do: frozen dataclasses, filled from a TOML file and the command line.

Fields are data: a type, a default, help, and what values are allowed. The command-line flags, the
checks and the file format all follow from them, so a new option is one new field. Unknown keys are
refused, and everything wrong with a configuration is reported in one UsageError. The file's keys
are the field names, without tables; paths in it are relative to the working directory.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from ondevice.errors import UsageError
from ondevice.units import parse_bytes


class _Check(NamedTuple):
    """Which values of a field's type are allowed, and how to say so."""

    allows: Callable[[Any], bool]
    wanted: str


def _is_size(text: str) -> bool:
    try:
        return parse_bytes(text) > 0
    except UsageError:
        return False


_COUNT = _Check(lambda value: value >= 1, "1 or more")
_NOT_NEGATIVE = _Check(lambda value: 0 <= value < math.inf, "0 or more")
_ABOVE_ZERO = _Check(lambda value: 0 < value < math.inf, "a number above 0")
_RISE = _Check(lambda value: value == 0 or 1 < value < math.inf, "0 or above 1")
_FILLED = _Check(lambda value: bool(value.strip()), "a name that is not empty")
_SIZE = _Check(_is_size, "a size such as 300MB, 1.5GB or 512MiB")
_RISING = _Check(
    lambda values: bool(values) and all(a < b for a, b in pairwise((0, *values))),
    "whole numbers above 0, each larger than the one before it",
)
_LAYERS = _Check(
    lambda text: text == "all-linear" or all(n.strip().isidentifier() for n in text.split(",")),
    "all-linear, or names of layers such as q_proj,v_proj",
)


def _option(default: Any, text: str, check: _Check | None = None) -> Any:
    return field(default=default, metadata={"help": text, "check": check})


def _required(text: str) -> Any:
    return _option(MISSING, text, _FILLED)


def _choice(default: str | int, text: str, *choices: str | int) -> Any:
    wanted = ", ".join(map(str, choices[:-1])) + f" or {choices[-1]}"
    return _option(default, f"{text}: {wanted}", _Check(choices.__contains__, wanted))


def _adapter_dtype() -> Any:
    text = "how a block holds its adapters; their float32 values stay on disk"
    return _choice("float32", text, "float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class _Config:
    """Checks itself: no configuration exists with a value that is not allowed (UsageError)."""

    positional: ClassVar[str] = "bundle"

    def __post_init__(self) -> None:
        _refuse(type(self), _problems(type(self), vars(self)))


@dataclass(frozen=True, kw_only=True)
class ExportConfig(_Config):
    """`ondevice export`: a checkpoint into a bundle."""

    positional: ClassVar[str] = "source"

    source: str = _required("checkpoint: a folder, a GGUF file or a model id")
    output: str = _required("bundle directory to write")
    bits: int = _choice(4, "bits per weight of the linear layers", 4, 8)
    group_size: int = _choice(64, "weights that share one scale", 32, 64, 128)
    embedding_bits: int = _choice(4, "bits per weight of embedding and head", 4, 8)
    lora_rank: int = _option(8, "rank of the LoRA adapters", _COUNT)
    lora_alpha: float = _option(16.0, "LoRA scale times the rank", _ABOVE_ZERO)
    lora_targets: str = _option("all-linear", "layers to adapt: all-linear or their names", _LAYERS)
    seq_lens: tuple[int, ...] = _option(
        (64, 128, 256, 512, 1024), "sequence lengths to hold graphs for, in tokens", _RISING
    )
    seed: int = _option(0, "seed of the adapters' first values", _NOT_NEGATIVE)
    device: str = _choice("auto", "device to trace for", "auto", "cpu", "gpu")
    force: bool = _option(False, "replace a bundle that is there already")

    @property
    def lora_target_names(self) -> tuple[str, ...] | None:
        """The layer names to adapt, or None for every linear layer."""
        if self.lora_targets == "all-linear":
            return None
        return tuple(name.strip() for name in self.lora_targets.split(","))


@dataclass(frozen=True, kw_only=True)
class _BundleConfig(_Config):
    """What every use of a bundle shares."""

    bundle: str = _required("bundle directory")
    budget: str = _option("1GB", "memory footprint never to pass, such as 300MB", _SIZE)
    max_seq_length: int = _option(256, "tokens predicted per row; longer rows are cut", _COUNT)
    arithmetic: str = _choice("auto", "how weights are multiplied", "auto", "packed", "unpacked")

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes."""
        return parse_bytes(self.budget)


@dataclass(frozen=True, kw_only=True)
class PlanConfig(_BundleConfig):
    """`ondevice plan`: what a budget buys. Training is configured by the same fields and more."""

    batch_size: int = _option(1, "rows per batch", _COUNT)
    grad_accumulation: int = _option(1, "batches per optimizer step", _COUNT)
    method: str = _choice("mebp", "how a batch becomes an update", "mebp", "mezo")
    optimizer: str = _choice("adamw", "optimizer of mebp (mezo has its own)", "adamw", "sgd")
    queries: int = _option(1, "directions that a step of mezo averages over", _COUNT)
    plan: str = _choice("budget", "memory plan: ours or as MeBP's paper", "budget", "paper")
    prefetch: bool = _option(True, "read the next block while one computes")
    adapter_dtype: str = _adapter_dtype()


@dataclass(frozen=True, kw_only=True)
class TrainConfig(PlanConfig):
    """`ondevice train`: LoRA adapters from a bundle and data."""

    data: str = _required("a .txt or .jsonl file, a folder with train and valid, or random:SEED")
    output: str = _option("run", "directory of the run", _FILLED)
    steps: int = _option(100, "optimizer steps", _COUNT)
    learning_rate: float = _option(1e-4, "learning rate at its highest", _ABOVE_ZERO)
    lr_schedule: str = _choice("constant", "after the warm-up", "constant", "linear", "cosine")
    epsilon: float = _option(1e-3, "how far mezo perturbs", _ABOVE_ZERO)
    noise: str = _choice("gaussian", "what mezo perturbs along", "gaussian", "rademacher")
    warmup_steps: int = _option(0, "steps over which the learning rate rises", _NOT_NEGATIVE)
    weight_decay: float = _option(0.0, "decoupled weight decay", _NOT_NEGATIVE)
    seed: int = _option(0, "seed of the order of rows and of the noise", _NOT_NEGATIVE)
    adapter: str | None = _option(None, "adapter to start from: a file or a run", _FILLED)
    eval_data: str | None = _option(None, "data to evaluate on (else valid of --data)", _FILLED)
    eval_every: int = _option(0, "steps between evaluations (0: none)", _NOT_NEGATIVE)
    eval_rows: int = _option(0, "rows per evaluation (0: all; one if random)", _NOT_NEGATIVE)
    save_every: int = _option(50, "steps between saved states (0: only the last)", _NOT_NEGATIVE)
    stop_seconds: float = _option(0.0, "training seconds to end after (0: none)", _NOT_NEGATIVE)
    stop_loss: float = _option(0.0, "held-out loss to end at (0: none)", _NOT_NEGATIVE)
    stop_rise: float = _option(
        0.0, "end where the held-out loss is above this many times its first (0: never)", _RISE
    )
    heap_relief: bool = _option(True, "give free heap memory back near the predicted peak")
    profile: bool = _option(False, "tell where time and memory go, in the summary")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_steps > self.steps:
            _refuse(type(self), [f"warmup_steps {self.warmup_steps} > steps {self.steps}"])
        unseen = [name for name in ("stop_loss", "stop_rise") if getattr(self, name)]
        if unseen and not self.eval_every:
            need = f"{' and '.join(unseen)} {'needs' if len(unseen) == 1 else 'need'} eval_every"
            _refuse(type(self), [f"{need}: the loss is looked at only then"])


@dataclass(frozen=True, kw_only=True)
class EvalConfig(_BundleConfig):
    """`ondevice eval`: the loss of a bundle, with or without an adapter."""

    data: str = _required("a .txt or .jsonl file, a folder with valid, or random:SEED")
    adapter: str | None = _option(None, "adapter file or run directory", _FILLED)
    adapter_dtype: str = _adapter_dtype()
    eval_rows: int = _option(0, "rows to evaluate (0: all; one if random)", _NOT_NEGATIVE)


C = TypeVar("C", bound=_Config)


def load(cls: type[C], file: Path | None, overrides: dict[str, Any]) -> C:
    """The configuration from the TOML `file`, where given, with `overrides` winning over it.

    Values in `overrides` may be text, as typed on the command line. Raises one UsageError that
    lists every unknown key, missing key and wrong value.
    """
    known = {one.name: one for one in fields(cls)}
    values: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in {**(_read(file) if file is not None else {}), **overrides}.items():
        if key not in known:
            near = difflib.get_close_matches(key.replace("-", "_"), known, n=2)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            problems.append(f"unknown key {key!r}{hint}")
            continue
        values[key] = value
        if isinstance(value, str) and key in overrides:
            with suppress(ValueError):  # reported below, as a value of the wrong kind
                values[key] = _kind(known[key]).from_text(value)
    _refuse(cls, problems + _problems(cls, values))
    return cls(**{key: _normal(known[key], value) for key, value in values.items()})


def to_toml(config: _Config) -> str:
    """`config` as a file that `load` reads back to an equal value; None is left out."""
    # what these values are in JSON they are in TOML too, but for a literal DEL
    values = {key: value for key, value in vars(config).items() if value is not None}
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items()]
    return "".join(lines).replace("\x7f", "\\u007f")


_GROUPS = {
    "memory": ("budget", "max_seq_length", "arithmetic", "plan", "prefetch", "adapter_dtype"),
    "optimization": (
        *("method", "steps", "batch_size", "grad_accumulation", "learning_rate", "lr_schedule"),
        *("warmup_steps", "weight_decay", "optimizer", "seed"),
    ),
    "mezo alone": ("epsilon", "noise", "queries"),
    "evaluations, saves and when to end": (
        *("eval_data", "eval_every", "eval_rows", "save_every"),
        *("stop_seconds", "stop_loss", "stop_rise"),
    ),
}
GROUPED_FROM = 16  # fields on: fewer are read at a glance


def add_arguments(parser: argparse.ArgumentParser, cls: type[_Config]) -> None:
    """Give `parser` a flag for each field of `cls`, and `--config FILE` and `--json`.

    Only what the user gave is set on the namespace (see `given`); nothing is checked here, so
    that `load` can report all problems together.
    """
    grouped = len(fields(cls)) >= GROUPED_FROM
    groups = {title: parser.add_argument_group(title) for title in _GROUPS if grouped}
    places = {name: groups[title] for title in groups for name in _GROUPS[title]}
    for one in fields(cls):
        place = places.get(one.name, parser)
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(one)}
        flag = "--" + one.name.replace("_", "-")
        aliases = ("--seq-len",) if one.name == "max_seq_length" else ()
        if one.name == cls.positional:
            place.add_argument(one.name, nargs="?", **options)
        elif one.type == "bool":
            place.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        else:
            metavar = _kind(one).metavar
            place.add_argument(flag, *aliases, dest=one.name, metavar=metavar, **options)
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of these options")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def given(namespace: argparse.Namespace, cls: type[_Config]) -> dict[str, Any]:
    """The fields of `cls` that the user gave on the command line: the overrides for `load`."""
    names = {one.name for one in fields(cls)}
    return {key: value for key, value in vars(namespace).items() if key in names}


class _Kind(NamedTuple):
    """A type that fields can have."""

    words: str
    metavar: str
    fits: Callable[[Any], bool]
    from_text: Callable[[str], Any] = str


def _whole(value: Any) -> bool:  # TOML's integers have 64 bits
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _number(value: Any) -> bool:
    return _whole(value) or isinstance(value, float)


_KINDS = {  # by annotation, which this file leaves as text
    "str": _Kind("text", "TEXT", lambda value: isinstance(value, str)),
    "str | None": _Kind("text", "TEXT", lambda value: isinstance(value, str | None)),
    "int": _Kind("a whole number", "N", _whole, int),
    "float": _Kind("a number", "X", _number, float),
    "bool": _Kind("true or false", "", lambda value: isinstance(value, bool)),
    "tuple[int, ...]": _Kind(
        "a list of whole numbers",
        "N,N",
        lambda value: isinstance(value, list | tuple) and all(map(_whole, value)),
        lambda text: tuple(map(int, text.split(","))),
    ),
    "tuple[float, ...]": _Kind(
        "a list of numbers",
        "X,X",
        lambda value: isinstance(value, list | tuple) and all(map(_number, value)),
        lambda text: tuple(map(float, text.split(","))),
    ),
}


def _kind(one: Field[Any]) -> _Kind:
    return _KINDS[str(one.type)]


def _normal(one: Field[Any], value: Any) -> Any:
    """A value of a type that passes, as the field's own type."""
    if one.type == "float":
        return float(value)
    if one.type == "tuple[float, ...]":
        return tuple(map(float, value))
    return tuple(value) if isinstance(value, list) else value


def _help(one: Field[Any]) -> str:
    text = str(one.metadata["help"])
    if one.default is not MISSING and one.default is not None and one.type != "bool":
        shown = ",".join(map(str, one.default)) if isinstance(one.default, tuple) else one.default
        text += f" (default: {shown})"
    return text.replace("%", "%%")


def _problems(cls: type[_Config], values: dict[str, Any]) -> list[str]:
    """What is missing from `values` or wrong in each by itself; their keys are known."""
    found = []
    for one in fields(cls):
        value, check = values.get(one.name, one.default), one.metadata["check"]
        if value is MISSING:
            found.append(f"{one.name} is missing: {one.metadata['help']}")
        elif not _kind(one).fits(value):
            found.append(f"{one.name} is {value!r}; it must be {_kind(one).words}")
        elif check and value is not None and not check.allows(value):
            found.append(f"{one.name} is {value!r}; it must be {check.wanted}")
    return found


def _refuse(cls: type[_Config], problems: list[str]) -> None:
    if problems:
        stage = cls.__name__.removesuffix("Config").lower()
        raise UsageError("\n  ".join([f"the {stage} configuration is wrong:", *problems]))


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read --config {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {file} is not TOML: {error}") from error
