"""A Hugging Face folder as a checkpoint: config.json, safetensors files and a tokenizer.

The weights may be floats or quantized by MLX.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from export.sources.families import (
    check_architecture,
    expected_shapes,
    normalise_config,
    parameter_shapes,
    readable_model,
    text_config,
)
from export.sources.general import ACTIVATION, completed
from export.sources.gpt_oss import with_experts_apart
from export.sources.mlx_quantized import find_layouts, matrix_shape, widened
from export.sources.safetensors_files import (
    FLOAT_TYPES,
    AnyTensor,
    JoinedTensor,
    SafetensorsFile,
    StoredTensor,
    open_shards,
    read_json,
)
from export.sources.sanitize import NAMES, Made, tensors_made
from export.sources.settings import own_code, unknown_settings
from export.sources.source import (
    INSIDE,
    Checkpoint,
    check_tensors,
    first_names,
    slices,
    turned,
)
from export.sources.tokenizer import folder_tokenizer
from export.stored import F32, QuantizedForm, QuantizedRows
from runtime.adapters.fused import IN_CONFIG, checked
from runtime.adapters.names import is_of_tower, unwrapped
from runtime.adapters.origins import RENAMED, Origin, of_each, together
from runtime.core.errors import BundleError, UsageError
from runtime.core.lookalikes import Kind, instead, kind_of
from runtime.core.units import counted

# prefixes of the language model's names in a multimodal checkpoint, new or old
_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""))
_HEAD = "lm_head"
_EMBEDDINGS = ("model.embed_tokens", "model.wte", "model.decoder.embed_tokens", "transformer.wte")
_OUTER = "model."  # which names lack in a model that was saved without its head
_XIELU = "xielu"  # the one activation with weights
_LAYER = re.compile(r"(?<=layers)\.\d+\.")
# what torch saves beside the weights: frequencies, and masks of attention, which have four axes
_BUFFERS = (".inv_freq", ".masked_bias")


class HFCheckpoint(Checkpoint):
    """A folder with config.json and safetensors files (F32, F16, BF16, or MLX affine integers).

    `origin` are further entries of the provenance, such as a name on the hub.

    Raises BundleError if a file is missing, truncated or inconsistent, or holds other tensors
    than the configuration implies.
    """

    def __init__(self, folder: Path, origin: dict[str, Any] | None = None) -> None:
        self._folder = folder
        _refuse_others(folder)
        raw = read_json(folder / "config.json")
        where = f"{folder}/config.json"
        family = check_architecture(raw, where)
        files, warnings = open_shards(folder)
        model = readable_model(raw, where)
        warnings += own_code(raw, where)
        text = text_config(raw, where)
        self._tensors, others, renamed = _language_model(files, model, str(folder))
        inside = text["model_type"] != raw["model_type"]
        if inside:  # what sees or hears is left out, as the text model alone is read
            others = [name for name in others if not is_of_tower(name)]
        if others:
            warnings.append(
                f"{folder}: read without {counted(len(others), 'tensor')} outside the language "
                f"model: {first_names(others)}"
            )
        own_head = f"{_HEAD}.weight" in self._tensors
        if own_head and _says_tied(raw, text):
            own_head = self._head_differs()
            if own_head:
                warnings.append(
                    f"{where} says tie_word_embeddings, but lm_head.weight is not the embedding: "
                    "it is used, as in transformers"
                )
        self._end_ids = raw.get("eos_token_id", text.get("eos_token_id"))
        config = normalise_config(raw, where, own_head)
        if unknown := unknown_settings(family, raw, where, parameter_shapes(model)):
            warnings.append(
                f"{where}: {len(unknown)} settings are not known and not used: {', '.join(unknown)}"
            )
        if dropout := text.get("attention_dropout"):
            warnings.append(f"{where}: attention_dropout = {dropout} is not applied in training")
        expected = expected_shapes(family, config, where)
        if head := self._copied_head(expected, _says_tied(raw, text)):
            self._tensors |= head
            config = normalise_config(raw, where, True)
            warnings.append(
                f"{where} says tie_word_embeddings, but mlx-lm's {family} has an output matrix of "
                "its own: it is a copy of the embedding"
            )
        if own_head and f"{_HEAD}.weight" not in expected:
            raise BundleError(
                f"{folder}: {_HEAD}.weight is not the embedding, which mlx-lm's {family} always "
                "takes for it"
            )
        _check_activation(family, config, expected, where)
        self._layouts = find_layouts(raw, self._tensors, str(folder))
        if raw.get("quantization_config") and not self._layouts:
            warnings.append(
                f"{where}: its quantization_config is ignored, since all weights are floats"
            )
        check_tensors(str(folder), expected, self._parameter_shapes(expected))
        for key in ("quantization", "quantization_config"):
            config.pop(key, None)
        provenance = {
            "kind": "hf",
            "model_type": raw["model_type"],
            "name": folder.resolve().name,
            **(origin or {}),
            "files": [{"name": file.name, "bytes": file.bytes} for file in files],
            "types": sorted({self._tensors[name].dtype for name in expected}),
        }
        if inside:
            provenance[INSIDE] = text["model_type"]
        if renamed:
            provenance[RENAMED] = renamed
        if digests := checked(text.get(IN_CONFIG, raw.get(IN_CONFIG, [])), where):
            provenance["fused"] = {"adapters": digests}
        super().__init__(family, config, provenance, expected)
        self.warnings, self.given = warnings, text

    def rows(self, name: str, start: int, stop: int) -> F32:
        shape = self._check_rows(name, start, stop)
        layout = self._layouts.get(name)
        if layout is None:
            values = self._tensors[name].rows(start, stop).astype(np.float32, copy=False)
            return values.reshape(stop - start, *shape[1:])  # of filters, see `turned`
        return self.quantized_rows(name, start, stop).values(layout.form)

    def quantized_form(self, name: str) -> QuantizedForm | None:
        self.shape(name)
        layout = self._layouts.get(name)
        return None if layout is None else layout.form

    def quantized_rows(self, name: str, start: int, stop: int) -> QuantizedRows:
        self._check_rows(name, start, stop)
        layout = self._layouts.get(name)
        if layout is None:
            return super().quantized_rows(name, start, stop)
        base = name.removesuffix("weight")
        weight, scales, biases = (
            self._tensors[base + part].rows(start, stop) for part in ("weight", "scales", "biases")
        )
        words = widened(weight, layout.bits, layout.form.bits)
        dtype = layout.form.scale_dtype
        return QuantizedRows(words, scales.astype(dtype), biases.astype(dtype))

    def tokenizer_files(self) -> dict[str, bytes]:
        return folder_tokenizer(self._folder, self._end_ids)

    def close(self) -> None:
        super().close()
        self._tensors.clear()

    def _copied_head(
        self, expected: Mapping[str, tuple[int, ...]], tied: bool
    ) -> dict[str, AnyTensor]:
        """The embedding as the output matrix of a tied model whose class cannot tie them."""
        head = f"{_HEAD}.weight"
        if not tied or head in self._tensors or head not in expected:
            return {}
        return {
            f"{_HEAD}.{part}": self._tensors[f"{name}.{part}"]
            for name in _EMBEDDINGS
            for part in ("weight", "scales", "biases")
            if f"{name}.{part}" in self._tensors
        }

    def _head_differs(self) -> bool:
        """Whether the output matrix has other values than the embedding, or another form."""
        names = [name for name in _EMBEDDINGS if f"{name}.weight" in self._tensors]
        for part in ("weight", "scales", "biases"):
            embedding = next((self._tensors.get(f"{name}.{part}") for name in names), None)
            head = self._tensors.get(f"{_HEAD}.{part}")
            if embedding is None and head is None:
                continue
            if embedding is None or head is None or embedding.shape != head.shape:
                return True
            if not {embedding.dtype, head.dtype} <= {*FLOAT_TYPES, "U32"}:
                return True
            for start, stop in slices(*embedding.shape):
                if not np.array_equal(embedding.rows(start, stop), head.rows(start, stop)):
                    return True
        return False

    def _parameter_shapes(self, expected: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that are parameters, those of quantized ones as (out, in).

        Raises BundleError for a type that is not supported.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for name, tensor in self._tensors.items():
            if name.endswith((".scales", ".biases")):
                continue
            if name == f"{_HEAD}.weight" and name not in expected:
                continue  # a tied model's copy of its embedding
            layout = self._layouts.get(name)
            if layout is None and tensor.dtype == "U32":
                raise BundleError(
                    f"{self._folder}: {name} has integers of MLX's quantization (U32) without "
                    f"{name.removesuffix('.weight')}.scales; the download may be incomplete"
                )
            if layout is None and tensor.dtype not in FLOAT_TYPES:
                raise BundleError(
                    f"{self._folder}: {name} has type {tensor.dtype}; supported are "
                    f"{', '.join(FLOAT_TYPES)} and MLX's affine quantization"
                )
            shapes[name] = tensor.shape if layout is None else matrix_shape(tensor, layout.bits)
            if shapes[name] == turned(expected.get(name, ())):
                shapes[name] = expected[name]
        return shapes


def _says_tied(raw: dict[str, Any], text: dict[str, Any]) -> bool:
    """Whether a configuration ties the embedding and the output matrix; by default as elsewhere."""
    tied = raw.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    if tied is None:
        tied = (completed({"model_type": raw["model_type"]}) or {}).get("tie_word_embeddings")
    return bool(tied)


def _check_activation(
    family: str, config: dict[str, Any], expected: Iterable[str], where: str
) -> None:
    """Raise BundleError where either the configuration or the model has an activation with weights.

    Their tensors would seem to be missing, or another model's. Of all other activations
    `export.cut.unread` says it.
    """
    key = next((key for key in ACTIVATION if config.get(key)), None)
    has_weights = any(name.endswith(".act_fn.alpha_p") for name in expected)
    if key and (config[key] == _XIELU) != has_weights:
        computes = f"computes with {_XIELU} alone" if has_weights else "does not compute with it"
        raise BundleError(f"{where}: {key} = {config[key]!r:.60}: mlx-lm's {family} {computes}")


def _refuse_others(folder: Path) -> None:
    """Raise UsageError for a bundle, a run or an adapter, which are no checkpoints."""
    if kind_of(folder) in (Kind.BUNDLE, Kind.RUN, Kind.COMPARISON, Kind.ADAPTER, Kind.BOTH):
        raise UsageError(f"{folder} is no checkpoint: {instead(folder, Kind.CHECKPOINT)}")


def _language_model(
    files: list[SafetensorsFile], model: Any, where: str
) -> tuple[dict[str, AnyTensor], list[str], dict[str, list[Origin]]]:
    """The language model's tensors, by the names in mlx-lm's `model`, and the names of the others.

    And where those are from that have another name in the checkpoint, or are parts of tensors.
    Raises BundleError where there is none, or two have the same name.
    """
    stored: dict[str, StoredTensor] = {}
    expected = parameter_shapes(model)
    weights = [
        tensor for file in files for tensor in file.tensors.values() if not _is_buffer(tensor)
    ]
    outer = _missing_outer((_inner_name(tensor.name) for tensor in weights), expected)
    for tensor in weights:
        name = _inner_name(tensor.name, outer, NAMES.get(model.model_type, ()))
        if name in stored:
            raise BundleError(
                f"{where}: {stored[name].name} and {tensor.name} are both {name}; it holds two "
                "models, of which one must go"
            )
        stored[name] = tensor
    made = {name: [Made(name, 0, tensor.flat().shape[0])] for name, tensor in stored.items()}
    dropped: list[str] = []
    tensors, apart = with_experts_apart(stored)
    complete = tensors.keys() >= expected.keys() - {f"{_HEAD}.weight"}
    held = {name: shape for name, shape in expected.items() if name in stored}
    if not complete or any(stored[name].shape != shape for name, shape in held.items()):
        sanitized = _made(model, stored, tensors, expected, where)
        taken = {part.source for parts in sanitized.values() for part in parts}
        dropped = sorted(stored.keys() - taken - {f"{_HEAD}.weight"})
        made, tensors = (made | sanitized, tensors) if complete else (sanitized, {})
        tensors |= {name: _joined(stored, parts) for name, parts in sanitized.items()}
    parts_of = _with_experts_stacked(made, tensors, expected)
    tensors = {
        name: tensor for name, tensor in tensors.items() if name in parts_of or name in apart
    }
    tensors |= {n: _joined(stored, parts) for n, parts in parts_of.items() if n not in tensors}
    _check_experts(stored, parts_of, where)
    # experts, which a file has one behind the other
    tensors = {
        name: tensor.flat() if _holds_experts(name, expected) else tensor
        for name, tensor in tensors.items()
    }
    parts = _parts(expected)
    others = [tensor.name for name, tensor in tensors.items() if not name.startswith(parts)]
    others += [stored[name].name for name in dropped if name not in tensors]
    tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(parts)}
    if (head := f"{_HEAD}.weight") in others:  # of a class that always takes the embedding for it
        tensors[head] = stored[others.pop(others.index(head))]
    if others and not any(_number(name) for name in tensors):
        example = next(name for name in expected if _number(name))
        raise BundleError(
            f"{where}: none of its {len(tensors) + len(others)} tensors has a name as "
            f"{example.partition('.0.')[0]}.0; they are {first_names([*others, *tensors])}; save "
            "it with transformers' save_pretrained, as a model for causal language modelling"
        )
    parts_of = {name: parts for name, parts in parts_of.items() if name in tensors}
    return tensors, others, {**_origins(stored, parts_of, outer, where), **apart}


def _made(
    model: Any,
    stored: Mapping[str, StoredTensor],
    tensors: Mapping[str, AnyTensor],
    expected: Mapping[str, tuple[int, ...]],
    where: str,
) -> dict[str, list[Made]]:
    """The parts of stored tensors that `sanitize` puts together, by the names that it gives.

    Raises BundleError, with the names of missing tensors where most others are there.
    """
    try:
        return tensors_made(model, {name: tensor.shape for name, tensor in stored.items()}, where)
    except BundleError:
        needed = {
            name: shape
            for name, shape in expected.items()
            if not name.startswith(_HEAD) and "switch_" not in name
        }
        held = {
            name: needed[name] if tensor.shape == turned(needed[name]) else tensor.shape
            for name, tensor in tensors.items()
            if name in needed and tensor.dtype in FLOAT_TYPES
        }
        if len(needed) < 2 * len(held):  # these have its names already
            check_tensors(where, needed, held)
        raise


def _check_experts(
    stored: Mapping[str, StoredTensor], made: Mapping[str, list[Made]], where: str
) -> None:
    """Raise BundleError where an expert of a layer has another shape than the first."""
    for name, experts in made.items():
        shapes = [(part.rows, stored[part.source].shape[-1]) for part in experts]
        for part, shape in zip(experts, shapes, strict=True):
            if "switch_" in name and shape != shapes[0]:
                raise BundleError(
                    f"{where}: {stored[part.source].name} has another shape than the first expert's"
                )


def _is_buffer(tensor: StoredTensor) -> bool:
    """Whether a tensor is none of a model's weights, but follows from its configuration."""
    is_mask = tensor.name.endswith(".bias") and len(tensor.shape) == 4
    return is_mask or tensor.name.endswith(_BUFFERS)


def _missing_outer(names: Iterable[str], expected: Iterable[str]) -> str:
    """The prefix that all names but the head's lack; empty, but in a model saved without a head."""
    within, wanted = _stems(names), _stems(expected)
    lacks = not within & wanted and {f"{_OUTER}{stem}" for stem in within} & wanted
    return _OUTER if lacks else ""


def _stems(names: Iterable[str]) -> set[str]:
    """How the names of tensors in layers begin, as `model.layers`."""
    return {name[: match.start()] for name in names if (match := _LAYER.search(name))}


def _origins(
    stored: Mapping[str, StoredTensor], made: Mapping[str, list[Made]], outer: str, where: str
) -> dict[str, list[Origin]]:
    """Where tensors are from, without those that are a checkpoint's of the same name.

    Raises BundleError where parts of a stack of matrices differ from one to the next.
    """
    elsewhere = {}
    for name, parts in made.items():
        stack = max(_stacked(stored[part.source]) for part in parts)
        if stack and name in stored:  # mlx-lm's own layout
            continue
        origins = []
        for part in parts:
            tensor = stored[part.source]
            height = tensor.shape[1] if part.transposed else tensor.flat().shape[0]
            inner = _inner_name(tensor.name, outer)
            columns = None if part.columns is None else (*part.columns, tensor.shape[-1])
            origins.append(Origin(inner, part.first, part.rows, height, part.transposed, columns))
        if origins == [Origin(name, 0, origins[0].height, origins[0].height)]:
            continue
        elsewhere[name] = of_each(origins, stack) if stack else together(origins)
        if not elsewhere[name]:
            raise BundleError(
                f"{where}: mlx-lm's {name} has other rows of each matrix of {origins[0].name}, "
                "which is not supported"
            )
    return elsewhere


def _stacked(tensor: StoredTensor) -> int:
    """The matrices, of experts, that a tensor is a stack of; 0 for others, and for filters."""
    return tensor.shape[0] if len(tensor.shape) == 3 and tensor.shape[1] != 1 else 0


def _joined(tensors: Mapping[str, StoredTensor], parts: list[Made]) -> AnyTensor:
    """A tensor that is parts of a file's tensors, by rows, or a transposed one."""
    first, *others = parts
    tensor = tensors[first.source]
    if first.transposed:
        return tensor.transposed()
    whole = not tensor.shape or first.rows == tensor.flat().shape[0]
    if not others and whole and first.columns is None:
        return replace(tensor, shift=first.shift)
    return JoinedTensor(tuple(_part(tensors[part.source], part) for part in parts))


def _part(tensor: StoredTensor, part: Made) -> StoredTensor:
    rows = tensor.flat().part(part.first, part.rows)
    return rows if part.columns is None else rows.across(*part.columns)


def _with_experts_stacked(
    made: Mapping[str, list[Made]],
    tensors: Mapping[str, AnyTensor],
    expected: Mapping[str, tuple[int, ...]],
) -> dict[str, list[Made]]:
    """The parts of each tensor; those of experts that the class has not stacked are one tensor's.

    They lie one below the other in it.
    """
    parts_of = {name: parts for name, parts in made.items() if name in tensors}
    for name in expected:
        before, stacked, after = name.partition("switch_mlp.")
        number = 0
        while stacked and (own := parts_of.pop(f"{before}experts.{number}.{after}", None)):
            parts_of.setdefault(name, []).extend(own)
            number += 1
    return parts_of


def _holds_experts(name: str, expected: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a tensor, of a matrix or of its scales, is of what a bundle stores as a matrix."""
    return len(expected.get(f"{name.rpartition('.')[0]}.weight", ())) == 2


def _number(name: str) -> bool:
    """Whether a name is that of a tensor inside of a layer."""
    return any(part.isdecimal() for part in name.split("."))


def _parts(expected: Iterable[str]) -> tuple[str, ...]:
    """The prefixes of a language model's names: its layers, and the modules around them."""
    parts = {f"{_HEAD}."}
    for name in expected:
        words = name.split(".")
        first = next((i for i, word in enumerate(words) if word.isdecimal()), len(words) - 1)
        parts.add(".".join(words[:first]) + ".")
    return tuple(sorted(parts))


def _inner_name(stored: str, outer: str = "", names: Sequence[tuple[str, str]] = ()) -> str:
    """mlx-lm's name of a tensor of a language model that a larger model may hold.

    `outer` is what all names but the head's lack, and `names` are parts that have other names in
    mlx-lm.
    """
    stored = unwrapped(stored)
    for around, inner in _PREFIXES:
        if stored.startswith(around):
            return inner + stored.removeprefix(around)
    if not stored.startswith(f"{_HEAD}."):
        stored = outer + stored
    for theirs, ours in names:
        stored = stored.replace(theirs, ours)
    return stored
