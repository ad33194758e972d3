"""The interface of checkpoints: a configuration, named tensors read by rows, and a tokenizer.

Invariant: an open checkpoint has exactly the parameters that its family's model class needs, in the
shapes that its configuration implies. Reading rows takes no more memory than those rows.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from export.stored import F32, QuantizedForm, QuantizedRows
from runtime.core.errors import BundleError
from runtime.core.units import counted

# in a provenance: the type of the text model, where it is inside of one that sees or hears
INSIDE = "text_model_type"
_EXPERTS = re.compile(r"\.switch_|experts")
SLICE_VALUES = 4 << 20  # how many values of a tensor are in memory at a time


class Checkpoint(ABC):
    """A checkpoint. Tensors are named as in mlx-lm, without an outer "language_model." prefix.

    Attributes:
        family: the name of a module under mlx_lm.models.
        config: the argument of its ModelArgs.from_dict, always with "tie_word_embeddings".
        given: the original configuration, where there is one.
        provenance: where the weights are from, as JSON values.
        warnings: what is read otherwise than its files say, in words.
        remedy: the way out, for messages about weights that are too large to store.
    """

    given: Mapping[str, Any] = {}
    warnings: Sequence[str] = ()
    remedy = "the checkpoint is damaged, download or convert it again"

    def __init__(
        self,
        family: str,
        config: dict[str, Any],
        provenance: dict[str, Any],
        shapes: dict[str, tuple[int, ...]],
    ) -> None:
        self.family = family
        self.config = config
        self.provenance = provenance
        self._shapes = shapes

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def names(self) -> list[str]:
        """All parameters in the model's order; "lm_head.weight" only where it is not tied."""
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """(out, in), (dim,) or, of filters, (dim, width, 1); also where a file has integers."""
        if name not in self._shapes:
            raise BundleError(f"{self.provenance['name']}: there is no tensor {name!r}")
        return self._shapes[name]

    @abstractmethod
    def rows(self, name: str, start: int, stop: int) -> F32:
        """Rows start:stop of a tensor, (stop - start, in) or (stop - start,), as a fresh array."""

    def quantized_form(self, name: str) -> QuantizedForm | None:
        """The form of `quantized_rows` for a matrix that the source has quantized, else None."""
        self.shape(name)
        return None

    def quantized_exactly(self, name: str) -> bool:
        """Whether `quantized_rows` stand for the same values as `rows`, bit for bit."""
        return self.quantized_form(name) is not None

    def quantized_rows(self, name: str, start: int, stop: int) -> QuantizedRows:
        """Rows start:stop of a matrix, in its `quantized_form`.

        They stand for the same values as `rows`, or for the nearest. Raises BundleError for a
        tensor that the source does not have quantized.
        """
        raise BundleError(f"{self.provenance['name']}: {name} is not quantized")

    @abstractmethod
    def tokenizer_files(self) -> dict[str, bytes]:
        """Hugging Face tokenizer files by name, e.g. "tokenizer.json"; empty when there are none.

        Raises BundleError for a vocabulary that has no equivalent there.
        """

    def close(self) -> None:
        """Release mapped files; no tensor can be read afterwards."""
        self._shapes = {}

    def _check_rows(self, name: str, start: int, stop: int) -> tuple[int, ...]:
        shape = self.shape(name)
        if not 0 <= start <= stop <= shape[0]:
            raise ValueError(f"rows {start}:{stop} of {name}, which has {shape[0]}")
        return shape


def turned(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in transformers of a tensor of mlx-lm: filters (C, width, 1) are (C, 1, width)."""
    return (shape[0], shape[2], shape[1]) if len(shape) == 3 else shape


def slices(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """The (start, stop) of slices of rows that are read at a time."""
    step = max(1, SLICE_VALUES // columns)
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def check_tensors(
    where: str, expected: dict[str, tuple[int, ...]], shapes: dict[str, tuple[int, ...]]
) -> None:
    """Compare the names and shapes that a source has with those that its model needs.

    Raises BundleError that names the first tensors that are missing, of another shape, or unknown.
    `shapes` must not contain tensors outside the language model, such as a vision tower's.
    """
    missing = [name for name in expected if name not in shapes]
    if missing:
        is_dense = any(map(_EXPERTS.search, missing)) and not any(map(_EXPERTS.search, shapes))
        why = (
            "the configuration is of a model with experts, and the weights are of one without: a "
            "dense model has another model_type"
            if is_dense
            else "the download may be incomplete, or the configuration belongs to another model"
        )
        raise BundleError(
            f"{where}: {len(missing)} of {len(expected)} tensors are missing: "
            f"{first_names(missing)}; {why}"
        )
    wrong = [
        f"{name} is {shapes[name]}, the configuration implies {shape}"
        for name, shape in expected.items()
        if shapes[name] != shape
    ]
    if wrong:
        raise BundleError(
            f"{where}: {counted(len(wrong), 'tensor')} of the wrong shape: {first_names(wrong)}; "
            "the configuration may belong to another model"
        )
    unknown = [name for name in shapes if name not in expected]
    if unknown:
        raise BundleError(
            f"{where}: it has {counted(len(unknown), 'tensor')} that this architecture does not "
            f"use: {first_names(unknown)}; results would differ from the original model's; if that "
            "does not compute with them either, write the checkpoint without them"
        )


def first_names(names: list[str]) -> str:
    """The first names of a list, for a message."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
