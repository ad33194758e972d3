"""The samples of a training, by position: rows, or sequences of packed rows."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.bundle.manifest import Manifest
from runtime.config.train import TrainConfig
from runtime.data.packing import Packing, PackingReport, pack
from runtime.data.rows import Rows
from runtime.data.sample_order import SampleOrder
from runtime.engine.sample import PackedRows, Row, Sample
from runtime.plan.plan import choose_bucket


@dataclass(frozen=True)
class Samples:
    """What training reads: rows in the order of a seed, packed where a packing says so."""

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
