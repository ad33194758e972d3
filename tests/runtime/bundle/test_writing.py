"""A bundle is whole or not there: interrupted, killed, forced, concurrent, on a full disk."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.bundles import Rng, copied, settings
from support.files import listing
from support.runs import python

from export.bundle import export_bundle
from runtime.bundle.store import MANIFEST, WEIGHTS, Bundle, BundleWriter, open_bundle
from runtime.core import files
from runtime.core.errors import BundleError, StorageError, UsageError
from runtime.core.files import storage_errors, write_atomic


@pytest.mark.parametrize("problem", [ValueError, KeyboardInterrupt, SystemExit, BundleError])
def test_an_interrupted_writer_leaves_nothing(tmp_path: Path, problem: type[BaseException]) -> None:
    with pytest.raises(problem), BundleWriter(tmp_path / "out") as writer:
        writer.tensor([b"abc"], "uint32", (1,))
        writer.file("tokenizer/tokenizer.json", b"{}")
        raise problem
    assert listing(tmp_path) == []


def test_an_export_interrupted_anywhere_leaves_nothing(tmp_path: Path, rng: Rng) -> None:
    calls: list[str] = []
    export_bundle(settings("random:tiny-qwen2", tmp_path / "whole"), lambda *a: calls.append(a[0]))
    before = listing(tmp_path)
    assert {"graphs", "model.layers.1.mlp.down_proj"} <= set(calls)
    places = [(False, "new"), (True, "whole")]
    problems: list[type[BaseException]] = [ZeroDivisionError, KeyboardInterrupt]
    for stop in (int(rng.integers(0, len(calls))), len(calls) - 1):
        for (force, name), problem in zip(places, rng.permutation(problems), strict=True):
            left = [stop]

            def progress(what: str, done: int, total: int) -> None:
                left[0] -= 1  # noqa: B023
                if left[0] < 0:  # noqa: B023
                    raise problem  # noqa: B023

            with pytest.raises(problem):
                export_bundle(settings("random:tiny-qwen2", tmp_path / name, force=force), progress)
            assert listing(tmp_path) == before
    open_bundle(tmp_path / "whole").verify()


def test_an_existing_destination_is_kept_unless_forced(origin: Bundle, tmp_path: Path) -> None:
    path = copied(origin, tmp_path / "bundle")
    (path / "mine.txt").write_text("kept")
    with pytest.raises(UsageError, match="--force"):
        export_bundle(settings("random:tiny-llama", path))
    assert open_bundle(path).manifest == origin.manifest
    with pytest.raises(UsageError, match=r"holds other files .* \(mine.txt\); it is not replaced"):
        export_bundle(settings("random:tiny-llama", path, force=True))
    assert open_bundle(path).manifest == origin.manifest
    assert (path / "mine.txt").read_text() == "kept"
    (path / "mine.txt").unlink()
    export_bundle(settings("random:tiny-llama", path, force=True))
    assert open_bundle(path).manifest.family == "llama"
    assert [item.name for item in tmp_path.iterdir()] == ["bundle"]


def test_force_replaces_bundles_only(tmp_path: Path) -> None:
    folder, file, link = tmp_path / "photos", tmp_path / "notes.txt", tmp_path / "link"
    folder.mkdir()
    (folder / "one.jpg").write_bytes(b"irreplaceable")
    file.write_text("irreplaceable")
    link.symlink_to(folder)
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nowhere")
    before = listing(tmp_path)
    for destination in (folder, file, link, dangling):
        told = "is a link" if destination.is_symlink() else "not a bundle"
        with pytest.raises(UsageError, match=told):
            export_bundle(settings("random:tiny-llama", destination, force=True))
    assert listing(tmp_path) == before
    (tmp_path / "empty").mkdir()
    export_bundle(settings("random:tiny-llama", tmp_path / "empty", force=True)).verify()


def test_a_limit_of_files_is_not_called_a_full_disk(tmp_path: Path) -> None:
    said = "limits how large a file may be; raise the limit .ulimit -f"
    with pytest.raises(StorageError, match=said), storage_errors(tmp_path / "weights.bin"):
        raise OSError(errno.EFBIG, "File too large")


def test_an_error_that_has_no_number_says_why(tmp_path: Path) -> None:
    said = "8 requested and 0 written"
    with pytest.raises(StorageError, match=f"{said}; is the disk full"), storage_errors(tmp_path):
        raise OSError(said)  # as NumPy's


def test_a_destination_below_a_file_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        export_bundle(settings("random:tiny-llama", tmp_path / "file" / "bundle"))
    with pytest.raises(StorageError):
        export_bundle(settings("random:tiny-llama", tmp_path / ("long" * 100)))
    assert listing(tmp_path) == ["file"]


def test_what_a_killed_export_left_is_cleared(tmp_path: Path) -> None:
    left = tmp_path / ".bundle.partial" / "graphs"
    left.mkdir(parents=True)
    (left / "old").write_bytes(b"old")
    export_bundle(settings("random:tiny-llama", tmp_path / "bundle")).verify()
    assert [item.name for item in tmp_path.iterdir()] == ["bundle"]


def test_a_failed_swap_restores_the_old_bundle(
    origin: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copied(origin, tmp_path / "bundle")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(KeyboardInterrupt):
        export_bundle(settings("random:tiny-llama", path, force=True))
    assert [item.name for item in tmp_path.iterdir()] == ["bundle"]
    assert open_bundle(path).manifest == origin.manifest


def test_write_atomic_keeps_the_old_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    write_atomic(file, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "flush", full)
    with pytest.raises(StorageError, match="disk is full"):
        write_atomic(file, b"new")
    assert file.read_bytes() == b"old"
    assert listing(tmp_path) == ["file"]


FULL = """
import os, resource, sys
from runtime.machine.backend import prepare
prepare()
import export.bundle
import export.graph_files
from export.config.export import ExportConfig
from runtime.core.errors import StorageError

where, output = sys.argv[1:]
def fill(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

if where == "weights":
    fill(50_000)
elif where == "last bytes of the weights":
    finish = export.bundle.BundleWriter.finish_weights
    def finished(self):
        self._write(bytes(3000))  # stays in the buffer
        fill(os.path.getsize(self.folder / "weights.bin") + 10)
        return finish(self)
    export.bundle.BundleWriter.finish_weights = finished
elif where == "graphs":
    serialize = export.graph_files.serialize
    def serialized(*a, **k):
        fill(700)
        serialize(*a, **k)
    export.graph_files.serialize = serialized
elif where == "manifest":
    commit = export.bundle.BundleWriter.commit
    def committed(self, manifest):
        fill(1000)
        return commit(self, manifest)
    export.bundle.BundleWriter.commit = committed
try:
    export.bundle.export_bundle(
        ExportConfig(source="random:tiny-qwen2", output=output, seq_lens=(16,), device="cpu")
    )
except StorageError as problem:
    sys.exit(str(problem))
"""


@pytest.mark.parametrize("where", ["weights", "last bytes of the weights", "graphs", "manifest"])
def test_a_write_that_meets_a_limit_leaves_nothing(tmp_path: Path, where: str) -> None:
    done = python(FULL, where, tmp_path / "out", exporting=True)
    assert done.returncode == 1, done
    # MLX writes graphs, and its errors have no number that would tell a limit from a full disk
    said = "the disk is full" if where == "graphs" else "File too large while writing"
    assert done.stderr.startswith(said), done.stderr
    assert "Traceback" not in done.stderr
    assert listing(tmp_path) == []


def test_too_little_room_is_known_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 1000))
    with pytest.raises(StorageError, match=r"needs about .* kB, but only 1 kB are free"):
        export_bundle(settings("random:tiny-qwen2", tmp_path / "out"))
    assert listing(tmp_path) == []
    # a file system that does not state its size
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 0))
    export_bundle(settings("random:tiny-qwen2", tmp_path / "out"))


# --- several processes, and the killed --------------------------------------------------------


def test_a_second_export_to_the_same_place_is_refused(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "out") as writer:
        writer.tensor([b"abcd"], "uint32", (1,))
        before = listing(tmp_path)
        with pytest.raises(UsageError, match=r"another process is exporting to .*out"):
            export_bundle(settings("random:tiny-llama", tmp_path / "out"))
        assert listing(tmp_path) == before
        writer.finish_weights()
        assert (writer.folder / WEIGHTS).read_bytes() == b"abcd"
    export_bundle(settings("random:tiny-llama", tmp_path / "out")).verify()
    assert [item.name for item in tmp_path.iterdir()] == ["out"]


def test_of_many_writers_each_commits_or_is_refused(origin: Bundle, tmp_path: Path) -> None:
    path, notes = tmp_path / "out", [f"tokenizer/{number}" for number in range(4)]

    def write(note: str) -> int:
        committed = 0
        for _ in range(25):
            try:
                with BundleWriter(path, force=True) as writer:
                    writer.file(note, b"")
                    writer.finish_weights()
                    writer.commit(origin.manifest)
                    committed += 1
            except UsageError as problem:
                assert "another process" in str(problem)
        return committed

    with ThreadPoolExecutor(len(notes)) as pool:
        assert sum(pool.map(write, notes)) > 0
    assert [item.name for item in tmp_path.iterdir()] == ["out"]
    assert len(list((path / "tokenizer").iterdir())) == 1  # of one writer alone


KILLED = """
import os, signal, sys
from pathlib import Path
from runtime.machine.backend import prepare
prepare()
from export.bundle import export_bundle
from export.config.export import ExportConfig

rename = Path.rename
def killed(self, target):
    if Path(target) == Path(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)
Path.rename = killed
export_bundle(
    ExportConfig(
        source="random:tiny-llama", output=sys.argv[1], seq_lens=(16,), device="cpu", force=True
    )
)
"""


def test_a_bundle_survives_the_kill_of_what_replaces_it(origin: Bundle, tmp_path: Path) -> None:
    """A forced export is killed between its two renames."""
    folder = tmp_path / "folder"
    folder.mkdir()
    path = copied(origin, folder / "bundle")
    done = python(KILLED, path)
    assert done.returncode == -signal.SIGKILL, done
    left = shutil.copytree(folder, tmp_path / "left")

    def killed() -> None:
        shutil.rmtree(folder)
        shutil.copytree(left, folder)
        old = folder / ".bundle.partial" / "old"
        assert not path.exists()
        with pytest.raises(BundleError, match=rf"whole in {old}: export again, or move it back"):
            open_bundle(path)
        assert open_bundle(old).manifest == origin.manifest
        open_bundle(old).verify()

    killed()
    with pytest.raises(UsageError, match="back in place"):
        export_bundle(settings("random:tiny-llama", path))
    assert [item.name for item in folder.iterdir()] == ["bundle"]
    assert open_bundle(path).manifest == origin.manifest
    open_bundle(path).verify()
    killed()
    with pytest.raises(KeyboardInterrupt), BundleWriter(path, force=True):
        raise KeyboardInterrupt
    assert [item.name for item in folder.iterdir()] == ["bundle"]
    assert open_bundle(path).manifest == origin.manifest
    killed()
    export_bundle(settings("random:tiny-llama", path, force=True)).verify()
    assert [item.name for item in folder.iterdir()] == ["bundle"]
    assert open_bundle(path).manifest.family == "llama"


def test_what_was_being_removed_is_not_put_back(origin: Bundle, tmp_path: Path) -> None:
    old = copied(origin, tmp_path / ".bundle.partial" / "old")
    (old / MANIFEST).unlink()
    with pytest.raises(BundleError, match="is no bundle: there is no such folder"):
        open_bundle(tmp_path / "bundle")
    export_bundle(settings("random:tiny-llama", tmp_path / "bundle")).verify()
    assert [item.name for item in tmp_path.iterdir()] == ["bundle"]


def test_what_was_left_beside_a_bundle_in_place_is_removed(origin: Bundle, tmp_path: Path) -> None:
    """Of a process that was killed after its last rename; not of one that is still exporting."""
    path = copied(origin, tmp_path / "bundle")
    place = tmp_path / ".bundle.partial"
    copied(origin, place / "old")
    lock = os.open(place, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    for left in (True, False):
        with pytest.raises(UsageError, match="exists; choose another"), BundleWriter(path):
            pass
        assert place.exists() == left
        if left:
            os.close(lock)
    open_bundle(path).verify()


def test_the_working_directory_is_no_destination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for destination in (".", "..", "/"):
        with pytest.raises(UsageError, match="exists"), BundleWriter(Path(destination)):
            pass
    with pytest.raises(StorageError):
        export_bundle(settings("random:tiny-llama", Path(), force=True))
    assert listing(tmp_path) == ["here"]
