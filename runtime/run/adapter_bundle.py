"""The bundle that an adapter belongs to, as its run says."""

from __future__ import annotations

from pathlib import Path

from ondevice.config.base import load
from ondevice.config.train import TrainConfig
from ondevice.errors import UsageError
from ondevice.paths import text_path
from runtime.run.folder import RunFolder
from runtime.storage.saves import CONFIG, SAVES


def bundle_of(source: Path) -> str:
    """The path of the bundle from which the run in `source`, or of a save there, was trained.

    Raises:
        UsageError: there is no adapter, or no run that names a bundle.
        BundleError: the run's configuration is altered.
    """
    source = text_path(source)
    if not source.exists():
        raise UsageError(f"{source}: there is no such run, adapter folder or file")
    folder = source.absolute() if source.is_dir() else source.absolute().parent
    run = folder.parent.parent if folder.parent.name == SAVES else folder
    if not (run / CONFIG).exists():
        raise UsageError(
            f"{source} is not in a run, whose {CONFIG} would name the bundle of its model; give "
            "--bundle BUNDLE"
        )
    RunFolder(run).check(CONFIG)
    bundle = load(TrainConfig, run / CONFIG, {}).bundle
    if not Path(bundle).exists():
        raise UsageError(
            f"{bundle}, the bundle that {run} was trained from, is not there; if it was moved, "
            "give --bundle BUNDLE"
        )
    return bundle
