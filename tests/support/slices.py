"""Bundles that are cut into slices, whose holders are in this process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from runtime.bundle.store import Bundle, write_slices
from runtime.core.errors import WorkerError
from runtime.core.stripes import Stripes
from runtime.parallel.holders import Holders
from runtime.storage.weights import Weights


@contextmanager
def held(
    bundle: Bundle, folder: Path, holding: list[int], opened: bool = True
) -> Iterator[list[Bundle]]:
    """The bundle as each worker has it: a slice, whose numbers in rank order are `holding`.

    Each sends its slice once it has opened its weights.
    """
    slices = write_slices(bundle, max(holding), folder)
    ranks = range(len(holding))
    pairs = {(a, b): socket.socketpair() for a in ranks for b in ranks if a != b}
    parts = [Stripes(number - 1, len(slices)) for number in holding]
    with ExitStack() as end:
        bundles = []
        for rank, number in enumerate(holding):
            asking = {b: ends[0] for (a, b), ends in pairs.items() if a == rank}
            asked = {a: ends[1] for (a, b), ends in pairs.items() if b == rank}
            holders = Holders(rank, parts, asking, asked)
            end.callback(holders.stop, WorkerError("the test has ended"))
            bundles.append(
                replace(
                    bundle,
                    path=slices[number - 1].path,
                    manifest=slices[number - 1].manifest,
                    holders=holders,
                )
            )
        if opened:
            for each in bundles:
                Weights(each)
        yield bundles
