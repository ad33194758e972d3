"""The tensors of a model as transformers has them, where layers have parts of them here."""

from __future__ import annotations

import numpy as np

from export.sources.families import build_model
from export.sources.general import whole_tensors
from export.sources.source import Checkpoint
from export.stored import F32


class Rejoined:
    """A checkpoint with those tensors joined of which layers have parts in our model's class."""

    def __init__(self, parts: Checkpoint) -> None:
        self._parts = parts
        self._whole = whole_tensors(build_model(parts.family, parts.config))
        self._inside = {name for names, _ in self._whole.values() for name in names}

    def names(self) -> list[str]:
        """The names of all tensors."""
        return [*self._whole, *(name for name in self._parts.names() if name not in self._inside)]

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        names, axis = self._whole.get(name, ([name], None))
        shape = list(self._parts.shape(names[0]))
        if axis is not None:
            shape[axis] *= len(names)
        return tuple(shape)

    def rows(self, name: str, start: int, stop: int) -> F32:
        """Rows start:stop of a tensor, as a fresh array."""
        names, axis = self._whole.get(name, ([name], None))
        if axis is None:
            return self._parts.rows(names[0], start, stop)
        if axis:
            return np.concatenate([self._parts.rows(one, start, stop) for one in names], axis=1)
        found, top = [], 0
        for one in names:
            height = self._parts.shape(one)[0]
            first, last = max(start - top, 0), min(stop - top, height)
            if first < last:
                found.append(self._parts.rows(one, first, last))
            top += height
        return np.concatenate(found)
