"""The processes that run a training or an evaluation together: what they agree on and send.

Rank 0 alone has the run's folder and shows anything. The others get from it the rows, the
configuration, the plan and the save, keep files in a folder of their own, and remove that.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from runtime.bundle.store import MANIFEST, Bundle
from runtime.core.errors import InterruptedRunError, OnDeviceError, UsageError, WorkerError
from runtime.core.files import sha256_file, storage_errors
from runtime.core.stripes import Stripes
from runtime.machine.footprint import Meter
from runtime.methods.adapter_reader import AdapterFiles
from runtime.parallel.workers import Workers

if TYPE_CHECKING:
    from runtime.parallel.heartbeat import Heartbeat
    from runtime.parallel.holders import Holders

PIECE_BYTES = 1 << 18  # of a file that is sent; each process holds one for each worker
WORKERS = ".workers.partial"  # the folder, in a run's, of the files of other ranks
ADAPTER = "adapter"  # the folder into which an adapter is received
_NEWS = struct.Struct("<dq?B")  # seconds of training, peak footprint, if above budget, signal

Facts = Mapping[str, str]
"""What must be the same on all workers, by what it is called in a message."""

WAYS_OUT = {
    "the BLAS": "install the same version of ondevice-tune on all machines, and set the same "
    "OPENBLAS_CORETYPE, such as Haswell",
    "the number of BLAS threads": "set the same OPENBLAS_NUM_THREADS",
    "the bundle": "copy one bundle to all machines",
}


class News(NamedTuple):
    """What all workers know after a step: rank 0's seconds, all peaks, and who must end."""

    seconds: float
    signals: Mapping[int, int]  # by rank
    over: Mapping[int, int]  # the peak footprint, by rank
    peaks: tuple[int, ...]  # the peak footprints, in rank order


class Speeds(msgspec.Struct, frozen=True):
    """Forward passes per second of each worker, on these machines in this grid, by rank."""

    hosts: tuple[str, ...]
    data: int
    perturb: int
    passes_per_s: tuple[Annotated[float, msgspec.Meta(gt=0, lt=1e12)], ...]


@dataclass
class Team:
    """The workers of a run, this one among them; alone by default.

    speeds: by which they share the work; None until they are measured.
    """

    workers: Workers = field(default_factory=Workers)
    hosts: tuple[str, ...] = ("",)
    heartbeat: Heartbeat | None = None
    speeds: Speeds | None = None
    holders: Holders | None = None  # of the slices of the weights, if these are cut

    @property
    def rank(self) -> int:
        return self.workers.exchange.rank

    @property
    def size(self) -> int:
        return self.workers.exchange.size

    @property
    def received_weight_bytes(self) -> int:
        """Bytes of weights that others have sent to this worker."""
        return 0 if self.holders is None else self.holders.received_bytes

    def named(self, rank: int) -> str:
        """A worker, for messages."""
        return f"rank {rank} on {self.hosts[rank]}"

    def agree(self, facts: Facts) -> None:
        """Return if the facts of all workers are equal.

        Raises:
            UsageError: some are not; it is raised on every worker.
        """
        if self.size == 1:
            return
        first, *others = map(json.loads, self.workers.exchange.texts(json.dumps(dict(facts))))
        for rank, theirs in enumerate(others, 1):
            require_same(first, theirs, self.named(0), self.named(rank))

    def joined(self, bundle: Bundle) -> Bundle:
        """The workers' bundle, once they have compared theirs; one that is cut, with all slices.

        Raises:
            UsageError: they differ, or the workers' slices are no whole bundle; it is raised on
                every worker.
        """
        exchange = self.workers.exchange
        if self.size == 1:
            bundle.require_whole()
            return bundle
        own = bundle.manifest.slice
        parts = [
            json.loads(text) for text in exchange.texts(json.dumps(own and [own.number, own.of]))
        ]
        if any(parts):
            self._check_slices(parts)
        self.agree(of_bundle(bundle))
        if own is None:
            return bundle
        from runtime.parallel.holders import Holders  # whole bundles need not load it
        from runtime.parallel.meeting import connect_all

        asking, asked = connect_all(exchange, self.hosts)
        slices = [Stripes(number - 1, of) for number, of in parts]
        self.holders = Holders(self.rank, slices, asking, asked)
        return replace(bundle, holders=self.holders)

    def _check_slices(self, parts: Sequence[Sequence[int] | None]) -> None:
        of = max(part[1] for part in parts if part)
        missing = [n for n in range(1, of + 1) if [n, of] not in parts]
        if missing or any(part is None or part[1] != of for part in parts):
            names = [f"slice {part[0]} of {part[1]}" if part else "a whole one" for part in parts]
            having = ", ".join(f"{name} on {self.named(at)}" for at, name in enumerate(names))
            lacking = f"slice {', '.join(map(str, missing))} of {of} is missing" if missing else ""
            raise UsageError(
                f"the workers' bundles are not all slices of one: {having}"
                f"{lacking and '; '}{lacking}; give each machine another slice, and start a "
                f"process for each of the {of} (mpirun -n {of}), or give all the whole bundle"
            )

    def compare(self, state: str, digest: str) -> None:
        """Return if the digests of all workers are equal.

        Raises:
            WorkerError: they are not; it is raised on every worker.
        """
        if self.size == 1:
            return
        digests = self.workers.exchange.texts(digest)
        for rank, theirs in enumerate(digests):
            if theirs != digests[0]:
                raise WorkerError(
                    f"the workers no longer agree: {state} have the SHA-256 {digests[0]} on "
                    f"{self.named(0)} and {theirs} on {self.named(rank)}, so one of these machines "
                    "computes otherwise",
                    differs=True,
                )

    def news(self, seconds: float, number: int | None, meter: Meter) -> News:
        """What the workers tell each other after a step."""
        over = meter.over_budget
        message = _NEWS.pack(seconds, meter.peak_bytes, over, number or 0)
        news = [_NEWS.unpack(each) for each in self.workers.exchange.all_bytes(message)]
        return News(
            news[0][0],
            {rank: signal for rank, (*_, signal) in enumerate(news) if signal},
            {rank: peak for rank, (_, peak, over, _) in enumerate(news) if over},
            tuple(peak for _, peak, *_ in news),
        )

    @property
    def news_bytes(self) -> int:
        """The news that a worker sends."""
        return 0 if self.size == 1 else _NEWS.size

    def recall(self, known: Speeds | None) -> None:
        """Share the work by earlier speeds, if they are of these machines in this grid."""
        if known is not None and known == self._of_speeds(known.passes_per_s):
            self.speeds = known
            self.workers.balance(known.passes_per_s)

    def measure(self, passes_per_s: float) -> Speeds:
        """Share the work by all workers' speeds; returns them."""
        exchange = self.workers.exchange
        self.speeds = self._of_speeds(exchange.gather([passes_per_s], [1] * exchange.size))
        self.workers.balance(self.speeds.passes_per_s)
        return self.speeds

    def _of_speeds(self, passes_per_s: Sequence[float]) -> Speeds:
        workers = self.workers
        return Speeds(self.hosts, workers.data, workers.perturb, tuple(passes_per_s))

    def where(self, rank: int) -> str:
        """ " on rank 1 on HOST", for the messages of several workers."""
        return "" if self.size == 1 else f" on {self.named(rank)}"

    def share(self, files: Mapping[str, Path | bytes]) -> None:
        """Send files of rank 0, as far as they are there, to the others, which call `receive`."""
        if self.size == 1:
            return
        exchange = self.workers.exchange
        sizes = {
            name: len(source) if isinstance(source, bytes) else source.stat().st_size
            for name, source in files.items()
            if isinstance(source, bytes) or source.exists()
        }
        exchange.broadcast(json.dumps(sizes).encode())
        for name, size in sizes.items():
            for piece in _pieces(files[name], size):
                exchange.broadcast(piece)

    @contextmanager
    def receive(self, folder: Path) -> Iterator[Path]:
        """Write what rank 0 sends into a folder of this worker's own, which is removed at the end.

        Raises:
            StorageError: it cannot be written.
        """
        exchange = self.workers.exchange
        sizes: dict[str, int] = json.loads(exchange.broadcast(b""))
        before = [parent for parent in folder.parents if not parent.exists()]
        if self.heartbeat is not None:
            self.heartbeat.clear = partial(_remove, folder, before)
        try:
            with storage_errors(folder):
                if folder.exists():  # of an earlier process that was killed
                    shutil.rmtree(folder)
                folder.mkdir(parents=True)
            for name, size in sizes.items():
                path = folder / name
                with storage_errors(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open("wb") as file:
                        while file.tell() < size:
                            file.write(exchange.broadcast(b""))
            yield folder
        finally:
            _remove(folder, before)

    def dismiss(self, problem: BaseException) -> None:
        """Tell the others that all must end, and on rank 0 wait until they have removed files."""
        if self.holders is not None:
            self.holders.stop(WorkerError(_text_of(problem)))
        if self.heartbeat is not None:
            self.heartbeat.fail(code_of(problem), _text_of(problem))

    def leave(self) -> None:
        """End the work, when the others no longer need this worker's slice of the weights."""
        if self.holders is not None:
            self.workers.exchange.texts("")
            self.holders.stop(WorkerError("all work is done"))
        assert self.heartbeat is not None
        self.heartbeat.leave()


def require_same(first: Facts, theirs: Facts, on_first: str, on_theirs: str) -> None:
    """Return if the facts of two workers are equal, which are named as messages do.

    Raises:
        UsageError: they differ.
    """
    for fact, value in first.items():
        if theirs.get(fact) != value:
            raise UsageError(
                f"the workers differ in {fact}: {value} on {on_first}, {theirs.get(fact)} on "
                f"{on_theirs}; {WAYS_OUT.get(fact, 'let all have the same')}"
            )


def adapter_files(adapter: str | Path | None) -> dict[str, Path]:
    """The files of an adapter to send, in the folder ADAPTER."""
    if adapter is None:
        return {}
    files = AdapterFiles.at(Path(adapter))
    return {f"{ADAPTER}/{path.name}": path for path in (files.weights, files.config)}


def of_bundle(bundle: Bundle) -> dict[str, str]:
    """The facts by which workers compare bundles, or the whole ones whose slices they have."""
    path = bundle.path / MANIFEST
    if bundle.manifest.slice is None:
        return {"the bundle": f"{MANIFEST} has the SHA-256 {sha256_file(path)}"}
    document = json.loads(path.read_bytes())
    del document["slice"]
    sha256 = hashlib.sha256(json.dumps(document).encode()).hexdigest()
    return {"the bundle": f"{MANIFEST} without its slice has the SHA-256 {sha256}"}


def versions() -> dict[str, str]:
    """What decides the last bits of results, besides the bundle and the options."""
    from runtime.core.version import __version__
    from runtime.machine.backend import arithmetic

    return {"ondevice's version": __version__, **arithmetic()}


def _remove(folder: Path, made: Sequence[Path]) -> None:
    """Remove a worker's own folder, and those above it that were made for it."""
    shutil.rmtree(folder, ignore_errors=True)
    for parent in dict.fromkeys((folder.parent, *made)):
        with suppress(OSError):  # another worker has files there, or has removed it
            parent.rmdir()


def _pieces(source: Path | bytes, size: int) -> Iterator[bytes]:
    if isinstance(source, bytes):
        yield from (source[at : at + PIECE_BYTES] for at in range(0, size, PIECE_BYTES))
        return
    with source.open("rb") as file:
        for at in range(0, size, PIECE_BYTES):
            yield file.read(min(PIECE_BYTES, size - at))


def code_of(problem: BaseException) -> int:
    """The exit code of a process that ends by this."""
    if isinstance(problem, OnDeviceError):
        return problem.exit_code
    return InterruptedRunError.exit_code if isinstance(problem, KeyboardInterrupt) else 1


def _text_of(problem: BaseException) -> str:
    if isinstance(problem, KeyboardInterrupt):
        return "interrupted"
    return str(problem) if isinstance(problem, OnDeviceError) else repr(problem)
