"""LoRA adapters: initialised, held, checked, written and read as mlx-lm does.

During training they live in a scratch file (`runtime.storage.scratch`). Those of one block at a
time are in memory, as float32 or bfloat16. Training updates and saves the float32 values.

`adapters.safetensors` holds `model.layers.N.PATH.lora_a` (in, r) and `.lora_b` (r, out), float32;
`adapter_config.json` is what `mlx_lm.generate --adapter-path` reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import MutableMapping
from pathlib import Path
from typing import IO, Any

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError, safe_open

from ondevice.bundle.manifest import Manifest
from ondevice.errors import BundleError, DivergedError
from ondevice.files import fsync_path, storage_errors, write_atomic
from ondevice.operations.program import Block
from ondevice.paths import text_path
from runtime.engine.values import Lora
from runtime.methods.noise import key_of

Tensors = MutableMapping[str, mx.array]
WEIGHTS, CONFIG = "adapters.safetensors", "adapter_config.json"
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}


class Adapters:
    """The trainable tensors of every layer, float32, by full name; blocks run with `dtype` copies.

    Products promote these to float32, so that only the values of adapters are rounded.
    """

    def __init__(self, manifest: Manifest, tensors: Tensors, dtype: str = "float32") -> None:
        self.manifest = manifest
        self.tensors = tensors
        self.dtype = dtype
        self.scale = float(manifest.lora["alpha"]) / int(manifest.lora["rank"])

    @staticmethod
    def shapes_of(manifest: Manifest, block: Block) -> dict[str, tuple[int, int]]:
        """The shapes of one block's tensors, in program order."""
        rank = int(manifest.lora["rank"])
        found: dict[str, tuple[int, int]] = {}
        for name in manifest.adapted(block):
            matrix = manifest.matrices[block.tensor(name)]
            found[f"{block.tensor(name)}.lora_a"] = (matrix.columns, rank)
            found[f"{block.tensor(name)}.lora_b"] = (rank, matrix.rows)
        return found

    @classmethod
    def shapes(cls, manifest: Manifest) -> dict[str, tuple[int, int]]:
        """Every tensor's shape, block by block in program order."""
        found: dict[str, tuple[int, int]] = {}
        for block in manifest.layers:
            found.update(cls.shapes_of(manifest, block))
        return found

    @property
    def size(self) -> int:
        """How many values are trained."""
        return sum(math.prod(shape) for shape in self.shapes(self.manifest).values())

    @classmethod
    def initial(cls, manifest: Manifest, seed: int, into: Tensors | None = None) -> Adapters:
        """New adapters in `into`: A uniform in +-1/sqrt(in), keyed by (seed, name), and B zero."""
        tensors: Tensors = {} if into is None else into
        for name, shape in cls.shapes(manifest).items():
            if name.endswith("lora_a"):
                bound = 1 / math.sqrt(shape[0])
                key = key_of(seed, "lora", name)
                value = mx.random.uniform(-bound, bound, shape, key=key)
            else:
                value = mx.zeros(shape)
            mx.eval(value)
            tensors[name] = value
        return cls(manifest, tensors)

    def in_dtype(self, dtype: str) -> Adapters:
        """The same adapters, except that blocks run with copies in another dtype."""
        return Adapters(self.manifest, self.tensors, dtype)

    def loras(self, block: Block) -> dict[str, Lora]:
        """The block's adapters by relative name."""
        return {
            name: Lora(
                self._copy(f"{block.tensor(name)}.lora_a"),
                self._copy(f"{block.tensor(name)}.lora_b"),
                self.scale,
            )
            for name in self.manifest.adapted(block)
        }

    def _copy(self, name: str) -> mx.array:
        value = self.tensors[name].astype(DTYPES[self.dtype])  # itself where it is float32
        mx.eval(value)
        return value

    def config(self) -> dict[str, Any]:
        """The content of adapter_config.json."""
        lora = self.manifest.lora
        keys = sorted({n for block in self.manifest.layers for n in self.manifest.adapted(block)})
        return {
            "fine_tune_type": "lora",
            "num_layers": len(self.manifest.layers),
            "lora_parameters": {
                "rank": lora["rank"],
                "scale": self.scale,
                "dropout": 0.0,
                "keys": keys,
            },
            "ondevice": {"weights_sha256": self.manifest.weights_sha256},
        }

    def check_finite(self) -> None:
        """Raise DivergedError if a value is not finite."""
        for name, tensor in self.tensors.items():
            if not mx.isfinite(tensor).all().item():
                raise DivergedError(f"{name} is no longer finite; lower --learning-rate")

    def save(self, folder: Path) -> None:
        """Write both files into an existing folder, each atomically."""
        temporary = folder / f".{WEIGHTS}.partial"
        with storage_errors(folder / WEIGHTS):
            try:
                with temporary.open("wb") as file:
                    self._write(file)
                fsync_path(temporary)
                temporary.replace(folder / WEIGHTS)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        write_atomic(folder / CONFIG, json.dumps(self.config(), indent=1).encode())

    def _write(self, file: IO[bytes]) -> None:
        """Write a safetensors file tensor by tensor; the library would hold all in memory."""
        header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
        end = 0
        for name, shape in self.shapes(self.manifest).items():
            start, end = end, end + math.prod(shape) * 4
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)
        for name in self.shapes(self.manifest):
            file.write(np.array(self.tensors[name], copy=False).tobytes())

    @classmethod
    def load(cls, manifest: Manifest, source: Path, into: Tensors | None = None) -> Adapters:
        """Read adapters (a folder, or the file itself) into `into`, and check them.

        Raises:
            BundleError: they are damaged or belong to another bundle.
            UsageError: the path is not valid UTF-8.
        """
        source = text_path(source)
        path = source / WEIGHTS if source.is_dir() else source
        _check_config(manifest, path.with_name(CONFIG))
        expected = cls.shapes(manifest)
        tensors: Tensors = {} if into is None else into
        try:
            with safe_open(path, framework="numpy") as file:
                if set(file.keys()) != set(expected):
                    odd = sorted(set(file.keys()) ^ set(expected))
                    raise BundleError(f"{path} does not fit the bundle: {len(odd)} names, {odd[0]}")
                for name, shape in expected.items():
                    value = file.get_tensor(name)
                    if value.shape != shape or value.dtype != np.float32:
                        raise BundleError(f"{path}: {name} is {value.shape}, expected {shape}")
                    if not np.isfinite(value).all():
                        raise BundleError(f"{path}: {name} holds values that are not finite")
                    tensors[name] = mx.array(value)
        except (OSError, SafetensorError) as problem:
            raise BundleError(f"{path} cannot be read: {problem}") from None
        return cls(manifest, tensors)


def _check_config(manifest: Manifest, path: Path) -> None:
    """Refuse adapters of other weights or another scale, as far as a config states these."""
    if not path.exists():
        return
    try:
        config = json.loads(path.read_bytes())
        scale = float(config["lora_parameters"]["scale"])
        weights = config.get("ondevice", {}).get("weights_sha256", manifest.weights_sha256)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise BundleError(f"{path} is damaged: {problem!r}") from None
    expected = float(manifest.lora["alpha"]) / int(manifest.lora["rank"])
    if not math.isclose(scale, expected):
        raise BundleError(f"{path}: its scale is {scale:g}, the bundle's alpha / rank {expected:g}")
    if weights != manifest.weights_sha256:
        raise BundleError(
            f"{path}: the adapter was trained on other weights (SHA-256 {str(weights)[:12]}), the "
            f"bundle's are {manifest.weights_sha256[:12]}"
        )
