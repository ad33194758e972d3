"""LoRA adapters: initialised, held, checked and written as mlx-lm does, and read.

During training they live in a scratch file (`runtime.storage.scratch`). Those of one block at a
time are in memory.

`adapters.safetensors` holds `model.layers.N.PATH.lora_a` (in, r) and `.lora_b` (r, out), float32;
of an embedding (V, r) and (r, D). `mlx_lm.generate --adapter-path` reads `adapter_config.json`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from runtime.adapters.fused import adapters_in, digest_of, refuse_held
from runtime.adapters.lora import LoraSettings
from runtime.adapters.mlx_lm import CONFIG, KIND, PREFIX, WEIGHTS, config_of
from runtime.arrays.stored import Block
from runtime.arrays.values import Lora
from runtime.bundle.manifest import Manifest
from runtime.core.documents import safetensors_header
from runtime.core.errors import BundleError, DivergedError
from runtime.core.files import replacing, write_atomic
from runtime.methods.adapter_reader import AdapterFiles
from runtime.methods.noise import key_of

Tensors = MutableMapping[str, mx.array]


class Adapters:
    """The trainable tensors of every block, float32, by full name."""

    def __init__(self, manifest: Manifest, tensors: Tensors) -> None:
        self.manifest = manifest
        self.tensors = tensors
        self.scale = manifest.lora.scale
        self.dropout = manifest.lora.dropout

    @classmethod
    def shapes(cls, manifest: Manifest) -> dict[str, tuple[int, int]]:
        """Every tensor's shape, block by block in program order."""
        shapes: dict[str, tuple[int, int]] = {}
        for block in manifest.blocks:
            shapes.update(manifest.adapter_shapes(block))
        return shapes

    @property
    def size(self) -> int:
        """How many values are trained."""
        return sum(math.prod(shape) for shape in self.shapes(self.manifest).values())

    @classmethod
    def initial(cls, manifest: Manifest, seed: int, into: Tensors | None = None) -> Adapters:
        """New adapters in `into`: A uniform in +-1/sqrt(in), keyed by (seed, name), and B zero.

        A prefix is zero, until `runtime.methods.first_prefix` fills it.
        """
        tensors: Tensors = {} if into is None else into
        for name, shape in cls.shapes(manifest).items():
            if name.endswith("lora_a"):
                bound = 1 / math.sqrt(shape[0])
                key = key_of(seed, "lora", name)
                value = mx.random.uniform(-bound, bound, shape, key=key, stream=mx.cpu)
            else:
                value = mx.zeros(shape)
            mx.eval(value)
            tensors[name] = value
        return cls(manifest, tensors)

    def loras(self, block: Block) -> dict[str, Lora]:
        """The block's adapters by relative name; of a tied head the embedding's, transposed."""
        loras, owner = {}, self.manifest.owner(block)
        for name in self.manifest.adapted(owner):
            names = self.manifest.adapter_names(owner, name)
            first, second = (self.tensors[full] for full in names)
            pair = (first, second) if owner == block else (second.T, first.T)
            loras[name] = Lora(*pair, self.scale)
        return loras

    def config(self) -> dict[str, Any]:
        """The content of adapter_config.json."""
        lora, layers, blocks = self.manifest.lora, self.manifest.layers, self.manifest.blocks
        own = {"ondevice": {"weights_sha256": self.manifest.weights_sha256, "lora": lora.to_json()}}
        if lora.prefix:
            return {KIND: PREFIX, **own}  # nothing else, so that mlx-lm refuses it
        keys = [name for block in blocks for name in self.manifest.adapted(block)]
        return {
            **config_of(lora, len(layers) - lora.first_layer(len(layers)), keys),
            **own,
        }

    def check_finite(self) -> None:
        """Raise DivergedError if a value is not finite."""
        for name, tensor in self.tensors.items():
            if not mx.isfinite(tensor).all().item():
                raise DivergedError(f"{name} is no longer finite; lower --learning-rate")

    def digest(self) -> str:
        """SHA-256 over the names and float32 values, in program order."""
        sha256 = hashlib.sha256()
        for name in self.shapes(self.manifest):
            sha256.update(name.encode())
            sha256.update(np.array(self.tensors[name], copy=False).tobytes())
        return sha256.hexdigest()

    def save(self, folder: Path) -> None:
        """Write both files into an existing folder, each atomically."""
        tensors = {name: ("F32", shape) for name, shape in self.shapes(self.manifest).items()}
        with replacing(folder / WEIGHTS) as file:  # safetensors would hold all in memory
            file.write(safetensors_header(tensors, {"format": "mlx"}))
            for name in tensors:
                file.write(np.array(self.tensors[name], copy=False).tobytes())
        write_atomic(folder / CONFIG, json.dumps(self.config(), indent=1).encode())

    @classmethod
    def applied(cls, manifest: Manifest, path: Path | None) -> Adapters:
        """Those in `path`, checked as `load` does; none without it."""
        return cls(manifest, {}) if path is None else cls.load(manifest, path)

    @classmethod
    def load(cls, manifest: Manifest, path: Path, into: Tensors | None = None) -> Adapters:
        """Read adapters (a run, a folder, or the file itself) into `into`, and check them.

        They may be ours, mlx-lm's or PEFT's, in float32, float16 or bfloat16.

        Raises:
            BundleError: they are damaged, of another bundle, or altered since their run saved them.
            UsageError: the path is not valid UTF-8, its run has trained all parameters, or the
                bundle's weights hold these adapters already.
        """
        files = AdapterFiles.at(path, manifest)
        _check_stated(manifest, files)
        expected = cls.shapes(manifest)
        tensors: Tensors = {} if into is None else into
        with files.opened(manifest.lora.rank) as stored:  # of a prefix too
            stored.check_fits(expected, files.hint)
            for name in expected:
                tensors[name] = mx.array(stored.read(name))
        adapters = cls(manifest, tensors)
        adapters._refuse_fused()
        return adapters

    def _refuse_fused(self) -> None:
        """Raise UsageError if the model's weights hold these adapters already."""
        where = "the bundle"
        held = adapters_in(self.manifest.provenance, where)
        if not held or self.manifest.lora.prefix:
            return
        parts = (
            (f"{name[: -len('lora_a')]}{name[-1]}", np.array(value, copy=False).tobytes())
            for name, value in self.tensors.items()
        )
        refuse_held(digest_of(parts, self.scale), held, where)


def lora_of(path: Path, manifest: Manifest) -> LoraSettings | None:
    """The LoRA settings of a model's adapters (a folder, or the file); None if no config is there.

    Raises:
        BundleError: the config is damaged, or of another kind of adapter.
        UsageError: the path is not valid UTF-8, or its run has trained all parameters.
    """
    stated = AdapterFiles.at(path, manifest).stated()
    return None if stated is None else stated.lora


def _check_stated(manifest: Manifest, files: AdapterFiles) -> None:
    """Refuse adapters of other weights or another scale, as far as a config states these."""
    if (stated := files.stated()) is None:
        return
    lora, weights = stated
    expected = manifest.lora.scale
    if not math.isclose(lora.scale, expected):
        raise BundleError(f"{files.config}: its scale is {lora.scale:g}, expected {expected:g}")
    if weights not in (None, manifest.weights_sha256):
        raise BundleError(
            f"{files.config}: the adapter was trained on other weights (SHA-256 "
            f"{str(weights)[:12]}), the bundle's are {manifest.weights_sha256[:12]}"
        )
