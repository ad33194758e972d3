"""The serialized functions of a bundle: opened when first asked for, and checked at every call."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np

from runtime.arrays.arrays import DTYPES
from runtime.bundle.store import Bundle
from runtime.core.errors import BundleError
from runtime.core.files import private_copy, read_file, reading_errors
from runtime.core.remembered import remembered
from runtime.engine.numpy_graphs import Array, Replay, UnknownPrimitiveError
from runtime.operations.values import dtype_of


class Graphs:
    """Opened functions by key, shared by all sequence buckets."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self._replays: dict[str, Replay | None] = {}

    def call(self, key: str, arguments: Sequence[mx.array]) -> tuple[mx.array, ...]:
        """A function's results, lazy.

        Raises:
            BundleError: the file cannot be loaded, or differs from its entry in the manifest.
        """
        graph, dtype = self.bundle.manifest.graphs[key], DTYPES[dtype_of(key)]
        function = self._open(key)
        try:
            results = tuple(function(*arguments))
        except (RuntimeError, ValueError) as problem:
            raise BundleError(f"{graph.file} does not take its inputs: {problem}") from None
        shapes = tuple(tuple(result.shape) for result in results)
        if shapes != graph.outputs or any(result.dtype != dtype for result in results):
            raise BundleError(f"{graph.file} returns {shapes}, the manifest says {graph.outputs}")
        return results

    def replay(self, key: str, arguments: Sequence[Array]) -> list[Array]:
        """The same by NumPy, of NumPy's arrays; by MLX if a primitive is not known there."""
        if key not in self._replays:
            given = [mx.array(argument) for argument in arguments]
            try:
                self._replays[key] = Replay(lambda *inputs: self.call(key, inputs), given)
            except UnknownPrimitiveError:
                self._replays[key] = None
        if (replay := self._replays[key]) is not None:
            return replay(*arguments)
        results = self.call(key, [mx.array(argument) for argument in arguments])
        return [np.asarray(result) for result in results]

    def workspace_bytes(self, key: str) -> int:
        """The memory that a function takes beside its arguments and results while it runs."""
        return self.bundle.manifest.graphs[key].workspace_bytes

    @remembered
    def _open(self, key: str) -> Callable[..., Any]:
        graph = self.bundle.manifest.graphs[key]
        if self.bundle.graphs_path is None:
            raise BundleError(
                f"{self.bundle.path}: its graphs may not run, since nobody has checked where "
                "they come from"
            )
        path = self.bundle.graphs_path / graph.file
        with reading_errors(path):
            data = read_file(path)
        if hashlib.sha256(data).hexdigest() != graph.sha256:  # it has changed since the start
            raise BundleError(f"{path} is altered: its SHA-256 differs")
        try:
            with private_copy(data) as copy:  # and may change again before MLX reads it
                return cast(Callable[..., Any], mx.import_function(copy))
        except RuntimeError as problem:
            raise BundleError(f"{graph.file} cannot be loaded: {problem}") from None
