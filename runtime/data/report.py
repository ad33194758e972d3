"""The rows that were read, kept, cut and dropped when data became rows of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from runtime.core.units import counted

SHOWN = 5  # warnings that are kept in full
MOST_LOST = 50  # different parts of rows that are counted each for itself
FURTHER = "further parts that are not learnt"
STEP = 16  # tokens between lengths that are recommended
BAR = 24  # characters of the longest bar


class DataReport(msgspec.Struct, kw_only=True):
    """The counts of one file of data.

    read: rows, or rows of tokens where the file is plain text. kept: those that became rows. cut:
    kept rows that were longer than `seq_length`. dropped: rows that did not, by reason. skipped:
    rows that could not be read, which only `--skip-bad-rows` allows. held_out: rows that
    `--valid-split` gives to the other part. is_valid: whether this part is the one held out.
    formats: rows by the format they were recognised as. tokens: that are predicted in the kept
    rows. scored: those that have a loss. lengths: how many rows are so long (in tokens to predict),
    before cutting, those too that were dropped as too long. lost: rows by what of them is not
    learnt, such as a field that is not read. warnings: the first few others, with file and line.
    warned: how many there were.
    """

    source: str
    loss_on: str = "assistant"
    seq_length: int = 0
    read: int = 0
    kept: int = 0
    cut: int = 0
    held_out: int = 0
    is_valid: bool = False
    skipped: int = 0
    dropped: dict[str, int] = {}
    formats: dict[str, int] = {}
    tokens: int = 0
    scored: int = 0
    lengths: dict[int, int] = {}
    lost: dict[str, int] = {}
    warnings: list[str] = []
    warned: int = 0

    def warn(self, text: str) -> None:
        """Count a warning, and keep it if it is one of the first."""
        self.warned += 1
        if len(self.warnings) < SHOWN:
            self.warnings.append(text)

    def lose(self, *parts: str) -> None:
        """Count a row of which parts are not learnt, once for each, and once for all too many."""
        counted = set()
        for part in parts:
            is_named = part in self.lost or len(self.lost) < MOST_LOST
            name = part if is_named else FURTHER
            if name not in counted:
                self.lost[name] = self.lost.get(name, 0) + 1
            counted.add(name)

    def measure(self, length: int) -> None:
        """Count a row of so many tokens to predict."""
        self.lengths[length] = self.lengths.get(length, 0) + 1

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    @property
    def longest(self) -> int:
        """The tokens to predict in the longest row, before cutting."""
        return max(self.lengths, default=0)

    def holding(self, share: float) -> int:
        """The smallest length that holds so large a share of the rows whole."""
        wanted, held = share * sum(self.lengths.values()), 0
        for length in sorted(self.lengths):
            held += self.lengths[length]
            if held >= wanted:
                return length
        return self.longest

    def recommended(self) -> list[int]:
        """Lengths to export for: multiples of 16 that hold half, nine tenths and all rows."""
        buckets = {-(-self.holding(share) // STEP) * STEP for share in (0.5, 0.9, 1.0)}
        return sorted(buckets - {0})

    def counts(self) -> str:
        """The counts, in a line or two."""
        name = f"{self.source}, held out" if self.held_out and self.is_valid else self.source
        parts = [f"{name}: {counted(self.read, 'row')} read"]
        if self.formats:
            parts[0] += f" ({', '.join(self.formats)})"
        parts.append(f"{self.kept} kept")
        if self.cut:
            parts.append(f"{self.cut} of them cut at {self.seq_length} tokens")
        if self.held_out:
            parts.append(f"{self.held_out} {'to train on' if self.is_valid else 'held out'}")
        parts += [f"{count} dropped ({why})" for why, count in self.dropped.items()]
        if self.skipped:
            parts.append(f"{self.skipped} skipped as unreadable")
        share = 100 * self.scored / self.tokens if self.tokens else 0
        return (
            f"{', '.join(parts)}; {self.tokens} tokens, {self.scored} of them scored "
            f"({share:.0f}%, --loss-on {self.loss_on})"
        )

    def histogram(self, buckets: Sequence[int]) -> str:
        """How many rows need which of the bundle's sequence buckets, a line each."""
        edges = sorted(buckets)
        sums = dict.fromkeys([*edges, None], 0)
        for length, rows in self.lengths.items():
            edge = next((bucket for bucket in edges if length <= bucket), None)
            sums[edge] += rows
        most = max(1, *sums.values())
        lines = []
        for edge, rows in sums.items():
            name = f"longer than {edges[-1]}" if edge is None else f"up to {edge} tokens"
            if rows or edge is not None:
                bar = "#" * -(-BAR * rows // most)
                lines.append(f"  {name:<22} {rows:>8}  {bar}".rstrip())
        return "\n".join(lines)

    def warning_lines(self) -> list[str]:
        """The warnings that were kept, and how many more there were."""
        more = self.warned - len(self.warnings)
        lost = [f"{counted(rows, 'row')} with {part:.200}" for part, rows in self.lost.items()]
        return [*lost, *self.warnings, *([f"and {more} more such rows"] if more else [])]

    def describe(self, buckets: Sequence[int], lengths: bool = True) -> str:
        """All of it as text for people, with or without the histogram of lengths."""
        warned = [f"warning: {line}" for line in self.warning_lines()]
        histogram = [self.histogram(buckets)] if lengths else []
        return "\n".join([self.counts(), *histogram, *warned])
