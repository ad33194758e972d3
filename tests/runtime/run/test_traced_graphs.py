"""Graphs that this user's exports did not write never run: they are traced into the cache."""

from __future__ import annotations

import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.bundles import copied, manifest_of, put, rewrite, runnable, say, settings, with_noise
from support.files import listing
from support.models import model_of
from support.runs import adapter, here, ondevice, refuses, succeeds, train_arguments

from export.bundle import export_bundle
from runtime.bundle.store import Bundle, open_bundle
from runtime.bundle.traced import RECORD
from runtime.bundle.trusted import are_trusted, trust_graphs
from runtime.core.errors import BundleError, StorageError, UsageError
from runtime.core.paths import cache_folder
from runtime.data.limits import Limits
from runtime.engine.graphs import Graphs
from runtime.machine.backend import automatic_device
from runtime.run import traced_graphs
from runtime.run.traced_graphs import with_graphs


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Another user's machine: a cache folder without graphs, which is returned, and no GPU.

    There graphs would be traced for it, and those of a CPU have other last bits.
    """
    known = cache_folder() / "code"  # what LLVM has compiled takes long to make
    monkeypatch.setattr(traced_graphs, "automatic_device", lambda: "cpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if known.exists():
        shutil.copytree(known, cache_folder() / "code")
    return tmp_path / "cache" / "ondevice"


def forward_of(bundle: Bundle, seed: int) -> np.ndarray:
    program = model_of(bundle, bundle.manifest.buckets[0])
    rng = np.random.default_rng(seed)
    x = program.embed(rng.integers(0, bundle.manifest.vocab_size, 9))
    for block in program.blocks[1:-1]:
        x = program.forward(block, x, {})
    return np.array(program.hidden(x, np.arange(9)))


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {
        name: (folder / name).read_bytes() for name in listing(folder) if (folder / name).is_file()
    }


def test_graphs_from_elsewhere_do_not_run_and_the_bundle_stays_as_it_is(
    origin: Bundle, stranger: Path, tmp_path: Path, rng: np.random.Generator, seed: int
) -> None:
    path = with_noise(origin, tmp_path / "bundle", rng)
    before = all_bytes(path)
    for one in (path, *path.rglob("*")):
        one.chmod(one.stat().st_mode & ~stat.S_IWUSR)
    told: list[str] = []
    bundle = with_graphs(open_bundle(path), note=told.append)
    assert len(told) == 1 and str(path) in told[0]
    assert bundle.graphs_path is not None and bundle.graphs_path.parent == stranger / "graphs"
    assert bundle.manifest.block_types == origin.manifest.block_types
    assert (forward_of(bundle, seed) == forward_of(origin, seed)).all()
    again = with_graphs(open_bundle(path), note=told.append)
    assert len(told) == 1 and again == bundle  # traced once
    same = with_graphs(origin, note=told.append)  # by whatever bundle of this model
    assert len(told) == 1 and same.graphs_path == bundle.graphs_path
    assert all_bytes(path) == before
    assert sorted(one.suffix for one in (stranger / "graphs").iterdir()) == ["", ".lock"]


def test_graphs_of_this_user_s_exports_run_as_they_lie(origin: Bundle, tmp_path: Path) -> None:
    moved = runnable(copied(origin, tmp_path / "elsewhere"))
    assert moved.graphs_path == moved.path


def test_a_program_that_its_export_did_not_write_is_not_trusted(
    origin: Bundle, tmp_path: Path
) -> None:
    path = copied(origin, tmp_path / "bundle")
    for where, value in (
        ("block_types/layer0/operations/0/tokenwise", False),
        ("graphs/layer0.0.vjp.16/workspace_bytes", 1),
        ("mlx_version", "0.1.2"),
        ("device", "gpu"),
    ):
        document = manifest_of(origin.path)
        put(document, where, value)
        rewrite(path, document)
        assert not are_trusted(open_bundle(path).manifest), where
    bundle = runnable(path)  # whatever it says of its device
    assert bundle.manifest.device == automatic_device()
    assert bundle.graphs_path != path


def test_a_bundle_without_graphs_trains_to_the_same_bytes(stranger: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    export_bundle(settings("random:tiny-qwen2", bare, graphs=False))
    whole = tmp_path / "whole"
    export_bundle(settings("random:tiny-qwen2", whole))
    assert not manifest_of(bare)["graphs"] and not (bare / "graphs").exists()
    shown = here("inspect", bare)
    assert "graphs: none; they are traced when the bundle is first used" in shown.stdout
    for path in (bare, whole):
        run = tmp_path / f"run-{path.name}"
        done = succeeds(*train_arguments(path, run, 2, max_seq_length=16), by=here)
        assert ("tracing the graphs" in done.stderr) == (path == bare)
    assert adapter(tmp_path / "run-bare") == adapter(tmp_path / "run-whole")


def test_what_is_damaged_in_the_cache_is_traced_again(
    origin: Bundle, stranger: Path, rng: np.random.Generator, seed: int
) -> None:
    folder = with_graphs(origin).graphs_path
    assert folder is not None
    files = [RECORD, *(one.file for one in runnable(origin.path).manifest.graphs.values())]
    for name in (RECORD, rng.choice(files[1:])):
        data = bytearray((folder / name).read_bytes())
        data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        (folder / name).write_bytes(data)
        told: list[str] = []
        bundle = with_graphs(origin, note=told.append)
        assert told
        assert (forward_of(bundle, seed) == forward_of(origin, seed)).all()


def test_several_processes_may_start_at_once(origin: Bundle, stranger: Path) -> None:
    told: list[str] = []
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: with_graphs(origin, note=told.append), range(3)))
    assert sum("tracing" in one for one in told) == 1 and found[0] == found[1] == found[2]


def test_a_bundle_of_another_model_is_refused_and_leaves_nothing(
    origin: Bundle, stranger: Path, tmp_path: Path
) -> None:
    path = say(copied(origin, tmp_path / "bundle"), "config/num_attention_heads", 3)
    with pytest.raises(BundleError, match=str(path)):
        runnable(path)
    assert [one.suffix for one in (stranger / "graphs").iterdir()] == [".lock"]


def test_graphs_that_nobody_has_looked_at_do_not_run(origin: Bundle) -> None:
    graphs = Graphs(open_bundle(origin.path))
    with pytest.raises(BundleError, match="may not run"):
        graphs.call(next(iter(origin.manifest.graphs)), [])


def test_trust_asks_and_then_lets_graphs_run_as_they_lie(
    origin: Bundle, stranger: Path, tmp_path: Path
) -> None:
    path = copied(origin, tmp_path / "bundle")
    refused = refuses(2, "pass --yes", "trust", path, by=ondevice)
    assert "Graphs are code" in refused.stderr and not are_trusted(origin.manifest)
    assert "from elsewhere, so they do not run" in here("inspect", path).stdout
    done = succeeds("trust", path, "--yes", "--json")
    assert '"trusted_before": false' in done.stdout
    assert runnable(path).graphs_path == path
    assert "could run already" in ondevice("trust", path).stdout
    assert "exported or trusted by you" in here("inspect", path).stdout
    bare = tmp_path / "bare"
    export_bundle(settings("random:tiny-qwen2", bare, graphs=False))
    refuses(2, "has no graphs", "trust", bare, "--yes")


def test_without_mlx_lm_the_way_out_is_named(
    origin: Bundle, stranger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traced_graphs, "installed_version", lambda package: "")
    with pytest.raises(BundleError, match=rf"pip install mlx-lm.*ondevice trust {origin.path}"):
        with_graphs(origin)


def test_a_cache_that_cannot_be_written_names_the_way_out(
    origin: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="set XDG_CACHE_HOME"):
        with_graphs(origin)
    with pytest.raises(StorageError, match="XDG_CACHE_HOME"):
        export_bundle(settings("random:tiny-qwen2", tmp_path / "bundle"))
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_gpu_that_is_not_here_is_refused(origin: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "is_available", lambda device: False)
    with pytest.raises(UsageError, match="--device gpu: MLX finds no GPU here"):
        with_graphs(origin, "gpu")


@pytest.mark.usefixtures("stranger")
def test_the_driver_of_a_gpu_has_room_for_its_addresses(
    origin: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX loads it where there is one, also where graphs are traced for the CPU."""
    bounds: list[int] = []

    def run(*arguments: object, limits: Limits, **options: object) -> None:
        bounds.append(limits.memory_bytes)
        raise BundleError("it ended")

    monkeypatch.setattr(traced_graphs, "call", run)
    for gpu in (True, False):
        monkeypatch.setattr(mx, "is_available", lambda device, gpu=gpu: gpu)
        with pytest.raises(BundleError, match="it ended"):
            with_graphs(origin, "cpu")
    assert bounds == [1 << 40, 4 << 30]


def test_the_cache_is_where_the_platform_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_folder() == Path("/home/me/.cache/ondevice")
    monkeypatch.setattr("sys.platform", "darwin")
    assert cache_folder() == Path("/home/me/Library/Caches/ondevice")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert cache_folder() == Path("/var/cache/me/ondevice")


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("block_types/layer0/operations/3/scale", 0.5),
        pytest.param("block_types/layer0/operations/3/window", 5, marks=pytest.mark.slow),
    ],
)
def test_a_program_that_is_not_that_of_its_model_is_refused(
    origin: Bundle, stranger: Path, tmp_path: Path, where: str, value: float
) -> None:
    """Also once the graphs of its configuration are there."""
    path = say(copied(origin, tmp_path / "bundle"), where, value)
    for _ in range(2):
        with pytest.raises(BundleError, match="computes the model in another way"):
            runnable(path)
        with_graphs(origin)


def test_a_manifest_that_changes_while_it_is_traced_changes_nothing(
    origin: Bundle, stranger: Path, tmp_path: Path, seed: int
) -> None:
    path = copied(origin, tmp_path / "bundle")
    bundle = open_bundle(path)
    say(path, "config/rms_norm_eps", 0.5)  # after it was read
    assert (forward_of(with_graphs(bundle), seed) == forward_of(origin, seed)).all()


def test_trust_refuses_what_cannot_run_anyway(
    origin: Bundle, stranger: Path, tmp_path: Path
) -> None:
    path = say(copied(origin, tmp_path / "bundle"), "mlx_version", "0.1.2")
    refuses(2, "traced by MLX '0.1.2'", "trust", path, "--yes")
    assert here("inspect", say(path, "mlx_version", "0.1\x1b[2J")).returncode == 4


def test_what_another_user_wrote_into_the_cache_is_not_trusted(
    origin: Bundle, stranger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust_graphs(origin.manifest, "a test")
    assert are_trusted(origin.manifest)
    monkeypatch.setattr("os.getuid", lambda: stranger.stat().st_uid + 1)
    assert not are_trusted(origin.manifest)
