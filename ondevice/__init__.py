"""Fine-tune language models with LoRA on the device that holds the data, inside a memory budget.

`export_bundle`, `open_bundle`, `plan`, `train`, `resume`, `evaluate`, `compare_with_source`,
`generate`, `chat`, `adapter` and `fuse` do what the command line does, with the same options and
defaults; errors are those of `runtime.core.errors`. Importing this package loads nothing heavy, no
MLX and no NumPy: a name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from runtime.core.version import __version__

if TYPE_CHECKING:
    from ondevice.api.bundles import export_bundle, open_bundle
    from ondevice.api.conversation import Conversation, chat
    from ondevice.api.converting import adapter
    from ondevice.api.fusing import fuse
    from ondevice.api.process import prepare
    from ondevice.api.results import (
        AdapterResult,
        Evaluation,
        EvaluationResult,
        ExportResult,
        FuseResult,
        Generation,
        MemoryPlan,
        Step,
        TrainResult,
    )
    from ondevice.api.training import plan, resume, train
    from ondevice.api.use import compare_with_source, evaluate, generate
    from runtime.bundle.quality import Quality
    from runtime.bundle.store import Bundle
    from runtime.core import errors

__all__ = [
    "AdapterResult",
    "Bundle",
    "Conversation",
    "Evaluation",
    "EvaluationResult",
    "ExportResult",
    "FuseResult",
    "Generation",
    "MemoryPlan",
    "Quality",
    "Step",
    "TrainResult",
    "__version__",
    "adapter",
    "chat",
    "compare_with_source",
    "errors",
    "evaluate",
    "export_bundle",
    "fuse",
    "generate",
    "open_bundle",
    "plan",
    "prepare",
    "resume",
    "train",
]

_MODULES = {
    "api.bundles": ("export_bundle", "open_bundle"),
    "api.conversation": ("Conversation", "chat"),
    "api.converting": ("adapter",),
    "api.fusing": ("fuse",),
    "api.process": ("prepare",),
    "api.results": (
        "AdapterResult",
        "Evaluation",
        "EvaluationResult",
        "ExportResult",
        "FuseResult",
        "Generation",
        "MemoryPlan",
        "Step",
        "TrainResult",
    ),
    "api.training": ("plan", "resume", "train"),
    "api.use": ("compare_with_source", "evaluate", "generate"),
    "bundle.quality": ("Quality",),
    "bundle.store": ("Bundle",),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load what is public when it is first used."""
    if name == "errors":
        return import_module("runtime.core.errors")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
