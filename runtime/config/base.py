"""Configurations: frozen dataclasses whose fields say what a command's options are.

A field holds a type, a default, a help text, the values that are allowed and the group it is shown
in. The command-line flags (`runtime.config.arguments`), the checks and the TOML format all follow
from the fields, so a new option is one new field. Unknown keys are refused, and one UsageError
reports everything that is wrong. The keys of a TOML file are the field names, without tables; paths
in it are relative to the working directory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import StrEnum
from itertools import pairwise
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from runtime.core.documents import from_toml
from runtime.core.errors import UsageError
from runtime.core.files import read_file
from runtime.core.units import parse_bytes


class Group(StrEnum):
    """The headings of a command's help, in the order in which they are shown."""

    MAIN = "main options"
    DATA = "data"
    TRAINING = "training"
    QUANTIZATION = "quantization"
    LORA = "LoRA adapters"
    GRAPHS = "graphs"
    EVALUATION = "evaluation"
    SWEEP = "sweep of options before a method runs"
    SAMPLING = "sampling"
    STOPPING = "saving and stopping"
    MEMORY = "memory and speed"
    ZEROTH_ORDER = "zeroth-order methods only (mezo and its variants)"
    OTHER = "other"


def flag(name: str) -> str:
    """An option's name on the command line."""
    return "--" + name.replace("_", "-")


def expanded(path: str) -> str:
    """A path with the folder of a user for ~, which the shell leaves as it is in --output=~/run."""
    with suppress(RuntimeError):  # there is no such user, or no such folder
        return str(Path(path).expanduser()) if path.startswith("~") else path
    return path


class Check(NamedTuple):
    """A condition on a field's value, and the words that describe it in messages."""

    allows: Callable[[Any], bool]
    wanted: str
    hint: Callable[[Any], str] = lambda value: ""  # the likely meaning of a wrong value
    stored: Callable[[Any], Any] = lambda value: value  # an allowed value, with whole paths


def _is_name(text: str) -> bool:
    try:
        return bool(text.strip()) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # half of a character
        return False


def is_size(text: str) -> bool:
    """Whether `text` is a number of bytes such as 300MB; without a unit it is a large one."""
    try:
        return parse_bytes(text) >= (SMALLEST_PLAIN_BYTES if _has_no_unit(text) else 1)
    except UsageError:
        return False


def _has_no_unit(text: str) -> bool:
    return not any(letter.isalpha() for letter in text)


def _in_megabytes(text: str) -> str:
    """A question for who has given a number alone and cannot have meant bytes."""
    try:
        meant = _has_no_unit(text) and parse_bytes(text) < SMALLEST_PLAIN_BYTES / 10
    except UsageError:
        return ""
    return f"; did you mean {text.strip()}MB?" if meant else ""


MOST = 1_000_000_000  # of steps, rows, tokens, seconds: more is a slip
MOST_TOKENS = 1 << 20  # of a row, as manifests have them
LEAST = 1e-9  # of a number that is not 0, and computes something else than 0 would
COUNT = Check(
    lambda value: 1 <= value <= MOST,
    f"1 or more, at most {MOST:,}",
)
NOT_NEGATIVE = Check(
    lambda value: value == 0 or LEAST <= value <= MOST,
    f"0 or more, at most {MOST:,}",
    lambda value: f"; below {LEAST:g} it would be 0" if 0 < value < LEAST else "",
)
SEED = Check(lambda value: value >= 0, "a whole number from 0 to 2^63 - 1")
SMALLEST_PLAIN_BYTES = 1_000_000  # that a number without a unit can mean
MOST_SHOWN = 100  # characters of a wrong value in a message
NAME = Check(_is_name, "a name that is not empty, and that a file can have")
FILLED = NAME._replace(stored=expanded)
ALL_FILLED = Check(
    lambda names: all(map(_is_name, names)),
    "names that are not empty, and that files can have",
    stored=lambda names: tuple(map(expanded, names)),
)
SIZE = Check(is_size, "a size such as 300MB, 1.5GB or 512MiB", _in_megabytes)
INCREASING = Check(
    lambda values: 0 < len(values) <= 64 and rise((0, *values, MOST_TOKENS + 1)),
    f"at most 64 whole numbers from 1 to {MOST_TOKENS:,}, each larger than the one before it",
)


def rise(values: Sequence[float]) -> bool:
    """Whether each value is larger than the one before it."""
    return all(a < b for a, b in pairwise(values))


def between(least: float, most: float, usual: str, *, or_zero: bool = False) -> Check:
    """The condition on a number that it has a size that computes something, or is 0.

    or_zero: whether it may be 0, as it may where `least` is 0; then others are from LEAST on.
    """
    zero, lowest = or_zero or least == 0, least or LEAST
    return Check(
        lambda value: lowest <= value <= most or (zero and value == 0),
        f"{'0, or ' * or_zero}from {least:g} to {most:,.12g}; {usual}",
        lambda value: f"; below {LEAST:g} it would be 0" if zero and 0 < value < LEAST else "",
    )


def readable(read: Callable[[str], Any], wanted: str, stored: Callable[[str], str] = str) -> Check:
    """The condition on a text that `read` takes it, which raises ValueError for others."""

    def allows(text: str) -> bool:
        try:
            read(text)
        except ValueError:
            return False
        return True

    return Check(allows, wanted, stored=stored)


def up_to(most: int) -> Check:
    """The condition on a count that it is at most `most`."""
    return Check(lambda value: 1 <= value <= most, f"from 1 to {most}")


def option(
    default: Any,
    text: str,
    check: Check | None = None,
    group: Group = Group.MAIN,
    *,
    metavar: str | None = None,
    aliases: tuple[str, ...] = (),
) -> Any:
    """A field that is an option of the command line.

    `text` is its help, to which the default is added. `metavar` stands for its value in the help,
    and `aliases` are further flags for it.
    """
    metadata = {"help": text, "check": check, "group": group, "metavar": metavar}
    return field(default=default, metadata={**metadata, "aliases": aliases})


def required(text: str, metavar: str | None = None) -> Any:
    """A field that must be given."""
    return option(MISSING, text, FILLED, metavar=metavar)


def choice(
    default: str | int | None,
    text: str,
    *choices: str | int,
    group: Group = Group.MAIN,
    hints: Mapping[str, str] = {},
) -> Any:
    """A field that takes one of a few values; `hints` says more of values that it does not take."""
    *others, last = map(str, choices)
    wanted = f"{', '.join(others)} or {last}" if others else last
    metavar = f"{{{','.join([*others, last])}}}"
    check = Check(choices.__contains__, wanted, lambda value: _after(hints.get(str(value))))
    return option(default, text, check, group, metavar=metavar)


def _after(hint: str | None) -> str:
    return "" if hint is None else f"; {hint}"


def output_option(default: Any, text: str, metavar: str) -> Any:
    """Where a command writes: `--output`, or `-o`."""
    return option(default, text, FILLED, metavar=metavar, aliases=("-o",))


@dataclass(frozen=True, kw_only=True)
class Config:
    """Base of configurations; creating one with a value that is not allowed raises UsageError.

    A `Path` is stored as text, a list as a tuple, a whole number as float if need be, and the
    scalars of other libraries as Python's.
    """

    positional: ClassVar[str] = "bundle"  # the field that is given without a flag

    def __post_init__(self) -> None:
        values = {name: _plain(value) for name, value in vars(self).items()}
        refuse(type(self), _problems(type(self), values))
        vars(self).update(
            {setting.name: _normal(setting, values[setting.name]) for setting in fields(self)}
        )

    def was_given(self, name: str) -> bool:
        """Whether an option of this or a derived class has another value than its default."""
        return bool(getattr(self, name, None) != getattr(type(self), name, None))


C = TypeVar("C", bound=Config)


def load(cls: type[C], file: Path | None, overrides: dict[str, Any]) -> C:
    """The configuration from the TOML `file`, if there is one; `overrides` win over it.

    Values in `overrides` may be text, as typed on the command line. Raises one UsageError that
    lists every unknown key, missing key and wrong value.
    """
    in_file = {} if file is None else read_values(file)
    known = {setting.name: setting for setting in fields(cls)}
    values: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in {**in_file, **overrides}.items():
        if key not in known:
            from runtime.config.suggestions import unknown_key  # training need not hold its tables

            problems.append(unknown_key(key, tuple(known), f"ondevice {_command(cls)}"))
            continue
        values[key] = _plain(value)
        if isinstance(value, str) and key in overrides:
            with suppress(ValueError):  # `_problems` reports it as a value of the wrong type
                values[key] = type_of(known[key]).from_text(value)
    refuse(cls, problems + _problems(cls, values))
    return cls(**values)


def to_toml(config: Config) -> str:
    """`config` as a file that `load` reads back to an equal value; None is left out."""
    # JSON writes these values as TOML does, but for a literal DEL
    values = {key: value for key, value in vars(config).items() if value is not None}
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items()]
    return "".join(lines).replace("\x7f", "\\u007f")


def refuse(cls: type[Config], problems: list[str]) -> None:
    """Raise one UsageError that lists `problems`, if there are any."""
    if problems:
        raise UsageError(
            "\n  ".join([f"{_command(cls)} cannot run with these settings:", *problems])
        )


def _command(cls: type[Config]) -> str:
    """The name of the command of which a class holds the options."""
    return cls.__name__.removesuffix("Config").lower()


class FieldType(NamedTuple):
    """A type that fields can have."""

    words: str
    metavar: str
    fits: Callable[[Any], bool]
    from_text: Callable[[str], Any] = str


def _too_long(value: Any) -> bool:
    """Whether a whole number has more than the 64 bits of TOML's."""
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def _whole(value: Any) -> bool:
    """Whether it is a whole number, as TOML can hold it."""
    return isinstance(value, int) and not isinstance(value, bool) and not _too_long(value)


def _number(value: Any) -> bool:
    return _whole(value) or isinstance(value, float)


# by annotation without None; `from __future__ import annotations` keeps annotations as text
_TYPES = {
    "str": FieldType("text", "TEXT", lambda value: isinstance(value, str)),
    "int": FieldType("a whole number", "N", _whole, int),
    "float": FieldType("a number", "X", _number, float),
    "bool": FieldType("true or false", "", lambda value: isinstance(value, bool)),
    "tuple[str, ...]": FieldType(
        "a list of names",
        "TEXT,TEXT,...",
        lambda value: (
            isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
        ),
        lambda text: tuple(text.split(",")),
    ),
    "tuple[int, ...]": FieldType(
        "a list of whole numbers",
        "N,N,...",
        lambda value: isinstance(value, list | tuple) and all(map(_whole, value)),
        lambda text: tuple(map(int, text.split(","))),
    ),
}


def type_of(setting: Field[Any]) -> FieldType:
    """The type of a configuration's field."""
    name = str(setting.type)
    kind = _TYPES[name.removesuffix(" | None")]
    if not name.endswith(" | None"):
        return kind
    return kind._replace(fits=lambda value: value is None or kind.fits(value))


def metavar(setting: Field[Any]) -> str:
    """The word that stands for an option's value in the help."""
    return setting.metadata["metavar"] or type_of(setting).metavar


def typed(cls: type[Config], setting: Field[Any]) -> str:
    """An option as a command's usage has it: its flag, if it has one, and its value's word."""
    flags = "" if setting.name == cls.positional else f"{flag(setting.name)} "
    return flags + metavar(setting)


def _plain(value: Any) -> Any:
    """A path as text, and a scalar of another library as Python's; others as they are."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    if getattr(value, "shape", None) == ():  # of NumPy, MLX or torch, whose truth is no number
        value = value.item()
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _normal(setting: Field[Any], value: Any) -> Any:
    """A valid value, converted to the field's type."""
    if setting.type in ("float", "float | None") and value is not None:
        return float(value)
    check = setting.metadata["check"]
    if check and value is not None:
        value = check.stored(value)
    return tuple(value) if isinstance(value, list) else value


def _problems(cls: type[Config], values: dict[str, Any]) -> list[str]:
    """Messages for values that are missing or not allowed; all keys are known."""
    problems = []
    for setting in fields(cls):
        value, check = values.get(setting.name, setting.default), setting.metadata["check"]
        if value is MISSING:
            problems.append(f"{typed(cls, setting)} is missing ({setting.metadata['help']})")
        elif not type_of(setting).fits(value) and not (
            _is_choice(setting) and isinstance(value, str)  # a name, which may mean one of them
        ):
            meant = check.hint(str(value)) if check and _whole(value) else ""
            wanted = type_of(setting).words
            if wanted == "text" and check:
                wanted = f"text: {check.wanted}"
            if _too_long(value):
                wanted = f"{wanted} of at most 64 bits, with its sign"
            problems.append(f"{setting.name} is {_shortened(value)}; it must be {wanted}{meant}")
        elif check and value is not None and not check.allows(value):
            from runtime.config.suggestions import value_meant  # training need not hold its tables

            meant = check.hint(value) or value_meant(setting.name, value)
            problems.append(
                f"{setting.name} is {_shortened(value)}; it must be {check.wanted}{meant}"
            )
        elif isinstance(value, str) and not _is_text(value):
            problems.append(
                f"{setting.name} is {_shortened(value)}, which is not valid UTF-8; if it is a "
                "path, rename the file, or the folder that is named so"
            )
    return problems


def _is_choice(setting: Field[Any]) -> bool:
    return str(setting.metadata["metavar"]).startswith("{")


def _is_text(value: str) -> bool:
    """Whether it can be printed, and written to JSON and TOML."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shortened(value: object) -> str:
    """A value as a message shows it, however long it is."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than 4300 digits
        return "a number with too many digits"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text)} characters)"


def read_values(file: Path) -> dict[str, Any]:
    """The unchecked content of the TOML `file`.

    Raises:
        UsageError: it cannot be read, or is no TOML.
    """
    try:
        return from_toml(read_file(file))
    except OSError as error:
        raise UsageError(f"cannot read --config {file}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(
            f"--config {file} is not TOML: {error}; its lines are such as: learning_rate = 1e-3"
        ) from error
