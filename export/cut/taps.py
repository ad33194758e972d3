"""Taps: stand-ins for a model's embedding, linear layers, convolutions and layers.

A tap computes nothing. It records its inputs to a tape and returns the tape's next array.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU

from export.cut.experts import ExpertsTap
from export.cut.stand_ins import replaced, stand_ins, with_delta_rule
from export.cut.tape import (
    MASK,
    ConvolutionCall,
    EmbeddingCall,
    LayerCall,
    LinearCall,
    Tap,
    Tape,
)
from runtime.core.errors import BundleError

SHORTEST_PROBE = 13


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


class _LinearTap(Tap):
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


class _EmbeddingTap(Tap):
    """Stands in for an embedding, which a tied model also uses as its head."""

    def __init__(self, taps: Taps, name: str, embedding: nn.Embedding) -> None:
        self.taps, self.name = taps, name
        self.of_model = name in dict(taps.model.named_modules())
        self.rows, self.columns = embedding.weight.shape
        self.first_position: int | None = None  # of an embedding of positions
        self.looked = False

    def _look(self, ids: mx.array) -> None:
        """See whether it is given positions; the tokens of a model that is tried are all alike."""
        numbers, self.looked = np.array(ids).reshape(-1), True
        if len(numbers) > 1 and np.array_equal(numbers, numbers[0] + np.arange(len(numbers))):
            self.first_position = int(numbers[0])
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


class _ConvolutionTap(Tap):
    """Stands in for a convolution whose input the model pads with zeros before the first token."""

    def __init__(self, taps: Taps, name: str, convolution: nn.Conv1d) -> None:
        self.taps, self.name = taps, name
        self.parameters = {
            f"{name}.{key}": tuple(value.shape) for key, value in convolution.items()
        }
        channels, self.width, inputs = convolution.weight.shape
        settings = (
            convolution.groups,
            convolution.stride,
            convolution.dilation,
            convolution.padding,
        )
        if inputs != 1 or settings != (channels, 1, 1, 0):
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
        given = _Given(self.tap, x)  # type: ignore[attr-defined]
        try:
            return super().__call__(given)  # type: ignore[misc]
        except TypeError:  # of a function of MLX that is given it, as a norm with a matrix is
            return given.__getattr__("no product")


class LayerTap:
    """Stands in for a transformer layer, remembers how it is called, and else is that layer."""

    @classmethod
    def of(cls, taps: Taps, index: int, layer: nn.Module) -> LayerTap:
        """A tap that is of the layer's class too, since models ask; as a module it is empty."""
        tapped: type[LayerTap] = type(cls.__name__, (cls, type(layer)), {})
        return tapped(taps, index, layer)

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

    """

    def __init__(
        self, model: nn.Module, probe: int, config: dict[str, Any], cuts: bool = True
    ) -> None:
        self.model, self.probe, self.cuts = model, probe, cuts
        self.positions: tuple[str, int] | None = None
        self.config = config
        self._deltas = with_delta_rule()
        self.tape = Tape()
        self.path, owner, key = _longest_list(model)
        self.layers = [LayerTap.of(self, i, layer) for i, layer in enumerate(owner[key])]
        for layer in owner[key]:
            self._tap(layer)
        if cuts:
            owner[key] = self.layers
        self._tap(model)

    def _tap(self, root: nn.Module) -> None:
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
        """Record to `tape`, with functions of MLX and mlx-lm replaced, inside the `with` block."""
        previous, self.tape = self.tape, tape
        try:
            with replaced(stand_ins(tape, self.model, self.config, self.cuts, self._deltas)):
                yield tape
        finally:
            self.tape = previous


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
        if isinstance(value, list) and value and all(isinstance(item, nn.Module) for item in value)
        if not any(part.isdecimal() for part in path.split("."))
    ]
    if not lists:
        raise BundleError("the model has no list of layers; such models are not supported")
    return max(sorted(lists, key=lambda place: place[0]), key=lambda place: len(place[1][place[2]]))


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
