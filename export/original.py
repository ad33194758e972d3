"""The model as its checkpoint has it, run block by block: to calibrate, and to compare with.

Nothing of it is written: its weights are read from the checkpoint, a tile of rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export.calibrated import write_calibrated
from export.cut.model import Cut
from export.quantize.calibrate import Calibration
from export.sources.source import Checkpoint
from export.tensors import Tensors
from ondevice.bundle.quality import Quality
from ondevice.bundle.store import Bundle
from ondevice.config.export import ExportConfig
from ondevice.engine import Engine, TokenRow

TEXT = Path(__file__).with_name("quality.txt")
OWN_TEXT = "the package's own text"
COMPARED_TOKENS = 2048  # held out of the calibration data for the comparison
EVERY = 5  # one row in so many is held out


@dataclass
class Original:
    """The checkpoint's own model: a manifest of float matrices, and the rows to run through it."""

    bundle: Bundle
    checkpoint: Checkpoint
    engine: Engine | None
    config: ExportConfig
    _held_out: Sequence[TokenRow] = ()

    def calibrate(self, tensors: Tensors, cut: Cut) -> dict[str, Any]:
        """Write all tensors, calibrated. Returns the facts that the bundle keeps about it."""
        assert self.engine is not None and self.config.calibrate is not None
        wanted = self.config.calibration_tokens
        data = self.config.calibrate
        found = self.engine.rows(self.bundle, data, self._row_tokens, wanted + COMPARED_TOKENS)
        few = len(found) < EVERY
        self._held_out = () if few else found[EVERY // 2 :: EVERY]
        rows = found if few else [r for i, r in enumerate(found) if i % EVERY != EVERY // 2]
        run = self.engine.open(self.bundle, tensors, rows)
        calibration = Calibration(len(rows), self.engine.spare_bytes())
        write_calibrated(tensors, cut, run, calibration)
        self.engine.check("while it calibrated")
        return {
            "data": data,
            "rows": len(rows),
            "tokens": sum(len(row.tokens) - 1 for row in rows),
            "damping": calibration.damping,
        }

    def quality_of(self, bundle: Bundle) -> Quality | None:
        """How far a bundle is from this model; None if that cannot be measured, or is not wanted.

        It is measured on rows that calibration has not seen, or on the package's own text.
        """
        if self.engine is None or not self.config.quality or not self._is_text_model:
            return None
        rows, text = self._held_out, f"held-out rows of {self.config.calibrate}"
        if not rows:
            length = self._row_tokens
            rows = self.engine.rows(self.bundle, str(TEXT), length, COMPARED_TOKENS)
            text = OWN_TEXT
        found = self.engine.compare(self.bundle, self.checkpoint, bundle, rows)
        return Quality(
            divergence=found.divergence,
            source_loss=found.source_loss,
            loss=found.loss,
            tokens=found.tokens,
            rows=found.rows,
            text=text,
        )

    @property
    def _is_text_model(self) -> bool:
        """Whether there is a tokenizer, and the weights are not random."""
        return bool(self.bundle.manifest.files) and self.checkpoint.provenance["kind"] != "random"

    @property
    def _row_tokens(self) -> int:
        """The tokens of a row for calibration or comparison."""
        return self.bundle.manifest.usual_bucket
