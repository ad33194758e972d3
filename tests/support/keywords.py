"""Writes `ondevice/api/keywords.py` from the commands' configurations.

Run `python -m tests.support.keywords` after an option has been added or changed.
"""

from __future__ import annotations

import re
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any

from export.config.adapter import AdapterConfig
from export.config.export import ExportConfig
from export.config.fuse import FuseConfig
from runtime.config.base import Config
from runtime.config.evaluate import EvalConfig
from runtime.config.generate import ChatConfig, GenerateConfig
from runtime.config.lora import LoraOptions
from runtime.config.plan import PlanConfig
from runtime.config.shared import BundleConfig, DataOptions, StepConfig
from runtime.config.train import TrainConfig
from runtime.config.zeroth_order import ZerothOrderOptions

PLACE = Path(__file__).parents[2] / "ondevice" / "api" / "keywords.py"
PATHS = {"data", "output", "eval_data", "adapter", "machine", "calibrate", "source", "bundle"}
HEAD = '''\
"""The options of the API's functions as keywords with types, for editors and type checkers.

They are the fields of the commands' configurations in `runtime.config`, which has their defaults,
their checks and what they mean; fields that are paths may also be a `Path`. This file is written
from them: python -m tests.support.keywords
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict
'''


@dataclass(frozen=True)
class Class:
    """A class of keywords: what is said of it, its configuration, and what it leaves out."""

    about: str
    config: type[Config]
    without: frozenset[str] = frozenset()


CLASSES = {
    "DataKeywords": Class("Which rows there are, and which tokens have a loss.", DataOptions),
    "BundleKeywords": Class(
        "The memory budget, the length of rows, and the device.",
        BundleConfig,
        frozenset({"bundle"}),
    ),
    "LoraKeywords": Class("Settings of adapters.", LoraOptions),
    "ZerothOrderKeywords": Class("Options of methods that see losses only.", ZerothOrderOptions),
    "StepKeywords": Class("Options of a step on which its memory depends.", StepConfig),
    "PlanKeywords": Class("The options of `plan`.", PlanConfig),
    "TrainKeywords": Class("The options of `train`.", TrainConfig, frozenset({"data"})),
    "EvaluateKeywords": Class(
        "The options of `evaluate`.",
        EvalConfig,
        frozenset({"data", "source", "max_tokens", "answers"}),
    ),
    "ExportKeywords": Class(
        "The options of `export_bundle`.", ExportConfig, frozenset({"source", "output"})
    ),
    "GenerateKeywords": Class(
        "The options of `generate`.", GenerateConfig, frozenset({"bundle", "prompt"})
    ),
    "ChatKeywords": Class("The options of `chat`.", ChatConfig, frozenset({"bundle"})),
    "AdapterKeywords": Class(
        "The options of `adapter`.", AdapterConfig, frozenset({"run", "to", "output"})
    ),
    "SourceKeywords": Class(
        "The options of `compare_with_source`.",
        EvalConfig,
        frozenset({"data", "source", "adapter", "task", "max_tokens", "answers", "adapter_dtype"}),
    ),
    "FuseKeywords": Class("The options of `fuse`.", FuseConfig, frozenset({"bundle", "output"})),
}


def written() -> str:
    """The file's text."""
    names = {one.config: name for name, one in CLASSES.items()}
    parts = [HEAD]
    for name, one in CLASSES.items():
        bases = [base for base in one.config.__bases__ if base in names]
        known = {field.name for base in bases for field in fields(base)}
        own = [f for f in fields(one.config) if f.name not in known | one.without]
        parents = ", ".join([names[base] for base in bases] or ["TypedDict"])
        lines = [f"    {field.name}: {_kind(field)}\n" for field in own]
        parts.append(
            f'\n\nclass {name}({parents}, total=False):\n    """{one.about}"""\n\n' + "".join(lines)
        )
    return "".join(parts)


def _kind(field: Field[Any]) -> str:
    """A field's type, for who calls."""
    kind = str(field.type)
    if field.name in PATHS:
        kind = kind.replace("str", "str | Path")
    return re.sub(r"tuple\[(\w+), \.\.\.\]", r"Sequence[\1]", kind)


if __name__ == "__main__":
    PLACE.write_text(written())
