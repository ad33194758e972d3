"""Taps: stand-ins for a model's embedding, linear layers, attention, convolutions and layers.

A tap computes nothing. It records its inputs and returns zeros, so that running the model shows the
order of its products and the inputs of each. Or it returns given arrays, so that the
computation between two products can be traced.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from export.sources import capped
from runtime.core.errors import BundleError
from runtime.operations.elementwise import Activation

SHORTEST_PROBE = 13
# transformers' names of activations -> MLX's; the last three are one function
_GELUS = {
    "gelu": nn.gelu,
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), nn.gelu_approx),
}


def activations_of(config: dict[str, Any]) -> dict[str, Callable[[mx.array], mx.array]]:
    """The function that a configuration names in place of either of MLX's two GELUs, by name."""
    keys = ("hidden_act", "hidden_activation", "activation_function")
    gelu = _GELUS.get(str(next((config[key] for key in keys if config.get(key)), None)))
    return {} if gelu is None else dict.fromkeys(("gelu", "gelu_approx"), gelu)


def probe_length(model: nn.Module, config: dict[str, Any]) -> int:
    """A sequence length that differs from every other dimension of an array in the model.

    Other dimensions are sizes in its configuration or parameters, or factors of them (a matrix of
    416 rows may be 13 heads of 32). So the length is the smallest that divides none of these.
    """
    sizes = set(_integers(config))
    sizes |= {size for _, value in tree_flatten(model.parameters()) for size in value.shape}
    return next(n for n in count(SHORTEST_PROBE) if all(size % n for size in sizes if size))


def _integers(value: Any) -> Iterator[int]:
    """The positive integers of a configuration, those inside of lists included."""
    if type(value) is int and value > 0:
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _integers(inner)


@dataclass(frozen=True)
class Call:
    """One call of a tap: the layer's name in the model, its inputs, and the returned array."""

    name: str
    inputs: tuple[mx.array, ...]
    output: mx.array


@dataclass(frozen=True)
class EmbeddingCall(Call):
    """A look-up of tokens, whose numbers (1, T) it reads.

    of_model: whether the embedding is outside of the layers.
    """

    of_model: bool


class LayerCall(Call):
    """A whole transformer layer, named by its index."""


@dataclass(frozen=True)
class LinearCall(Call):
    """A product with a weight matrix; for the head of a tied model, the embedding's."""

    bias: bool


@dataclass(frozen=True)
class AttentionCall(Call):
    """Scaled dot-product attention of (q, k, v), whose scores may be capped."""

    scale: float
    cap: float | None


@dataclass(frozen=True)
class ConvolutionCall(Call):
    """A causal convolution over tokens, one filter a channel: its parameters by name."""

    parameters: dict[str, tuple[int, ...]]


class DeltaCall(Call):
    """The gated delta rule of (q, k, v, log of the decay, beta)."""


@dataclass(frozen=True)
class ExpertsCall(Call):
    """Gated MLPs, of which each token takes some: of (x, weights, numbers as floats)."""

    count: int
    activation: Activation


class Tape:
    """The calls of one run, in order. Taps return `outputs`; without them, zeros or random values.

    drawn: whether they are random.
    """

    def __init__(self, outputs: Sequence[mx.array] | None = None, drawn: bool = False) -> None:
        self._drawn = drawn
        self.calls: list[Call] = []
        self.masks: list[Any] = []  # of attention, in layers that run as they are
        self.positions: mx.array | None = None  # (T, D), of learned positions; without it, zeros
        self.padded: list[tuple[mx.array, mx.array]] = []  # before the first token, and what it was
        self._outputs = outputs
        self._batched: dict[int, tuple[mx.array, mx.array]] = {}
        self._floats: dict[int, tuple[mx.array, mx.array]] = {}

    @property
    def replays(self) -> bool:
        """Whether the taps return given arrays."""
        return self._outputs is not None

    def output(self, shape: tuple[int, ...]) -> mx.array:
        """The array that the next call returns, of this shape."""
        if self._outputs is not None:
            return self._outputs[len(self.calls)]
        key = mx.random.key(len(self.calls))
        return mx.random.normal(shape, key=key) if self._drawn else mx.zeros(shape)

    def batched(self, x: mx.array) -> mx.array:
        """x (T, C) as (1, T, C), the same array whenever it is asked for; others as they are."""
        if x.ndim != 2:
            return x
        _, whole = self._batched.setdefault(id(x), (x, x[None]))
        return whole

    def floats(self, ids: mx.array) -> mx.array:
        """Tokens' numbers as float32, the same array whenever it is asked for."""
        _, values = self._floats.setdefault(id(ids), (ids, ids.astype(mx.float32)))
        return values

    def record(self, call: Call) -> mx.array:
        """Append a call; returns its output."""
        self.calls.append(call)
        return call.output


class _Tap:
    """Stands in for a module with a matrix."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{self.__dict__.get('name')} is used otherwise than by a call ({name})"
        )


class _LinearTap(_Tap):
    """Stands in for a linear layer."""

    def __init__(self, taps: Taps, name: str, linear: nn.Linear) -> None:
        self.taps, self.name = taps, name
        self.rows = linear.weight.shape[0]
        self.bias = "bias" in linear

    def __call__(self, x: mx.array) -> mx.array:
        tape = self.taps.tape
        given = tape.batched(x)
        output = tape.output((*given.shape[:-1], self.rows))
        y = tape.record(LinearCall(self.name, (given,), output, self.bias))
        return y if x.ndim == y.ndim else y.squeeze(0)


class _EmbeddingTap(_Tap):
    """Stands in for an embedding, which a tied model also uses as its head."""

    def __init__(self, taps: Taps, name: str, embedding: nn.Embedding) -> None:
        self.taps, self.name = taps, name
        self.of_model = name in dict(taps.model.named_modules())
        self.rows, self.columns = embedding.weight.shape
        self.first_position: int | None = None  # of an embedding of positions
        self.looked = False

    def _look(self, ids: mx.array) -> None:
        """See whether it is given positions; the tokens of a model that is tried are all alike."""
        given, self.looked = np.array(ids).reshape(-1), True
        if len(given) > 1 and np.array_equal(given, given[0] + np.arange(len(given))):
            self.first_position = int(given[0])
            self.taps.positions = (self.name, self.first_position)

    def __call__(self, ids: mx.array) -> mx.array:
        tape = self.taps.tape
        if not self.looked:
            self._look(ids)
        if self.first_position is not None:
            shape = (*ids.shape, self.columns)
            added = mx.zeros(shape) if tape.positions is None else tape.positions.reshape(shape)
            return added
        output = tape.output((*ids.shape, self.columns))
        return tape.record(EmbeddingCall(self.name, (tape.floats(ids),), output, self.of_model))

    def as_linear(self, x: mx.array) -> mx.array:
        tape = self.taps.tape
        output = tape.output((*x.shape[:-1], self.rows))
        return tape.record(LinearCall(self.name, (x,), output, bias=False))


class _ConvolutionTap(_Tap):
    """Stands in for a convolution whose input the model pads with zeros before the first token."""

    def __init__(self, taps: Taps, name: str, convolution: nn.Conv1d) -> None:
        self.taps, self.name = taps, name
        self.parameters = {
            f"{name}.{key}": tuple(value.shape) for key, value in convolution.items()
        }
        channels, self.width, inputs = convolution.weight.shape
        given = (convolution.groups, convolution.stride, convolution.dilation, convolution.padding)
        if inputs != 1 or given != (channels, 1, 1, 0):
            raise BundleError(
                f"{name} is a convolution over tokens other than one filter a channel at every "
                "token; such models are not supported"
            )

    def __call__(self, x: mx.array) -> mx.array:
        tape, before = self.taps.tape, self.width - 1
        if not tape.replays and before and mx.any(x[:, :before]).item():
            raise BundleError(
                f"{self.name} reads something else than zeros before the first token; such models "
                "are not supported"
            )
        plain = (given for padded, given in tape.padded if padded is x)
        x = next(plain, x[:, before:])  # itself where it is known, so that nothing is copied
        output = tape.output(tuple(x.shape))
        return tape.record(ConvolutionCall(self.name, (x,), output, self.parameters))


class _Given:
    """An input x that a module multiplies by its own matrix: x @ weight.T, and nothing else."""

    dtype = mx.float32

    def __init__(self, tap: _LinearTap, x: mx.array) -> None:
        self.tap, self.x, self.shape = tap, x, x.shape

    def astype(self, dtype: mx.Dtype) -> _Given:
        """The same: everything is float32."""
        return self

    def __matmul__(self, weight: Any) -> mx.array:
        if not isinstance(weight, _Weight):
            self.__getattr__("a product with another matrix")
        return self.tap(self.x)

    def __getattr__(self, name: str) -> Any:
        raise BundleError(
            f"the model has matrices that are no linear layers ({self.__dict__['tap'].name}, "
            f"{name}), which is not supported"
        )


class _Weight:
    """A module's own matrix, which it multiplies by."""

    @property
    def T(self) -> _Weight:  # noqa: N802  (MLX's name)
        return self


class _OwnMatrix:
    """Mixed into the class of a module that multiplies by a parameter `weight`, as routers do."""

    weight = _Weight()

    def __call__(self, x: mx.array) -> Any:
        return super().__call__(_Given(self.tap, x))  # type: ignore[misc, attr-defined]


class LayerTap:
    """Stands in for a transformer layer, remembers how it is called, and else is that layer."""

    @classmethod
    def of(cls, taps: Taps, index: int, layer: nn.Module) -> LayerTap:
        """A tap that is of the layer's class too, since models ask; as a module it is empty."""
        both: type[LayerTap] = type(cls.__name__, (cls, type(layer)), {})
        return both(taps, index, layer)

    def __init__(self, taps: Taps, index: int, layer: nn.Module) -> None:
        nn.Module.__init__(self)
        self.taps, self.index, self.layer = taps, index, layer
        self.signature = inspect.signature(type(layer).__call__)
        self.mask: Any = None
        self.names: dict[str, str] = {}  # of its arguments: "x", "mask", "cache"
        self.further: dict[str, Any] = {}  # arguments that it may be given besides

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        (_, (first, x), *others) = self.signature.bind(
            self.layer, *args, **kwargs
        ).arguments.items()
        self.names, self.mask, self.further = {"x": first}, None, {}
        for name, value in others:
            role = next((word for word in ("mask", "cache") if word in name), None)
            if role is not None and role not in self.names:
                self.names[role] = name
            if role == "mask":
                self.mask = value
            elif value is not None:
                if self.signature.parameters[name].default is not None or role is not None:
                    raise self.problem(name)
                self.further[name] = value
        tape = self.taps.tape
        columns = getattr(self.layer, "returned_columns", x.shape[-1])
        output = tape.output((*x.shape[:-1], columns))
        return tape.record(LayerCall(str(self.index), (x,), output))

    def problem(self, name: str) -> BundleError:
        """What to say of an argument without which it computes something else."""
        return BundleError(
            f"layer {self.index} is given more than its input and a mask ({name}); such models are "
            "not supported"
        )

    def run(self, x: mx.array, cache: Position | None, **further: Any) -> mx.array:
        """The layer itself, with causal attention, and `further` arguments.

        A layer without a mask has no attention, and takes no cache.
        """
        given = {"x": x, "mask": MASK, "cache": cache}
        if self.mask is None:
            given = {"x": x, "mask": None, "cache": None}
        names = {name: given[role] for role, name in self.names.items()}
        out = self.layer(**names, **further)
        if not isinstance(out, mx.array):
            raise BundleError(
                f"layer {self.index} returns more than its hidden state; such models are not "
                "supported"
            )
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    __setattr__ = object.__setattr__  # a module's own would make the layer a child


MASK = "causal"  # the mask of a layer while it is cut


@dataclass(frozen=True)
class Position:
    """Stands in for a cache of keys and values: the position, and keys and values as they are."""

    offset: mx.array  # the position of the first token, an int32

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The new keys and values alone."""
        return keys, values


class Taps:
    """A model with its taps in place, which record to the current `tape`.

    Its layers are the longest list of modules that it holds, wherever that is.

    Attributes:
        probe: the sequence length to run the model at: no other dimension has this size, so an
            axis of it is the tokens'.
        path: the name of the list of layers in the model, such as "model.layers".
        positions: the name of the embedding of learned positions, and its row for the first token.
        cuts: whether the layers have taps, too; without, they run as the model runs them.

    A class of mlx-lm has one of MLX's two GELUs, whichever `config` names: the model runs with that
    one. So it does with the epsilon of norms, where its class has a number of its own.
    """

    def __init__(
        self, model: nn.Module, probe: int, config: dict[str, Any], cuts: bool = True
    ) -> None:
        self.model, self.probe, self.cuts = model, probe, cuts
        self.positions: tuple[str, int] | None = None
        self.activations = activations_of(config)
        own = hasattr(getattr(model, "args", None), "rms_norm_eps")
        self.epsilon = None if own else config.get("rms_norm_eps")
        self.tape = Tape()
        self.path, owner, key = _longest_list(model)
        self.layers = [LayerTap.of(self, i, layer) for i, layer in enumerate(owner[key])]
        for layer in owner[key]:
            self._tap(layer)
        if cuts:
            owner[key] = self.layers
        self._tap(model)

    def _tap(self, root: nn.Module) -> None:
        from mlx_lm.models.switch_layers import SwitchGLU

        from export.cut.experts import ExpertsTap  # which is built on these taps

        makers = {
            nn.Linear: _LinearTap,
            nn.Embedding: _EmbeddingTap,
            nn.Conv1d: _ConvolutionTap,
            SwitchGLU: ExpertsTap,
        }
        parents = dict(root.named_modules())
        for path, child in list(parents.items()):
            maker = makers.get(type(child))
            if maker is not None:
                parent, _, attribute = path.rpartition(".")
                setattr(parents[parent], attribute, maker(self, path, child))
            elif _has_matrix(child):
                child.tap = _LinearTap(self, path, child)
                del child["weight"]
                kind = type(child)
                child.__class__ = type(kind.__name__, (_OwnMatrix, kind), {})

    @contextmanager
    def recording(self, tape: Tape) -> Iterator[Tape]:
        """Record to `tape`, with MLX's attention replaced by a tap, inside the `with` block."""

        def attention(
            q: mx.array,
            k: mx.array,
            v: mx.array,
            *,
            scale: float,
            mask: Any = None,
            cap: float | None = None,
            **rest: Any,
        ) -> mx.array:
            if given := sorted(name for name, value in rest.items() if value is not None):
                raise BundleError(
                    f"attention takes {', '.join(given)} besides q, k, v, scale and mask; such "
                    "models are not supported"
                )
            if not self.cuts:
                tape.masks.append(mask)
            elif mask is not MASK:
                raise BundleError(
                    "attention is given another mask than its layer; such models are not supported"
                )
            output = tape.output((*q.shape[:-1], v.shape[-1]))
            return tape.record(AttentionCall("attention", (q, k, v), output, float(scale), cap))

        def norm(x: mx.array, weight: mx.array | None, eps: float, **rest: Any) -> mx.array:
            given = eps if self.epsilon is None else self.epsilon
            return rms_norm(x, weight, given, **rest)

        rms_norm, mx.fast.rms_norm = mx.fast.rms_norm, norm
        original = mx.fast.scaled_dot_product_attention, capped.attention

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

        pad, concatenate = mx.pad, mx.concatenate

        def padding(x: mx.array, pad_width: Any, *rest: Any, **more: Any) -> mx.array:
            padded = pad(x, pad_width, *rest, **more)
            if isinstance(pad_width, list) and [after for _, after in pad_width[1:]] == [0, 0]:
                tape.padded.append((padded, x))
            return padded

        def joining(arrays: list[mx.array], axis: int = 0, **more: Any) -> mx.array:
            joined = concatenate(arrays, axis, **more)
            if axis == 1 and len(arrays) == 2:
                tape.padded.append((joined, arrays[1]))
            return joined

        rules = _modules_with("gated_delta_update")
        previous, self.tape = self.tape, tape
        mx.fast.scaled_dot_product_attention = capped.attention = attention
        own = {name: getattr(nn, name) for name in self.activations}
        try:
            mx.pad, mx.concatenate = padding, joining  # type: ignore[assignment]
            for module in rules:
                module.gated_delta_update = delta
            for name, function in self.activations.items():
                setattr(nn, name, function)
            yield tape
        finally:
            for name, function in own.items():
                setattr(nn, name, function)
            mx.fast.rms_norm = rms_norm
            mx.fast.scaled_dot_product_attention, capped.attention = original
            mx.pad, mx.concatenate = pad, concatenate
            for module, rule in rules.items():
                module.gated_delta_update = rule
            self.tape = previous


def _modules_with(name: str) -> dict[Any, Any]:
    """mlx-lm's modules that have a function of this name, and what it is there."""
    return {
        module: getattr(module, name)
        for path, module in [*sys.modules.items()]
        if path.startswith("mlx_lm.models.") and hasattr(module, name)
    }


def _has_matrix(module: nn.Module) -> bool:
    """Whether a module has a matrix `weight` of its own, and no modules inside."""
    weight = module.get("weight")
    if not isinstance(weight, mx.array) or weight.ndim != 2 or module.children():
        return False
    return bool(mx.issubdtype(weight.dtype, mx.floating))


def _longest_list(model: nn.Module) -> tuple[str, nn.Module, str]:
    """The longest list of modules that is inside of no other: its path, its owner and its key."""
    lists = [
        (f"{path}.{key}".removeprefix("."), module, key)
        for path, module in model.named_modules()
        for key, value in module.items()
        if isinstance(value, list) and value and all(isinstance(one, nn.Module) for one in value)
        if not any(part.isdecimal() for part in path.split("."))
    ]
    if not lists:
        raise BundleError("the model has no list of layers; such models are not supported")
    return max(sorted(lists, key=lambda one: one[0]), key=lambda one: len(one[1][one[2]]))


def attention_windows(taps: Taps, config: dict[str, Any]) -> list[int | None]:
    """Each layer's attention window in tokens, from the mask that it is given; None: no window."""
    sizes = [int(v) for k, v in config.items() if "window" in k and isinstance(v, int)]
    length = min(max([taps.probe, *sizes]) + 3, 8192)
    with taps.recording(Tape()):
        taps.model(mx.zeros((1, length), dtype=mx.int32))
    return [_window(tap, length) for tap in taps.layers]


def _window(tap: LayerTap, length: int) -> int | None:
    mask = tap.mask
    if mask is None or (isinstance(mask, str) and mask == "causal"):
        return None
    if isinstance(mask, mx.array) and mask.shape == (length, length) and mask.dtype == mx.bool_:
        window = int(mask[-1].astype(mx.int32).sum().item())  # type: ignore[arg-type]
        rows, columns = mx.arange(length)[:, None], mx.arange(length)[None]
        if mx.array_equal(mask, (rows >= columns) & (rows - columns < window)):
            return window if window < length else None
    raise BundleError(
        f"the attention mask of layer {tap.index} is neither causal nor a sliding window; such "
        "models are not supported"
    )
