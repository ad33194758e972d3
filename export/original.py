"""The model as its checkpoint has it, run block by block: to calibrate, and to compare with.

Nothing of it is written: its weights are read from the checkpoint, a tile of rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from export.calibrated import write_calibrated
from export.cut.model import Cut
from export.packed import Packing, Stored
from export.quantize.bits import Candidate, choose_bits
from export.quantize.calibrate import Calibration
from export.quantize.sensitivity import Sensitivities
from export.sources.source import Checkpoint
from export.tensors import Tensors
from ondevice.bundle.float_manifest import float_manifest
from ondevice.bundle.quality import Quality
from ondevice.bundle.store import Bundle
from ondevice.config.export import ExportConfig
from ondevice.engine import Engine, TokenRow
from ondevice.errors import UsageError

TEXT = Path(__file__).with_name("quality.txt")
OWN_TEXT = "the package's own text"
COMPARED_TOKENS = 2048  # held out of the calibration data for the comparison
EIGHT_BITS_LOSE = 1 / 256  # of what 4 bits lose: the errors are 16 times smaller
EVERY = 5  # one row in so many is held out


@dataclass
class Original:
    """The checkpoint's own model: a manifest of float matrices, and the rows to run through it."""

    bundle: Bundle
    checkpoint: Checkpoint
    engine: Engine | None
    config: ExportConfig
    _held_out: Sequence[TokenRow] = ()

    def choose_bits(self, tensors: Tensors) -> dict[str, str]:
        """Give 8 bits to the matrices of `--bits auto` that lose most with 4.

        Returns why each has its bits.
        """
        assert self.engine is not None
        asked = {
            name: one
            for name, one in tensors.stored.items()
            if isinstance(one, Packing) and self._is_layer(name)
        }
        data = str(TEXT) if self.config.calibrate is None else self.config.calibrate
        rows = self.engine.rows(self.bundle, data, self._row_tokens, COMPARED_TOKENS)
        found = Sensitivities(tensors, asked, self.engine.scratch)
        self.engine.backward(self.bundle, self.checkpoint, rows, found)
        self.engine.check("while it measured sensitivities")
        tokens = sum(len(row.scored) for row in rows)
        total = sum(_bytes(tensors, name, one) for name, one in tensors.stored.items())
        candidates = []
        for name, one in asked.items():
            eight = replace(one, bits=8, layout="symmetric")
            loss = found.divergence(name, tokens)
            sizes = (_bytes(tensors, name, one), _bytes(tensors, name, eight))
            candidates.append(Candidate(name, *sizes, loss, loss * EIGHT_BITS_LOSE))
        chosen = choose_bits(candidates, int(total * self.config.size_share))
        for name, choice in chosen.items():
            if choice.bits == 8:
                tensors.stored[name] = replace(asked[name], bits=8, layout="symmetric")
        return {name: f"{choice.bits} bits: {choice.reason}" for name, choice in chosen.items()}

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

    def _is_layer(self, name: str) -> bool:
        """Whether a matrix belongs to a layer, and not to the embedding or the head."""
        ends = (self.bundle.manifest.blocks[0], self.bundle.manifest.blocks[-1])
        types = self.bundle.manifest.block_types
        return all(
            name not in operation.matrices(block.tensor)
            for block in ends
            for operation in types[block.type].operations
        )

    @property
    def _is_text_model(self) -> bool:
        """Whether there is a tokenizer, and the weights are not random."""
        return bool(self.bundle.manifest.files) and self.checkpoint.provenance["kind"] != "random"

    @property
    def _row_tokens(self) -> int:
        """The tokens of a row for calibration or comparison."""
        return self.bundle.manifest.usual_bucket


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
    found = {name: checkpoint.shape(name) for name in checkpoint.names()}
    if found != shapes:
        wrong = sorted({*found, *shapes} - {n for n in found if found[n] == shapes.get(n)})
        raise UsageError(
            f"{checkpoint.provenance['name']} is not the checkpoint of {bundle.path}: "
            f"{len(wrong)} tensors differ in name or shape, such as {wrong[0]}"
        )
    return Bundle(bundle.path, manifest)


def _bytes(tensors: Tensors, name: str, stored: Stored) -> int:
    rows, columns = tensors.shape(name)
    return int(rows * columns * stored.bits_per_weight / 8)
