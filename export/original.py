"""The model as its checkpoint has it, run block by block: to calibrate, and to compare with.

Nothing of it is written: its weights are read from the checkpoint, a tile of rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from export.calibrated import Calibration, write_calibrated
from export.config.export import ExportConfig
from export.cut.model import Cut
from export.passes.block_pass import RowPass
from export.passes.engine import Compared, ExportEngine
from export.recipe import expert_matrices
from export.sources.source import Checkpoint
from export.sources.tokenizer import UNREADABLE
from export.tensors import Tensors
from runtime.bundle.manifest import WARNINGS, Quality
from runtime.bundle.store import TOKENIZER, Bundle
from runtime.core.errors import BudgetError, DataError, UsageError
from runtime.data.tokenizer_files import VOCABULARY
from runtime.engine.sample import Row
from runtime.storage.row_weights import float_manifest

TEXT = Path(__file__).with_name("quality.txt")
OWN_TEXT = "the package's own text"
COMPARED_TOKENS = 2048  # of the package's own text, to compare
LEAST_COMPARED = 512  # tokens with a loss that held-out rows must have
LEAST_BLOCK = 128  # columns of the smallest Gram matrix
EVERY = 5  # one row in so many is held out


@dataclass
class Original:
    """The checkpoint's own model: a manifest of float matrices, and the rows to run through it."""

    bundle: Bundle
    checkpoint: Checkpoint
    engine: ExportEngine | None
    config: ExportConfig

    def calibrate(self, tensors: Tensors, cut: Cut) -> dict[str, Any]:
        """Write all tensors, calibrated. Returns the facts about it for the manifest."""
        assert self.engine is not None
        rows, _ = self._split
        tokens = sum(len(row.tokens) - 1 for row in rows)
        if tokens < self.config.calibration_tokens:
            self.engine.note(
                f"{self.config.calibrate} gives {tokens} tokens for calibration, of "
                f"{self.config.calibration_tokens} that would be used"
            )
        quantized = [name for name in tensors.stored if tensors.is_quantized(name)]
        experts = expert_matrices(cut)
        names = [name for name in quantized if name not in experts]
        if rounded := len(quantized) - len(names):
            self.engine.note(
                f"{rounded} matrices hold experts: these are rounded as without --calibrate, "
                "because each expert sees a part of the tokens"
            )
        shapes = {tensors.shape(name) for name in names}
        calibration, row_pass = self._planned(tensors, shapes, rows, tokens)
        write_calibrated(tensors, cut, row_pass, calibration)
        self.engine.check("while it calibrated")
        return {
            "data": self.config.calibrate,
            "rows": len(rows),
            "tokens": tokens,
            "damping": calibration.largest_damping,
            "block": calibration.block,
            **({"rounded_experts": rounded} if rounded else {}),
        }

    def _planned(
        self,
        tensors: Tensors,
        shapes: set[tuple[int, int]],
        rows: Sequence[Row],
        tokens: int,
    ) -> tuple[Calibration, RowPass]:
        """The calibration with the largest Gram matrices that fit the budget, and its pass.

        Raises:
            BudgetError: not even the smallest fit.
        """
        assert self.engine is not None
        block = max(columns for _, columns in shapes)
        while True:
            calibration = Calibration(tokens, block)
            spare = max(calibration.needed_bytes(*shape) for shape in shapes)
            try:
                return calibration, self.engine.open(self.bundle, tensors, rows, spare)
            except BudgetError:
                if block <= LEAST_BLOCK:
                    raise
            block = max(LEAST_BLOCK, block // 2 // LEAST_BLOCK * LEAST_BLOCK)

    @cached_property
    def _split(self) -> tuple[Sequence[Row], Sequence[Row]]:
        """The rows to calibrate with, and those that are held out; of few rows none are."""
        assert self.engine is not None and self.config.calibrate is not None
        tokens = self.config.calibration_tokens * EVERY // (EVERY - 1)
        length = self.bundle.manifest.usual_bucket
        rows = self.engine.rows(self.bundle, self.config.calibrate, length, tokens, self.config)
        held_out = rows[EVERY // 2 :: EVERY]
        if sum(len(row.scored) for row in held_out) < LEAST_COMPARED:
            return rows, []
        return [row for i, row in enumerate(rows) if i % EVERY != EVERY // 2], held_out

    def quality_of(self, bundle: Bundle) -> Quality | None:
        """How far a bundle is from this model; None if that cannot be measured, or is not wanted.

        It is measured on rows that calibration has not seen, or on the package's own text. Where
        the model cannot be run here, the bundle is good all the same: the reason is said, but where
        the export has said already that there is no tokenizer, or none that can be read.
        """
        provenance = self.checkpoint.provenance
        unreadable = any(text.startswith(UNREADABLE) for text in provenance.get(WARNINGS, ()))
        has_text = f"{TOKENIZER}/{VOCABULARY}" in self.bundle.manifest.files and not unreadable
        has_text = has_text and provenance["kind"] != "random"
        if self.engine is None or not self.config.quality or not has_text:
            return None
        try:
            rows: Sequence[Row] = []
            text = f"held-out rows of {self.config.calibrate}"
            if self.config.calibrate is not None:
                _, rows = self._split
            if not rows:
                rows, text = own_text(self.engine, self.bundle), OWN_TEXT
            own = Compared(self.bundle, self.checkpoint)
            return self.engine.compare(own, Compared(bundle), rows, text)
        except (BudgetError, DataError) as problem:
            self.engine.check("while it measured the quality")
            why = str(problem).replace(f"bundle {self.bundle.path}", "the bundle")  # not in place
            self.engine.note(
                f"what the export has cost the model was not measured: {why}; --no-quality leaves "
                "the measurement out"
            )
            return None


def own_text(engine: ExportEngine, bundle: Bundle) -> Sequence[Row]:
    """Rows of the package's own text."""
    return engine.rows(bundle, str(TEXT), bundle.manifest.usual_bucket, COMPARED_TOKENS, None)


def original_of(bundle: Bundle, checkpoint: Checkpoint) -> Bundle:
    """The float model of the checkpoint that a bundle was exported from, with the bundle's graphs.

    Raises:
        UsageError: the checkpoint is another model.
    """
    manifest = float_manifest(bundle.manifest)
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.weight": (matrix.rows, matrix.columns)
        for name, matrix in manifest.matrices.items()
    }
    shapes |= {name: extent.shape for name, extent in manifest.vectors.items()}
    source_shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
    if source_shapes == shapes and checkpoint.config != bundle.manifest.config:
        raise UsageError(
            f"{checkpoint.provenance['name']} is not the checkpoint of {bundle.path}: its "
            "configuration differs"
        )
    if source_shapes != shapes:
        wrong = sorted(
            name
            for name in {*source_shapes, *shapes}
            if source_shapes.get(name) != shapes.get(name)
        )
        raise UsageError(
            f"{checkpoint.provenance['name']} is not the checkpoint of {bundle.path}: "
            f"{len(wrong)} tensors differ in name or shape, such as {wrong[0]}"
        )
    return Bundle(bundle.path, manifest, bundle.graphs_path)
