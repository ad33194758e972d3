"""The bundle that an adapter belongs to, as its run says."""

from __future__ import annotations

from pathlib import Path

from runtime.config.removed import load_run
from runtime.core.errors import UsageError
from runtime.methods.adapter_files import AdapterFiles
from runtime.run.folder import RunFolder
from runtime.storage.saves import CONFIG, SAVES


def bundle_of(source: Path) -> str:
    """The path of the bundle from which the run in `source`, or of a save there, was trained.

    Raises:
        UsageError: there is no run that names a bundle, or it holds no adapter.
        BundleError: there is no adapter, or the run is altered.
    """
    source = AdapterFiles.at(source).weights
    folder = source.absolute().parent
    run = folder.parent.parent if folder.parent.name == SAVES else folder
    if not (run / CONFIG).exists():
        raise UsageError(
            f"{source} is in no run, whose {CONFIG} would name the bundle of its model; give "
            "--bundle BUNDLE"
        )
    RunFolder(run).check(CONFIG)
    bundle = load_run(run / CONFIG, {}).bundle
    if not Path(bundle).exists():
        raise UsageError(
            f"{bundle}, the bundle that {run} was trained from, is not there; if it was moved, "
            "give --bundle BUNDLE"
        )
    return bundle
