"""Fine-tune language models with LoRA on the device that holds the data, inside a memory budget.

`export_bundle`, `open_bundle`, `plan`, `train`, `resume`, `evaluate`, `compare_with_source`,
`generate`, `chat`, `adapter` and `fuse` work as the commands do. The options, with the same
defaults, are in the command's configuration, such as `TrainConfig`. Errors are those of
`ondevice.errors`. Importing this package loads nothing heavy, no MLX and no NumPy: a name is loaded
when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from runtime.core.version import __version__

if TYPE_CHECKING:
    from export.config.export import ExportConfig
    from export.config.fuse import AdapterConfig, FuseConfig
    from ondevice import errors
    from ondevice.api.bundles import ExportResult, export_bundle, open_bundle
    from ondevice.api.conversation import Conversation, chat
    from ondevice.api.converting import AdapterResult, adapter
    from ondevice.api.fusing import FuseResult, fuse
    from ondevice.api.process import prepare
    from ondevice.api.training import plan, resume, train
    from ondevice.api.use import compare_with_source, evaluate, generate
    from runtime.bundle.manifest import Quality
    from runtime.bundle.store import Bundle
    from runtime.config.evaluate import EvalConfig
    from runtime.config.generate import ChatConfig, GenerateConfig
    from runtime.config.train import PlanConfig, TrainConfig
    from runtime.plan.plan import Plan
    from runtime.run.results import Evaluation, EvaluationResult, Generation, Step, TrainResult

__all__ = [
    "AdapterConfig",
    "AdapterResult",
    "Bundle",
    "ChatConfig",
    "Conversation",
    "EvalConfig",
    "Evaluation",
    "EvaluationResult",
    "ExportConfig",
    "ExportResult",
    "FuseConfig",
    "FuseResult",
    "GenerateConfig",
    "Generation",
    "Plan",
    "PlanConfig",
    "Quality",
    "Step",
    "TrainConfig",
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
    "ondevice.api.bundles": ("ExportResult", "export_bundle", "open_bundle"),
    "ondevice.api.conversation": ("Conversation", "chat"),
    "ondevice.api.converting": ("AdapterResult", "adapter"),
    "ondevice.api.fusing": ("FuseResult", "fuse"),
    "ondevice.api.process": ("prepare",),
    "ondevice.api.training": ("plan", "resume", "train"),
    "ondevice.api.use": ("compare_with_source", "evaluate", "generate"),
    "runtime.bundle.manifest": ("Quality",),
    "runtime.bundle.store": ("Bundle",),
    "runtime.config.evaluate": ("EvalConfig",),
    "export.config.export": ("ExportConfig",),
    "export.config.fuse": ("AdapterConfig", "FuseConfig"),
    "runtime.config.generate": ("ChatConfig", "GenerateConfig"),
    "runtime.config.train": ("PlanConfig", "TrainConfig"),
    "runtime.plan.plan": ("Plan",),
    "runtime.run.results": (
        "Evaluation",
        "EvaluationResult",
        "Generation",
        "Step",
        "TrainResult",
    ),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used."""
    if name == "errors":
        return import_module("ondevice.errors")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
