"""The optimizer, applied to a few tensors at a time; its state lives in a mapped scratch file.

The rules are mlx.optimizers' own (AdamW with bias correction, as PyTorch's; SGD). They treat every
value alike, so small tensors are joined first: an operation costs the same for many values as for
few. Large ones, such as an adapter of the embedding, are updated some rows at a time. Only the
values that are being updated have their moments in memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim

from runtime.arrays.stored import Block
from runtime.arrays.values import Gradients
from runtime.core.errors import BundleError
from runtime.core.files import flush, storage_errors
from runtime.methods.adapters import Adapters
from runtime.storage.scratch import MappedTensors

MOMENTS = ("m", "v")
GROUP_VALUES = 1 << 16  # of a save's layout, too: see `runtime.storage.saves.VERSION`


def moments(name: str) -> tuple[str, ...]:
    """The names of the values that an optimizer keeps for each trained value."""
    return MOMENTS if name == "adamw" else ()


@dataclass(frozen=True)
class Group:
    """Tensors of one block that are updated together: names and shapes, in order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def ends(self) -> list[int]:
        """Where each tensor's values end when they are joined."""
        return list(accumulate(map(math.prod, self.shapes)))

    def moment(self, name: str) -> str:
        """The name of one of the group's moments."""
        return f"{self.names[0]}.{name}"


def groups(shapes: Mapping[str, tuple[int, ...]], most: int) -> list[Group]:
    """Groups of adjacent tensors with at most `most` values; a larger tensor is alone."""
    groups_of_tensors: list[dict[str, tuple[int, ...]]] = []
    room = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        if size > room:
            groups_of_tensors.append({})
            room = most
        groups_of_tensors[-1][name] = shape
        room -= size
    return [Group(tuple(group), tuple(group.values())) for group in groups_of_tensors]


class Optimizer:
    """Updates adapters in place, and keeps their moments in a scratch file."""

    def __init__(
        self,
        adapters: Adapters,
        name: str,
        weight_decay: float,
        folder: Path,
        most: int = GROUP_VALUES,
    ) -> None:
        self.adapters = adapters
        self.rule: optim.Optimizer
        if name == "adamw":
            self.rule = optim.AdamW(1e-4, weight_decay=weight_decay, bias_correction=True)
        else:
            self.rule = optim.SGD(1e-4, weight_decay=weight_decay)
        self.moments = moments(name)
        manifest = adapters.manifest
        self._groups = {
            block: groups(manifest.adapter_shapes(block), most) for block in manifest.blocks
        }
        state = {
            group.moment(which): (group.ends[-1],)
            for of_block in self._groups.values()
            for group in of_block
            for which in self.moments
        }
        self._state = MappedTensors(folder, "optimizer", state)
        self._most = most

    def begin(self, step: int, rate: float) -> None:
        """Set the step (0-based) and learning rate of the updates that follow."""
        self.rule.state["step"] = mx.array(step + 1, mx.uint64)
        self.rule.learning_rate = rate

    def apply(self, block: Block, gradients: Gradients) -> None:
        """Update the block's adapters with (dA, dB) by relative name."""
        by_full_name = {
            full: gradient
            for name, pair in gradients.items()
            for full, gradient in zip(
                self.adapters.manifest.adapter_names(block, name), pair, strict=True
            )
        }
        tensors = self.adapters.tensors
        for group in self._groups[block]:
            if group.ends[-1] > self._most and isinstance(tensors, MappedTensors):
                self._apply_by_rows(group, tensors, by_full_name)
            else:
                self._apply(group, by_full_name)

    def _apply_by_rows(
        self, group: Group, tensors: MappedTensors, gradients: dict[str, mx.array]
    ) -> None:
        """Update a tensor that is alone because it is large."""
        (name,), ((count, width, *_),) = group.names, group.shapes
        step = max(1, self._most // width)
        for start in range(0, count, step):
            rows, values = slice(start, start + step), slice(start * width, (start + step) * width)
            state = {which: self._state.part(group.moment(which), values) for which in self.moments}
            gradient, value = gradients[name][rows].reshape(-1), tensors.part(name, rows)
            moved = self.rule.apply_single(gradient, value.reshape(-1), state)
            mx.eval(moved, state)
            for which in self.moments:
                self._state.put_part(group.moment(which), values, state[which])
            tensors.put_part(name, rows, moved.reshape(value.shape))

    def _apply(self, group: Group, gradients: dict[str, mx.array]) -> None:
        state = {which: self._state[group.moment(which)] for which in self.moments}
        tensors = self.adapters.tensors
        gradient = mx.concatenate([gradients[name].reshape(-1) for name in group.names])
        value = mx.concatenate([tensors[name].reshape(-1) for name in group.names])
        value = self.rule.apply_single(gradient, value, state)
        parts = mx.split(value, group.ends[:-1])
        mx.eval(parts, state)
        for which in self.moments:
            self._state[group.moment(which)] = state[which]
        for name, shape, part in zip(group.names, group.shapes, parts, strict=True):
            tensors[name] = part.reshape(shape)

    def write(self, path: Path) -> None:
        """Write the moments to a file, group by group in the order of `Adapters.shapes`."""
        with storage_errors(path), path.open("wb") as file:
            self._state.write(file)
            file.flush()
            flush(file.fileno())

    def read(self, path: Path) -> None:
        """Read the moments that `write` wrote.

        Raises:
            BundleError: the file has another size.
        """
        size, expected = path.stat().st_size, self._state.nbytes
        if size != expected:
            raise BundleError(f"{path} has {size} bytes, expected {expected}")
        with path.open("rb") as file:
            self._state.read(file)
