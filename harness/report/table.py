"""A table of cells, as aligned text and as HTML; both show the same cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.core.control_characters import in_markup

COLUMNS = 80  # of a line of text


@dataclass(frozen=True)
class Table:
    """Cells under a heading; the first `left` columns are words, the others numbers.

    As text, columns for which a line has no room follow below, beside the first one again.
    """

    title: str
    rows: Sequence[tuple[str, ...]]
    left: int

    def text(self) -> str:
        """Aligned columns."""
        columns = [
            [cell.ljust(width) if index < self.left else cell.rjust(width) for cell in column]
            for index, column in enumerate(zip(*self.rows, strict=True))
            for width in [max(map(len, column))]
        ]
        first, *others = columns
        parts, room = [[first]], COLUMNS - len(first[0])
        for column in others:
            room -= len(column[0]) + 2
            if room < 0 and len(parts[-1]) > 1:
                parts.append([first])
                room = COLUMNS - len(first[0]) - len(column[0]) - 2
            parts[-1].append(column)
        lines = [("  ".join(row).rstrip() for row in zip(*part, strict=True)) for part in parts]
        return "\n".join([f"{self.title}:", "\n\n".join(map("\n".join, lines))])

    def html(self) -> str:
        """A <table> under its heading."""

        def line(row: tuple[str, ...], tag: str) -> str:
            words = f'{tag} class="left"'
            cells = [
                f"<{words if index < self.left else tag}>{in_markup(cell)}</{tag}>"
                for index, cell in enumerate(row)
            ]
            return f"<tr>{''.join(cells)}</tr>"

        head, *body = self.rows
        return (
            f"<h2>{in_markup(self.title)}</h2>\n"
            f'<div class="wide"><table>\n<thead>{line(head, "th")}</thead>\n<tbody>\n'
            + "\n".join(line(row, "td") for row in body)
            + "\n</tbody></table></div>"
        )
