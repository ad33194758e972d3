"""The samples of a training in the order of a seed: rows, or sequences of packed rows.

The samples of a step run at one length, to which the longest of them is padded. So those of a step
are taken from one sequence bucket where that is possible: in windows of WINDOW_STEPS steps, samples
of equal buckets come together, and otherwise in their order by the seed. With one sample a step, or
samples of one bucket only, it is that order unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from runtime.bundle.manifest import Manifest
from runtime.config.train import TrainConfig
from runtime.data.packing import Packing, PackingReport, pack
from runtime.data.token_rows import Lengths, Rows, order
from runtime.engine.sample import PackedRows, Row, Sample
from runtime.plan.plan import choose_bucket

WINDOW_STEPS = 64
Places = npt.NDArray[np.int32]


class SampleOrder:
    """The order of samples of these lengths (n,), of which `step` make a step of training.

    A position's sample is a function of the arguments, so a resumed run sees the same samples as
    an uninterrupted one. The orders of the last two epochs are cached.
    """

    def __init__(self, seed: int, lengths: Lengths, buckets: Sequence[int], step: int) -> None:
        self._seed, self._count, self._step = seed, len(lengths), step
        self._buckets = _buckets_of(lengths, buckets) if step > 1 else None
        self._epoch_order = lru_cache(maxsize=2)(self._epoch)

    def sample(self, position: int) -> int:
        """The number of the sample at a position (from 0), over epochs."""
        epoch, place = divmod(position, self._count)
        return int(self._epoch_order(epoch)[place])

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


@dataclass(frozen=True)
class Samples:
    """The training data: rows in the order of a seed, packed where a packing says so."""

    rows: Rows
    order: SampleOrder
    packing: Packing | None = None
    packing_report: PackingReport | None = None

    @classmethod
    def of(cls, config: TrainConfig, manifest: Manifest, rows: Rows) -> Samples:
        """The samples of a configuration whose `max_seq_length` is known."""
        lengths, buckets = rows.lengths, manifest.buckets
        step = config.batch_size * config.grad_accumulation
        if not config.pack:
            return cls(rows, SampleOrder(config.seed, lengths, buckets, step))
        assert config.max_seq_length is not None
        packing = pack(lengths, choose_bucket(manifest, config.max_seq_length), config.seed)
        order = SampleOrder(config.seed, packing.lengths(lengths), buckets, step)
        return cls(rows, order, packing, packing.report(lengths, buckets))

    def __len__(self) -> int:
        return len(self.rows if self.packing is None else self.packing)

    def at(self, position: int) -> Sample:
        """The sample at a position of training, from 0, over epochs."""
        index = self.order.sample(position)
        if self.packing is None:
            return Row(*self.rows.row(index))
        return PackedRows(tuple(Row(*self.rows.row(row)) for row in self.packing.rows_of(index)))
