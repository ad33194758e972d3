"""Workers reach rank 0 by one of its addresses, if they know the run's token; losses are heard."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from queue import SimpleQueue
from typing import Any

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
    for fails in (True, False):
        ours, theirs = socket.socketpair()
        heard: SimpleQueue[Loss] = SimpleQueue()
        first = Heartbeat(0, {1: ours}, heard.put, str)
        if fails:
            text = b"the disk is full"
            theirs.sendall(HEAD.pack(FAILED, 5, 1, len(text)) + text + HEAD.pack(LEFT, 0, 0, 0))
            assert heard.get() == Loss(1, 5, "the disk is full")
        else:
            theirs.close()
            loss = heard.get()
            assert (loss.rank, loss.code) == (1, 1) and "its process has ended" in loss.text
        first.fail(1, "what is known is not said again")
        assert first.loss is not None and first.loss.rank == 1


def test_a_worker_that_leaves_is_no_loss() -> None:
    ours, theirs = socket.socketpair()
    heard: SimpleQueue[Loss] = SimpleQueue()
    first = Heartbeat(0, {1: ours}, heard.put, str)
    Heartbeat(1, {0: theirs}, heard.put, str).leave()
    first._cleared.wait()
    assert heard.empty() and first.loss is None
