"""Handles the commands that make a model: export, inspect and slice."""

from __future__ import annotations

from pathlib import Path

from export.config.export import ExportConfig, SliceConfig
from ondevice.cli.handlers.common import print_json, set_up, show
from ondevice.cli.progress import task_bar
from ondevice.cli.screen import note, out
from runtime.config.inspect import InspectConfig
from runtime.core.units import format_bytes


def run_export(config: ExportConfig, as_json: bool) -> None:
    """Convert a checkpoint, and tell the cost."""
    set_up(keep_heap=False)
    from ondevice.api.bundles import export

    with task_bar() as progress:
        done = export(config, progress, note)
    text = (
        f"{done.bundle}: {format_bytes(done.weights_bytes)} of weights "
        f"({done.bits_per_weight:.2f} bits each), {done.graphs} graphs, "
        f"peak footprint {format_bytes(done.peak_footprint_bytes)}"
    )
    quality = "" if done.quality is None else f"\n{done.quality.describe()}"
    show(done, text + quality, as_json)


def run_inspect(config: InspectConfig, as_json: bool) -> None:
    """Show a bundle."""
    from ondevice.cli.describe import describe_bundle, describe_matrices, facts_of
    from runtime.bundle.store import open_bundle

    bundle = open_bundle(config.bundle)
    if config.verify:
        bundle.verify()
    if as_json:
        print_json({**facts_of(bundle), "verified": config.verify}, indent=1)
        return
    out(describe_bundle(bundle))
    out(describe_matrices(bundle), is_data=True)  # names can be long
    if config.verify:
        out("every file agrees with its checksum")


def run_slice(config: SliceConfig, as_json: bool) -> None:
    """Cut a bundle into parts for several machines."""
    from runtime.bundle.store import open_bundle, write_slices

    output = Path(config.output)
    slices = write_slices(open_bundle(config.bundle), config.count, output, config.force)
    sizes = {each.path: each.manifest.held_nbytes for each in slices}
    text = "\n".join(f"{path}: {format_bytes(size)} of weights" for path, size in sizes.items())
    facts = [{"bundle": path, "bytes": size} for path, size in sizes.items()]
    show(facts, text, as_json)
