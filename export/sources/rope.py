"""Rotary positions as transformers computes them, where mlx-lm's own classes leave settings out.

A scaling's settings are each used, without effect, or refused by name. Frequencies that depend on
the length of the sequence are refused, but longrope's within its original length: a bundle's graphs
hold them as constants.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from export.stored import F32
from runtime.core.errors import BundleError

ORIGINAL_LENGTH = "original_max_position_embeddings"
# rope_type -> the settings that it computes with
SETTINGS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", ORIGINAL_LENGTH}),
    "yarn": frozenset(
        {"factor", ORIGINAL_LENGTH, "attention_factor", "beta_fast", "beta_slow"}
        | {"mscale", "mscale_all_dim", "truncate"}
    ),
    "longrope": frozenset(
        {"factor", ORIGINAL_LENGTH, "attention_factor", "short_factor", "long_factor"}
    ),
}
# settings that must be there; the rest have defaults
_NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
# with 0 there is the default, or no such factor
_MAY_BE_0 = frozenset({"beta_fast", "beta_slow", "mscale", "mscale_all_dim"})
# settings that compute nothing: names of the type, the base (read beside it), a remark
_NEUTRAL = frozenset({"type", "rope_type", "rope_theta", "finetuned"})
# what Ministral 3 has beside a scaling of positions: a scale of queries far from the start
BESIDE_SCALING = ("llama_4_scaling_beta", "max_position_embeddings")
# settings beside a scaling that the classes of mlx-lm compute with
_OF_CLASSES = (*BESIDE_SCALING, "partial_rotary_factor", "mrope_section", "mrope_interleaved")
_OWN = ("yarn", "longrope")  # computed here, since mlx-lm leaves settings of them out


def checked_scaling(
    scaling: dict[str, Any], config: dict[str, Any], where: str
) -> dict[str, Any] | None:
    """A configuration's scaling of positions with its length filled in; None without a scaling.

    Args:
        scaling: "rope_scaling" or "rope_parameters", flat.
        config: the configuration around it, for the lengths.
        where: the file, for messages.

    Raises BundleError for a type or a setting that cannot be computed.
    """
    names = [scaling[name] for name in ("rope_type", "type") if scaling.get(name) is not None]
    kind = names[0] if names else "default"
    kind = "longrope" if kind == "su" else kind  # Phi-3's name of the first release
    if kind == "dynamic":
        raise BundleError(
            f"{where}: rope_type 'dynamic' is not supported: its frequencies depend on the length "
            "of the sequence; to train on at most max_position_embeddings tokens (now "
            f"{config.get('max_position_embeddings')}), where it does nothing, delete it there"
        )
    if not isinstance(kind, str) or kind not in SETTINGS:
        raise BundleError(
            f"{where}: rope_type {kind!r:.40} is not supported; supported are "
            f"{', '.join(sorted(SETTINGS))}"
        )
    partial = scaling.get("partial_rotary_factor")
    if partial not in (None, 1):
        raise BundleError(
            f"{where}: partial_rotary_factor {partial!r} is not supported; positions must turn the "
            "whole head"
        )
    known = SETTINGS[kind] | _NEUTRAL | {"partial_rotary_factor"}
    unknown = sorted(k for k, value in scaling.items() if k not in known and value is not None)
    if unknown:
        raise BundleError(
            f"{where}: rope_type {kind!r} with {', '.join(unknown)} is not supported; its settings "
            f"are {', '.join(sorted(SETTINGS[kind])) or 'none'}"
        )
    if kind == "default":
        return None
    settings = {k: v for k, v in scaling.items() if k in SETTINGS[kind] and v is not None}
    if "truncate" in SETTINGS[kind] and "truncate" in scaling:
        settings["truncate"] = bool(scaling["truncate"])  # null is false, and absence true
    _check_values(settings, where)
    longest = config.get("max_position_embeddings")
    if ORIGINAL_LENGTH in SETTINGS[kind]:
        lengths = (config.get(ORIGINAL_LENGTH), settings.get(ORIGINAL_LENGTH), longest)
        length = next((length for length in lengths if length is not None), None)
        if length is None:
            raise BundleError(f"{where}: rope_type {kind!r} needs {ORIGINAL_LENGTH}")
        if type(length) not in (int, float) or length <= 0:
            raise BundleError(
                f"{where}: {ORIGINAL_LENGTH} must be a positive number, is {length!r:.40}"
            )
        settings[ORIGINAL_LENGTH] = length
        if "factor" in scaling and longest is not None:  # null is the ratio of the lengths
            settings.setdefault("factor", longest / length)
    if missing := [name for name in _NEEDED[kind] if name not in settings]:
        raise BundleError(f"{where}: rope_type {kind!r} needs {', '.join(missing)}")
    return {"rope_type": kind, **settings}


def _check_values(settings: Mapping[str, Any], where: str) -> None:
    """Raise BundleError for a setting of a scaling with which nothing can be computed."""
    for key, value in settings.items():
        if key in ("truncate", ORIGINAL_LENGTH):
            continue
        listed = key in ("short_factor", "long_factor")
        numbers = value if listed and isinstance(value, list) else [value]
        least = 0 if key in _MAY_BE_0 else math.ulp(0)
        if (listed and numbers is not value) or not all(
            type(number) in (int, float) and least <= number < math.inf for number in numbers
        ):
            wanted = "a list of positive numbers" if listed else "a positive number"
            raise BundleError(
                f"{where}: {key} of rotary positions must be {wanted}, is {value!r:.60}"
            )


def with_fixed_base(scaling: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """A scaling; HunYuan's "dynamic" one with an `alpha`, as the base that it is at any length.

    That is base * alpha^(dims / (dims - 2)), and the settings beside `alpha` do nothing.
    """
    if not (scaling.get("alpha") and str(config.get("model_type")).startswith("hunyuan")):
        return scaling
    dims = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    base = config["rope_theta"] if scaling.get("rope_theta") is None else scaling["rope_theta"]
    return {"rope_type": "default", "rope_theta": base * scaling["alpha"] ** (dims / (dims - 2))}


def yarn(scaling: dict[str, Any], base: float, dims: int) -> tuple[F32, float]:
    """YaRN's inverse frequencies (dims / 2,) and the factor of queries and keys.

    Between two dimensions, found from the rotations `beta_fast` and `beta_slow` over the original
    length, the frequencies go over from 1/base^(2i/dims) to that divided by `factor`
    (Peng et al. 2023, section 3.2; the factor is its equation 22).
    """
    factor, length = float(scaling["factor"]), scaling[ORIGINAL_LENGTH]

    def dimension(rotations: float) -> float:
        return dims * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = dimension(scaling.get("beta_fast") or 32)
    high = dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    high += 0.001 * (low == high)
    ramp = np.clip((np.arange(dims // 2) - low) / (high - low), 0, 1)
    frequencies = base ** -(np.arange(0, dims, 2) / dims)
    mixed = frequencies / factor * ramp + frequencies * (1 - ramp)
    return mixed.astype(np.float32), _yarn_factor(scaling, factor)


def _yarn_factor(scaling: dict[str, Any], factor: float) -> float:
    if (given := scaling.get("attention_factor")) is not None:
        return float(given)

    def grown(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1

    over, under = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return grown(over) / grown(under) if over and under else grown(1)


def longrope(scaling: dict[str, Any], base: float, dims: int, longest: int) -> tuple[F32, float]:
    """LongRoPE's inverse frequencies (dims / 2,) within the original length, and the factor.

    `longest` is the configuration's max_position_embeddings (Ding et al. 2024).
    """
    length = scaling[ORIGINAL_LENGTH]
    factor = float(scaling.get("factor") or longest / length)
    grown = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    given = scaling.get("attention_factor")
    divisors = np.asarray(scaling["short_factor"], np.float64)
    frequencies = base ** -(np.arange(0, dims, 2) / dims) / divisors
    return frequencies.astype(np.float32), grown if given is None else float(given)


@contextmanager
def as_in_transformers(config: Mapping[str, Any], where: str) -> Iterator[list[Any]]:
    """Let the classes of mlx-lm that are built inside turn heads as transformers does.

    Yields a list, of the layers for which they give a scaling. Raises BundleError where it cannot
    be computed.
    """
    from mlx_lm.models import rope_utils

    plain = rope_utils.initialize_rope

    made: list[Any] = []

    def initialize(
        dims: int,
        base: float,
        traditional: bool = False,
        scaling_config: Mapping[str, Any] | None = None,
        max_position_embeddings: int | None = None,
    ) -> Any:
        layer = _layer(dims, base, traditional, scaling_config, config, where)
        made.extend([layer] if scaling_config else [])
        return layer

    owners = [
        module
        for path, module in [*sys.modules.items()]
        if module is not rope_utils
        and path.startswith("mlx_lm.models.")
        and vars(module).get("initialize_rope") is plain
    ]
    try:
        for owner in owners:
            setattr(owner, "initialize_rope", initialize)  # noqa: B010  a module has no such field
        yield made
    finally:
        for owner in owners:
            setattr(owner, "initialize_rope", plain)  # noqa: B010


def _layer(
    dims: int,
    base: float,
    traditional: bool,
    given: Mapping[str, Any] | None,
    config: Mapping[str, Any],
    where: str,
) -> Any:
    """The layer that turns `dims` of each head, with a scaling as configurations have it."""
    from mlx_lm.models import rope_utils

    given = given or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    scaling: dict[str, Any] | None = {k: v for k, v in given.items() if k not in _OF_CLASSES}
    if kind != "proportional":  # which mlx-lm's Gemma 4 computes
        scaling = checked_scaling(scaling or {}, dict(config), where)
        kind = scaling["rope_type"] if scaling else kind  # not one of its other names
    if scaling and kind in _OWN:
        longest = config["max_position_embeddings"]
        own = (
            yarn(scaling, base, dims) if kind == "yarn" else longrope(scaling, base, dims, longest)
        )
        return _rotary(*own, traditional)
    share = given.get("partial_rotary_factor")
    if scaling and kind == "proportional" and share is not None:
        scaling["partial_rotary_factor"] = share
    return rope_utils.initialize_rope(dims, base, traditional, scaling)


def _rotary(frequencies: F32, factor: float, traditional: bool) -> Any:
    """A layer that turns the first of the heads' dimensions by these frequencies.

    It multiplies them by `factor` before.
    """
    import mlx.core as mx
    import mlx.nn as nn

    class Rope(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._periods = mx.array(1 / frequencies)
            self._dims = 2 * len(frequencies)

        def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
            if factor != 1:
                turned = x[..., : self._dims] * factor
                x = mx.concatenate([turned, x[..., self._dims :]], axis=-1)
            return mx.fast.rope(
                x,
                self._dims,
                traditional=traditional,
                base=None,
                scale=1.0,
                offset=offset,
                freqs=self._periods,
            )

    return Rope()


def install(model: Any, config: Mapping[str, Any], where: str) -> None:
    """Scale positions in the layers that a class of mlx-lm makes by itself, with or without it.

    Args:
        model: it, from a configuration with a `checked_scaling`.
        config: that configuration.
        where: the checkpoint, for messages.
    """
    import mlx.nn as nn
    from mlx_lm.models import rope_utils

    layers = list[tuple[Any, str, Any]]()
    for _, module in model.named_modules():
        layers += [
            (module, name, rope)
            for name, rope in module.items()
            if isinstance(rope, (nn.RoPE, rope_utils.SuScaledRoPE))
        ]
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    by_type = any(isinstance(value, dict) for value in scaling.values())
    scales = by_type or any(isinstance(r, nn.RoPE) and r.scale != 1 for _, _, r in layers)
    for module, name, rope in layers:
        if isinstance(rope, rope_utils.SuScaledRoPE):
            args = model.args
            made = longrope(
                args.rope_scaling, float(args.rope_theta), rope.dim, args.max_position_embeddings
            )
            module[name] = _rotary(*made, traditional=False)
        elif scaling and not scales:
            module[name] = _layer(rope.dims, rope.base, rope.traditional, scaling, config, where)


def turn_part(model: Any, share: float) -> None:
    """Let the layers of one of mlx-lm's models turn so much of each head, and no more.

    For classes that turn all of it, as that of GLM does.
    """
    import mlx.nn as nn

    for _, module in model.named_modules():
        if isinstance(module, nn.RoPE):
            module.dims = int(module.dims * share)
