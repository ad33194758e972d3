"""What a thread has of its own while compiled code attends: sizes alone, for the plan too."""

from __future__ import annotations

BLOCK = 64  # queries of a part
TILE = 64  # keys at a time
PANEL = 64  # columns of the widest panel, of which rows have whole ones
SLACK = 16 * PANEL  # past the last panel, which a transposed square may reach


def scratch_sections(width: int, value_width: int, backward: bool) -> dict[str, int]:
    """Float32 values of each part of a thread's scratch, for heads of these widths."""
    row, value_row = (-(-n // PANEL) * PANEL for n in (width, value_width))
    scores = BLOCK * TILE
    sections = {
        "keys_across": TILE * row + SLACK,
        "scores": scores,
        "product": BLOCK * max(row, value_row),
        "factors": BLOCK,
        "sums": BLOCK,
    }
    if not backward:
        return sections | {"values": TILE * value_row}
    return sections | {
        "values_across": TILE * value_row + SLACK,
        "keys": TILE * row,
        "queries": BLOCK * row,
        "d_rows": BLOCK * value_row,
        "d_scores": scores,
        "d_keys": TILE * row,
        "d_values": TILE * value_row,
    }


def scratch_values(width: int, value_width: int, backward: bool) -> int:
    """Float32 values of a thread's whole scratch."""
    return sum(scratch_sections(width, value_width, backward).values())
