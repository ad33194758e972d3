"""Tracing a bundle's graphs again: only for the model that its manifest describes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.bundles import put
from support.files import listing

from export.graph_files import trace_graphs
from runtime.bundle.manifest import Manifest
from runtime.bundle.store import Bundle
from runtime.bundle.traced import RECORD, read_traced
from runtime.core.errors import BundleError


def test_the_graphs_are_those_of_the_export(origin: Bundle, tmp_path: Path) -> None:
    trace_graphs(origin.manifest, "cpu", tmp_path)
    traced = read_traced(tmp_path)
    assert traced.block_types == origin.manifest.block_types
    signatures = [
        {key: (g.inputs, g.outputs, g.workspace_bytes) for key, g in graphs.items()}
        for graphs in (traced.graphs, origin.manifest.graphs)
    ]
    assert signatures[0] == signatures[1]
    files = {one.file for one in traced.graphs.values()}
    assert set(listing(tmp_path)) == {RECORD, "graphs", *files}


def lies() -> Iterator[tuple[str, Any]]:
    yield "family", "llama"
    yield "family", "no such"
    yield "family", "..pack"
    yield "config/num_hidden_layers", 3
    yield "config/num_hidden_layers", 10**9
    yield "config/num_attention_heads", 3
    yield "config/intermediate_size", 256
    yield "config/hidden_size", "128"
    yield "config/hidden_size", -1
    yield "config", {}


@pytest.mark.parametrize(("where", "value"), list(lies()), ids=repr)
def test_a_configuration_of_another_model_is_refused(
    origin: Bundle, tmp_path: Path, where: str, value: Any
) -> None:
    document = msgspec.to_builtins(origin.manifest)
    put(document, where, value)
    with pytest.raises(BundleError):
        trace_graphs(msgspec.convert(document, Manifest), "cpu", tmp_path)
    assert listing(tmp_path) == []
