"""The stored form of each matrix of a model: the recipe that an export follows.

The integers of a quantized checkpoint are copied, unless bits are asked for. A float checkpoint is
quantized to 4 bits in affine groups. Keys and values take 8 bits: their matrices are small, and
errors there harm all later tokens. So do routers, whose errors choose other experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from export.config.export import EIGHT_BIT, GROUP_SIZES, ExportConfig
from export.cut.model import Cut
from export.sources.source import Checkpoint, slices
from export.stored import FloatForm, FloatType, QuantizedForm, StoredForm
from runtime.bundle.manifest import Manifest
from runtime.config.base import flag
from runtime.core.errors import UsageError


@dataclass(frozen=True)
class Use:
    """A matrix, whether a layer is the first block that uses it, and whether it chooses.

    A router, which chooses experts, has as many rows as there are of these.
    """

    name: str
    in_layer: bool
    routes: bool


def matrices(cut: Cut) -> Iterator[Use]:
    """Every matrix of a model once, in the order of its blocks."""
    seen: set[str] = set()
    for index, block in enumerate(cut.blocks):
        block_type = cut.block_types[block.type]
        counts = {operation.experts for operation in block_type.operations} - {0}
        for operation in block_type.operations:
            rows = [block_type.values[name][-1] for name in operation.products]
            for at, name in enumerate(operation.matrices(block.tensor)):
                if name not in seen:
                    seen.add(name)
                    routes = bool(counts and operation.adaptable) and rows[at] in counts
                    yield Use(name, 0 < index < len(cut.blocks) - 1, routes)


def stored_forms(
    config: ExportConfig, checkpoint: Checkpoint, cut: Cut
) -> tuple[dict[str, StoredForm], frozenset[str]]:
    """The stored form of each matrix, and the matrices whose integers are copied from the source.

    Raises:
        UsageError: the group size does not divide a matrix, or an option contradicts the source.
    """
    _check_names(config, cut)
    if config.is_full and (experts := expert_names(cut)):
        raise UsageError(
            f"--trainable full: {', '.join(sorted(experts))} hold experts, which are not trained; "
            "leave it out"
        )
    if config.is_full and (tables := _table_names(cut)):
        raise UsageError(
            f"--trainable full: layers look tokens up in {', '.join(sorted(tables))}, which are "
            "not trained; leave it out"
        )
    stored: dict[str, StoredForm] = {}
    copied: set[str] = set()
    for use in matrices(cut):
        if config.is_full:
            stored[use.name] = FloatForm(cast(FloatType, config.storage))
            continue
        asked = config.bits if use.in_layer else config.head_bits
        source_form = checkpoint.quantized_form(f"{use.name}.weight")
        if source_form is not None and asked is None:
            stored[use.name] = source_form
            copied.add(use.name)
        else:
            stored[use.name] = _form(config, checkpoint, use, asked)
    quantized = {name for name, form in stored.items() if isinstance(form, QuantizedForm)} - copied
    names = ("calibrate", "eight_bit", "group_size")
    unused = [name for name in names if config.was_given(name)]
    if unused and not quantized:
        raise UsageError(
            f"{', '.join(flag(name) for name in unused)}: nothing is quantized; "
            + (
                "a quantized checkpoint keeps its values: add --bits 4 to quantize it again"
                if copied
                else f"--bits {config.bits} keeps floats: leave one of the two options out"
            )
        )
    return stored, frozenset(copied)


def _check_names(config: ExportConfig, cut: Cut) -> None:
    """Raise UsageError for a name in --eight-bit that no linear layer has."""
    names = linear_names(cut)
    unknown = sorted(set(config.eight_bit_names) - names)
    if unknown and config.eight_bit != EIGHT_BIT:
        raise UsageError(
            f"--eight-bit {','.join(unknown)}: the model has no such linear layer; it has "
            f"{', '.join(sorted(names))}"
        )


def linear_names(cut: Cut, outside: bool = False) -> set[str]:
    """The last parts of the names of all linear layers; `outside` of embedding and head too."""
    return {
        name.split(".")[-1]
        for block in (cut.blocks if outside else cut.blocks[1:-1])
        for operation in cut.block_types[block.type].operations
        for name in operation.adaptable
    }


def expert_matrices(model: Cut | Manifest) -> set[str]:
    """The names of all matrices of experts."""
    return {
        name
        for block in model.blocks
        for operation in model.block_types[block.type].operations
        if operation.experts
        for name in operation.matrices(block.tensor)
    }


def expert_names(cut: Cut) -> set[str]:
    """The last parts of their names."""
    return {name.split(".")[-1] for name in expert_matrices(cut)}


def _table_names(cut: Cut) -> set[str]:
    """The last parts of the names of all tables that layers look tokens up in."""
    return {
        name.split(".")[-1]
        for block_type in cut.block_types.values()
        for operation in block_type.operations
        if operation.chosen_by_tokens and not operation.experts
        for name in operation.matrices(str)
    }


def _form(config: ExportConfig, checkpoint: Checkpoint, use: Use, asked: int | None) -> StoredForm:
    if asked == 32:
        return FloatForm("float32")
    if asked == 16:
        return _short_form(checkpoint, f"{use.name}.weight")
    bits = 4 if asked is None else asked
    if use.routes or use.name.split(".")[-1] in config.eight_bit_names:
        bits = 8
    columns = checkpoint.shape(f"{use.name}.weight")[1]
    group = config.group_size
    if columns % group:
        fitting = [str(size) for size in GROUP_SIZES if columns % size == 0]
        raise UsageError(
            f"{use.name} has {columns} columns, which --group-size {group} does not divide; "
            f"use {' or '.join(fitting) or 'another model'}"
        )
    return QuantizedForm(bits, group, "symmetric" if bits == 8 else "affine", "float16")


def _short_form(checkpoint: Checkpoint, tensor: str) -> FloatForm:
    """bfloat16, unless float16 holds all values exactly and bfloat16 does not."""
    forms = {FloatForm("float16"), FloatForm("bfloat16")}
    for start, stop in slices(*checkpoint.shape(tensor)):
        values = checkpoint.rows(tensor, start, stop)
        forms = {form for form in forms if form.holds(values)}
        if not forms:
            break
    return FloatForm("float16") if forms == {FloatForm("float16")} else FloatForm("bfloat16")


def stored_bytes(checkpoint: Checkpoint, stored: Mapping[str, StoredForm]) -> int:
    """The bytes of all tensors in a bundle, without padding."""
    bits = 0.0
    for name in checkpoint.names():
        values = math.prod(checkpoint.shape(name))
        form = stored.get(name.removesuffix(".weight"))
        bits += values * (32 if form is None else form.bits_per_weight)
    return math.ceil(bits / 8)
