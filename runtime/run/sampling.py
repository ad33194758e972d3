"""Choosing the next token from logits: the most likely one, or at random within limits.

The limits are those of llama.cpp, in its order: the `top_k` most likely tokens; of these the fewest
whose probabilities add up to `top_p`; of these such as are at least `min_p` times as likely as the
most likely one. Probabilities for the limits are those of temperature 1; the temperature is applied
to the tokens that are left, as in llama.cpp and mlx-lm.

A vocabulary may have hundreds of thousands of tokens, so the float64 values of each are
computed a tile at a time: beside the logits it takes a copy of them and a bit more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.core.errors import BundleError
from runtime.operations.logits import CHOICE_TILE as TILE

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
FEW = 256  # of the most likely tokens, in which `top_p` is looked for first


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    temperature: 0 for the most likely token; then the other fields have no effect.
    top_k: 0 for no limit.  top_p: 1 for no limit.  min_p: 0 for no limit.
    seed: with a token's position it determines the random number that chooses it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def choose(self, logits: Floats, position: int) -> int:
        """The token at a position of the sequence, from the logits (V,) for it.

        Raises:
            BundleError: the logits are not finite numbers.
        """
        best = int(logits.argmax())
        if not np.isfinite(logits[best]):
            raise BundleError(
                "the model gives logits that are not finite: weights are not numbers, or too "
                "large; export the model again, or leave out the adapter"
            )
        if not self.temperature:
            return best
        allowed, top = self.allowed(logits), float(logits[best])
        totals = np.cumsum(
            [self._weights(logits, allowed, tile, top).sum() for tile in _tiles(allowed)]
        )
        drawn = np.random.Generator(np.random.Philox(key=[self.seed, position])).random()
        index = _reaching(totals, drawn * totals[-1])
        before = totals[index - 1] if index else 0.0
        tile = slice(index * TILE, (index + 1) * TILE)
        weights = np.cumsum(self._weights(logits, allowed, tile, top))
        return index * TILE + _reaching(weights, drawn * totals[-1] - before)

    def _weights(self, logits: Floats, allowed: Flags, tile: slice, top: float) -> Doubles:
        """How likely the tokens of a tile are; 1 for the most likely of all."""
        with np.errstate(over="ignore", under="ignore"):  # by a temperature next to 0
            return (
                np.exp((logits[tile].astype(np.float64) - top) / self.temperature) * allowed[tile]
            )

    def allowed(self, logits: Floats) -> Flags:
        """Which tokens the limits leave (V,)."""
        count = min(self.top_k or len(logits), len(logits))
        if count == len(logits) and self.top_p == 1:
            allowed = np.ones(len(logits), np.bool_)
        else:
            allowed = _largest(logits, self._most_likely(logits, count))
        if self.min_p:
            allowed &= logits >= np.float64(logits.max()) + math.log(self.min_p)
        return allowed

    def _most_likely(self, logits: Floats, count: int) -> Floats:
        """The logits that `top_p` leaves of the `count` largest ones, in no order."""
        values = logits.copy()
        values.partition(len(values) - count)
        values = values[len(values) - count :]
        if self.top_p == 1:
            return values
        top, few = float(logits.max()), FEW
        wanted = self.top_p * sum(_likely(values[tile], top).sum() for tile in _tiles(values))
        while True:
            few = min(few, count)
            values.partition(count - few)
            values[count - few :].sort()
            fewest = _fewest(values[count - few :], top, wanted)
            if fewest is not None or few == count:
                return values[count - (fewest or count) :]
            few *= 8


def _tiles(values: npt.NDArray[np.generic]) -> Iterator[slice]:
    return (slice(start, start + TILE) for start in range(0, len(values), TILE))


def _likely(logits: Floats, top: float) -> Doubles:
    with np.errstate(under="ignore"):  # of tokens that are next to impossible
        return np.exp(logits.astype(np.float64) - top)


def _reaching(totals: Doubles, drawn: float) -> int:
    """The first place where running totals exceed a number; else the last where they grow."""
    place = int(np.searchsorted(totals, drawn, "right"))
    return place if place < len(totals) else int(np.searchsorted(totals, totals[-1]))


def _fewest(values: Floats, top: float, wanted: float) -> int | None:
    """How many of the largest sorted logits add up to a likelihood; None if all do not."""
    largest_first, total = values[::-1], 0.0
    for tile in _tiles(values):
        totals = total + np.cumsum(_likely(largest_first[tile], top))
        if totals[-1] >= wanted:
            return int(tile.start) + int(np.searchsorted(totals, wanted)) + 1
        total = float(totals[-1])
    return None


def _largest(logits: Floats, values: Floats) -> Flags:
    """Where the largest logits are, which are `values`; of equal ones the first are taken."""
    lowest = values.min()
    allowed: Flags = logits > lowest
    equal = len(values) - int(np.count_nonzero(allowed))
    allowed[np.flatnonzero(logits == lowest)[:equal]] = True
    return allowed
