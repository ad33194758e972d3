"""Writes an adapter in the format of another tool: PEFT, mlx-lm, or llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from export.adapters.adapter import Adapter, base_model
from export.adapters.elsewhere import Term, terms_elsewhere
from export.adapters.gguf import write_gguf
from export.sources.families import TEXT_TYPES, build_model
from export.stored import F32
from runtime.adapters import mlx_lm, peft
from runtime.adapters.names import A, B, outer_name
from runtime.core.errors import UsageError
from runtime.core.files import write_atomic
from runtime.core.folder_writer import FolderWriter
from runtime.core.paths import text_path

_INSIDE = "language_model."  # mlx-lm's prefix of the language model in a model with a vision tower


def write_adapter(
    adapter: Adapter, form: str, output: Path, force: bool = False, base: str | None = None
) -> None:
    """Write an adapter for another tool, whole or not at all.

    Args:
        adapter: the adapter and its model.
        form: "peft", "gguf" or "mlx".
        output: the folder, or for gguf the file, to write.
        force: whether one that is there is replaced.
        base: the name of the model in the other tool; without it that of the bundle's source.

    Raises:
        UsageError: the output exists, or the format cannot hold this adapter.
        StorageError: it cannot be written.
    """
    _WRITERS[form](adapter, text_path(output), force, base)


def _write_peft(adapter: Adapter, output: Path, force: bool, base: str | None) -> None:
    """Write a folder for `PeftModel.from_pretrained`: PEFT, transformers, vLLM and others."""
    manifest, lora = adapter.manifest, adapter.manifest.lora
    name, revision = base_model(manifest.provenance) if base is None else (base, None)
    every_layer = len(adapter.layers) == len(manifest.layers)
    terms = terms_elsewhere(adapter, "--to peft")
    tied = adapter.tied and bool(adapter.lookup)
    if tied:  # PEFT's head has an adapter of its own
        a, b = adapter.modules[adapter.lookup]
        terms[peft.HEAD] = Term(b.T, a.T)
    named = {module for module, term in terms.items() if term.parameter}
    if named and lora.dropout:
        raise UsageError(
            f"--to peft: PEFT has no dropout ({lora.dropout:g}) of {min(named)} beside experts; "
            "train without it or without that target, or use --to mlx"
        )
    config = peft.config_of(
        lora,
        terms.keys() - named,
        None if every_layer else adapter.layers,
        name,
        revision,
        adapter.sees,
    )
    ranks = {peft.module_name(module, adapter.sees): t.a.shape[1] for module, t in terms.items()}
    weights = sorted(f"{peft.module_name(module, adapter.sees)}.weight" for module in named)
    config |= peft.patterns_of(lora, ranks) | {
        "target_parameters": weights or None,
        "fan_in_fan_out": all(term.transposed for term in terms.values()),
        "ensure_weight_tying": tied,
    }
    tensors = {
        peft.stored_name(f"{module}.{part}", adapter.sees, term.lookup): value.T
        for module, term in terms.items()
        for part, value in ((A, term.a), (B, term.b))
    }
    _write_folder(output, force, (peft.WEIGHTS, tensors, "pt"), (peft.CONFIG, config))


def _write_mlx(adapter: Adapter, output: Path, force: bool, base: str | None) -> None:
    """Write a folder for `mlx_lm.load(model, adapter_path=...)`."""
    name = base_model(adapter.manifest.provenance)[0] if base is None else base
    manifest = adapter.manifest
    # not so where mlx-lm has the text model alone, under the name of the whole
    apart = adapter.sees and manifest.provenance.get("model_type") != manifest.family
    inside = apart or manifest.family in TEXT_TYPES.values()
    ends = [outer_name(own, _INSIDE) if inside else own for own in adapter.outside]
    keys = [*adapter.paths, *ends]
    config = mlx_lm.config_of(adapter.manifest.lora, len(adapter.layers), keys)
    modules = dict(build_model(adapter.manifest.family, adapter.manifest.config).named_modules())
    if others := sorted(
        path
        for path in adapter.modules
        if type(modules.get(path)).__name__ not in ("Linear", "Embedding")
    ):
        raise UsageError(
            f"--to mlx: mlx-lm adapts linear layers and embeddings, and has {others[0]} as "
            "something else; train without that target (--lora-targets), or use --to peft"
        )
    tensors = {
        outer_name(own, _INSIDE) if inside else own: value for own, value in adapter.tensors.items()
    }
    weights = (mlx_lm.WEIGHTS, tensors, "mlx")
    _write_folder(output, force, weights, (mlx_lm.CONFIG, {"model": name, **config}))


_WRITERS: dict[str, Callable[[Adapter, Path, bool, str | None], None]] = {
    "peft": _write_peft,
    "gguf": write_gguf,
    "mlx": _write_mlx,
}


def _write_folder(
    output: Path,
    force: bool,
    weights: tuple[str, Mapping[str, F32], str],
    config: tuple[str, dict[str, Any]],
) -> None:
    """Write a folder with a file of tensors and a configuration.

    Args:
        output: the folder; it must not exist, unless `force` replaces it.
        weights: the name of the safetensors file, its tensors, and the library that it is for.
        config: the name and the content of the configuration.
    """
    (file, tensors, library), (name, content) = weights, config
    with FolderWriter(
        output, force, name, "folder with an adapter", lambda path: path.name in (file, name)
    ) as writer:
        contiguous = {key: np.ascontiguousarray(value) for key, value in tensors.items()}
        write_atomic(writer.folder / file, save(contiguous, metadata={"format": library}))
        write_atomic(writer.folder / name, json.dumps(content, indent=2).encode() + b"\n")
        writer.finish()
