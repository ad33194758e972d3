"""A simulation of equal machines that train together: arithmetic on the measured times of one.

The times of a machine are measured; the networks are assumed (`Assumptions`). Machines do not
disturb each other, and none is slower than the others. What a machine repeats whatever its share
is (reading and dequantizing weights, drawing noise, the update) is not divided.

Invariant: nothing here is measured, and whoever shows it says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal


@dataclass(frozen=True)
class Network:
    """What carries messages between machines.

    latency_s: from one machine's program to the other's. bytes_per_s: of one direction of a link.
    message_s: the least time that a message occupies the medium.
    shape: "ring": a machine has links to two neighbours; "switch": all pairs talk at once, in both
    directions; "shared": one machine sends at a time.
    """

    name: str
    latency_s: float
    bytes_per_s: float
    message_s: float
    shape: Literal["ring", "switch", "shared"]

    def round_s(self, machines: int, message_bytes: float) -> float:
        """Every machine sends one message, and receives one."""
        in_turn = machines if self.shape == "shared" else 1
        return self.latency_s + in_turn * (self.message_s + message_bytes / self.bytes_per_s)

    def gather_s(self, machines: int, message_bytes: float) -> float:
        """Every machine has every machine's message.

        Along a ring each message goes from neighbour to neighbour; elsewhere in every round a
        machine sends all that it has, and has twice as much afterwards.
        """
        if self.shape == "ring":
            return (machines - 1) * self.round_s(machines, message_bytes)
        rounds = range(math.ceil(math.log2(machines)))
        known = [min(1 << number, machines - (1 << number)) for number in rounds]
        return sum(self.round_s(machines, count * message_bytes) for count in known)

    def sum_s(self, machines: int, size_bytes: float) -> float:
        """Every machine has the sum of all machines' arrays: the faster of two ways.

        In parts, which go around twice; or whole, in rounds that add up pairs.
        """
        if machines == 1:
            return 0.0
        in_parts = 2 * (machines - 1) * self.round_s(machines, size_bytes / machines)
        if self.shape == "ring":
            return in_parts
        rounds = math.ceil(math.log2(machines))
        return min(in_parts, rounds * self.round_s(machines, size_bytes))


NETWORKS = (
    Network("no network", 0.0, 1e18, 0.0, "switch"),  # what the compute alone allows
    Network("Thunderbolt", 300e-6, 2.5e9, 0.0, "ring"),
    Network("10 Gbit Ethernet", 50e-6, 1.17e9, 0.0, "switch"),
    Network("1 Gbit Ethernet", 100e-6, 117e6, 0.0, "switch"),
    Network("Wi-Fi", 2e-3, 25e6, 300e-6, "shared"),
)
ASSUMED = (
    "Thunderbolt: TCP/IP over cables in a ring, 0.3 ms and 20 Gbit/s; Ethernet: a switch, 0.05 ms "
    "and 9.4 Gbit/s, 0.1 ms and 0.94 Gbit/s; Wi-Fi: one access point for all, 2 ms, 200 Mbit/s for "
    "all together, and 0.3 ms of the air for each message"
)


@dataclass(frozen=True)
class Assumptions:
    """What the simulation assumes: the networks, the batches, and the bytes of a message.

    rows, points: of a step whose rows are many, as MeZO's, with two points.
    few_rows, many_points: of a step whose points are many.
    pays: the efficiency below which further machines do not pay.
    """

    networks: tuple[Network, ...] = NETWORKS
    machines: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    rows: int = 64
    points: int = 2
    few_rows: int = 2
    many_points: int = 64
    loss_bytes: int = 16  # of every row at a point: its loss, and what it adds to the objective
    gradient_bytes: int = 4  # of every LoRA parameter
    news_bytes: int = 18  # that every machine tells all others after a step
    pays: float = 0.5


@dataclass(frozen=True)
class Line:
    """Seconds that grow with a number: `fixed_s` + number x `each_s`."""

    fixed_s: float = 0.0
    each_s: float = 0.0

    def __call__(self, number: float) -> float:
        return self.fixed_s + number * self.each_s


def line_through(first: tuple[float, float], second: tuple[float, float]) -> Line:
    """The line through two measurements (number, seconds), with neither part below zero."""
    (a, a_s), (b, b_s) = first, second
    each = (b_s - a_s) / (b - a)
    if each < 0:
        return Line((a_s + b_s) / 2)
    fixed = a_s - a * each
    return Line(fixed, each) if fixed > 0 else Line(0.0, b_s / b)


@dataclass(frozen=True)
class Times:
    """One machine's seconds for the parts of a step, each for one layer but for the head.

    The numbers of `forward` and `head` are hidden states: rows, times the points at which a
    zeroth-order method evaluates them. `backward` is zero for such methods.
    head: with the embedding. update_s: with the noise that a zeroth-order method draws.
    parameters: of a layer's adapters.
    """

    layers: int
    forward: Line
    head: Line
    update_s: float
    parameters: int
    backward: Line = field(default_factory=Line)


def zeroth_order_s(
    times: Times,
    assumed: Assumptions,
    network: Network,
    rows: int,
    points: int,
    data: int = 1,
    perturb: int = 1,
) -> float:
    """Seconds of a step whose rows are divided by `data`, and whose points by `perturb`.

    At its end every machine has the loss of each row at each point.
    """
    states = math.ceil(rows / data) * math.ceil(points / perturb)
    compute = times.layers * (times.forward(states) + times.update_s) + times.head(states)
    machines = data * perturb
    messages = messages_bytes(assumed, states)
    return compute + sum(network.gather_s(machines, message) for message in messages)


def messages_bytes(assumed: Assumptions, states: int) -> tuple[int, int]:
    """The bytes that a machine with so many hidden states sends in a step, and after it."""
    return assumed.loss_bytes * states, assumed.news_bytes


def backprop_s(
    times: Times, assumed: Assumptions, network: Network, rows: int, data: int = 1
) -> float:
    """Seconds of a step of MeBP whose rows are divided by `data`.

    A layer's gradients are summed while the layers before it run backward; sums wait for each
    other, and the last layer's update for its sum.
    """
    own = math.ceil(rows / data)
    now = times.layers * times.forward(own) + times.head(own)
    summed = now
    each = network.sum_s(data, assumed.gradient_bytes * times.parameters)
    for _ in range(times.layers):
        now += times.backward(own)
        summed = max(now, summed) + each
    ended = max(now + times.layers * times.update_s, summed + times.update_s)
    return ended + network.gather_s(data, assumed.news_bytes)


@dataclass(frozen=True)
class Way:
    """A way to share the work: how long a step takes on a network, by the number of machines.

    most: the machines that it can employ.
    """

    name: str
    most: int
    step_s: Callable[[Network, int], float]


def ways(mezo: Times, mebp: Times, assumed: Assumptions) -> list[Way]:
    """PertP, DDP and both for MeZO, PertP for many points, and DDP for MeBP."""
    many = (assumed.rows, assumed.points)
    few = (assumed.few_rows, assumed.many_points)

    def shared(
        batch: tuple[int, int], split: Callable[[int], tuple[int, int]], network: Network, n: int
    ) -> float:
        return zeroth_order_s(mezo, assumed, network, *batch, *split(n))

    def both(machines: int) -> tuple[int, int]:
        perturb = min(machines, assumed.points)
        return machines // perturb, perturb

    return [
        Way("PertP", assumed.points, partial(shared, many, lambda n: (1, n))),
        Way("DDP", assumed.rows, partial(shared, many, lambda n: (n, 1))),
        Way("2D", assumed.rows * assumed.points, partial(shared, many, both)),
        Way("PertP, many points", assumed.many_points, partial(shared, few, lambda n: (1, n))),
        Way(
            "MeBP, DDP",
            assumed.rows,
            lambda network, n: backprop_s(mebp, assumed, network, assumed.rows, n),
        ),
    ]


def simulate(mezo: Times, mebp: Times, assumed: Assumptions) -> Iterator[dict[str, Any]]:
    """For each way, network and number of machines: seconds, speed-up and efficiency."""
    for way in ways(mezo, mebp, assumed):
        for network in assumed.networks:
            alone = way.step_s(network, 1)
            for machines in assumed.machines:
                if machines > way.most:
                    continue
                step_s = way.step_s(network, machines)
                yield {
                    "way": way.name,
                    "network": network.name,
                    "machines": machines,
                    "step_s": step_s,
                    "speedup": alone / step_s,
                    "efficiency": alone / step_s / machines,
                }


def sliced_bytes(weight_bytes: int, machines: int, passes: int) -> float:
    """Bytes of weights that a machine which keeps 1/n of them would receive in a step."""
    return passes * weight_bytes * (machines - 1) / machines
