"""Cutting an mlx-lm model into blocks of matrix products, attention and elementwise graphs.

The model runs over taps (see `export.cut.taps`), which record its matrix products and attention in
order, with their inputs. The computations between these are traced and become elementwise
graphs. Nothing here is specific to an architecture. A model that a program cannot express is
refused: if it has a matrix outside linear layers, an operation between two layers, or a mask that
is neither causal nor a sliding window.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from export.cut.ends import EndsCutter, columns_of
from export.cut.graphs import ElementwiseGraph
from export.cut.layer import LayerCutter
from export.cut.taps import Taps, attention_windows, probe_length
from export.sources.families import build_model
from export.sources.misread import MISREAD, misread
from runtime.arrays.stored import Block
from runtime.operations.program import BlockType


@dataclass
class Cut:
    """A model as blocks in order, the types they share, and the graphs of all types."""

    block_types: dict[str, BlockType] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    graphs: list[ElementwiseGraph] = field(default_factory=list)


def cut_model(family: str, config: dict[str, Any]) -> Cut:
    """Cut the model of `mlx_lm.models.<family>` into programs.

    Args:
        family: mlx-lm's module name.
        config: the argument of its `ModelArgs.from_dict`.

    Raises:
        BundleError: the model does something that a program cannot express.
    """
    try:
        return _cut_model(family, config)
    except MISREAD as problem:
        said = "it cannot be run with this configuration"
        raise misread(problem, family, said) from problem


def _cut_model(family: str, config: dict[str, Any]) -> Cut:
    model = build_model(family, config)
    taps = Taps(model, probe_length(model, config), config)
    cut = Cut()
    ends = EndsCutter(taps)
    for block_type, graphs in (ends.embedding(), ends.head()):
        cut.block_types[block_type.name] = block_type
        cut.blocks.append(Block("", block_type.name))
        cut.graphs += graphs
    windows = attention_windows(taps, config)
    types: dict[str, str] = {}  # the names of layers' block types, by signature
    layers: list[Block] = []
    for index, layer in enumerate(taps.layers):
        name, hidden = f"layer{len(types)}", columns_of(ends.calls[index + 1].inputs[0])
        cutter = LayerCutter(taps, layer, windows[index], name, hidden)
        if (signature := cutter.signature()) not in types:
            types[signature] = name
            cut.block_types[name], graphs = cutter.cut()
            cut.graphs += graphs
        layers.append(Block(f"{taps.path}.{index}", types[signature]))
    cut.blocks[1:1] = layers
    return cut
