"""Who is still there: workers tell rank 0 every second that they live, and rank 0 tells them.

MPI's calls wait without an end for a worker that is gone. So each worker is also connected to rank
0 by TCP, on a thread of its own. A worker whose connection closes, or that is silent for
SILENT_BEATS, is lost; one that fails says why. Rank 0 tells all others of either.

After that every process ends: rank 0 first, once it has saved what it can and shown the message,
since `mpirun` kills all others when a process ends with an error. Rank 0 also shows at once that a
process is gone: `mpirun` kills it, too, 2 s later, and on a busy machine it has saved nothing then.
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from runtime.core.control_characters import shown
from runtime.parallel.watch import leave_launcher

BEAT_S, SILENT_BEATS = 1.0, 10
SILENCE_S = BEAT_S * SILENT_BEATS
WENT_ON_S = 5.0  # after a pause, in which the process has just gone on
LONGEST_END_S = 10.0  # in which rank 0 must come to the end of what it computes
LONGEST_CLEARING_S = 5.0  # in which the others must remove their files
HEAD = struct.Struct("<cBHI")  # kind, exit code, rank, bytes of the text that follows
ALIVE, FAILED, LEFT = b".", b"!", b"-"


class Loss(NamedTuple):
    """A worker that has failed or is gone, the exit code of all, and what it said, or why."""

    rank: int
    code: int
    text: str


class Heartbeat:
    """The connections of this worker: on rank 0 to all others, else to rank 0.

    heard: receives the first loss, on a thread of its own. describe: the message for it. clear:
    removes this worker's own files, when it ends with an error. unreachable: one was silent.
    """

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, socket.socket],
        heard: Callable[[Loss], None],
        describe: Callable[[Loss], str],
    ) -> None:
        self.loss: Loss | None = None
        self.unreachable = False
        self.clear: Callable[[], None] = lambda: None
        self._rank, self._heard, self._describe = rank, heard, describe
        self._peers = dict(peers)
        self._buffers = dict.fromkeys(peers, b"")
        self._silent = dict.fromkeys(peers, 0)
        self._beaten, self._went_on = time.monotonic(), -math.inf
        self._lock = threading.Lock()  # one message at a time, whole
        self._left: set[int] = set()  # those that have removed their files, or done their work
        self._closed = False
        self._noticed = False  # rank 0's main thread knows of the loss, and ends its work
        self._cleared = threading.Event()  # all others are in `_left`, or gone
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def leave(self) -> None:
        """Say that this worker has done all its work."""
        self._closed = True
        self._send(LEFT)

    def fail(self, code: int, text: str) -> None:
        """Tell the others, unless they know, that all must end; on rank 0 wait for their files."""
        self.notice()
        if self.loss is None:
            self.loss = Loss(self._rank, code, text)
            self._send(FAILED, self.loss)
        if self._rank == 0 and self._peers:
            self._cleared.wait(LONGEST_CLEARING_S)

    def notice(self) -> None:
        """Let rank 0 take its time to end its work, now that its main thread knows of a loss."""
        self._noticed = True

    def was_stopped(self) -> bool:
        """Whether this process has just gone on after a signal had stopped it.

        The beat may go on before the main thread asks.
        """
        now = time.monotonic()
        return now - self._beaten > 2 * BEAT_S or now - self._went_on < WENT_ON_S

    def wait_for_end(self) -> None:
        """Wait until rank 0 has ended, which ends this process."""
        self._clear()
        while True:
            time.sleep(BEAT_S)

    def _beat(self) -> None:
        try:
            self._listen()
        except Exception as problem:  # a fault of this file must not leave the others waiting
            self._lose(Loss(self._rank, 1, f"its heartbeat failed: {problem!r}"))

    def _listen(self) -> None:
        due, lost_at = time.monotonic(), 0.0
        while not self._closed:
            left = max(0.0, due - time.monotonic())
            ready, _, _ = select.select(list(self._peers.values()), [], [], left)
            for peer in [peer for peer, its in self._peers.items() if its in ready]:
                self._read(peer)
            if time.monotonic() < due:
                continue
            self._count_pause()
            due = self._beaten + BEAT_S  # not += : a pause of this process is one beat
            self._send(ALIVE)
            self._count_silence()
            if self.loss is not None and self._rank == 0:
                lost_at = lost_at or time.monotonic()
                if not self._noticed and time.monotonic() - lost_at > LONGEST_END_S:
                    self._end(shown=True)

    def _count_pause(self) -> None:
        before, self._beaten = self._beaten, time.monotonic()
        if self._beaten - before > 2 * BEAT_S:
            self._went_on = self._beaten

    def _count_silence(self) -> None:
        for peer in set(self._peers) - self._left:
            self._silent[peer] += 1
            if self._silent[peer] > SILENT_BEATS:
                self.unreachable = True
                self._lose(Loss(peer, 1, f"nothing was heard of it for {SILENCE_S:.0f} s"))
                self._leaves(peer)
                if peer == 0:
                    self._end(shown=True)

    def _read(self, peer: int) -> None:
        try:
            data = self._peers[peer].recv(1 << 16)
        except OSError:  # reset, as when the process was killed
            data = b""
        if not data:
            self._gone(peer)
            return
        self._silent[peer] = 0
        buffer = self._buffers[peer] + data
        while len(buffer) >= HEAD.size:
            kind, code, rank, length = HEAD.unpack_from(buffer)
            if len(buffer) < HEAD.size + length:
                break
            text = buffer[HEAD.size : HEAD.size + length].decode()
            buffer = buffer[HEAD.size + length :]
            if kind == FAILED:
                self._lose(Loss(rank, code, text))
            elif kind == LEFT:
                self._leaves(peer)
        self._buffers[peer] = buffer

    def _gone(self, peer: int) -> None:
        """A worker is no longer connected."""
        self._peers.pop(peer).close()
        expected = peer in self._left or self._closed
        self._leaves(peer)
        if expected:
            return
        untold = self.loss is None
        self._lose(Loss(peer, 1, "its process has ended, or its connection was cut"))
        if peer == 0:
            self._end(shown=untold)
        elif untold and self._rank == 0:
            self._say("this run ends")

    def _leaves(self, peer: int) -> None:
        self._left.add(peer)
        if self._left >= set(self._peers):
            self._cleared.set()
            self._closed = self.loss is None  # all have done their work

    def _lose(self, loss: Loss) -> None:
        """Stop the work because of a loss, and pass it on."""
        if self.loss is not None:
            return
        self.loss = loss
        if 0 in (self._rank, loss.rank):  # a stopped rank 0 may go on, and should know why
            self._send(FAILED, loss)
        if self._rank:
            self._clear()
        self._heard(loss)

    def _clear(self) -> None:
        """Remove this worker's files, and say so."""
        self.clear()
        self._send(LEFT)

    def _end(self, shown: bool) -> None:
        """End this process, whose main thread may wait or compute for long."""
        assert self.loss is not None
        self.clear()
        if shown:
            self._say("what was saved is whole")
        if self._rank == 0 and self.unreachable:
            leave_launcher()
        os._exit(self.loss.code)

    def _say(self, more: str) -> None:
        """Show the loss, at once where `mpirun` may kill this process before its work has ended."""
        assert self.loss is not None
        said = shown(f"ondevice: {self._describe(self.loss)}; {more}", sys.stderr)
        print(said, file=sys.stderr, flush=True)

    def _send(self, kind: bytes, loss: Loss | None = None) -> None:
        text = b"" if loss is None else loss.text.encode()
        head = HEAD.pack(kind, loss.code if loss else 0, loss.rank if loss else 0, len(text))
        with self._lock:
            for its in list(self._peers.values()):
                with suppress(OSError):  # reading from it tells that it is gone
                    its.sendall(head + text)
