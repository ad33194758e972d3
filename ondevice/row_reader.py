"""The interface of anything that reads tensors by rows, such as a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # the core imports no NumPy
    import numpy as np
    import numpy.typing as npt


class RowReader(Protocol):
    """Named tensors of one or two dimensions, read as float32."""

    def rows(self, name: str, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Rows start:stop of a tensor, (stop - start, C) or (stop - start,)."""
