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
from typing import IO, Any, NamedTuple

import mlx.core as mx
import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from ondevice.bundle.manifest import Manifest
from ondevice.documents import from_json
from ondevice.errors import BundleError, DivergedError, UsageError
from ondevice.files import fsync_path, read_file, require_file, storage_errors, write_atomic
from ondevice.lora import ALL_LAYERS, ALL_LINEAR, LoraSettings
from ondevice.operations.program import Block
from ondevice.paths import text_path
from runtime.engine.values import Lora
from runtime.methods.noise import key_of
from runtime.storage.saves import SLOTS, check_adapter

Tensors = MutableMapping[str, mx.array]
WEIGHTS, CONFIG = "adapters.safetensors", "adapter_config.json"
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}


_DAMAGE = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError),
    msgspec.ValidationError,
)


class Adapters:
    """The trainable tensors of every layer, float32, by full name; blocks run with `dtype` copies.

    Products promote these to float32, so that only the values of adapters are rounded.
    """

    def __init__(self, manifest: Manifest, tensors: Tensors, dtype: str = "float32") -> None:
        self.manifest = manifest
        self.tensors = tensors
        self.dtype = dtype
        self.scale = manifest.lora.scale
        self.dropout = manifest.lora.dropout

    @staticmethod
    def shapes_of(manifest: Manifest, block: Block) -> dict[str, tuple[int, int]]:
        """The shapes of one block's tensors, in program order."""
        rank = manifest.lora.rank
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
        lora, layers = self.manifest.lora, self.manifest.layers
        keys = sorted({n for block in layers for n in self.manifest.adapted(block)})
        return {
            "fine_tune_type": "lora",
            "num_layers": len(layers) - lora.first_layer(len(layers)),
            "lora_parameters": {
                "rank": lora.rank,
                "scale": self.scale,
                "dropout": lora.dropout,
                "keys": keys,
            },
            "ondevice": {
                "weights_sha256": self.manifest.weights_sha256,
                "lora": lora.to_json(),
            },
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
    def applied(cls, manifest: Manifest, source: Path | None) -> Adapters:
        """Those in `source`, checked as `load` does; none without it."""
        return cls(manifest, {}) if source is None else cls.load(manifest, source)

    @classmethod
    def load(cls, manifest: Manifest, source: Path, into: Tensors | None = None) -> Adapters:
        """Read adapters (a folder, or the file itself) into `into`, and check them.

        Raises:
            BundleError: they are damaged, of another bundle, or not what their run saved.
            UsageError: the path is not valid UTF-8.
        """
        source = text_path(source)
        path = _weights_path(source)
        _check_kind(source)
        check_adapter(path)
        _check_config(manifest, _config_path(source))
        expected = cls.shapes(manifest)
        hint = "" if _config_path(source).exists() else f"; there is no {CONFIG} that describes it"
        tensors: Tensors = {} if into is None else into
        try:
            require_file(path)
            with safe_open(path, framework="numpy") as file:
                if set(file.keys()) != set(expected):
                    odd = sorted(set(file.keys()) ^ set(expected))
                    raise BundleError(
                        f"{path} does not fit the bundle: {len(odd)} names, {odd[0]}{hint}"
                    )
                for name, shape in expected.items():
                    value = file.get_tensor(name)
                    if value.shape != shape or value.dtype != np.float32:
                        raise BundleError(
                            f"{path}: {name} is {value.shape}, expected {shape}{hint}"
                        )
                    if not np.isfinite(value).all():
                        raise BundleError(f"{path}: {name} holds values that are not finite")
                    tensors[name] = mx.array(value)
        except (OSError, SafetensorError) as problem:
            raise BundleError(f"{path} cannot be read: {problem}") from None
        return cls(manifest, tensors)


def lora_of(source: Path) -> LoraSettings | None:
    """The LoRA settings of adapters (a folder, or the file itself); None if no config is there.

    A config that mlx-lm wrote says no alpha: it is the scale times the rank.

    Raises:
        BundleError: the config is damaged, or of another kind of adapter.
        UsageError: the path is not valid UTF-8.
    """
    path = _config_path(text_path(source))
    _check_kind(source)
    for one in (path, _weights_path(source)):  # before anything is planned for them
        check_adapter(one)
    return _read_config(path).lora if path.exists() else None


class _Config(NamedTuple):
    """What adapter_config.json states; `weights` is None if it names none."""

    lora: LoraSettings
    weights: str | None


def _weights_path(source: Path) -> Path:
    return source / WEIGHTS if source.is_dir() else source


def _check_kind(source: Path) -> None:
    """Raise UsageError for a run that has trained all parameters, and holds no adapter."""
    if (source / SLOTS).exists():
        raise UsageError(
            f"{source} has trained all parameters and holds no adapter; ondevice replay {source} "
            "--output BUNDLE writes the trained model as a bundle, which is used without --adapter"
        )


def _config_path(source: Path) -> Path:
    return source / CONFIG if source.is_dir() else source.with_name(CONFIG)


def _read_config(path: Path) -> _Config:
    try:
        config = from_json(read_file(path))
        kind = config.get("fine_tune_type", "lora")
        if kind != "lora":
            raise BundleError(f"{path}: its adapter is {kind!r:.80}; only lora is supported")
        parameters, own = config["lora_parameters"], config.get("ondevice", {})
        scale, weights = float(parameters["scale"]), own.get("weights_sha256")
        lora = msgspec.convert(own.get("lora") or _from_mlx_lm(config), LoraSettings)
    except _DAMAGE as problem:
        raise BundleError(f"{path} is damaged: {problem!r}") from None
    if lora.problem:
        raise BundleError(f"{path}: {lora.problem}")
    if not math.isclose(scale, lora.scale):
        raise BundleError(f"{path}: its scale is {scale:g}, that of its settings {lora.scale:g}")
    return _Config(lora, weights)


def _from_mlx_lm(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of `LoraSettings` in a config that mlx-lm wrote."""
    parameters = config["lora_parameters"]
    keys = parameters.get("keys")
    return {
        "rank": parameters["rank"],
        "alpha": parameters["scale"] * parameters["rank"],
        "targets": ALL_LINEAR if keys is None else sorted({key.split(".")[-1] for key in keys}),
        "layers": config.get("num_layers", ALL_LAYERS),
        "dropout": parameters.get("dropout", 0.0),
    }


def _check_config(manifest: Manifest, path: Path) -> None:
    """Refuse adapters of other weights or another scale, as far as a config states these."""
    check_adapter(path)
    if not path.exists():
        return
    lora, weights = _read_config(path)
    expected = manifest.lora.scale
    if not math.isclose(lora.scale, expected):
        raise BundleError(f"{path}: its scale is {lora.scale:g}, expected {expected:g}")
    if weights not in (None, manifest.weights_sha256):
        raise BundleError(
            f"{path}: the adapter was trained on other weights (SHA-256 {str(weights)[:12]}), the "
            f"bundle's are {manifest.weights_sha256[:12]}"
        )
