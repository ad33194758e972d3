"""Which sample comes at which position of training: in each epoch all, in an order by the seed.

The samples of a step run at one length, to which the longest of them is padded. So those of a step
are taken from one sequence bucket where that is possible: in windows of WINDOW_STEPS steps, samples
of equal buckets come together, and otherwise in their order by the seed. With one sample a step, or
samples of one bucket only, it is that order unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from runtime.data.rows import Lengths, order

WINDOW_STEPS = 64
Places = npt.NDArray[np.int32]


class SampleOrder:
    """The order of samples of these lengths (n,), of which `step` make a step of training.

    A position's sample is a function of the arguments, so a resumed run sees what an uninterrupted
    one does. The orders of the last epochs asked for are kept for speed.
    """

    def __init__(self, seed: int, lengths: Lengths, buckets: Sequence[int], step: int) -> None:
        self._seed, self._count, self._step = seed, len(lengths), step
        self._buckets = _buckets_of(lengths, buckets) if step > 1 else None
        self._kept = lru_cache(maxsize=2)(self._epoch)

    def sample(self, position: int) -> int:
        """The number of the sample at a position (from 0), over epochs."""
        epoch, place = divmod(position, self._count)
        return int(self._kept(epoch)[place])

    def _epoch(self, epoch: int) -> Places:
        samples = order(self._seed, epoch, self._count)
        if self._buckets is None:
            return samples
        begun = -epoch * self._count % self._step  # samples that end a step of the epoch before
        window = WINDOW_STEPS * self._step
        for at in range(begun, self._count, window):
            part = samples[at : at + window]
            samples[at : at + window] = part[_together(self._buckets[part], self._step)]
        return samples


def _buckets_of(lengths: Lengths, buckets: Sequence[int]) -> Places | None:
    """The number of the bucket of each sample (n,); None if all are of one."""
    numbers = np.searchsorted(np.array(buckets), lengths).astype(np.int32)
    return numbers if numbers.min() < numbers.max() else None


def _together(buckets: Places, step: int) -> npt.NDArray[np.int64]:
    """An order of samples (n,) with these buckets, in which steps have equal ones if possible.

    Steps are in the order of their first samples; samples too few for a step are the last.
    """
    places = np.argsort(buckets, kind="stable")
    whole = len(places) // step * step
    steps = np.sort(places[:whole].reshape(-1, step), axis=1)
    steps = steps[np.argsort(steps[:, 0], kind="stable")]
    return np.concatenate([steps.reshape(-1), places[whole:]])
