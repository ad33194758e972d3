"""Passes over a checkpoint's blocks under the memory budget of an export, and comparisons.

The models read their float weights from the checkpoint, a tile of rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from export.passes.block_pass import RowPass
from runtime.arrays.weight_source import RowReader
from runtime.bundle.manifest import Quality
from runtime.bundle.store import Bundle
from runtime.config.shared import DataOptions
from runtime.core.errors import BudgetError, BundleError
from runtime.core.notes import Progress
from runtime.core.units import format_bytes
from runtime.data.source import TokenSource, reading_of
from runtime.data.token_rows import RandomRows, Rows
from runtime.engine.divergence import HEAD_VALUES, Divergence, compare_heads
from runtime.engine.sample import Row
from runtime.machine.footprint import Meter
from runtime.methods.adapters import Adapters
from runtime.operations.values import F32
from runtime.plan.demand import Demand, lane_choices
from runtime.plan.plan import Request, Task, choose_bucket
from runtime.plan.planner import EVALUATION_LANES, Planner
from runtime.run.budget import machine_for
from runtime.run.session import Session, open_session
from runtime.storage.row_weights import RowWeights

FORWARD = Demand(slots=0, lanes=lane_choices(EVALUATION_LANES), trains=False)
"""The demand of a forward pass without adapters, in which rows travel together."""
COMPARED_ROWS = 32  # rows that go through the blocks of two models at a time
HEAD_ROWS = 4  # rows whose logits are compared in one pass over the vocabulary
LOGITS = 5  # arrays of logits at a time: of both models, exponentials, differences, a copy
TILES = 4  # float32 tiles that the second model's takes while it is dequantized


@dataclass(frozen=True)
class Compared:
    """A model to compare, and its adapters, which may be none.

    reader: gives the weights, where they are not in the files of a bundle.
    """

    bundle: Bundle
    reader: RowReader | None = None
    adapters: Adapters | None = None


@dataclass
class ExportEngine:
    """Runs models under the meter's budget; scratch files go to `scratch`."""

    meter: Meter
    budget_bytes: int
    progress: Progress
    note: Callable[[str], None]
    scratch: Path

    def rows(
        self, bundle: Bundle, data: str, length: int, tokens: int, options: DataOptions | None
    ) -> list[Row]:
        """Rows of `data`, spread evenly over it, with about `tokens` tokens in all.

        A row has at most `length` targets. A note reports the rows that were read, unless
        there are no options: then the data are the package's own text.

        Raises:
            DataError: the data cannot be used.
        """
        reading = reading_of(DataOptions() if options is None else options)
        name = "export.tokens" if options is None else "calibration.tokens"
        source = TokenSource(name, data, "train", reading)
        rows = source.rows(bundle, self.scratch, length, self.progress)
        if options is not None and rows.report is not None:
            self.note(f"{data}: {rows.report.describe(bundle.manifest.buckets)}")
        return _spread(rows, tokens)

    def first_rows(
        self, bundle: Bundle, source: TokenSource, length: int | None, count: int
    ) -> list[Row]:
        """The first `count` rows of held-out data; 0: all, of random rows one.

        Without a `length`, the rows are as long as the source says.

        Raises:
            DataError: the data cannot be used.
        """
        length = length or source.bucket(bundle, self.scratch, self.progress)
        rows = source.rows(bundle, self.scratch, length, self.progress)
        if not count and isinstance(rows, RandomRows):
            count = 1
        count = min(len(rows), count) if count else len(rows)
        return [Row(*rows.row(index)) for index in range(count)]

    def open(
        self, source: Bundle, reader: RowReader, rows: Sequence[Row], spare_bytes: int
    ) -> RowPass:
        """A pass of rows through a model whose weights `reader` gives.

        It leaves `spare_bytes` of the budget to the caller.

        Raises:
            BudgetError: not even the smallest tiles fit the budget.
        """
        session = self._session(source, reader, rows, spare_bytes)
        return RowPass(session, rows, self.scratch, self._watch)

    def compare(self, source: Compared, model: Compared, rows: Sequence[Row], text: str) -> Quality:
        """Compare a model's predictions with those of its source, both block by block.

        A limited number of rows goes through the blocks at a time, which bounds the scratch files.

        Raises:
            BudgetError: not even the smallest tiles fit the budget.
            BundleError: the predictions of one of them are not finite.
        """
        spare = self._head_bytes(model.bundle, rows)
        models = [
            (self._session(each.bundle, each.reader, rows, spare), each.adapters)
            for each in (source, model)
        ]
        parts: list[Divergence] = []
        for start in range(0, len(rows), COMPARED_ROWS):
            chosen = rows[start : start + COMPARED_ROWS]
            parts += self._compare_rows(models, chosen, start, len(rows))
        tokens = sum(len(part.loss) for part in parts)
        if not all(np.isfinite(part.divergence).all() for part in parts):
            raise BundleError(
                "the predictions of one of the two models are not finite: its weights are damaged, "
                "or too large for the form in which they are stored"
            )
        return Quality(
            divergence=sum(float(part.divergence.sum()) for part in parts) / tokens,
            source_loss=sum(float(part.source_loss.sum()) for part in parts) / tokens,
            loss=sum(float(part.loss.sum()) for part in parts) / tokens,
            tokens=tokens,
            rows=len(rows),
            text=text,
        )

    def _compare_rows(
        self,
        models: Sequence[tuple[Session, Adapters | None]],
        rows: Sequence[Row],
        done: int,
        total: int,
    ) -> list[Divergence]:
        """Compare two models on some of `total` rows, of which `done` went before."""
        passes = [
            RowPass(session, rows, self.scratch, self._watch, adapters)
            for session, adapters in models
        ]
        layers = range(1, len(passes[0].models[0].lowered.blocks) - 1)
        steps = 2 * len(layers)
        for number, row_pass in enumerate(passes):
            row_pass.embed()
            for index in layers:
                for _ in row_pass.layer(index):
                    pass
                compared = done + len(rows) * (number * len(layers) + index) / steps
                self.progress("comparing", round(compared), total)
        divergences: list[Divergence] = []
        for start in range(0, len(rows), HEAD_ROWS):
            chosen = range(start, min(len(rows), start + HEAD_ROWS))
            first, second = (
                [row_pass.hidden(index, rows[index].scored) for index in chosen]
                for row_pass in passes
            )
            targets = [rows[i].targets for i in chosen]
            heads = (passes[0].models[start], passes[1].models[start])
            loras = passes[0].loras(-1), passes[1].loras(-1)
            divergences += compare_heads(*heads, first, second, targets, loras)
            self._watch()
        return divergences

    def check(self, doing: str) -> None:
        """Raise BudgetError if the process has exceeded the budget."""
        if self.meter.over_budget:
            peak = format_bytes(self.meter.peak_bytes, up=True)
            raise BudgetError(
                f"the process passed its budget {doing}: footprint {peak} > "
                f"{format_bytes(self.budget_bytes)}; give a larger --budget"
            )

    def _watch(self) -> None:
        self.check("while it ran the model")

    def _session(
        self, bundle: Bundle, reader: RowReader | None, rows: Sequence[Row], spare_bytes: int
    ) -> Session:
        """A session under the most generous plan in which blocks take all tokens at once.

        The plan leaves `spare_bytes` of the budget.
        """
        manifest, machine = bundle.manifest, machine_for(bundle, "auto")
        process = machine.process_bytes + spare_bytes
        larger = msgspec.structs.replace(machine, process_bytes=process)
        bucket = choose_bucket(manifest, max(len(row.tokens) - 1 for row in rows))
        request = Request(bucket, keeps=False, prefetch=False)
        plan = Planner(manifest, larger).plan(Task(request, FORWARD), self.budget_bytes)
        return open_session(bundle, plan, None if reader is None else RowWeights(manifest, reader))

    def _head_bytes(self, model: Bundle, rows: Sequence[Row]) -> int:
        """The bytes that comparing heads takes beside a model: hidden states, logits, a tile."""
        tokens = max(len(row.tokens) - 1 for row in rows)
        hidden = 4 * HEAD_ROWS * tokens * model.manifest.hidden_size * F32
        return hidden + (LOGITS + TILES) * HEAD_VALUES * F32


def _spread(rows: Rows, tokens: int) -> list[Row]:
    """About so many tokens in rows that are spread evenly, in their order."""
    most = max(1, min(len(rows), tokens))
    sample = [rows.row(i * len(rows) // most) for i in range(min(most, 64))]
    mean = sum(len(row_tokens) - 1 for row_tokens, _ in sample) / len(sample)
    count = max(1, min(len(rows), round(tokens / mean)))
    return [Row(*rows.row((2 * i + 1) * len(rows) // (2 * count))) for i in range(count)]
