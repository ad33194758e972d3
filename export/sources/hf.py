"""A Hugging Face folder as a model source: config.json and one or more safetensors files.

Its weights may be floats or quantized by MLX. Invariant: every file that is read lies directly in
the folder, and is whole.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from export.sources.families import expected_shapes, normalise_config
from export.sources.safetensors_file import FLOAT_TYPES, SafetensorsFile
from export.sources.source import F32, U32, Checkpoint, Floats, Prequantized, check_tensors
from ondevice.errors import BundleError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
INDEX = "model.safetensors.index.json"
# of the language model in multimodal checkpoints, of new and old ones -> of the text model's own
_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""))


class HFCheckpoint(Checkpoint):
    """A folder with config.json and safetensors files (F32, F16, BF16, or MLX affine 4 and 8 bits).

    Raises BundleError when a file is missing, truncated or inconsistent, or its contents are not
    what the configuration implies.
    """

    def __init__(self, folder: Path, provenance: dict[str, Any] | None = None) -> None:
        self._folder = folder
        raw = read_json(folder / "config.json")
        self._files = _open_shards(folder)
        self._homes = {  # mlx-lm's name -> (file, the file's name for it)
            _inner_name(stored): (file, stored)
            for file in self._files
            for stored in file.entries
            if _inner_name(stored)
        }
        config = normalise_config(raw, f"{folder}/config.json", "lm_head.weight" in self._homes)
        family = str(config["model_type"])
        expected = expected_shapes(family, config, f"{folder}/config.json")
        self._quantized = self._find_quantized(raw)
        check_tensors(str(folder), expected, self._logical_shapes(expected))
        for key in ("quantization", "quantization_config"):
            config.pop(key, None)
        described = {
            "kind": "hf",
            "name": folder.resolve().name,
            **(provenance or {}),
            "files": [{"name": f.name, "bytes": f.bytes} for f in self._files],
            "types": sorted(
                {f.entries[n].dtype for f, n in map(self._homes.__getitem__, expected)}
            ),
        }
        super().__init__(family, config, described, expected)

    def rows(self, name: str, start: int, stop: int) -> F32:
        self._check_rows(name, start, stop)
        layout = self._quantized.get(name)
        if layout is None:
            file, stored = self._homes[name]
            return file.rows(stored, start, stop).astype(np.float32, copy=False)
        packed, scales, biases = (mx.array(a) for a in self.packed_rows(name, start, stop))
        return np.array(
            mx.dequantize(
                packed,
                scales.astype(mx.float32),
                biases.astype(mx.float32),
                group_size=layout.group_size,
                bits=layout.bits,
            )
        )

    def prequantized(self, name: str) -> Prequantized | None:
        self.shape(name)
        return self._quantized.get(name)

    def packed_rows(self, name: str, start: int, stop: int) -> tuple[U32, Floats, Floats]:
        self._check_rows(name, start, stop)
        if name not in self._quantized:
            return super().packed_rows(name, start, stop)
        weight, scales, biases = (
            file.rows(stored, start, stop)
            for file, stored in (
                self._homes[name.removesuffix("weight") + part]
                for part in ("weight", "scales", "biases")
            )
        )
        return weight, scales, biases

    def tokenizer_files(self) -> dict[str, bytes]:
        paths = [self._folder / name for name in TOKENIZER_FILES]
        return {path.name: path.read_bytes() for path in paths if path.is_file()}

    def close(self) -> None:
        super().close()
        self._files.clear()
        self._homes.clear()

    def _find_quantized(self, raw: dict[str, Any]) -> dict[str, Prequantized]:
        """Each quantized matrix's layout, from the configuration and its settings by layer."""
        packed = [name for name in self._homes if name.endswith(".scales")]
        settings = raw.get("quantization")
        foreign = raw.get("quantization_config")
        if settings is None and isinstance(foreign, dict):
            method = foreign.get("quant_method", foreign.get("mode", "unknown"))
            raise BundleError(
                f"{self._folder}: quantized by {method!r}; supported are unquantized checkpoints "
                "and MLX's affine quantization in 4 or 8 bits"
            )
        if settings is None and packed:
            raise BundleError(
                f"{self._folder}/config.json: without a 'quantization', though the weights hold "
                f"{packed[0]}; download it again"
            )
        found: dict[str, Prequantized] = {}
        for name in packed:
            base = name.removesuffix(".scales")
            outer = self._homes[name][1].removesuffix(".scales")
            own = settings.get(outer, settings.get(base)) if isinstance(settings, dict) else None
            chosen = {**(settings or {}), **own} if isinstance(own, dict) else settings
            layout = _layout(f"{self._folder}: {base}", chosen)
            for part, types in (
                ("weight", ("U32",)),
                ("scales", FLOAT_TYPES),
                ("biases", FLOAT_TYPES),
            ):
                home = self._homes.get(f"{base}.{part}")
                if home is None or home[0].entries[home[1]].dtype not in types:
                    raise BundleError(
                        f"{self._folder}: {base}.{part} is missing or of another type than "
                        f"{' or '.join(types)}; download it again"
                    )
            found[f"{base}.weight"] = layout
        return found

    def _logical_shapes(self, expected: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Shapes of the language model's tensors, those of packed ones as if unpacked.

        Raises BundleError for a type that is not supported, or scales that do not fit.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (file, stored) in self._homes.items():
            entry = file.entries[stored]
            if name.endswith((".scales", ".biases")) or name.endswith(".rotary_emb.inv_freq"):
                continue
            if name == "lm_head.weight" and name not in expected:
                continue  # a tied model's copy of its embedding
            layout = self._quantized.get(name)
            if layout is None and entry.dtype not in FLOAT_TYPES:
                raise BundleError(
                    f"{self._folder}: {name} has type {entry.dtype}; supported are "
                    f"{', '.join(FLOAT_TYPES)} and MLX's affine quantization"
                )
            shapes[name] = entry.shape
            if layout is not None and len(entry.shape) == 2:
                out, words = entry.shape
                width = words * 32 // layout.bits
                shapes[name] = (out, width)
                for part in ("scales", "biases"):
                    p_file, p_name = self._homes[name.removesuffix("weight") + part]
                    got = p_file.entries[p_name].shape
                    if got != (out, width // layout.group_size) or width % layout.group_size:
                        raise BundleError(
                            f"{self._folder}: {name.removesuffix('weight')}{part} is {got}, but "
                            f"{layout.bits} bits in groups of {layout.group_size} imply "
                            f"{(out, width // layout.group_size)}"
                        )
        return shapes


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds. Raises BundleError where it is missing or no object."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise BundleError(f"{path}: missing; a checkpoint folder needs it") from None
    except ValueError as e:
        raise BundleError(f"{path}: not JSON: {e}") from e
    if not isinstance(value, dict):
        raise BundleError(f"{path}: must hold a JSON object, not a {type(value).__name__}")
    return value


def _inner_name(stored: str) -> str:
    """mlx-lm's name of a language model's tensor; "" for others, such as a vision tower's."""
    for outer, inner in _PREFIXES:
        if stored.startswith(outer):
            return inner + stored.removeprefix(outer)
    return stored if stored.startswith(("model.layers.", "model.embed_tokens.", "model.norm.",
                                        "lm_head.")) else ""  # fmt: skip


def _layout(where: str, settings: Any) -> Prequantized:
    if not isinstance(settings, dict):
        raise BundleError(f"{where}: 'quantization' must be an object, is {settings!r}")
    mode = settings.get("mode", "affine")
    bits, group = settings.get("bits"), settings.get("group_size")
    if mode != "affine" or bits not in (4, 8) or group not in (32, 64, 128):
        raise BundleError(
            f"{where}: quantized as {mode}, {bits} bits, groups of {group}; supported are affine, "
            "4 or 8 bits, groups of 32, 64 or 128; start from an unquantized checkpoint instead"
        )
    return Prequantized(int(bits), int(group))


def _open_shards(folder: Path) -> list[SafetensorsFile]:
    """Open all weight files, and check that each holds the tensors that the index puts there."""
    index = folder / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise BundleError(f"{index}: needs a 'weight_map' of tensor to file")
        names = sorted({str(value) for value in weight_map.values()})
    else:
        weight_map = {}
        names = sorted(path.name for path in folder.glob("model*.safetensors"))
        for name in list(names):  # without an index, the files' names say how many there are
            if match := re.fullmatch(r"(.+)-\d{5}-of-(\d{5})\.safetensors", name):
                stem, total = match[1], int(match[2])
                whole = {f"{stem}-{i:05}-of-{total:05}.safetensors" for i in range(1, total + 1)}
                names = sorted({*names, *whole})
    if not names:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pth"))
        raise BundleError(
            f"{folder}: no model*.safetensors"
            + ("; pickled weights are not read, convert them to safetensors" if pickled else "")
        )
    files: dict[str, SafetensorsFile] = {}
    for name in names:
        if Path(name).name != name or name in ("", ".", ".."):
            raise BundleError(f"{index}: {name!r} is not a plain file name")
        if not (folder / name).is_file():
            raise BundleError(
                f"{folder}: {name} is missing (one of {len(names)} weight files); download it again"
            )
        files[name] = SafetensorsFile(folder / name)
    for tensor, name in weight_map.items():
        if tensor not in files[str(name)].entries:
            raise BundleError(
                f"{folder}: the index puts {tensor} in {name}, which does not hold it"
            )
    return list(files.values())
