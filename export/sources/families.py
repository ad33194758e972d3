"""The model classes of mlx-lm, and the configurations of models as these spell them.

Any model type is read by `export.sources.general`. Listed here are the exceptions.

Invariant: the returned configuration has the same meaning to mlx-lm as the given one has to the
original library. A setting that mlx-lm would silently ignore is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from export.sources.general import normalised, text_settings
from export.sources.misread import MISREAD, MisreadError, blamed, misread
from export.sources.model_classes import (
    arguments_of,
    model_class,
    model_classes,
    model_module,
    text_family,
)
from export.sources.rope import ORIGINAL_LENGTH, as_in_transformers, install, turn_part
from export.sources.sanitize import sanitized
from export.sources.windows import layer_types
from runtime.bundle.positions import positions_of, short_length
from runtime.core.errors import BundleError, UsageError

# whose modules have the text model's class too
TEXT_TYPES = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}
# settings that describe a single checkpoint, and not its architecture
_OF_THE_SOURCE = (
    *("quantization", "quantization_config", "torch_dtype", "dtype", "_name_or_path"),
    *("auto_map", "transformers_version", "rope_traditional"),
)

# settings of mlx-lm's classes alone, which do not read them where there is a list by layer
OF_MLX_LM = {
    "gemma4_text": (
        *("global_partial_rotary_factor", "partial_rotary_factor", "sliding_window_pattern"),
    ),
}

# the weight with which a norm scales by 1, where it is not 1: Gemma multiplies by 1 + w
NORM_NEUTRAL = dict.fromkeys(("gemma", "gemma2", "gemma3_text", "nemotron"), 0.0)


def check_architecture(raw: dict[str, Any], where: str) -> str:
    """The family of a configuration: the name of the module of mlx-lm with its class.

    Raises:
        BundleError: mlx-lm has none.
    """
    from mlx_lm.utils import MODEL_REMAPPING

    given = raw.get("model_type")
    if not isinstance(given, str):
        raise BundleError(
            f"{where}: model_type is {given!r:.40} and names no architecture; get the config.json "
            "of the checkpoint for transformers"
        )
    family: str = {**MODEL_REMAPPING, **TEXT_TYPES}.get(given, given)
    if text := text_settings(raw, where):
        family = text_family(family, text.get("model_type"))
    model_module(family, where)
    return family


def normalise_config(raw: dict[str, Any], where: str, has_lm_head: bool) -> dict[str, Any]:
    """The language model's configuration, as mlx-lm's ModelArgs spells it.

    Args:
        raw: the content of a Hugging Face config.json, of any version of transformers.
        where: the file, for messages.
        has_lm_head: whether the source holds an output matrix of its own. It says whether the
            embedding is tied, but where the configuration denies that and there is none.

    Returns the configuration; its "model_type" is the family. Raises BundleError for an
    architecture or a setting that is not supported.
    """
    family = check_architecture(raw, where)
    try:
        return normalised(text_config(raw, where), family, where, has_lm_head)
    except MISREAD as e:
        raise misread(e, where, "the configuration cannot be understood") from e


def readable_model(raw: dict[str, Any], where: str) -> Any:
    """mlx-lm's own model for the content of a config.json; see `build_model`.

    It has an output matrix of its own. Raises BundleError, which names the settings of a wrong type
    or a value that makes no sense, or says why the architecture or a setting is not supported.
    """

    def read(config: dict[str, Any]) -> Any:
        family = check_architecture(config, where)
        return build_model(family, normalise_config(config, where, True), where)

    try:
        return read(raw)
    except MisreadError as problem:
        raise blamed(raw, read, problem, where) from problem


def completed_config(family: str, config: dict[str, Any], where: str = "config") -> dict[str, Any]:
    """A normalised configuration with the settings that mlx-lm's model gives it by default.

    Raises BundleError where the model class cannot be built from it.
    """
    build_model(family, config, where)
    arguments = model_classes(family, where)[1].from_dict(deepcopy(config))
    defaults = vars(arguments).items()
    plain = {key: value for key, value in defaults if isinstance(value, bool | int | float | str)}
    return {**plain, **config}


def transformers_config(
    family: str, config: dict[str, Any], dtype: str, model_type: str | None = None
) -> dict[str, Any]:
    """The content of config.json for a normalised configuration, so that transformers reads it too.

    Settings that the configuration leaves out are written as mlx-lm's model takes them: the
    defaults of transformers are others in places. `dtype` is the type of the weights, `model_type`
    the source's: mlx-lm has one class for several types.
    """
    settings = {
        key: value
        for key, value in completed_config(family, config).items()
        if key not in _OF_THE_SOURCE
    }
    for name in OF_MLX_LM.get(family, ()):
        settings.pop(name, None)
    if pattern := settings.get("sliding_window_pattern"):
        settings["layer_types"] = layer_types(pattern, settings["num_hidden_layers"])
        if isinstance(pattern, str):
            del settings["sliding_window_pattern"]
    # transformers reads the first name up to 4.55, and both after that
    types = {"torch_dtype": dtype, "dtype": dtype}
    text_type = next((text for text, outer in TEXT_TYPES.items() if outer == family), None)
    kind = family if text_type or not model_type else model_type
    named = {"architectures": [name for name in (model_class(kind),) if name]}
    whole = {**named, **settings, "model_type": kind, **types}
    if text_type is None:
        return whole
    text = {**settings, "model_type": text_type, **types}
    # mlx-lm knows no other name of the text model's type
    outside = {key: whole[key] for key in (*named, "model_type", "tie_word_embeddings", *types)}
    return {**outside, "text_config": text}


def build_model(family: str, config: dict[str, Any], where: str = "config") -> Any:
    """mlx-lm's own model for a normalised configuration, with random parameters.

    The parameters are lazy: each takes memory only when it is evaluated. Those that are numbers are
    vectors of one, as transformers stores them. Raises BundleError where
    the model class cannot be built from the configuration.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten

    from export.sources import capped  # loads MLX

    make, settings = model_classes(family, where)
    mx.eval(mx.random.state)  # else lazy parameters depend on those of all models before this one
    try:
        with as_in_transformers(config, where) as scaled:
            model = make(settings.from_dict(deepcopy(config)))
        if "partial_rotary_factor" not in arguments_of(family):
            turn_part(model, config.get("partial_rotary_factor", 1))
        if not scaled:
            install(model, config, where)
    except MISREAD as e:
        raise misread(e, where, f"{family} cannot be built from this configuration") from e
    capped.install(model)
    if hasattr(model, "sanitize"):  # in which mlx-lm drops the output matrix of tied models
        own = dict(tree_flatten(model.parameters()))
        if config.get("tie_word_embeddings", True):
            own.pop("lm_head.weight", None)
        sanitized(model, own, where)
    numbers = [(name, x[None]) for name, x in tree_flatten(model.parameters()) if not x.ndim]
    model.update(tree_unflatten(numbers))
    return model


def stored_numbers(family: str, config: dict[str, Any]) -> set[str]:
    """The parameters that checkpoints hold as numbers, and not as vectors of one.

    mlx-lm's class takes both as numbers: its `sanitize` makes them of vectors.
    """
    from mlx.utils import tree_flatten

    module = model_module(family)
    model = module.Model(module.ModelArgs.from_dict(config))
    parameters = tree_flatten(model.parameters())
    vectors = {name: value[None] for name, value in parameters if not value.ndim}
    if vectors and hasattr(model, "sanitize"):
        vectors = sanitized(model, vectors, "config")
    return {name for name, value in vectors.items() if value.ndim}


def expected_shapes(
    family: str, config: dict[str, Any], where: str = "config"
) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters of the model class, by name; nothing is evaluated."""
    return parameter_shapes(build_model(family, config, where))


def parameter_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters of one of mlx-lm's models, by name.

    Matrices of experts, which mlx-lm stacks as (experts, out, in), are (experts * out, in).
    """
    from mlx.utils import tree_flatten

    shapes = {name: tuple(array.shape) for name, array in tree_flatten(model.parameters())}
    for path, module in model.named_modules():
        if type(module).__name__ == "SwitchLinear":
            count, out, width = shapes[f"{path}.weight"]
            shapes[f"{path}.weight"] = (count * out, width)
    return shapes


def text_config(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """The settings of the text half of a model that sees or hears; those of others whole."""
    if not isinstance(raw.get("text_config"), dict) and "num_hidden_layers" in raw:
        for text_type, outer in TEXT_TYPES.items():
            if raw["model_type"] == outer:  # as mlx-lm reads it
                return {**raw, "model_type": text_type}
    text = text_settings(raw, where)
    if text is None or "text_config" in arguments_of(check_architecture(raw, where)):
        return dict(raw)  # in the second case mlx-lm has no class of its own for the text model
    return text | {key: raw[key] for key in ("vocab_size", "tie_word_embeddings") if key in raw}


def check_lengths(config: dict[str, Any], lengths: Sequence[int]) -> None:
    """Raise UsageError for lengths at which a normalised configuration would compute otherwise.

    That is longrope beyond its original length: a bundle's graphs hold its short factors alone.
    """
    limits = {}
    scaling = positions_of(config)
    if scaling.get("llama_4_scaling_beta"):  # counts positions, which go on in packed rows
        limits[f"llama_4_scaling_beta with {ORIGINAL_LENGTH}"] = scaling[ORIGINAL_LENGTH]
    if (length := short_length(config)) is not None:
        limits[f"longrope with {ORIGINAL_LENGTH}"] = length
    for name, longest in limits.items():
        if max(lengths) > longest:
            raise UsageError(
                f"seq_lens has {max(lengths)} tokens, but {name} = {longest} can be computed up to "
                f"that length alone; give --seq-lens of at most {longest}"
            )
