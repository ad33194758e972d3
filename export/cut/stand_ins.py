"""Functions of MLX and mlx-lm that are replaced while a model records to a tape, and by which.

`stand_ins` is the table. Operations without matrices record themselves, as taps do. Paddings are
noted. Norms and activations compute, but by the configuration's numbers and names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from export.cut.tape import MASK, AttentionCall, DeltaCall, PartCall, Tape
from export.sources import capped
from export.sources.general import ACTIVATION
from export.sources.stream import Stream
from runtime.core.errors import BundleError

Replacement = tuple[Any, str, Any]  # a module, the name of a function there, and the stand-in
DELTA_RULE = "gated_delta_update"  # a function of mlx-lm
# transformers' names of activations -> MLX's; the last three are one function
_GELUS = {
    "gelu": nn.gelu,
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), nn.gelu_approx),
}


def stand_ins(
    tape: Tape, model: nn.Module, config: dict[str, Any], cuts: bool, deltas: Sequence[Any]
) -> list[Replacement]:
    """The replacements under which `model` records to `tape`.

    cuts: whether layers have taps, which give them MASK; without, masks are noted as they are.
    deltas: mlx-lm's modules that have the gated delta rule.

    A class of mlx-lm has one of MLX's two GELUs, whichever `config` names: the model runs with that
    one. So it does with the epsilon of norms, where its class has a number of its own.
    """
    attention = _attention(tape, cuts)
    return [
        (mx.fast, "scaled_dot_product_attention", attention),
        (capped, "attention", attention),
        (Stream, "split", _split(tape)),
        *((module, DELTA_RULE, _delta(tape)) for module in deltas),
        (mx, "pad", _pad(tape)),
        (mx, "concatenate", _concatenate(tape)),
        *((nn, name, function) for name, function in activations_of(config).items()),
        *((mx.fast, "rms_norm", norm) for norm in _norms(model, config)),
    ]


@contextmanager
def replaced(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Replace functions inside the `with` block."""
    own = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    try:
        for owner, name, function in replacements:
            setattr(owner, name, function)
        yield
    finally:
        for owner, name, function in own:
            setattr(owner, name, function)


def activations_of(config: dict[str, Any]) -> dict[str, Callable[[mx.array], mx.array]]:
    """The function that a configuration names in place of either of MLX's two GELUs, by name."""
    gelu = _GELUS.get(str(next((config[key] for key in ACTIVATION if config.get(key)), None)))
    return {} if gelu is None else dict.fromkeys(("gelu", "gelu_approx"), gelu)


def with_delta_rule() -> list[Any]:
    """mlx-lm's modules that have it, of those that are loaded."""
    return [
        module
        for path, module in [*sys.modules.items()]
        if path.startswith("mlx_lm.models.") and hasattr(module, DELTA_RULE)
    ]


def _attention(tape: Tape, cuts: bool) -> Callable[..., mx.array]:
    def attention(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        scale: float,
        mask: Any = None,
        cap: float | None = None,
        sinks: mx.array | None = None,
        **rest: Any,
    ) -> mx.array:
        if given := sorted(name for name, value in rest.items() if value is not None):
            raise BundleError(
                f"attention takes {', '.join(given)} besides q, k, v, scale, mask and sinks; such "
                "models are not supported"
            )
        if not cuts:
            tape.masks.append(mask)
        elif mask is not MASK:
            raise BundleError(
                "attention is given another mask than its layer; such models are not supported"
            )
        output = tape.output((*q.shape[:-1], v.shape[-1]))
        return tape.record(AttentionCall("attention", (q, k, v), output, float(scale), cap, sinks))

    return attention


def _split(tape: Tape) -> Callable[[Stream, mx.array], dict[str, mx.array]]:
    plain = Stream.split

    def split(stream: Stream, x: mx.array) -> dict[str, mx.array]:
        parts = plain(stream, x)
        if len(parts) == 1:
            return parts
        return {
            name: tape.record(PartCall(name, (part,), tape.output(tuple(part.shape))))
            for name, part in parts.items()
        }

    return split


def _delta(tape: Tape) -> Callable[..., tuple[mx.array, None]]:
    def delta(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        a: mx.array,
        b: mx.array,
        a_log: mx.array,
        dt_bias: mx.array,
        state: mx.array | None = None,
        mask: mx.array | None = None,
        *,
        use_kernel: bool = True,
        lower_bound: float | None = None,
        allow_neg_eigval: bool = False,
    ) -> tuple[mx.array, None]:
        beta = mx.sigmoid(b) * (2.0 if allow_neg_eigval else 1.0)
        decay = mx.exp(a_log)
        if lower_bound is None:
            decay = -decay * nn.softplus(a + dt_bias)
        else:
            decay = lower_bound * mx.sigmoid(decay * (a + dt_bias))
        if decay.shape != beta.shape or state is not None or mask is not None:
            raise BundleError(
                "the gated delta rule has a decay for each key, a first state or a mask; such "
                "models are not supported"
            )
        inputs = (q, k, v, decay, beta)
        return tape.record(DeltaCall("delta", inputs, tape.output(tuple(v.shape)))), None

    return delta


def _pad(tape: Tape) -> Callable[..., mx.array]:
    plain = mx.pad

    def pad(x: mx.array, pad_width: Any, *rest: Any, **more: Any) -> mx.array:
        padded = plain(x, pad_width, *rest, **more)
        if isinstance(pad_width, list) and [after for _, after in pad_width[1:]] == [0, 0]:
            tape.padded.append((padded, x))
        return padded

    return pad


def _concatenate(tape: Tape) -> Callable[..., mx.array]:
    plain = mx.concatenate

    def concatenate(arrays: list[mx.array], axis: int = 0, **more: Any) -> mx.array:
        joined = plain(arrays, axis, **more)
        if axis == 1 and len(arrays) == 2:
            tape.padded.append((joined, arrays[1]))
        return joined

    return concatenate


def _norms(model: nn.Module, config: dict[str, Any]) -> list[Callable[..., mx.array]]:
    """The norm of root mean squares, where the model's class has an epsilon of its own."""
    plain, epsilon = mx.fast.rms_norm, config.get("rms_norm_eps")
    if epsilon is None or hasattr(getattr(model, "args", None), "rms_norm_eps"):
        return []

    def norm(x: mx.array, weight: mx.array | None, eps: float, **rest: Any) -> mx.array:
        return plain(x, weight, epsilon, **rest)

    return [norm]
