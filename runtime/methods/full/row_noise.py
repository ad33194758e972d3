"""Noise z for the weights themselves, drawn a tile of rows at a time, the same on every device.

z of a matrix is cut into tiles of `NOISE_VALUES` values, whole rows. Each is a function of (seed,
purpose, step, query, tensor, number of the tile) alone, so that any range of rows can be
drawn in any order. Bits come from NumPy's SFC64, whose streams NumPy keeps. MLX's own normal
deviates take ten times as long on a CPU.

"gaussian" values are the 65,536 quantiles of the normal distribution in the middle of equal shares,
scaled to variance 1; the largest is 4.3. "rademacher" values are -1 or 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt

from runtime.methods.noise import Noise, number_of

NOISE_VALUES = 1 << 17  # of a tile of noise, unless one row is longer
F32 = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]


def rows_of_noise(columns: int) -> int:
    """How many rows of a matrix are drawn together."""
    return max(1, NOISE_VALUES // columns)


def noise_bytes() -> int:
    """Memory of a tile of noise while it is drawn, and of the bits by which weights are rounded.

    Each value has random bits, which NumPy widens to look them up in the table.
    """
    value, bits, place = 4, 2, 8
    return NOISE_VALUES * (value + bits + place + 2 * bits)


@cache
def _gaussian() -> F32:
    """The quantiles (65536,), float32."""
    half = np.empty(1 << 15)
    x = 0.0
    for index in range(half.size):  # from the middle outwards: Newton's steps from the last one
        share = (index + 0.5) / (1 << 16)  # of the probability between 0 and x
        for _ in range(60):
            density = math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
            step = (math.erf(x / math.sqrt(2)) / 2 - share) / density
            x -= max(-0.5, min(0.5, step))
            if abs(step) < 1e-14:
                break
        half[index] = x
    half /= math.sqrt((half**2).mean())
    return np.concatenate([-half[::-1], half]).astype(np.float32)


@cache
def _signs() -> F32:
    """The eight signs (256, 8) that a byte stands for."""
    bits = (np.arange(256)[:, None] >> np.arange(8)) & 1
    return (bits * 2 - 1).astype(np.float32)


def _bits(key: int, octets: int) -> npt.NDArray[np.uint8]:
    words = np.random.SFC64(key).random_raw(-(-octets // 8))
    return np.asarray(words, "<u8").view(np.uint8)[:octets]


def _draw_gaussian(key: int, out: F32) -> None:
    numbers = _bits(key, 2 * out.size).view("<u2")
    np.take(_gaussian(), numbers, out=out, mode="clip")


def _draw_signs(key: int, out: F32) -> None:
    whole = out.size // 8
    octets = _bits(key, -(-out.size // 8))
    np.take(_signs(), octets[:whole], axis=0, out=out[: 8 * whole].reshape(-1, 8), mode="clip")
    if out.size % 8:
        out[8 * whole :] = _signs()[octets[whole], : out.size % 8]


DRAWS: dict[str, Callable[[int, F32], None]] = {
    "gaussian": _draw_gaussian,
    "rademacher": _draw_signs,
}


@dataclass
class RowNoise:
    """The noise of one run, of the seed, kind and pool of a `Noise`."""

    of: Noise
    _tile: F32 = field(default_factory=lambda: np.empty(0, np.float32), repr=False)

    def draw(self, step: int, query: int, tensor: str, start: int, out: F32) -> None:
        """Fill `out` (R, C) with z of rows start:start+R of `tensor`, contiguous."""
        rows, columns = out.shape
        for tile, first, last in _tiles(start, rows, columns):
            target = out[first - start : last - start]
            top = tile * rows_of_noise(columns)
            if last - first == rows_of_noise(columns):
                self._draw(step, query, tensor, tile, target.reshape(-1))
            else:
                whole = self._whole(step, query, tensor, tile, columns)
                target[...] = whole[first - top : last - top]

    def draw_rows(self, step: int, query: int, tensor: str, chosen: Indices, out: F32) -> None:
        """Fill `out` (N, C) with z of the chosen rows (N,) of `tensor`."""
        for tile, here, rows in _tiles_of(chosen, out.shape[1]):
            out[here] = self._whole(step, query, tensor, tile, out.shape[1])[rows]

    def integers(
        self, step: int, tensor: str, chosen: Indices, columns: int
    ) -> npt.NDArray[np.uint16]:
        """Random integers (N, C), uniform, by which the chosen rows (N,) are rounded."""
        integers = np.empty((len(chosen), columns), np.uint16)
        for tile, here, rows in _tiles_of(chosen, columns):
            key = number_of(self.of.seed, "rounding", step, 0, tensor, tile)
            bits = _bits(key, 2 * rows_of_noise(columns) * columns)
            integers[here] = bits.view("<u2").reshape(-1, columns)[rows]
        return integers

    def _whole(self, step: int, query: int, tensor: str, tile: int, columns: int) -> F32:
        """A whole tile of noise, in memory that the next one reuses."""
        size = rows_of_noise(columns) * columns
        if self._tile.size < size:
            self._tile = np.empty(size, np.float32)
        drawn = self._tile[:size]
        self._draw(step, query, tensor, tile, drawn)
        return drawn.reshape(-1, columns)

    def _draw(self, step: int, query: int, tensor: str, tile: int, out: F32) -> None:
        drawn = ("rows", step, query)
        if self.of.pool:
            drawn = ("pool", 0, self.of.member(step, query))
        DRAWS[self.of.kind](number_of(self.of.seed, *drawn, tensor, tile), out)


def _tiles_of(chosen: Indices, columns: int) -> Iterator[tuple[int, Indices, Indices]]:
    """The tiles of noise that chosen rows (N,) lie in, each with their numbers, and rows in it."""
    tiles, rows = np.divmod(chosen, rows_of_noise(columns))
    for tile in np.unique(tiles).tolist():
        here = np.flatnonzero(tiles == tile)
        yield tile, here, rows[here]


def _tiles(start: int, rows: int, columns: int) -> Iterator[tuple[int, int, int]]:
    """The tiles of noise that rows start:start+R lie in, with the first and last row in each."""
    height = rows_of_noise(columns)
    for tile in range(start // height, -(-(start + rows) // height)):
        yield tile, max(start, tile * height), min(start + rows, (tile + 1) * height)
