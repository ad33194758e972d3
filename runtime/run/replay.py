"""`ondevice replay`: rebuilds the result of a run from its trajectory and its initial values.

The result is an adapter, or where all parameters were trained, a whole bundle.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from runtime.bundle.manifest import Manifest
from runtime.bundle.store import Bundle
from runtime.config.train import TrainConfig
from runtime.core.errors import BundleError, StorageError, UsageError
from runtime.core.files import storage_errors
from runtime.core.lookalikes import Kind, instead
from runtime.core.notes import Progress, no_progress
from runtime.core.paths import output_path
from runtime.machine.backend import arithmetic, use_device
from runtime.methods.adapters import Adapters
from runtime.methods.full.run_weights import open_weights, write_trained
from runtime.methods.full.weights import FullWeights
from runtime.methods.log import check_belongs, read_log, rebuild
from runtime.methods.log_header import Header
from runtime.methods.protocol import TRAJECTORY
from runtime.methods.zeroth.descent import Update
from runtime.run.folder import INITIAL, RunFolder
from runtime.run.results import best_of
from runtime.run.session import open_verified
from runtime.run.traced_graphs import choose_device
from runtime.storage.saves import CONFIG, SLOTS, SUMMARY


class Replayed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result that was rebuilt from a log, and whether it equals the run's own.

    saved_steps: those of the run's last save. best_step: the step that `--keep-best` has kept.
    identical: None where nothing was compared. not_compared: why it was not.
    other_arithmetic: what decides the last bits here, and was another when the run was saved.
    """

    steps: int
    skipped_steps: int
    log_bytes: int
    output: str
    saved_steps: int | None
    best_step: int | None
    identical: bool | None
    not_compared: str | None = None
    other_arithmetic: str = ""


def replay(
    run: Path,
    output: Path,
    bundle: str | None = None,
    initial: Path | None = None,
    progress: Progress = no_progress,
) -> Replayed:
    """Rebuild the adapter of `run` into the folder `output`, and compare it with the run's own.

    Of a finished run with `--keep-best` this is the adapter of its best evaluation, as in the run.
    `initial` are the adapters that the run started from; without it they are drawn again from the
    run's seed, or read from where its configuration says.

    Raises:
        UsageError: `run` has no trajectory (its method writes none).
        BundleError: the trajectory does not belong to the bundle or to the initial adapters.
        StorageError: the adapter cannot be written, since the run is read-only, say.
    """
    output_path(output)
    if output.resolve() == run.resolve():
        raise UsageError(f"{output} is the run itself: its adapters would be overwritten")
    if why := instead(run, Kind.RUN):
        raise UsageError(f"{run} is no run: {why}")
    if not (run / TRAJECTORY).exists():
        raise UsageError(
            f"{run} has no {TRAJECTORY}: its method logs no steps, so it cannot be replayed"
        )
    folder = RunFolder(run)
    folder.check(CONFIG)
    header, updates = read_log(run / TRAJECTORY)
    config = folder.config()
    opened = open_verified(bundle or config.bundle)
    of_weights = header.more.keys() >= {*FullWeights.log_fields}
    if of_weights:
        check_belongs(header, opened.manifest)
    else:
        opened = opened.with_lora(header.settings or opened.manifest.lora)
    use_device(choose_device(config.device, opened.manifest))
    best, saved = _best(folder, config, len(updates)), folder.saves.latest()
    saved_steps = None if saved is None else folder.saves.step_of(saved)
    reason, last = None, len(updates) if best is None else best
    if of_weights:
        own = None
        with folder.lock.held_to_read() as still:
            if saved is not None and saved_steps == last:
                folder.check_save(saved)
                own, reason = _own_weights(folder, config, opened, last, still)
            identical = write_trained(opened, header, updates[:last], output, own, progress)
    else:
        start = _initial(folder, config, header, opened.manifest, initial)
        # the log of a killed run is longer than its last save
        known = dict.fromkeys(steps for steps in (best, saved_steps) if steps is not None)
        identical = _compared(folder, header, updates, start, known, progress)
        _write(rebuild(header, updates[:last], start, progress), output)
    others = "" if saved is None else folder.saves.read(saved).other_arithmetic(arithmetic())
    return Replayed(
        other_arithmetic=others,
        steps=len(updates),
        skipped_steps=updates.count(None),
        log_bytes=(run / TRAJECTORY).stat().st_size,
        output=str(output),
        saved_steps=saved_steps,
        best_step=best,
        identical=identical,
        not_compared=reason,
    )


def _compared(
    folder: RunFolder,
    header: Header,
    updates: list[Update | None],
    start: Adapters,
    known: Iterable[int],
    progress: Progress,
) -> bool | None:
    """Whether the adapters after some steps are those that were saved; None where none were."""
    identical = None
    for steps in known:
        place = folder.saves.place(steps)
        folder.check_save(place)
        own = Adapters.load(start.manifest, place)
        same = own.digest() == rebuild(header, updates[:steps], start, progress).digest()
        identical = same and identical is not False
    return identical


def _write(adapters: Adapters, output: Path) -> None:
    adapters.check_finite()
    try:
        with storage_errors(output):
            output.mkdir(parents=True, exist_ok=True)
        adapters.save(output)
    except StorageError as problem:
        raise StorageError(f"{problem}; --output DIR writes elsewhere") from None


def _initial(
    folder: RunFolder, config: TrainConfig, header: Header, manifest: Manifest, given: Path | None
) -> Adapters:
    """The adapters that a run started from: given, written by the run, named by it, or drawn."""
    written = folder.path / INITIAL
    path = given or (written if written.exists() else config.adapter)
    if path is None:
        return Adapters.initial(manifest, header.seed)
    return Adapters.load(manifest, Path(path))


def _own_weights(
    folder: RunFolder, config: TrainConfig, bundle: Bundle, steps: int, still: bool
) -> tuple[FullWeights | None, str | None]:
    """The weights that a run holds after `steps` steps, or why they cannot be compared."""
    if not still:
        return None, "another process is training it"
    try:
        own = open_weights(config, bundle, folder.path, steps, writable=False)
    except BundleError as problem:
        return None, str(problem)
    if behind := own.behind(1):
        blocks = len(bundle.manifest.blocks)
        return None, f"{folder.path / SLOTS} lacks {behind} of {blocks} blocks, or they are damaged"
    return own, None


def _best(folder: RunFolder, config: TrainConfig, steps: int) -> int | None:
    """The step whose adapter a finished run has kept as its own, if it is not the last's."""
    if not (config.keep_best and (folder.path / SUMMARY).exists()):
        return None
    best = best_of(folder.evaluations(steps), steps)
    return None if best is None else best.step
