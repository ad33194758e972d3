"""What an export asks of the runtime, as protocols: neither imports the other.

`ondevice.cli` hands the runtime's implementation (`runtime.run.export_engine`) to the export.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ondevice.bundle.quality import Quality
from ondevice.bundle.store import Bundle
from ondevice.config.shared import DataOptions
from ondevice.row_reader import RowReader

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    F32 = npt.NDArray[np.float32]
    Tokens = npt.NDArray[np.int32]
    Positions = npt.NDArray[np.int64]


Visit = Callable[[str, "F32", "F32"], None]
Progress = Callable[[str, int, int], None]  # (what is done, how much of it, of how much)


@dataclass(frozen=True)
class TokenRow:
    """A row of tokens (T + 1,): the first T are inputs, the last T targets.

    `scored` (N,) holds the positions of the inputs whose targets have a loss, in increasing order.
    """

    tokens: Tokens
    scored: Positions


class Products(Protocol):
    """Products of one input with one or several matrices, which are about to be computed."""

    @property
    def names(self) -> tuple[str, ...]:
        """The matrices, by full name."""

    def inputs(self) -> Iterator[F32]:
        """The input (T, C) of every row, without padding. Read it at once: memory is reused."""


class BlockPass(Protocol):
    """One forward pass of rows through all blocks, which stops before the products of a block."""

    def embed(self) -> None:
        """Run the first block."""

    def layer(self, index: int) -> Iterator[Products]:
        """Run the layer at `index` in the manifest's blocks, stopping before every product.

        The matrices are read after the caller has gone on, so that the caller may replace them.
        """

    def head(self) -> Products:
        """What the head is about to multiply."""


class Engine(Protocol):
    """Runs models block by block under the memory budget of an export."""

    @property
    def scratch(self) -> Path:
        """A folder for scratch files."""

    def rows(
        self, bundle: Bundle, data: str, length: int, tokens: int, options: DataOptions | None
    ) -> Sequence[TokenRow]:
        """Rows of `data`, spread evenly over it, with about `tokens` tokens in all.

        A row has at most `length` targets. Says what was read; without options the data are text
        of ours, and nothing is said.

        Raises:
            DataError: the data cannot be used.
        """

    def open(
        self, source: Bundle, reader: RowReader, rows: Sequence[TokenRow], spare_bytes: int
    ) -> BlockPass:
        """A pass of rows through a model whose weights `reader` gives.

        It leaves `spare_bytes` of the budget to the caller.

        Raises:
            BudgetError: not even the smallest tiles fit the budget.
        """

    def backward(
        self, source: Bundle, reader: RowReader, rows: Sequence[TokenRow], visit: Visit
    ) -> None:
        """Compute the gradients of each row's summed loss, block by block from the last.

        `visit` receives, for one row after another of a block, a matrix by its full name, its input
        x (T, C), and the gradient dy (T, R) of its output.

        Raises:
            BudgetError: not even the smallest tiles fit the budget.
        """

    def compare(
        self,
        source: Bundle,
        reader: RowReader,
        model: Bundle,
        rows: Sequence[TokenRow],
        text: str,
    ) -> Quality:
        """Compare a bundle's predictions with those of its source, on rows of `text`.

        Raises:
            BudgetError: not even the smallest tiles fit the budget.
            BundleError: the predictions of one of them are not finite.
        """

    def note(self, text: str) -> None:
        """Say something to the user."""

    def check(self, doing: str) -> None:
        """Raise BudgetError if the process has exceeded the budget; `doing` says when."""
