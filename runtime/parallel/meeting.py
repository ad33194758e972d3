"""How the workers of a run meet: over MPI, and by a TCP connection of each to rank 0.

Those that hold slices of the weights also connect to each other.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import Any

from runtime.core.errors import UsageError
from runtime.parallel.exchange import Exchange
from runtime.parallel.heartbeat import Heartbeat, Loss
from runtime.parallel.launch import launched

MEETING_S = 15.0  # in which all workers must have reached rank 0
ATTEMPT_S = 3.0  # for one address of rank 0
Connections = dict[int, socket.socket]
LOOPBACK, OUTSIDE = "127.0.0.1", "192.0.2.1"  # the second is no machine's


def meet(
    exchange: Exchange,
    hosts: Sequence[str],
    heard: Callable[[Loss], None],
    describe: Callable[[Loss], str],
) -> Heartbeat:
    """Connect all workers, whose machines have these names, with rank 0.

    Raises:
        UsageError: one cannot reach rank 0; it is raised on every worker.
    """
    if exchange.rank == 0:
        together = launched().here == exchange.size
        with closing(_listening(together)) as server:
            token = secrets.token_hex(16)
            addresses = [LOOPBACK] if together else _addresses(hosts)
            place = {"addresses": addresses, "port": server.getsockname()[1]}
            exchange.broadcast(json.dumps({**place, "token": token}).encode())
            peers = _accepted(server, exchange.size, token)
        problem = ""
    else:
        place = json.loads(exchange.broadcast(b""))
        connection, problem = _connected(place, exchange.rank)
        peers = {} if connection is None else {0: connection}
    _check(exchange, problem and f"rank 0 on {hosts[0]} at {problem}", hosts)
    return Heartbeat(exchange.rank, peers, heard, describe)


def connect_all(exchange: Exchange, hosts: Sequence[str]) -> tuple[Connections, Connections]:
    """Connections of each worker to each other, by rank: by which it asks, and is asked.

    Raises:
        UsageError: one cannot reach another; it is raised on every worker.
    """
    rank, together = exchange.rank, launched().here == exchange.size
    with closing(_listening(together)) as server:
        token = secrets.token_hex(16)
        addresses = [LOOPBACK] if together else _addresses([hosts[rank], *hosts])
        place = {"addresses": addresses, "port": server.getsockname()[1], "token": token}
        places = [json.loads(text) for text in exchange.texts(json.dumps(place))]
        asked: Connections = {}
        accepting = threading.Thread(
            target=lambda: asked.update(_accepted(server, exchange.size, token)), daemon=True
        )
        accepting.start()
        asking, problem = {}, ""
        for other in range(exchange.size):
            if other != rank and not problem:
                connection, why = _connected(places[other], rank)
                if connection is None:
                    problem = f"rank {other} on {hosts[other]} at {why}"
                else:
                    asking[other] = connection
        accepting.join()
    _check(exchange, problem, hosts)
    return asking, asked


def _check(exchange: Exchange, problem: str, hosts: Sequence[str]) -> None:
    """Return if no worker has a problem.

    Raises:
        UsageError: one cannot reach another; it is raised on every worker.
    """
    for rank, text in enumerate(exchange.texts(problem)):
        if text:
            raise UsageError(
                f"rank {rank} on {hosts[rank]} cannot reach {text}; the machines must resolve each "
                "other's names, and a firewall must let connections between them pass"
            )


def _listening(together: bool) -> socket.socket:
    """A server that all workers can reach; if they are together on this machine, nobody else."""
    if together:
        return socket.create_server((LOOPBACK, 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _addresses(hosts: Sequence[str]) -> list[str]:
    """By which the other machines may reach this one: its name, and its end of the way to each.

    The last is its end of the way out, since machines may share a name.
    """
    addresses = [hosts[0]]
    for host in (*sorted({*hosts} - {hosts[0]}), OUTSIDE):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((host, 9))  # sends nothing
            addresses.append(way.getsockname()[0])
    return list(dict.fromkeys(addresses))


def _accepted(server: socket.socket, size: int, token: str) -> dict[int, socket.socket]:
    """The connections of those that know the token, as far as they come in time."""
    peers: dict[int, socket.socket] = {}
    server.settimeout(MEETING_S)
    with suppress(TimeoutError):
        while len(peers) < size - 1:
            peer, _ = server.accept()
            peer.settimeout(ATTEMPT_S)
            with suppress(OSError, ValueError):
                said, _, rank = peer.recv(64, socket.MSG_WAITALL).decode().strip().partition(" ")
                if secrets.compare_digest(said, token) and 0 <= int(rank) < size:
                    peers[int(rank)] = peer
                    peer.sendall(b"+")
                    continue
            peer.close()
    return peers


def _connected(place: dict[str, Any], rank: int) -> tuple[socket.socket | None, str]:
    """This worker's connection to rank 0; else the addresses that were tried, and why in vain."""
    port, token, tried = int(place["port"]), place["token"], []
    for address in place["addresses"]:
        try:
            connection = socket.create_connection((address, port), ATTEMPT_S)
            connection.sendall(f"{token} {rank}".ljust(64).encode())
            if connection.recv(1) == b"+":
                return connection, ""
            why = "it is no worker of this run"
        except OSError as problem:
            why = problem.strerror or str(problem)
        tried.append(f"{address} port {port} ({why})")
    return None, " or ".join(tried)
