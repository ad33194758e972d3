"""Fine-tune language models with LoRA on the device that holds the data, inside a memory budget.

`export_bundle`, `open_bundle`, `plan`, `train`, `resume`, `evaluate`, `generate` and `fuse` do what
the commands of the same names do, with the same options and defaults; errors are those of
`ondevice.errors`. Importing this package loads nothing heavy, no MLX and no NumPy: a name is loaded
when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ondevice.version import __version__

if TYPE_CHECKING:
    from ondevice import errors
    from ondevice.api.bundles import export_bundle, open_bundle
    from ondevice.api.fusing import fuse
    from ondevice.api.process import prepare
    from ondevice.api.results import (
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
    from ondevice.api.use import evaluate, generate
    from ondevice.bundle.store import Bundle

__all__ = [
    "Bundle",
    "Evaluation",
    "EvaluationResult",
    "ExportResult",
    "FuseResult",
    "Generation",
    "MemoryPlan",
    "Step",
    "TrainResult",
    "__version__",
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
    "api.fusing": ("fuse",),
    "api.process": ("prepare",),
    "api.results": (
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
    "api.use": ("evaluate", "generate"),
    "bundle.store": ("Bundle",),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load what is public when it is first used."""
    if name == "errors":
        return import_module("ondevice.errors")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
