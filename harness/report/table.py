"""A table of cells, as aligned text and as HTML; both show the same cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.core.control_characters import in_markup


@dataclass(frozen=True)
class Table:
    """Cells under a heading; the first `left` columns are words, the others numbers."""

    title: str
    rows: Sequence[tuple[str, ...]]
    left: int

    def text(self) -> str:
        """Aligned columns."""
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if index < self.left else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in self.rows
        ]
        return "\n".join([f"{self.title}:", *lines])

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
