"""The classes of a model type: mlx-lm's, our own beside them, and transformers'."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from runtime.core.errors import BundleError

# model types that mlx-lm has no class for, or one that leaves something out, or whose layers are
# given too much -> our module
OWN = {
    "gemma2": "export.sources.gemma2",
    "gemma4_text": "export.sources.gemma4",
    "opt": "export.sources.opt",
}


@cache
def parameters_of(family: str) -> Mapping[str, inspect.Parameter]:
    """The arguments of mlx-lm's class of a family's settings, by name."""
    return inspect.signature(model_classes(family)[1]).parameters


def model_module(family: str, where: str = "config") -> ModuleType:
    """The module of mlx-lm with a family's class. Raises BundleError where there is none.

    MLX compiles nothing in this process from then on. On Linux it would call g++, which takes
    seconds for each function, and ended an export where g++ was newer than MLX's sources allow.
    """
    if not isinstance(family, str) or family not in module_names():
        raise BundleError(
            f"{where}: architecture {family!r:.40} is not supported: mlx-lm has no class for it"
        )
    from mlx.core import disable_compile

    disable_compile()
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # on which some say what they miss
            module = importlib.import_module(OWN.get(family, f"mlx_lm.models.{family}"))
    except (ImportError, SystemExit) as e:  # some end the process where a package is missing
        raise BundleError(
            f"{where}: mlx-lm cannot load architecture {family!r:.40}: a package that it needs is "
            f"missing ({e})"
        ) from e
    if not hasattr(module, "Model") or not hasattr(module, "ModelArgs"):
        raise BundleError(f"{where}: architecture {family!r:.40} is not supported: it is no model")
    return module


def model_classes(family: str, where: str = "config") -> tuple[Any, Any]:
    """mlx-lm's class of a family's language model, and that of its settings.

    Where a module wraps a text model of its own, or its class's base does, they are the text
    model's.
    """
    module = model_module(family, where)
    wraps = "text_config" in inspect.signature(module.ModelArgs).parameters
    made_in = sys.modules[module.Model.__init__.__module__]  # a subclass may add names alone
    if wraps and hasattr(made_in, "TextModel") and hasattr(made_in, "TextModelArgs"):
        return made_in.TextModel, made_in.TextModelArgs
    return module.Model, module.ModelArgs


@cache
def module_names() -> tuple[str, ...]:
    """The names of all modules under mlx_lm.models, and of our own beside them."""
    (folder,) = importlib.import_module("mlx_lm.models").__path__
    return tuple(sorted({*(path.stem for path in Path(folder).glob("*.py")), *OWN}))


def arguments_of(family: str) -> set[str]:
    """The names of the settings that mlx-lm's class of a family takes."""
    return set(parameters_of(family))


def is_own_default(family: str, key: str, value: Any) -> bool:
    """Whether a class of mlx-lm takes this value for a setting that is left out."""
    parameter = parameters_of(family).get(key)
    # a comma too many in dots1's class makes a tuple of one
    return parameter is not None and parameter.default in (value, (value,))


def text_family(outer: str, model_type: str | None) -> str:
    """The module of mlx-lm with the class of a text model of a type inside of an `outer` one.

    mlx-lm's class of the outer model says where it is, unless mlx-lm has one for the text's type.
    It is the outer one itself where that has a text model of its own.
    """
    from mlx_lm.utils import MODEL_REMAPPING

    names = module_names()
    own = str(MODEL_REMAPPING.get(model_type, model_type))
    if outer not in names:
        return own if own in names else outer
    held = vars(model_module(outer)).values()
    imported = [
        value.__name__.rpartition(".")[2]
        for value in held
        if isinstance(value, ModuleType) and hasattr(value, "ModelArgs")
    ]
    taken = {value.__module__.rpartition(".")[2] for value in held if isinstance(value, type)}
    if not imported:
        return own if own in taken else outer
    return own if own in names else imported[0] if len(imported) == 1 else outer


def model_class(model_type: str) -> str | None:
    """The name of transformers' class of causal language models of a type, or None."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name: str | None = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return name
