"""The files that a run says it will write are those that it does write, each with its size."""

from __future__ import annotations

import mmap
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.bundles import Tiny
from support.exchange import on_workers
from support.plans import LINUX
from support.runs import on_machine

from runtime.config.train import TrainConfig
from runtime.core.errors import StorageError
from runtime.parallel.exchange import Exchange
from runtime.parallel.workers import Workers
from runtime.run import disk, resume, start
from runtime.run.folder import RunFolder
from runtime.run.results import Events
from runtime.run.team import Team
from runtime.storage import activations, scratch
from runtime.storage.saves import SUMMARY


def config_of(tiny: Tiny, run: Path, **options: object) -> TrainConfig:
    options = {"budget": "1GB", "max_seq_length": 64, **options}
    return TrainConfig(
        bundle=str(tiny("gemma3").path), data="random:5", output=str(run), steps=2, save_every=1,
        keep=2, **options,
    )  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"method": "mebp", "max_grad_norm": 1.0, "batch_size": 2},
        {"method": "mebp", "optimizer": "sgd"},
        {"method": "mebp", "budget": "37.7MB"},
        {"method": "mezo", "batch_size": 2},
        {"method": "hizoo"},
        {"method": "zo-act", "batch_size": 2},
    ],
)
def test_every_file_is_counted(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    on_machine(monkeypatch, LINUX)
    made: dict[str, int] = {}
    checked: dict[str, int] = {}

    def recorded(folder: Path, name: str, size: int) -> mmap.mmap:
        assert checked, "the disk is looked at before anything is written"
        made[name] = made.get(name, 0) + size
        return whole(folder, name, size)

    def listed(*arguments: object) -> dict[str, int]:
        files = to_write(*arguments)  # type: ignore[arg-type]
        checked.update(files)
        return files

    whole, to_write = scratch.map_scratch, disk.files_to_write
    monkeypatch.setattr(scratch, "map_scratch", recorded)
    monkeypatch.setattr(activations, "map_scratch", recorded)
    monkeypatch.setattr(disk, "files_to_write", listed)
    run = tmp_path / "run"
    start.train(config_of(tiny, run, **options), Events())
    assert ("mlp-products" in made) == ("budget" in options)
    made = {name: size for name, size in made.items() if size > 1}  # of no values
    assert set(made) == {name for name, size in checked.items() if size} - {"saves", "the adapter"}
    for name, size in made.items():
        rows = 64 if name in ("activations", "mlp-products") else 1  # begin at whole pages
        assert checked[name] <= size <= checked[name] + rows * mmap.PAGESIZE, name
    saved = [file.stat().st_size for file in run.glob("saves/*/*")]
    small = 20_000  # headers, settings and checksums
    assert sum(saved) <= checked["saves"] + 3 * small
    assert (run / "adapters.safetensors").stat().st_size <= checked["the adapter"] + small


def test_a_disk_that_is_too_small_is_refused_before_with_each_file(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    config = config_of(tiny, run, method="mebp", max_grad_norm=1.0)
    start.train(config, Events())
    folder = RunFolder(run)
    files = disk.files_to_write(config, tiny("gemma3").manifest, folder.plan(), folder)
    space = (10**12, 0, sum(files.values()) - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: space)
    told = r"the run will write .* are free: activations .*, adapters .*, optimizer .*, gradients"
    with pytest.raises(StorageError, match=told + ".*; make room, or move its folder"):
        resume.resume(run, Events(), {"steps": 3})
    other = tmp_path / "other"
    with pytest.raises(
        StorageError, match=told + ".*, saves .*, the adapter .*; make room, or choose"
    ):
        start.train(config_of(tiny, other, method="mebp", max_grad_norm=1.0), Events())
    assert not other.exists()
    space = (0, 0, 0)  # a file system that does not state its size
    assert resume.resume(run, Events(), {"steps": 3}).steps == 3


@pytest.mark.parametrize(
    ("hosts", "systems", "refused"),
    [
        (("here", "here"), (1, 1), "'s 2 processes on here"),
        (("here", "here"), (1, 2), ""),
        (("here", "there"), (1, 1), ""),
        (("here", "there", "there"), (1, 1, 1), "'s 2 processes on there"),
    ],
)
def test_files_of_all_workers_on_one_disk_count(
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hosts: tuple[str, ...],
    systems: tuple[int, ...],
    refused: str,
) -> None:
    run = tmp_path / "run"
    config = config_of(tiny, run, method="mebp")
    start.train(config, Events())
    folder, manifest = RunFolder(run), tiny("gemma3").manifest
    first = sum(disk.files_to_write(config, manifest, folder.plan(), folder).values())
    others = sum(disk.files_of_worker(config, manifest, folder.plan()).values())
    assert others > 1
    free = [first + others - 1, 2 * others - 1]  # of the machine of rank 0, and of another

    def check(exchange: Exchange) -> str:
        team = Team(Workers(exchange, exchange.size), hosts)
        own = run if exchange.rank == 0 else run / ".workers.partial" / str(exchange.rank)
        if exchange.rank:
            assert [place.free_bytes for place in disk.places_of(team, own)] == sizes
            return ""
        try:
            disk.check_disk(config, manifest, folder.plan(), folder, team)
        except StorageError as problem:
            return str(problem)
        return ""

    sizes = [free[host == "there"] for host in hosts]
    places_of = disk.places_of

    def stated(team: Team, path: Path) -> list[disk.Place]:
        places = places_of(team, path)
        assert [place.folder for place in places] == [
            str(run / ".workers.partial" / str(rank) if rank else run) for rank in range(len(hosts))
        ]
        return [
            place._replace(file_system=system, free_bytes=size)
            for place, system, size in zip(places, systems, sizes, strict=True)
        ]

    monkeypatch.setattr(disk, "places_of", stated)
    said = on_workers(len(hosts), check)[0]
    assert (f"the run{refused} will write" in said) if refused else said == ""


def test_saves_that_are_never_made_take_no_space(tiny: Tiny, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = config_of(tiny, run, method="mezo")
    start.train(config, Events())
    folder, manifest = RunFolder(run), tiny("gemma3").manifest

    def saves(done: int, **options: object) -> int:
        asked = replace(config, **options)  # type: ignore[arg-type]
        files = disk.files_to_write(asked, manifest, folder.plan(), folder, done)
        return files["saves"] // files["adapters"]

    assert saves(0) == 1  # two of at most three are there
    assert saves(0, keep=1000, save_every=0) == saves(2, keep=1000) == 2
    assert saves(0, keep=1000, steps=100, save_every=10) == 12
    assert saves(0, keep=1000, steps=100, save_every=10, keep_best=True, eval_every=50) == 14


def test_a_full_disk_says_how_much_a_file_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(scratch, "reserve", full)
    with pytest.raises(StorageError, match=r"mlp-products \(\d+ MB free, 24 MB needed\)"):
        activations.Activations(tmp_path, 3, 2, (1, 1000, 1000), "mlp-products")


def test_a_disk_that_is_full_for_the_summary_says_how_to_go_on(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, written = tmp_path / "run", RunFolder.write_json

    def write(folder: RunFolder, name: str, value: object) -> None:
        if name == SUMMARY:
            raise StorageError("the disk is full; make room")
        written(folder, name, value)

    monkeypatch.setattr(RunFolder, "write_json", write)
    told = f"; make room; its state after step 2 is saved; go on with: .* --resume {run}$"
    with pytest.raises(StorageError, match=told):
        start.train(config_of(tiny, run, method="mezo"), Events())
    monkeypatch.undo()
    assert resume.resume(run, Events(), {}).steps == 2
