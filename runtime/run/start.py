"""Starting a run, and going on with one: its folder, plan, data, adapters and method."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from ondevice.bundle.store import Bundle
from ondevice.config.base import load, to_toml
from ondevice.config.train import TrainConfig
from ondevice.errors import UsageError
from ondevice.files import write_atomic
from runtime.data.rows import Rows
from runtime.data.run_rows import absolute, open_run_rows
from runtime.methods.adapters import Adapters
from runtime.methods.trajectory import Header, digest, start_log, truncate_log
from runtime.planner.plan import Plan
from runtime.run.beginning import initial_adapters, method_of
from runtime.run.evaluate import Events
from runtime.run.folder import CONFIG, PLAN, STATE_OF_METHOD, RunFolder, read_json
from runtime.run.open import open_checked, open_session, plan_of
from runtime.run.trainer import Training
from runtime.storage.scratch import MappedTensors
from runtime.system.footprint import Meter
from runtime.system.heap import trim_heap


def train(config: TrainConfig, events: Events) -> dict[str, Any]:
    """Start a run. Returns its summary.

    Raises:
        OnDeviceError: of the kind that says what is wrong; a refused run leaves nothing behind.
    """
    with _meter(config) as meter:
        bundle = open_checked(config.bundle)
        plan = plan_of(config, bundle)
        meter.aim(plan.predicted_peak_bytes)
        folder = RunFolder(Path(config.output))
        existed = folder.path.exists()
        with folder.created():
            try:
                fixed = replace(
                    config,
                    bundle=str(Path(config.bundle).resolve()),
                    data=absolute(config.data),
                    output=str(folder.path.resolve()),
                    eval_data=None if config.eval_data is None else absolute(config.eval_data),
                    adapter=None if config.adapter is None else absolute(config.adapter),
                )
                rows, eval_rows = open_run_rows(fixed, bundle, folder.path)
                if eval_rows is None and fixed.eval_every:
                    raise UsageError(
                        "--eval-every needs held-out data: give --eval-data, or a folder with a "
                        "valid file as --data"
                    )
                training = _assemble(
                    fixed, bundle, plan, folder, rows, eval_rows, None, events, meter
                )
                if fixed.method == "mezo":
                    start_log(folder.trajectory, _header(fixed, training.adapters))
                folder.write_json(PLAN, plan.to_json())
                write_atomic(folder.path / CONFIG, to_toml(fixed).encode())
            except BaseException:
                _remove_refused(folder, existed)
                raise
            events.plan(plan)
            return training.run()


def resume(path: Path, events: Events, budget: str | None = None) -> dict[str, Any]:
    """Go on with the run in `path` from its last save, under another budget where one is given.

    Another budget may choose other tile sizes, which change results in the last bits.
    """
    folder = RunFolder(path)
    if not (path / CONFIG).exists():
        raise UsageError(f"{path} holds no run to resume: it has no {CONFIG}")
    given = {} if budget is None else {"budget": budget}
    config = replace(load(TrainConfig, path / CONFIG, given), output=str(path))
    with folder.locked(), _meter(config) as meter:
        bundle = open_checked(config.bundle)
        plan = plan_of(config, bundle)
        events.plan(plan)
        meter.aim(plan.predicted_peak_bytes)
        rows, eval_rows = open_run_rows(config, bundle, folder.path)
        save = folder.latest()
        training = _assemble(config, bundle, plan, folder, rows, eval_rows, save, events, meter)
        if save is not None:  # a kill may have come between the save and this copy of it
            training.adapters.save(path)
        if json.dumps(plan.to_json()) != json.dumps(read_json(path / PLAN)):
            events.note("the run is planned otherwise than before; its last bits may differ")
        folder.write_json(PLAN, plan.to_json())
        write_atomic(path / CONFIG, to_toml(config).encode())
        training.seconds = sum(entry["seconds"] for entry in folder.truncate_metrics(training.done))
        if config.method == "mezo":
            truncate_log(folder.trajectory, training.done)
        done = path / "evaluations.json"
        if done.exists():
            known = read_json(done)
            training.evaluations = {  # not those of steps that were lost with the process
                when: facts
                for when, facts in known.items()
                if when == "before" or (when.isdecimal() and int(when) <= training.done)
            }
            if training.ended and "after" in known:
                training.evaluations["after"] = known["after"]
        if training.ended:
            events.note(
                f"this run is finished, after step {training.done}; to train further, start "
                f"another with --adapter {path}"
            )
        else:
            events.note(f"resuming after step {training.done} of {config.steps}")
        return training.run()


def _assemble(
    config: TrainConfig,
    bundle: Bundle,
    plan: Plan,
    folder: RunFolder,
    rows: Rows,
    eval_rows: Rows | None,
    save: Path | None,
    events: Events,
    meter: Meter,
) -> Training:
    session = open_session(bundle, plan)
    manifest = bundle.manifest
    tensors = MappedTensors(folder.path, "adapters", Adapters.shapes(manifest))
    if save is not None:
        step, adapters = folder.restore(manifest, save, tensors)
    else:
        step, adapters = 0, initial_adapters(manifest, config.seed, config.adapter, tensors)
    adapters = adapters.lent_as(config.adapter_dtype)
    method = method_of(config, session, adapters, folder.path)
    if save is not None:
        method.read(save / STATE_OF_METHOD)
    return Training(
        config,
        folder,
        session,
        adapters,
        method,
        rows,
        eval_rows,
        events,
        meter,
        done=step,
        first=step,
    )


def _meter(config: TrainConfig) -> Meter:
    return Meter(
        budget_bytes=config.budget_bytes, relieve=trim_heap if config.heap_relief else None
    )


def _header(config: TrainConfig, adapters: Adapters) -> Header:
    weights = adapters.manifest.weights_sha256
    return Header(config.seed, config.noise, config.weight_decay, weights, digest(adapters))


def _remove_refused(folder: RunFolder, existed: bool) -> None:
    """Take back what a run that never started has written, and nothing else."""
    if not existed:
        shutil.rmtree(folder.path)
        return
    for path in folder.path.iterdir():  # it was empty before
        shutil.rmtree(path) if path.is_dir() else path.unlink()
