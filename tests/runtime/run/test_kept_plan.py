"""A run keeps its plan: it is executed again as it is stored, or planned anew, and that is said."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import msgspec
import pytest
from safetensors.numpy import load_file
from support.bundles import Tiny
from support.plans import COMPILED, LINUX, plan_of, task_of
from support.runs import adapter, on_machine, replaced

from runtime.arrays.attention_scratch import scratch_values
from runtime.config.base import load
from runtime.config.train import TrainConfig
from runtime.core.errors import BudgetError, BundleError, UsageError
from runtime.core.version import __version__
from runtime.machine.backend import PANEL_BYTES, ROW_BYTES, arithmetic
from runtime.machine.machine import Blas, Heap
from runtime.operations.values import F32
from runtime.plan.block_peaks import BlockPeak
from runtime.plan.plan import FACTS, Plan, deciding_differences
from runtime.plan.planner import Planner
from runtime.plan.size_levels import LEVELS
from runtime.run import budget, resume, start
from runtime.run.folder import VERSION, RunFolder, plan_bytes
from runtime.run.lora import to_resume
from runtime.run.results import Evaluation, Events, Step
from runtime.run.session import open_checked
from runtime.run.team import Speeds
from runtime.storage import saves
from runtime.storage.logs import Prefix

BUDGET = 41_000_000
STEPS, STOPPED_AFTER = 4, 3


class StoppedError(Exception):
    """What ends a run in the middle."""


def on(monkeypatch: pytest.MonkeyPatch, **facts: object) -> None:
    """Let this machine be the written down one, with other facts."""
    on_machine(monkeypatch, msgspec.structs.replace(LINUX, **facts))


def stopping(step: Step, total: int) -> None:
    if step.number == STOPPED_AFTER + 1:  # the step before it is the last that was saved
        raise StoppedError


@pytest.fixture(scope="module")
def runs(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run that was never stopped, and the same, stopped after a few steps."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        on(patch)
        for name, events in (("whole", Events()), ("stopped", Events(step=stopping))):
            config = TrainConfig(
                bundle=str(tiny("gemma3").path), data="random:5", output=str(folder / name),
                max_seq_length=64, batch_size=2, budget="41MB", steps=STEPS, save_every=1,
                learning_rate=1e-2,
            )  # fmt: skip
            if name == "whole":
                start.train(config, events)
            else:
                with pytest.raises(StoppedError):
                    start.train(config, events)
    assert (folder / "stopped" / "saves" / f"step-{STOPPED_AFTER:08d}").exists()
    return folder / "whole", folder / "stopped"


@pytest.fixture
def stopped(runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the stopped run, on the machine that planned it."""
    on(monkeypatch)
    return Path(shutil.copytree(runs[1], tmp_path / "stopped"))


@pytest.fixture
def whole(runs: tuple[Path, Path]) -> Path:
    return runs[0]


def plan_in(run: Path) -> Plan:
    return RunFolder(run).plan()


def resumed(run: Path, given: str | None = None) -> tuple[Plan, str]:
    """The plan that is executed, and what is said."""
    plans: list[Plan] = []
    notes: list[str] = []
    resume.resume(
        run, Events(plan=plans.append, note=notes.append), {"budget": given} if given else {}
    )
    (plan,) = plans
    assert plan == plan_in(run)
    return plan, "\n".join(notes)


def test_plan_json_is_the_plan(runs: tuple[Path, Path]) -> None:
    whole, stopped = map(plan_in, runs)
    assert whole == stopped
    assert whole.budget_bytes == BUDGET and whole.predicted_peak_bytes <= BUDGET
    assert whole.kept_layers and whole.materialized_layers  # what a larger process costs it


@pytest.mark.parametrize(
    ("more", "budget"),  # the last is the same budget in other words
    [(-2_000_000, None), (0, None), (500_000, None), (0, "41000kB")],
)
def test_a_process_of_another_size_that_still_fits_executes_the_stored_plan(
    whole: Path, stopped: Path, monkeypatch: pytest.MonkeyPatch, more: int, budget: str | None
) -> None:
    before = plan_in(stopped)
    assert before.predicted_peak_bytes + more <= BUDGET
    on(monkeypatch, process_bytes=LINUX.process_bytes + more)
    plan, said = resumed(stopped, budget)
    assert plan == before
    assert "planned anew" not in said and f"resuming after step {STOPPED_AFTER}" in said
    assert adapter(stopped) == adapter(whole)


def test_another_arithmetic_than_that_of_the_save_is_said(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = arithmetic()
    monkeypatch.setattr(resume, "arithmetic", lambda: {**here, "the BLAS": "another"})
    _, said = resumed(stopped)
    assert f"unbroken run: the BLAS is another, not {here['the BLAS']}" in said


def test_a_run_is_not_resumed_beyond_the_systems_limit(
    whole: Path, stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, limit_bytes=BUDGET - 1)
    with pytest.raises(BudgetError, match="the memory limit under which this process runs"):
        resumed(stopped)
    on(monkeypatch, limit_bytes=BUDGET + 1_000_000)
    plan, said = resumed(stopped)
    assert plan.limit_bytes == BUDGET + 1_000_000
    assert "planned anew" not in said and "leaves 1 MB beside the budget of 41 MB" in said
    assert adapter(stopped) == adapter(whole)


def test_the_plan_of_the_run_decides_and_not_the_machine(
    tiny: Tiny, whole: Path, stopped: Path
) -> None:
    """What another machine would choose by itself has other sizes."""
    before = plan_in(stopped)
    planner, task = Planner(tiny("gemma3").manifest, LINUX), task_of(64, rows=2)
    stored = planner.predict(task, LEVELS[-1], BUDGET, before.minimum_bytes)
    assert stored.tile_values != before.tile_values and not stored.kept_layers
    replaced(stopped, "plan.json", plan_bytes(stored).decode())
    plan, said = resumed(stopped)
    assert plan == stored and "planned anew" not in said
    for name, value in load_file(whole / "adapters.safetensors").items():
        assert load_file(stopped / "adapters.safetensors")[name] == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize("name", ["attention_block", "kept_products", "kept_layers"])
def test_a_new_plan_that_rounds_otherwise_says_so(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """An MLP in slices rounds otherwise than a whole one; what else is kept changes no bit."""
    before = plan_in(stopped)
    assert before.kept_products
    least = {"kept_layers": before.kept_layers, name: getattr(before, name) - 1}
    other = msgspec.structs.replace(before, **{"kept_products": 0, "kept_mlps": 0, **least})
    monkeypatch.setattr(Planner, "plan", lambda *wanted: other)
    stored = msgspec.structs.replace(other, **{name: getattr(before, name)})
    replaced(stopped, "plan.json", plan_bytes(stored).decode())
    _, said = resumed(stopped, "41MB")
    assert "planned anew" in said and ("last bits" in said) == (name != "kept_layers")


def test_another_budget_is_planned_anew_and_said(stopped: Path) -> None:
    before = plan_in(stopped)
    plan, said = resumed(stopped, "39MB")
    assert "the run is planned anew: the budget is 39 MB, no longer 41 MB" in said
    assert plan.budget_bytes == 39_000_000 and plan != before
    assert 'budget = "39MB"' in (stopped / "config.toml").read_text()
    after, said = resumed(stopped)  # the run has that budget now
    assert after == plan and "planned anew" not in said


def test_a_process_that_has_outgrown_the_plan_is_planned_anew_and_said(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = plan_in(stopped)
    room = BUDGET - before.predicted_peak_bytes
    on(monkeypatch, process_bytes=LINUX.process_bytes + room + 100_000)
    plan, said = resumed(stopped)
    assert "the run is planned anew: it would take 41.1 MB of a budget of 41 MB" in said
    assert "in this process" in said
    assert plan.process_bytes > before.process_bytes
    assert plan.predicted_peak_bytes <= BUDGET
    cheaper = plan.materialized_bytes + plan.kept_bytes
    assert cheaper < before.materialized_bytes + before.kept_bytes


def test_a_process_that_no_plan_fits_is_refused_and_the_run_stays(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    on(monkeypatch, process_bytes=BUDGET)
    with pytest.raises(BudgetError, match="the smallest that fits is"):
        resume.resume(stopped, Events(), {})
    assert {path: path.read_bytes() for path in files} == files


CHANGED: dict[str, object] = {
    "limit_bytes": 50_000_000,
    "arithmetic": "packed",
    "compute_dtype": "bfloat16",
    "blocks": lambda blocks: (*blocks[1:], blocks[0]),
    "minimum_bytes": 1,
    "evaluation": "block",
}  # other numbers grow by one, and switches are turned


def changed(plan: Plan, name: str) -> Plan:
    """The plan with another value of one field."""
    value, other = getattr(plan, name), CHANGED.get(name)
    if callable(other):
        other = other(value)
    elif other is None:
        other = not value if isinstance(value, bool) else value + 1
    return msgspec.structs.replace(plan, **{name: other})


def plan_again(run: Path, stored: Plan) -> tuple[Plan, list[str]]:
    """The plan with which a run goes on that has stored this one, and what is said."""
    replaced(run, "plan.json", plan_bytes(stored).decode())
    config = load(TrainConfig, run / "config.toml", {})
    config, bundle = to_resume(config, open_checked(config.bundle))
    said: list[str] = []
    plan = resume._plan_again(config, bundle, RunFolder(run), Events(note=said.append), workers=1)
    return plan, said


def test_no_field_of_a_plan_changes_in_silence(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is changed, and the checksum with it: the plan is what follows from its choices."""
    before = plan_in(stopped)
    monkeypatch.setattr(Planner, "plan", lambda *wanted: before)
    for name in Plan.__struct_fields__:
        plan, said = plan_again(stopped, changed(before, name))
        assert not deciding_differences(plan, before), (name, said)
        assert len(said) == 1 + (name == "threads"), (name, said)  # they change what is smallest
        assert ("planned anew" in said[0]) != (name in FACTS), (name, said)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("context", 64, "planned anew: its plan has context 64, where 0 follows from the rest"),
        ("chunk_rows", 100, "planned anew: its plan has chunk_rows 100, where "),
        ("tile_values", 12345, "planned anew: its plan has "),
    ],
)
def test_a_run_whose_plan_was_changed_goes_on_to_the_same_bits(
    whole: Path, stopped: Path, name: str, value: int, told: str
) -> None:
    other = msgspec.structs.replace(plan_in(stopped), **{name: value})
    replaced(stopped, "plan.json", plan_bytes(other).decode())
    _, said = resumed(stopped)
    assert told in said
    assert adapter(stopped) == adapter(whole)


def test_another_arithmetic_is_planned_anew_and_said(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, arithmetic="packed")
    plan, said = resumed(stopped)
    assert plan.arithmetic == "packed"
    assert "planned anew: the bundle or the arithmetic has changed" in said


def test_how_the_heap_behaves_comes_from_a_file_and_the_process_does_not(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch)
    path = tmp_path / "machine.json"
    elsewhere = msgspec.structs.replace(LINUX, process_bytes=1, heap=Heap(flat_bytes=54_321))
    path.write_bytes(msgspec.json.encode({"measured_machine": elsewhere}))
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(
        bundle=str(tiny("gemma3").path), data="random:5", output="run", max_seq_length=64,
        budget="41MB", steps=1, machine="machine.json",
    )  # fmt: skip
    start.train(config, Events())
    plan = plan_in(tmp_path / "run")
    here = msgspec.structs.replace(LINUX, heap=elsewhere.heap)
    assert plan == plan_of(tiny("gemma3").manifest, task_of(64), BUDGET, here)
    assert plan != plan_of(tiny("gemma3").manifest, task_of(64), BUDGET)
    monkeypatch.chdir("/")  # the run's own configuration says where the file is
    after, said = resumed(tmp_path / "run")
    assert after == plan and "planned anew" not in said


def damaged(text: str) -> dict[str, str]:
    """Texts of plan.json that hold no plan."""
    plan = json.loads(text)
    return {
        "nothing": "",
        "half of it": text[: len(text) // 2],
        "a list": "[]",
        "no object": "3",
        "deep": "[" * 100_000,
        "a field less": json.dumps({k: v for k, v in plan.items() if k != "lanes"}),
        "a field more": json.dumps({**plan, "more": 64}),
        "text for bytes": json.dumps({**plan, "live_bytes": "much"}),
        "a fraction": json.dumps({**plan, "tile_values": 0.5}),
        "no queries at once": json.dumps({**plan, "query_block": 0}),
        "fewer than no rows": json.dumps({**plan, "chunk_rows": -5}),
        "less than nothing": json.dumps({**plan, "live_bytes": -1}),
        "no blocks": json.dumps({**plan, "blocks": [{}]}),
    }


def test_a_damaged_plan_is_refused(stopped: Path) -> None:
    path = stopped / "plan.json"
    before = adapter(stopped)
    for what, text in damaged(path.read_text()).items():
        replaced(stopped, "plan.json", text)
        with pytest.raises(BundleError, match=r"plan\.json is damaged: ") as refused:
            resume.resume(stopped, Events(), {})
        assert refused.value.exit_code == 4, what
        assert len(str(refused.value)) < 1000, what
        assert path.read_text() == text, what
    path.unlink()
    with pytest.raises(BundleError, match=r"plan\.json"):
        resume.resume(stopped, Events(), {})
    assert adapter(stopped) == before


def test_options_beyond_todays_bounds_are_named_with_the_way_out(stopped: Path) -> None:
    text = (stopped / "config.toml").read_text()
    text = re.sub(r"(?m)^lora_rank = .*", "lora_rank = 9999", text)
    replaced(stopped, "config.toml", f"patch = 3\n{text}")
    with pytest.raises(UsageError) as refused:
        resume.resume(stopped, Events(), {})
    said = str(refused.value)
    assert said.startswith(f"{stopped / 'config.toml'}: train cannot run with these")
    assert "unknown key 'patch'" in said
    assert re.search(r"lora_rank is 9999\d*; it must be .*4096", said)
    assert said.endswith(
        "if another version of ondevice has written it, go on with that version, or start another "
        f"run with --adapter {stopped}"
    )


@pytest.mark.parametrize(
    ("stamps", "told"),
    [
        ({}, "another version of ondevice wrote it, with no format version, and this is"),
        ({"version": VERSION - 1, "written_by": "ondevice 0.0.9"}, "ondevice 0.0.9 wrote it, with"),
        ({"version": True}, "with format version True"),
    ],
)
def test_a_run_of_another_version_is_refused_before_its_fields(
    tiny: Tiny, stopped: Path, stamps: dict[str, object], told: str
) -> None:
    """Whatever differs in its files, the message is the same, and its way out works."""
    before = json.loads((stopped / "plan.json").read_text())
    assert before["version"] == VERSION and before["written_by"] == f"ondevice {__version__}"
    config = (stopped / "config.toml").read_text()
    replaced(stopped, "config.toml", "an_option_that_is_gone = 3\n" + config)
    replaced(stopped, "plan.json", json.dumps({**stamps, "more": 64}))
    with pytest.raises(BundleError, match=told) as refused:
        resume.resume(stopped, Events(), {})
    assert f"which reads version {VERSION}; go on with that version" in str(refused.value)
    assert str(refused.value).endswith(f"or start another run with --adapter {stopped}")
    further = TrainConfig(
        bundle=str(tiny("gemma3").path), data="random:5", adapter=str(stopped),
        output=str(stopped.parent / "further"), max_seq_length=64, budget="41MB", steps=1,
    )  # fmt: skip
    assert start.train(further, Events()).steps == 1


FIELDS = {  # of the files of a run, and the versions that their formats then have
    "run": (5, "895aff7c0f76"),
    "save": (3, "9460c24a715a"),
}


@pytest.mark.parametrize(
    ("name", "version", "structs"),
    [
        ("run", VERSION, (Plan, BlockPeak, Evaluation, Step, Speeds)),
        ("save", saves.VERSION, (saves.State, Prefix)),
    ],
)
def test_other_fields_are_another_version(
    name: str, version: int, structs: tuple[type, ...]
) -> None:
    """A format whose fields change gets a new version, so that who reads an old file hears so."""
    fields = [[struct.__name__, *struct.__annotations__.items()] for struct in structs]
    assert (version, hashlib.sha256(repr(fields).encode()).hexdigest()[:12]) == FIELDS[name]


THREADED = msgspec.structs.replace(LINUX, llvm=True, blas=Blas(2, PANEL_BYTES, ROW_BYTES))


def planned_again(
    run: Path, monkeypatch: pytest.MonkeyPatch, before: Plan, threads: int
) -> tuple[Plan, str]:
    """The plan with which a run goes on where so many threads run, and what is said."""
    blas = msgspec.structs.replace(THREADED.blas, threads=threads)
    on(monkeypatch, llvm=True, blas=blas)
    plan, said = plan_again(run, before)
    return plan, "\n".join(said)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_other_threads_execute_the_plan_where_it_fits(
    tiny: Tiny, stopped: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    before = plan_of(tiny("gemma3").manifest, task_of(64, rows=2), BUDGET, THREADED)
    assert before.compiled and before.threads == 2
    plan, said = planned_again(stopped, monkeypatch, before, threads)
    assert plan == before
    assert said == (
        ""
        if threads == 2
        else f"the run was planned for 2 threads, and {threads} run here; its plan still fits"
    )


def test_threads_for_which_the_plan_is_too_large_are_said(
    tiny: Tiny, stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = plan_of(tiny("gemma3").manifest, task_of(64, rows=2), BUDGET, THREADED)
    with pytest.raises(BudgetError, match="set OPENBLAS_NUM_THREADS=1: each of 64 threads"):
        planned_again(stopped, monkeypatch, before, 64)
    monkeypatch.setattr(Planner, "plan", lambda *wanted: before)
    _, said = planned_again(stopped, monkeypatch, before, 64)
    assert "planned anew: it would take 5" in said and "budget of 41 MB in this process" in said
    assert "64 threads take more memory than the 2 of its plan (OPENBLAS_NUM_THREADS=2 has" in said


def test_a_worker_without_compiled_code_refuses_a_plan_that_takes_it(tiny: Tiny) -> None:
    manifest = tiny("gemma3").manifest
    task = task_of(32)
    compiled = Planner(manifest, COMPILED)
    chosen = compiled.plan(task, BUDGET)
    assert chosen.compiled
    assert budget.plan_of_first(chosen, compiled, task, BUDGET) == chosen
    with pytest.raises(UsageError, match=r"by compiled code: .*leave this machine out"):
        budget.plan_of_first(chosen, Planner(manifest, LINUX), task, BUDGET)


@pytest.mark.parametrize("method", ["mebp", "mezo"])
def test_a_workers_own_threads_count(tiny: Tiny, method: str) -> None:
    """Each has scratch in attention's compiled code, where rank 0 has fewer."""
    manifest = tiny("gemma3").manifest
    task = task_of(32, method)
    one, many = (
        msgspec.structs.replace(LINUX, llvm=True, blas=Blas(count, 0, 0)) for count in (1, 64)
    )
    chosen = plan_of(manifest, task, machine=one)
    assert Planner(manifest, one).peak_of(chosen, task) == chosen.predicted_peak_bytes
    scratch = scratch_values(32, 32, backward=method == "mebp") * F32
    more = Planner(manifest, many).peak_of(chosen, task) - chosen.predicted_peak_bytes
    assert more > 64 * scratch - chosen.live_bytes
    most = chosen.predicted_peak_bytes + more - 1
    chosen = msgspec.structs.replace(chosen, budget_bytes=most)
    assert budget.plan_of_first(chosen, Planner(manifest, one), task, most) == chosen
    with pytest.raises(BudgetError, match="does not fit here: it would take"):
        budget.plan_of_first(chosen, Planner(manifest, many), task, most)
