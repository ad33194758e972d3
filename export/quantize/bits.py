"""Which matrices get 8 bits instead of 4, under a limit of added bytes.

Taken in order of the loss that they save for each byte that they add, as long as they fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """What a matrix takes and costs at 4 and at 8 bits.

    loss_4, loss_8: the loss that is expected on top of the source's, in any one unit.
    """

    name: str
    bytes_4: int
    bytes_8: int
    loss_4: float
    loss_8: float

    @property
    def added_bytes(self) -> int:
        """What 8 bits take more than 4."""
        return self.bytes_8 - self.bytes_4

    @property
    def saved_loss(self) -> float:
        """What 8 bits lose less than 4."""
        return self.loss_4 - self.loss_8


@dataclass(frozen=True)
class Choice:
    """The bits of a matrix, and why, in words for the manifest."""

    bits: int
    reason: str


def choose_bits(candidates: Sequence[Candidate], limit_bytes: int) -> dict[str, Choice]:
    """Each matrix's bits, by name, so that at most `limit_bytes` are added to 4 bits everywhere.

    The choice depends on the candidates' numbers and names, and not on their order.
    """
    ranked = sorted(candidates, key=lambda c: (-c.saved_loss / max(1, c.added_bytes), c.name))
    choices: dict[str, Choice] = {}
    left = limit_bytes
    for rank, one in enumerate(ranked, start=1):
        saves = (
            f"8 bits save {one.saved_loss:.3g} of loss for {one.added_bytes} bytes, "
            f"rank {rank} of {len(ranked)}"
        )
        if one.saved_loss <= 0:
            reason = f"8 bits save no loss ({one.loss_8:.3g}, with 4 bits {one.loss_4:.3g})"
            choices[one.name] = Choice(4, reason)
        elif one.added_bytes <= left:
            choices[one.name] = Choice(8, saves)
            left -= one.added_bytes
        else:
            choices[one.name] = Choice(4, f"{saves}; {left} bytes of the limit were left")
    return {one.name: choices[one.name] for one in candidates}
