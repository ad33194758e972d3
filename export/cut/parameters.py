"""What a computation between two products is given: parameters of its module, and tokens."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from runtime.core.errors import BundleError
from runtime.operations.values import Shape, is_parameter, token_axis

# modules of mlx-lm with other matrices -> what they compute
_OPERATIONS = {
    "SwitchLinear": "experts, of which each token takes some",
    "Conv1d": "a convolution over tokens",
    "BitLinear": "packed ternary matrices",
    "MultiLinear": "a product of its own for each head",
}


def parameters_of(root: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of a module's parameters outside its taps: the weights of norms and the like.

    Raises BundleError for matrices: a program has no operation with them.
    """
    for path, module in root.named_modules():
        large = {
            f"{path}.{key}".removeprefix("."): tuple(value.shape)
            for key, value in module.items()
            if isinstance(value, mx.array) and value.ndim > 1 and not key.startswith("_")
        }
        if large:
            operation = _OPERATIONS.get(type(module).__name__, "matrices that are no linear layers")
            raise BundleError(f"the model has {operation}, which is not supported: {large}")
    return {name: tuple(value.shape) for name, value in tree_flatten(root.parameters())}


def set_parameters(root: nn.Module, given: Mapping[str, mx.array]) -> None:
    """Give a module those of a graph's inputs that are parameters, named "@name"."""
    values = [(key[1:], value) for key, value in given.items() if is_parameter(key)]
    if values:
        root.update(tree_unflatten(values))


def token_count(given: Mapping[str, mx.array], shapes: dict[str, Shape]) -> int:
    """The number of tokens of arrays by name."""
    for key, array in given.items():
        if key in shapes:
            return int(array.shape[token_axis(shapes[key])])
    raise BundleError(
        "the model computes something between two products that depends on no activation; that is "
        "not supported"
    )
