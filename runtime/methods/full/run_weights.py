"""The weights of a run that trains all parameters: opened in the run, and written as a bundle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from runtime.arrays.stored import Extent
from runtime.bundle.manifest import Manifest
from runtime.bundle.store import Bundle, BundleWriter
from runtime.config.train import TrainConfig
from runtime.core.errors import DivergedError
from runtime.core.notes import Progress, no_progress
from runtime.methods.full.row_noise import DRAWS, RowNoise
from runtime.methods.full.stored_floats import expand
from runtime.methods.full.weights import FullWeights, slot_layouts
from runtime.methods.full.zeroth_order import FullZerothOrder  # noqa: F401 - loaded for the plan
from runtime.methods.log import read_log
from runtime.methods.log_header import Header
from runtime.methods.noise import Noise
from runtime.methods.protocol import TRAJECTORY
from runtime.methods.zeroth.descent import Update
from runtime.storage.read_ahead import ReadAhead
from runtime.storage.saves import SLOTS
from runtime.storage.slots import Slots
from runtime.storage.weights import Weights

WRITTEN_VALUES = 1 << 18  # of a tensor at once


def load() -> None:
    """Load the tables and libraries of later training, so that a plan counts them."""
    for kind in DRAWS:
        RowNoise(Noise(0, kind)).draw(0, 0, "", 0, np.empty((1, 8), np.float32))


def open_weights(
    config: TrainConfig,
    bundle: Bundle,
    run: Path,
    done: int,
    prefetch: bool = False,
    writable: bool = True,
) -> FullWeights:
    """The weights of a run after `done` steps: its slots, and the updates of its log beyond them.

    Raises:
        BundleError: the log is damaged, or the slots cannot be read.
        StorageError: the disk has no room for the slots.
    """
    updates = read_log(run / TRAJECTORY)[1] if done else []
    manifest = bundle.manifest
    settings = (manifest.weights_sha256, config.seed, config.noise_kind)
    identity = hashlib.sha256(json.dumps(settings).encode()).digest()
    base = Weights(bundle, prefetch)
    layers = range(1, len(manifest.blocks) - 1)
    layouts = slot_layouts(manifest)
    slots = Slots(run / SLOTS, layouts, identity, writable, base.assembly, layers)
    return FullWeights(
        manifest,
        base,
        slots,
        RowNoise(Noise(config.seed, config.noise_kind, config.pool)),
        done,
        dict(enumerate(updates[:done])),
        ReadAhead(slots.path) if prefetch and base.assembly is None else None,
    )


def write_trained(
    bundle: Bundle,
    header: Header,
    updates: list[Update | None],
    output: Path,
    own: FullWeights | None,
    progress: Progress = no_progress,
) -> bool | None:
    """Write the bundle that training with these updates leads to, a tile of a tensor at a time.

    Returns whether it equals `own`, the run's weights; None without them.

    Raises:
        DivergedError: a value is not finite.
        StorageError: the bundle cannot be written.
        UsageError: there is something at `output` already.
    """
    manifest = bundle.manifest
    trained = FullWeights(
        manifest,
        Weights(bundle),
        None,
        RowNoise(Noise.of_log(header)),
        len(updates),
        dict(enumerate(updates)),
    )
    compared = _Compared(trained, own)
    with BundleWriter(output) as writer:
        for name, extent in _in_order(manifest):
            writer.align()
            if writer.offset < extent.offset:
                writer.align_block()
            written = writer.tensor(compared.tiles(name), extent.dtype, extent.shape)
            assert written == extent, "the tensors of the bundle lie otherwise"
            progress(name, writer.offset, manifest.weights_nbytes)
        writer.align(manifest.weights_nbytes)  # the padding at its end
        nbytes, sha256 = writer.finish_weights()
        writer.copy_files(bundle)
        writer.commit(
            msgspec.structs.replace(
                manifest,
                weights_nbytes=nbytes,
                weights_sha256=sha256,
                provenance={**manifest.provenance, "trained": {"steps": len(updates)}},
                quality=None,
            )
        )
    return None if own is None else compared.equal


@dataclass
class _Compared:
    """Trained weights as bytes, which are compared with the run's own while they are written."""

    trained: FullWeights
    own: FullWeights | None
    equal: bool = True  # so far

    def tiles(self, name: str) -> Iterator[bytes]:
        """The stored bytes of a tensor, tile by tile.

        Raises:
            DivergedError: a value is not finite.
        """
        trained, own = self.trained, self.own
        rows, columns, dtype = trained.tensors[trained.owner[name]][name]
        step = max(1, WRITTEN_VALUES // columns)
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            stored = trained.stored(name, start, stop)
            values = np.empty((stop - start, columns), np.float32)
            expand(stored, dtype, values)
            if not np.isfinite(values).all():
                raise DivergedError(
                    f"after step {trained.done} of its log, {name} holds values that are no finite "
                    "numbers: the run diverged; train another with a lower --learning-rate"
                )
            octets = stored.tobytes()
            if own is not None:
                self.equal &= octets == own.stored(name, start, stop).tobytes()
            yield octets


def _in_order(manifest: Manifest) -> list[tuple[str, Extent]]:
    """All tensors, in the order in which they lie in weights.bin."""
    tensors = list(manifest.vectors.items())
    tensors += [(name, matrix.packed) for name, matrix in manifest.matrices.items()]
    return sorted(tensors, key=lambda entry: entry[1].offset)
