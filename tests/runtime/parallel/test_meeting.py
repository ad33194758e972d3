"""Workers reach rank 0 by one of its addresses, if they know the run's token; losses are heard."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from support.forks import ROOT
from support.runs import python

from runtime.parallel.heartbeat import FAILED, HEAD, LEFT, Heartbeat, Loss
from runtime.parallel.meeting import LOOPBACK, _accepted, _connected, _listening

TOKEN = "ab" * 16


def test_a_worker_without_the_token_is_refused() -> None:
    with closing(_listening(together=True)) as server, ThreadPoolExecutor(1) as other:
        port = server.getsockname()[1]
        place: dict[str, Any] = {"addresses": ["nowhere.invalid", LOOPBACK], "port": port}
        accepted = other.submit(_accepted, server, 3, TOKEN)
        refused, why = _connected({**place, "token": "cd" * 16}, 1)
        assert refused is None and f"{LOOPBACK} port {port} (it is no worker of this run)" in why
        connections = [_connected({**place, "token": TOKEN}, rank)[0] for rank in (2, 1)]
        peers = accepted.result()
        assert sorted(peers) == [1, 2]
        for connection in (*connections, *peers.values()):
            assert connection is not None
            connection.close()


def test_rank_0_hears_of_a_failure_and_of_a_lost_connection() -> None:
    """Of the second it also tells at once."""
    said: SimpleQueue[str] = SimpleQueue()

    def describe(loss: Loss) -> str:
        said.put(loss.text)
        return loss.text

    for fails in (True, False):
        ours, theirs = socket.socketpair()
        heard: SimpleQueue[Loss] = SimpleQueue()
        first = Heartbeat(0, {1: ours}, heard.put, describe)
        if fails:
            text = b"the disk is full"
            theirs.sendall(HEAD.pack(FAILED, 5, 1, len(text)) + text + HEAD.pack(LEFT, 0, 0, 0))
            assert heard.get() == Loss(1, 5, "the disk is full")
            assert said.empty()
        else:
            theirs.close()
            loss = heard.get()
            assert (loss.rank, loss.code) == (1, 1) and "its process has ended" in loss.text
            assert said.get() == loss.text
        first.fail(1, "what is known is not said again")
        assert first.loss is not None and first.loss.rank == 1


def test_a_pause_is_known_after_the_next_beat() -> None:
    ours, theirs = socket.socketpair()
    paused = Heartbeat(0, {1: ours}, lambda loss: None, str)
    assert not paused.was_stopped()
    paused._beaten -= 3.0  # as if nothing had run for so long
    paused._count_pause()
    assert paused.was_stopped()
    paused._went_on -= 5.0
    assert not paused.was_stopped()
    theirs.close()


WAITS = """
import sys, time
from runtime.parallel import watch

watch.START_S, watch.END_S, begin_s, end_s = map(float, sys.argv[1:])
with watch.in_time():
    time.sleep(begin_s)
print("all are there", flush=True)
watch.watch_end()
time.sleep(end_s)
"""


def test_nobody_waits_without_an_end_for_the_others() -> None:
    fine = python(WAITS, 60, 60, 0, 0)
    assert (fine.returncode, fine.stdout) == (0, "all are there\n"), fine.stderr
    for given, said in (((0.1, 60, 60, 0), "begin: one"), ((60, 0.1, 0, 60), "end: one")):
        late = python(WAITS, *given)
        assert late.returncode == -signal.SIGKILL
        assert "rank 0 on " in late.stderr and f"the other processes to {said}" in late.stderr
    silent = ("sh", "-c", 'exec "$0" -c "$1" 0.1 60 60 0 2>&-', sys.executable, WAITS)
    unheard = subprocess.run(silent, cwd=ROOT, stdout=subprocess.PIPE)
    assert (unheard.returncode, unheard.stdout) == (-signal.SIGKILL, b"")


STOPPED = """
import os, signal
from runtime.parallel.watch import watch

forked, fork = [], os.fork
os.fork = lambda: forked.append(fork()) or forked[-1]
end = watch(60, "begin")
os.kill(forked[0], signal.SIGSTOP)
end()
print("it goes on")
"""


def test_a_child_that_keeps_the_time_and_is_stopped_holds_nobody() -> None:
    ended = python(STOPPED)
    assert (ended.returncode, ended.stdout) == (0, "it goes on\n"), ended.stderr


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
def test_an_mpirun_that_waits_for_a_lost_machine_is_ended(tmp_path: Path) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text('#!/bin/sh\n"$@"\nexec sleep "$SLEEP"\n')
    mpirun.chmod(0o755)
    code = "from runtime.parallel.watch import leave_launcher as leave; leave({})"
    for patience_s, seconds in ((0.1, "60"), (60, "0")):
        ended = subprocess.run(
            [mpirun, sys.executable, "-c", code.format(patience_s)],
            cwd=ROOT,
            env={**os.environ, "SLEEP": seconds},
        )
        assert ended.returncode == (-signal.SIGKILL if patience_s < 1 else 0)


def test_a_worker_that_leaves_is_no_loss() -> None:
    ours, theirs = socket.socketpair()
    heard: SimpleQueue[Loss] = SimpleQueue()
    first = Heartbeat(0, {1: ours}, heard.put, str)
    Heartbeat(1, {0: theirs}, heard.put, str).leave()
    first._cleared.wait()
    assert heard.empty() and first.loss is None
