"""Choosing the next token from logits: the most likely one, or at random within limits.

The limits are those of llama.cpp, in its order: the `top_k` most likely tokens; of these the fewest
whose probabilities add up to `top_p`; of these such as are at least `min_p` times as likely as the
most likely one. Probabilities for the limits are those of temperature 1; the temperature is applied
to what is left, as in llama.cpp and mlx-lm.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ondevice.errors import BundleError

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
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
        kept = self.kept(logits)
        weights = np.exp((logits[kept].astype(np.float64) - logits[best]) / self.temperature)
        total = np.cumsum(weights)
        drawn = np.random.Generator(np.random.Philox(key=[self.seed, position])).random()
        return int(
            kept[min(int(np.searchsorted(total, drawn * total[-1], "right")), len(kept) - 1)]
        )

    def kept(self, logits: Floats) -> Ids:
        """The tokens that the limits leave, in the order of their ids."""
        kept = np.arange(len(logits))
        if 0 < self.top_k < len(logits):
            kept = _most_likely(logits, self.top_k)
        likely = np.exp(logits[kept].astype(np.float64) - logits.max())  # the most likely has 1
        if self.top_p < 1:
            chosen = _fewest(likely, self.top_p)
            kept, likely = kept[chosen], likely[chosen]
        return np.sort(kept[likely >= self.min_p])


def _most_likely(values: npt.NDArray[np.floating], count: int) -> Ids:
    """The places of the `count` largest values (N,), in no order."""
    if count >= len(values):
        return np.arange(len(values))
    return np.argpartition(values, len(values) - count)[len(values) - count :]


def _fewest(weights: npt.NDArray[np.float64], share: float) -> Ids:
    """The places of the fewest weights (N,) that add up to this share of them; at least one."""
    wanted, count = share * weights.sum(), FEW
    while True:
        places = _most_likely(weights, count)
        places = places[np.argsort(-weights[places], kind="stable")]
        total = np.cumsum(weights[places])
        if total[-1] >= wanted or count >= len(weights):
            return places[: int(np.searchsorted(total, wanted)) + 1]
        count *= 8
