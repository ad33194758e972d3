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

from runtime.core.version import __version__ as __version__

if TYPE_CHECKING:
    from export.config.export import ExportConfig as ExportConfig
    from export.config.fuse import AdapterConfig as AdapterConfig
    from export.config.fuse import FuseConfig as FuseConfig
    from ondevice import errors as errors
    from ondevice.api.bundles import ExportResult as ExportResult
    from ondevice.api.bundles import export_bundle as export_bundle
    from ondevice.api.bundles import open_bundle as open_bundle
    from ondevice.api.conversation import Conversation as Conversation
    from ondevice.api.conversation import chat as chat
    from ondevice.api.converting import AdapterResult as AdapterResult
    from ondevice.api.converting import adapter as adapter
    from ondevice.api.fusing import FuseResult as FuseResult
    from ondevice.api.fusing import fuse as fuse
    from ondevice.api.process import prepare as prepare
    from ondevice.api.training import plan as plan
    from ondevice.api.training import resume as resume
    from ondevice.api.training import train as train
    from ondevice.api.use import compare_with_source as compare_with_source
    from ondevice.api.use import evaluate as evaluate
    from ondevice.api.use import generate as generate
    from runtime.bundle.manifest import Quality as Quality
    from runtime.bundle.store import Bundle as Bundle
    from runtime.config.evaluate import EvalConfig as EvalConfig
    from runtime.config.generate import ChatConfig as ChatConfig
    from runtime.config.generate import GenerateConfig as GenerateConfig
    from runtime.config.train import PlanConfig as PlanConfig
    from runtime.config.train import TrainConfig as TrainConfig
    from runtime.plan.plan import Plan as Plan
    from runtime.run.results import Evaluation as Evaluation
    from runtime.run.results import EvaluationResult as EvaluationResult
    from runtime.run.results import Generation as Generation
    from runtime.run.results import Step as Step
    from runtime.run.results import TrainResult as TrainResult

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
__all__ = sorted(["__version__", "errors", *_PLACES])


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
