"""Starting and resuming a run: its folder, plan, data, adapters and method."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from runtime.bundle.store import Bundle, open_bundle
from runtime.config.base import to_toml
from runtime.config.removed import load_run
from runtime.config.shared import DataOptions, StepConfig, mix_of
from runtime.config.train import GENERAL, NO_DATA, PlanConfig, TrainConfig
from runtime.core.errors import BundleError, UsageError
from runtime.core.lookalikes import Kind, instead
from runtime.core.notes import Note, silent, warning
from runtime.core.units import format_bytes
from runtime.data.mixed import MixedRows
from runtime.data.rows import Rows
from runtime.data.run_rows import MIX, TOKENS, absolute, open_run_rows, with_length
from runtime.data.samples import Samples
from runtime.machine.backend import arithmetic
from runtime.machine.compute_dtype import choose
from runtime.machine.footprint import Meter
from runtime.machine.machine import Machine, read_machine
from runtime.methods.adapters import Adapters
from runtime.methods.protocol import Method, Start, started
from runtime.plan.plan import Plan, Planner
from runtime.run.budget import (
    make_plan,
    plan_of_first,
    reason_to_replan,
    training,
    training_machine,
)
from runtime.run.folder import (
    EVALUATIONS,
    OTHER_EVALUATIONS,
    PLAN,
    SPEEDS,
    STATE_OF_METHOD,
    RunFolder,
    WorkerFolder,
    read_json,
)
from runtime.run.learning_rate import learning_rate
from runtime.run.length import settled
from runtime.run.lora import to_resume, to_train
from runtime.run.results import Events, TrainResult
from runtime.run.session import Session, open_checked, open_session
from runtime.run.team import ADAPTER, WORKERS, Team, adapter_files, of_bundle, team_of, versions
from runtime.run.traced_graphs import with_graphs
from runtime.run.trackers import reporting
from runtime.run.trainer import ENDS, FURTHER, Progress, Trainer
from runtime.storage.checksums import CHECKSUMS
from runtime.storage.saves import CONFIG, STATE, State, another_run
from runtime.storage.scratch import MappedTensors

OF_A_WORKER = ("bundle", "output", "machine")  # options that may differ among the workers of a run
# options on which a step depends, besides `StepConfig`
OF_STEPS = ("data", "mix", "seed", "epsilon", "noise", "weight_decay")

if TYPE_CHECKING:
    from runtime.methods.full.weights import FullWeights


def plan_training(
    config: StepConfig, bundle: Bundle, machine: Machine | None = None, note: Note | None = None
) -> Plan:
    """The plan for this configuration of training, on a machine (default: this machine).

    `note` receives lines for people.

    Raises:
        BudgetError: nothing fits.
        UsageError: rows are longer than the bundle has graphs for, the machine cannot be read, or
            the LoRA settings do not fit the model or the adapter to start from.
    """
    return _plan(*to_train(config, bundle, note), machine, note=note or silent)


def _plan(
    config: StepConfig,
    bundle: Bundle,
    machine: Machine | None,
    workers: int = 1,
    note: Note = silent,
) -> Plan:
    """The plan for a configuration and a bundle with the same LoRA settings."""
    machine = machine or training_machine(config, bundle)
    if config.arithmetic != "auto" and config.arithmetic != machine.arithmetic:
        machine = msgspec.structs.replace(machine, arithmetic=config.arithmetic)
    if config.compute_dtype == "bfloat16" and machine.compute_dtype == "float32":  # not this one
        dtype = choose("bfloat16", machine.device, machine.packed, None)
        machine = msgspec.structs.replace(machine, compute_dtype=dtype.name)
    if config.compute_dtype == "auto":
        note(f"products in {machine.compute_dtype}: {machine.compute_reason}")
    return make_plan(bundle.manifest, machine, training(config, bundle.manifest, workers))


def show_plan(config: PlanConfig, note: Note) -> Plan:
    """The plan that `ondevice plan` shows: as `plan_training`, for a bundle yet to be opened."""
    import subprocess  # noqa: F401 - in another process `train` reads its rows

    machine = machine_of(config.machine)
    with Meter():  # as in `train`: the plan counts the memory of loaded libraries
        bundle = with_graphs(open_bundle(config.bundle), config.device, note)
        plan = plan_training(config, bundle, machine, note)
    if plan.warning:
        note(warning(plan.warning))
    return plan


def machine_of(path: str | None) -> Machine | None:
    """The machine that a file describes; None without one."""
    return None if path is None else read_machine(Path(path))


def train(config: TrainConfig, events: Events) -> TrainResult:
    """Start a run. Returns its summary.

    Raises:
        OnDeviceError: the run was refused, or failed; a refused run leaves no files behind.
    """
    same = {name: value for name, value in vars(config).items() if name not in OF_A_WORKER}
    with team_of(config.parallel, "train", same) as team:
        if team.rank:
            own = {"bundle": absolute(config.bundle), "machine": config.machine}
            return _join(Path(config.output), own, team)
        with Meter(budget_bytes=config.budget_bytes) as meter:
            bundle = open_checked(config.bundle, config.device, events.note, team.size)
            folder = RunFolder(Path(config.output))
            existed = folder.path.exists()
            with folder.created():
                try:
                    with reporting(config, folder.path, 0, events) as events:
                        return _begin(config, bundle, folder, events, meter, team)
                except BaseException as problem:
                    team.dismiss(problem)  # others may have files in the folder
                    folder.remove_scratch_of_workers()
                    # config.toml is the last file of a beginning
                    if folder.is_there and not (folder.path / CONFIG).exists():
                        remove_refused(folder, existed)
                    raise


def _begin(
    config: TrainConfig,
    bundle: Bundle,
    folder: RunFolder,
    events: Events,
    meter: Meter,
    team: Team,
) -> TrainResult:
    """Plan and train a run in its empty folder."""
    config, bundle = to_train(with_length(config, bundle, folder.path), bundle, events.note)
    chosen = None if config.pack else _first_plan(config, bundle, team, events)
    fixed = _with_absolute_paths(config, folder)
    rows = open_run_rows(fixed, bundle, folder.path)
    for report in rows.reports.values():
        events.note(report.describe(bundle.manifest.buckets, events.lengths))
    if isinstance(rows.train, MixedRows):
        events.note(rows.train.describe(mix_of(fixed.mix or "")[0]))
    samples = Samples.of(fixed, bundle.manifest, rows.train)
    if samples.packing_report is not None:
        events.note(samples.packing_report.describe())
    if chosen is None:  # packing takes memory, so a refusal before it would name too little
        chosen = _first_plan(config, bundle, team, events)
    fixed = settled(fixed, samples, events.note)
    fixed = replace(fixed, compute_dtype=chosen.compute_dtype)  # no longer "auto"
    if rows.valid is None and fixed.eval_every:
        raise UsageError(
            "--eval-every needs held-out data: give --eval-data or --valid-split, or a "
            "folder with a valid file as --data"
        )
    for name in folder.token_files:
        folder.checksums.record(name)
    team.share(_files(fixed, folder, chosen, None))
    bundle = team.joined(bundle)
    weights = _weights(fixed, bundle, chosen, folder, 0)
    session = open_session(bundle, chosen, weights)
    adapters, running = _first_state(fixed, session, folder, rows.train, team)
    _invite(fixed, folder, chosen, bundle, team, events)
    folder.write_json(PLAN, chosen)
    folder.write(CONFIG, to_toml(fixed).encode())
    if bundle.manifest.quality is not None and bundle.manifest.quality.is_hurt:
        events.note(warning(bundle.manifest.quality.warning()))
    for text in bundle.manifest.warnings:
        events.note(warning(text))
    _announce(chosen, events)
    return Trainer(
        fixed, folder, session, adapters, running, samples, rows, events, meter, team=team
    ).run()


def _first_plan(config: TrainConfig, bundle: Bundle, team: Team, events: Events) -> Plan:
    return _plan(config, bundle, _this_machine(config, bundle), team.size, events.note)


def _join(output: Path, own: Mapping[str, Any], team: Team) -> TrainResult:
    """Train as a worker other than rank 0, with its rows, plan and save; returns the same summary.

    `own` are settings that only this worker's machine knows.
    """
    with (
        team.receive(output.absolute() / WORKERS / str(team.rank)) as path,
        worker(path, own, team) as trainer,
    ):
        return trainer.run()


@contextmanager
def worker(path: Path, own: Mapping[str, Any], team: Team) -> Iterator[Trainer]:
    """The training of a worker that has received its files into a folder.

    `own` are settings that only this worker's machine knows.
    """
    folder = WorkerFolder(path)
    with folder.locked():
        folder.saves.folder.mkdir(exist_ok=True)
        config = load_run(path / CONFIG, {})
        config = replace(config, **_received(config, path), **own, output=str(path))
        save = folder.saves.latest()
        state = None if save is None else folder.check_save(save)
        progress = _progress(folder, state)
        with Meter(budget_bytes=config.budget_bytes) as meter:
            bundle = open_checked(config.bundle, config.device, workers=team.size)
            config, bundle = to_resume(config, bundle)
            bundle = team.joined(bundle)
            rows = open_run_rows(config, bundle, path)
            samples = Samples.of(config, bundle.manifest, rows.train)
            chosen = plan_of_first(
                msgspec.convert(read_json(path / PLAN), Plan),
                bundle.manifest,
                _this_machine(config, bundle),
                training(config, bundle.manifest, team.size),
            )
            weights = _weights(config, bundle, chosen, folder, progress.done)
            session = open_session(bundle, chosen, weights)
            adapters, running = _state(config, session, folder, rows.train, state, team)
            yield Trainer(
                *(config, folder, session, adapters, running, samples, rows),
                *(Events(), meter, progress, team),
            )


def _invite(
    config: TrainConfig, folder: RunFolder, chosen: Plan, bundle: Bundle, team: Team, events: Events
) -> None:
    """Let devices join the run through the team's folder, if it has one.

    What they get says how steps are computed, and no more, so it is the same when a run goes on.
    """
    fleet = team.workers.fleet
    if fleet is None:
        return
    names = {setting.name for options in (StepConfig, DataOptions) for setting in fields(options)}
    settings = {name: getattr(config, name) for name in (*names, *OF_STEPS)}
    settings |= {"bundle": "bundle", "adapter": ADAPTER if config.adapter else None}
    plain = TrainConfig(**settings, also_evaluate=(NO_DATA,))
    least = {"limit_bytes": None, "minimum_bytes": chosen.predicted_peak_bytes}
    files: dict[str, Path | bytes] = {
        CONFIG: to_toml(plain).encode(),
        PLAN: msgspec.json.encode(msgspec.structs.replace(chosen, **least)),
        **adapter_files(config.adapter),
        **{name: folder.path / name for name in (TOKENS[0], MIX) if (folder.path / name).exists()},
    }
    log = folder.trajectory.path.read_text().splitlines(keepends=True)
    fleet.begin({**versions(), **of_bundle(bundle)}, files, log, events.note)
    events.note(f"others join by ondevice train BUNDLE --parallel join={fleet.path}")


def _files(
    config: TrainConfig, folder: RunFolder, chosen: Plan, state: State | None
) -> dict[str, Path | bytes]:
    """What `_join` needs, by name: of a run's folder, and of the adapter to start from."""
    files: dict[str, Path | bytes] = {
        CONFIG: to_toml(config).encode(),
        PLAN: msgspec.json.encode(chosen),
    }
    names = [*folder.token_files, CHECKSUMS, OTHER_EVALUATIONS, SPEEDS]
    if state is not None:
        save = folder.saves.place(state.step).relative_to(folder.path)
        names += [EVALUATIONS, *state.logs, *(str(save / name) for name in (*state.files, STATE))]
    else:
        files |= adapter_files(config.adapter)
    return files | {name: folder.path / name for name in names}


def _received(config: TrainConfig, path: Path) -> dict[str, Any]:
    """The settings of a run whose data and first adapter were received into a folder."""
    train, valid = (path / name for name in TOKENS)
    settings: dict[str, Any] = {"valid_split": None}
    if train.exists():
        settings["data"] = str(train)
    if valid.exists():
        settings["eval_data"] = str(valid)
    if config.adapter is not None:
        settings["adapter"] = str(path / ADAPTER)
    return settings


def resume(path: Path, events: Events, wanted: dict[str, Any]) -> TrainResult:
    """Continue the run in `path` from its last save, with its plan.

    `wanted` are new values of CHANGEABLE settings; a bundle among them is the new place of the
    run's. A new plan is made under another budget, or if the plan no longer fits. Tile sizes may
    then differ, which changes the last bits of results.
    With another number of steps in all, the learning rate goes on as the schedule over that many
    steps says. More patience lets a run go on that its patience has ended.

    Raises:
        OnDeviceError: the run cannot go on; its saves stay as they are.
    """
    same = {name: value for name, value in wanted.items() if name not in OF_A_WORKER}
    with team_of(wanted.get("parallel"), f"train --resume {path}", same) as team:
        if team.rank:
            moved = {"bundle": absolute(wanted["bundle"])} if "bundle" in wanted else {}
            own = {"machine": None, **moved}
            return _join(path, own, team)
        try:
            return _resume(path, events, wanted, team)
        except BaseException as problem:
            team.dismiss(problem)
            RunFolder(path).remove_scratch_of_workers()
            raise


def _resume(path: Path, events: Events, wanted: dict[str, Any], team: Team) -> TrainResult:
    """See `resume`; on rank 0."""
    folder = RunFolder(path)
    if not (path / CONFIG).exists():
        why = instead(path, Kind.RUN) or (
            f"it has no {CONFIG}, which is there from the first step on; start the training with "
            f"--output {path}"
        )
        raise UsageError(f"{path} holds no run to resume: {why}")
    with folder.locked():
        folder.prepare_to_resume()
        for name in (CONFIG, PLAN):
            folder.check(name)
        before = load_run(path / CONFIG, {}, events.note)
        if "epochs" in wanted:
            wanted = {"steps": None, **wanted}  # the run's own, which they replace
        if "bundle" in wanted:
            wanted = {**wanted, "bundle": absolute(wanted["bundle"])}
        config = replace(load_run(path / CONFIG, wanted), output=str(path), parallel=None)
        save = folder.saves.latest()
        state = None if save is None else folder.check_save(save)
        progress = _progress(folder, state)
        with (
            Meter(budget_bytes=config.budget_bytes) as meter,
            reporting(config, path, progress.done, events) as events,
        ):
            return _continue(before, config, folder, state, progress, events, meter, team)


def _continue(
    before: TrainConfig,
    config: TrainConfig,
    folder: RunFolder,
    state: State | None,
    progress: Progress,
    events: Events,
    meter: Meter,
    team: Team,
) -> TrainResult:
    """Go on after a save, or from the start without one; `before` is its configuration so far."""
    bundle = open_checked(config.bundle, config.device, events.note, team.size)
    config, bundle = to_resume(config, bundle)
    chosen = _plan_again(config, bundle, folder, events, team.size)
    _announce(chosen, events)
    if state is not None and (others := state.other_arithmetic(arithmetic())):
        events.note(warning(f"the last bits may differ from those of an unbroken run: {others}"))
    rows = open_run_rows(config, bundle, folder.path)
    folder.check_tokens()
    samples = Samples.of(config, bundle.manifest, rows.train)
    config = settled(config, samples, silent if config.steps == before.steps else events.note)
    _check_steps(config, folder, progress.done)
    team.share(_files(config, folder, chosen, state))
    bundle = team.joined(bundle)
    weights = _weights(config, bundle, chosen, folder, progress.done)
    if weights is not None and (behind := weights.behind(1)):
        events.note(
            f"the weights of {behind} of {len(bundle.manifest.blocks)} blocks are damaged or gone: "
            f"the first step rebuilds them from the bundle and the log of {progress.done} steps"
        )
    if state is None and _has_lines(folder.metrics.path):
        events.note(f"{folder.path} has no save: it is trained from its beginning")
    session = open_session(bundle, chosen, weights)
    adapters, running = _state(config, session, folder, rows.train, state, team)
    _invite(config, folder, chosen, bundle, team, events)
    trainer = Trainer(
        *(config, folder, session, adapters, running, samples, rows),
        *(events, meter, progress, team),
    )
    if trainer.ended:
        _say_ended(trainer, before, events)
    folder.write_json(PLAN, chosen)
    folder.write(CONFIG, to_toml(config).encode())
    if not trainer.ended:
        events.note(f"resuming after step {progress.done} of {config.steps}")
        _say_rates(before, config, progress.done, events)
    return trainer.run()


def _state(
    config: TrainConfig,
    session: Session,
    folder: RunFolder,
    rows: Rows,
    state: State | None,
    team: Team,
) -> tuple[Adapters, Method]:
    """The adapters and the method of a save, or before the first step without one."""
    if state is None:
        return _first_state(config, session, folder, rows, team)
    return _saved_state(config, session, folder, rows, state, team)


def _first_state(
    config: TrainConfig, session: Session, folder: RunFolder, rows: Rows, team: Team
) -> tuple[Adapters, Method]:
    """The adapters and the method before the first step; begins the logs."""
    adapters = _first_adapters(config, session, folder)
    running = _method(config, session, adapters, folder, rows, team)
    folder.start_logs(running.log_header() if running.keeps_log else None)
    team.compare("the first adapters", adapters.digest())
    return adapters, running


def _saved_state(
    config: TrainConfig,
    session: Session,
    folder: RunFolder,
    rows: Rows,
    state: State,
    team: Team,
) -> tuple[Adapters, Method]:
    """The adapters and the method of a save; goes on with its logs."""
    save, manifest = folder.saves.place(state.step), session.bundle.manifest
    if config.trains_all:
        adapters = _first_adapters(config, session, folder)
    else:
        adapters = Adapters.load(manifest, save, _scratch_tensors(session, folder))
        adapters = adapters.in_dtype(config.adapter_dtype)
    running = _method(config, session, adapters, folder, rows, team, fresh=False)
    running.read(save / STATE_OF_METHOD)
    folder.go_on_with_logs(state, running.keeps_log)
    folder.publish(state.step)  # a kill may have come between the save and this copy of it
    team.compare("the saved adapters", adapters.digest())
    return adapters, running


def _say_ended(trainer: Trainer, before: TrainConfig, events: Events) -> None:
    """Note that the run is over.

    Raises:
        UsageError: more steps are asked for, which would change nothing.
    """
    path = trainer.folder.path
    finished = f"this run is finished, after step {trainer.done}: {ENDS[trainer.ended]}"
    further = FURTHER.get(trainer.ended)
    ways = f"give --resume {path} {further}, or " if further else ""
    said = f"{finished}; to train further, {ways}{another_run(path)}"
    if trainer.config.all_steps > before.all_steps:
        raise UsageError(said)
    events.note(said)


def _say_rates(before: TrainConfig, config: TrainConfig, done: int, events: Events) -> None:
    """Note that the next step's learning rate is no longer that of the configuration before."""
    rate_before, rate = (
        learning_rate(
            options.highest_rate,
            options.lr_schedule,
            options.warmup_steps,
            options.all_steps,
            min(done, options.all_steps),
        )
        for options in (before, config)
    )
    if rate_before != rate:
        events.note(
            f"the learning-rate schedule is now over {config.steps} steps: the next step's "
            f"rate is {rate:.3g}, over {before.steps} steps it would be {rate_before:.3g}"
        )


def _check_steps(config: TrainConfig, folder: RunFolder, done: int) -> None:
    """Refuse fewer steps than are done.

    Raises:
        UsageError: the save has more.
    """
    if config.all_steps < done:
        raise UsageError(
            f"--steps {config.steps} < {done}, the steps that {folder.path} has done; give more"
        )


def _this_machine(config: TrainConfig, bundle: Bundle) -> Machine:
    """This machine and process, with the heap values of `--machine FILE` if it is given."""
    machine = training_machine(config, bundle)
    if config.machine is None:
        return machine
    return msgspec.structs.replace(machine, heap=read_machine(Path(config.machine)).heap)


def _with_absolute_paths(config: TrainConfig, folder: RunFolder) -> TrainConfig:
    """The configuration with absolute paths, valid from any working directory."""
    return replace(
        config,
        bundle=str(Path(config.bundle).resolve()),
        data=absolute(config.data),
        output=str(folder.path.resolve()),
        eval_data=None if config.eval_data is None else absolute(config.eval_data),
        also_evaluate=tuple(
            name if name in (GENERAL, NO_DATA) else absolute(name) for name in config.also_evaluate
        ),
        mix=None if config.mix is None else _absolute_mix(config.mix),
        adapter=None if config.adapter is None else absolute(config.adapter),
        machine=None if config.machine is None else absolute(config.machine),
        parallel=None,  # of the processes at hand, not of the run
    )


def _absolute_mix(mix: str) -> str:
    data, share = mix_of(mix)
    return f"{absolute(data)}:{share}"


def _plan_again(
    config: TrainConfig, bundle: Bundle, folder: RunFolder, events: Events, workers: int
) -> Plan:
    """The plan that the run was started with, or a new one where it cannot be executed again."""
    path = folder.path / PLAN
    try:
        stored = msgspec.convert(read_json(path), Plan)
    except (msgspec.ValidationError, UnicodeError) as problem:
        raise BundleError(
            f"{path} is damaged: {problem}; if another version of ondevice wrote it, go on with "
            f"that one, or {another_run(folder.path)}"
        ) from None
    manifest = bundle.manifest
    machine = _this_machine(config, bundle)
    wanted = training(config, manifest, workers)
    made = Planner(manifest, machine).again(stored, wanted.request, wanted.demand)
    reason = reason_to_replan(stored, made, manifest, machine, wanted)
    if not reason:
        _say_facts(stored, made, events)
        return made
    chosen = make_plan(manifest, machine, wanted)
    differs = chosen.sizes != stored.sizes or chosen.bucket != stored.bucket
    last_bits = "; other tile sizes may change its last bits" if differs else ""
    events.note(f"the run is planned anew: {reason}{last_bits}")
    return chosen


def _say_facts(before: Plan, now: Plan, events: Events) -> None:
    """Note what is no longer as it was when a plan was made, though the plan stays."""
    if before.limit_bytes != now.limit_bytes:
        limits = [
            "none" if limit is None else format_bytes(limit)
            for limit in (now.limit_bytes, before.limit_bytes)
        ]
        events.note(f"the memory limit of this process is {limits[0]}, no longer {limits[1]}")
    if before.minimum_bytes != now.minimum_bytes:
        events.note(
            f"the smallest budget that fits is {format_bytes(now.minimum_bytes, up=True)} here, "
            f"not {format_bytes(before.minimum_bytes, up=True)}"
        )


def _announce(chosen: Plan, events: Events) -> None:
    if chosen.warning:
        events.note(warning(chosen.warning))
    events.plan(chosen)


def _scratch_tensors(session: Session, folder: RunFolder) -> MappedTensors:
    return MappedTensors(folder.path, "adapters", Adapters.shapes(session.bundle.manifest))


def _first_adapters(config: TrainConfig, session: Session, folder: RunFolder) -> Adapters:
    """The first adapters of a training: those in a file or run, or new ones."""
    manifest, tensors = session.bundle.manifest, _scratch_tensors(session, folder)
    if config.adapter is None:
        adapters = Adapters.initial(manifest, config.seed, tensors)
        if config.trains_prefix:
            from runtime.methods.first_prefix import fill_prefix  # other runs need it not

            fill_prefix(session.model, adapters, config.seed, session.plan.bucket)
            folder.write_initial(adapters)
    else:
        adapters = Adapters.load(manifest, Path(config.adapter), tensors)
    return adapters.in_dtype(config.adapter_dtype)


def _method(
    config: TrainConfig,
    session: Session,
    adapters: Adapters,
    folder: RunFolder,
    rows: Rows,
    team: Team,
    fresh: bool = True,
) -> Method:
    manifest = session.bundle.manifest
    begin = Start(
        session.model,
        session.plan,
        adapters,
        folder.path,
        len(manifest.blocks),
        manifest.hidden_size,
        session.weights,
        rows,
        fresh,
        folder.write_initial,
        team.workers,
    )
    return started(config, begin)


def _weights(
    config: TrainConfig, bundle: Bundle, chosen: Plan, folder: RunFolder, done: int
) -> FullWeights | None:
    """The weights that the run trains after `done` steps; None if it trains adapters."""
    if not config.trains_all:
        return None
    from runtime.methods.full.run_weights import open_weights  # other runs need not load it

    return open_weights(config, bundle, folder.path, done, prefetch=chosen.prefetch)


def _progress(folder: RunFolder, state: State | None) -> Progress:
    """How far the run has come: seconds, and the evaluations that no lost step came before."""
    if state is None:
        return Progress(evaluations=folder.evaluations(0), others=folder.other_evaluations())
    evaluations = folder.evaluations(state.step, state.evaluated)
    others = folder.other_evaluations()
    return Progress(state.step, folder.check_logs(state), evaluations, others)


def _has_lines(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def remove_refused(folder: RunFolder, existed: bool) -> None:
    """Remove the files of a run that never started, and nothing else."""
    if not existed:
        shutil.rmtree(folder.path)
        return
    for path in folder.path.iterdir():  # it was empty before
        shutil.rmtree(path) if path.is_dir() else path.unlink()
