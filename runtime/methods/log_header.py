"""The first line of a trajectory log: which run it belongs to, and how its noise is drawn.

Every log has the fields of `Header`. Its other fields are in `more`: a descent, the noise, an
estimator or the trained weights wrote it, and `runtime.methods.log` lists these writers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec

from runtime.adapters.lora import LoraSettings
from runtime.core.typed import as_type


class Part:
    """A part of a zeroth-order method, which may have fields in a log's header, and a state.

    A class that names `log_fields` must write them in `header`, and check them in `check_fields`.
    """

    log_fields: ClassVar[tuple[str, ...]] = ()  # that only it writes

    def __init_subclass__(cls, **options: Any) -> None:
        """Check that fields are written and checked. Raises TypeError."""
        super().__init_subclass__(**options)
        missing = "header" if cls.header is Part.header else ""
        checks: Any = cls.check_fields
        if checks.__func__ is Part.__dict__["check_fields"].__func__:
            missing = "check_fields"
        if cls.log_fields and missing:
            raise TypeError(f"{cls.__name__} has log_fields and no {missing}")

    def header(self) -> dict[str, Any]:
        """Its `log_fields`, as a log's header holds them."""
        return {}

    @classmethod
    def check_fields(cls, fields: Mapping[str, Any]) -> None:
        """Check its own among all fields that are not common; only one that has fields is asked.

        Raises:
            ValueError: one of them is missing or invalid, or cannot stand beside another's.
        """

    def state(self) -> dict[str, Any]:
        """The state that the next step needs, for a save, as JSON."""
        return {}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Take the facts of an earlier `state`.

        Raises:
            ValueError, KeyError, TypeError: `facts` hold something else.
        """


FORMAT = "ondevice-trajectory-1"


class Header(msgspec.Struct, frozen=True):
    """The fields of every log.

    `lora` are the fields of `LoraSettings`; empty where all parameters are trained. `more` comes
    after these in the line.
    """

    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    noise: Annotated[str, msgspec.Meta(pattern=r"\A(gaussian|rademacher)\Z")]
    weight_decay: Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
    weights_sha256: str
    initial_sha256: str
    lora: dict[str, Any] = {}
    format: str = FORMAT
    more: Mapping[str, Any] = {}

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Header:
        """The header of a line that was read, checked but for `more`.

        Raises:
            ValueError: a common field is missing or invalid, since anybody may have written it.
        """
        if (written := facts.get("format", FORMAT)) != FORMAT:
            raise ValueError(
                f"another version of ondevice wrote it: its format is {written!r:.80}, "
                f"not {FORMAT!r}"
            )
        more = {name: value for name, value in facts.items() if name not in COMMON}
        header = as_type(
            {**{name: facts[name] for name in COMMON & facts.keys()}, "more": more}, cls
        )
        if header.settings is not None and (wrong := header.settings.problem):
            raise ValueError(f"its LoRA {wrong}")
        return header

    @property
    def settings(self) -> LoraSettings | None:
        """The LoRA settings, None if the log has none. Raises ValueError if they are invalid."""
        try:
            return as_type(self.lora, LoraSettings) if self.lora else None
        except ValueError as problem:
            raise ValueError(f"its LoRA settings: {problem}") from None

    def line(self) -> str:
        """The first line of the log."""
        facts = msgspec.structs.asdict(self)
        more = facts.pop("more")
        return json.dumps({**facts, **more}) + "\n"


COMMON = frozenset(Header.__struct_fields__) - {"more"}
