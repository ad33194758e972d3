"""Machines as network namespaces of this one, between which a relay carries every packet.

Each has a TUN device, whose other ends the relay holds: it delays packets, loses some, and drops
all of a machine that is cut off. The kernel's own TCP sends again what was lost. Needs root.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType

import numpy as np

_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x0001 | 0x1000
_HOSTS = Path("/etc/netns")  # whose files `ip netns exec` puts in place of those in /etc
_SUBNET = "10.77.0"
_LARGEST = 1 << 16  # bytes of a packet
AGENT = """#!/bin/sh
# in place of ssh: run a command in the namespace of a machine, under its name
host=$1
shift
exec ip netns exec "PREFIX$host" unshare --uts sh -c "hostname $host; $*"
"""


class Network:
    """Machines node0, node1, … for the time of a context.

    delay_s: of a packet, one way. loss: the share of packets that are lost.
    """

    def __init__(self, machines: int, delay_s: float, loss: float, folder: Path, seed: int) -> None:
        self.hosts = [f"node{number}" for number in range(machines)]
        self.delay_s, self.loss = delay_s, loss
        self.prefix = f"faults-{os.getpid()}-"  # of the namespaces
        self.agent = folder / "agent"
        self.cut: set[int] = set()  # machines whose packets are dropped
        self.carried = self.lost = 0  # packets
        self._rng = np.random.default_rng(seed)
        self._tuns: list[int] = []
        self._closed = False
        self._relay = threading.Thread(target=self._carry, name="relay", daemon=True)

    def __enter__(self) -> Network:
        self.agent.write_text(AGENT.replace("PREFIX", self.prefix))
        self.agent.chmod(0o755)
        try:
            for number, host in enumerate(self.hosts):
                self._add(number, host)
        except BaseException:
            self._remove()
            raise
        self._relay.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed = True
        self._relay.join()
        self._remove()

    def at(self, host: str, *words: str) -> list[str]:
        """A command as a machine's own."""
        named = f'hostname {host} && exec "$@"'
        return [
            "ip",
            "netns",
            "exec",
            self.prefix + host,
            "unshare",
            "--uts",
            "sh",
            "-c",
            named,
            host,
            *words,
        ]

    def _add(self, number: int, host: str) -> None:
        space = self.prefix + host
        _run("ip", "netns", "add", space)
        (_HOSTS / space).mkdir(parents=True)
        lines = [f"{_SUBNET}.{n + 1} {name}" for n, name in enumerate(self.hosts)]
        (_HOSTS / space / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        self._tuns.append(tun)
        name = f"f{os.getpid()}-{number}"
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH", name.encode(), _TUN_WITHOUT_HEADER))
        _run("ip", "link", "set", name, "netns", space, "name", "eth0")
        for words in (
            ("addr", "add", f"{_SUBNET}.{number + 1}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            _run("ip", "-n", space, *words)

    def _remove(self) -> None:
        for tun in self._tuns:
            os.close(tun)
        for host in self.hosts:
            subprocess.run(
                ["ip", "netns", "del", self.prefix + host], check=False, capture_output=True
            )
            shutil.rmtree(_HOSTS / (self.prefix + host), ignore_errors=True)

    def _carry(self) -> None:
        due: list[tuple[float, int, int, bytes]] = []  # when, in which order, to which machine
        while not self._closed:
            wait = min(0.1, max(0.0, due[0][0] - time.monotonic())) if due else 0.1
            ready, _, _ = select.select(self._tuns, [], [], wait)
            for tun in ready:
                source, packet = self._tuns.index(tun), os.read(tun, _LARGEST)
                if (target := self._target(packet)) is None:
                    continue
                self.carried += 1
                if {source, target} & self.cut or self._rng.random() < self.loss:
                    self.lost += 1
                    continue
                when = time.monotonic() + self.delay_s
                heapq.heappush(due, (when, self.carried, target, packet))
            while due and due[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(due)
                if target not in self.cut:
                    os.write(self._tuns[target], packet)

    def _target(self, packet: bytes) -> int | None:
        """The machine to which a packet of IPv4 goes; None for any other packet."""
        if packet[0] >> 4 != 4:
            return None
        number = packet[19] - 1
        return number if 0 <= number < len(self.hosts) else None


def _run(*words: str) -> None:
    subprocess.run(words, check=True)
