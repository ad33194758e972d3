"""The files of an adapter, from whichever tool, read as ours: settings, and tensors by our names.

Ours and mlx-lm's are `adapters.safetensors`, PEFT's `adapter_model.safetensors`. The file
`adapter_config.json` beside it says which tool wrote them. Nothing in them is trusted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from runtime.adapters import mlx_lm, peft
from runtime.adapters.lora import LoraSettings
from runtime.adapters.names import A, B, Coverage, coverage_of, is_of_tower, is_prefix, number
from runtime.bundle.manifest import Manifest
from runtime.core.documents import from_json
from runtime.core.errors import BundleError, UsageError
from runtime.core.files import read_small, require_file
from runtime.core.lookalikes import HUB_ID
from runtime.core.paths import text_path
from runtime.core.typed import as_type
from runtime.methods.joined_adapters import Piece, joined, pieces_of
from runtime.storage.saves import SLOTS, check_adapter

F32 = npt.NDArray[np.float32]
Shape = tuple[int, ...]
MOST_CONFIG_BYTES = 1 << 20
MERGE = "merge it into its model there (PEFT's merge_and_unload, mlx_lm.fuse) and export that"
TYPES = ("F32", "F16", "BF16")  # of tensors, as safetensors names them

_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError)


class Stated(NamedTuple):
    """The content of adapter_config.json; `weights_sha256` is None if it names no bundle."""

    lora: LoraSettings
    weights_sha256: str | None


@dataclass(frozen=True)
class AdapterFiles:
    """Where an adapter's two files are; only `weights` must exist."""

    weights: Path
    config: Path
    is_peft: bool
    manifest: Manifest | None = None  # of the model, where tensors are read

    @classmethod
    def at(cls, path: Path, manifest: Manifest | None = None) -> AdapterFiles:
        """Those of a run, an adapter folder, or a .safetensors file, for a model.

        Raises:
            BundleError: there is nothing, or a file is altered, or no safetensors file.
            UsageError: the path is not valid UTF-8, or a run holds no adapter.
        """
        path = text_path(path)
        if not path.exists():
            name = str(path)
            hub = f"; one of the hub is fetched by: hf download {name} --local-dir FOLDER"
            raise BundleError(
                f"{name}: there is no such run, adapter folder or .safetensors file"
                f"{hub if HUB_ID.fullmatch(name) and not path.parent.exists() else ''}"
            )
        if (path / SLOTS).exists():
            raise UsageError(
                f"{path} has trained all parameters and holds no adapter; ondevice replay "
                f"{path} --output BUNDLE writes the trained model as a bundle, which is used "
                "without --adapter"
            )
        folder = path if path.is_dir() else path.parent
        config = folder / mlx_lm.CONFIG
        check_adapter(config)
        is_peft = _is_peft(config)
        if path.is_dir():
            theirs = folder / peft.WEIGHTS
            if not config.exists() and not (folder / mlx_lm.WEIGHTS).exists():
                is_peft = theirs.exists()
            path = theirs if is_peft else folder / mlx_lm.WEIGHTS
            if is_peft and not theirs.exists() and (pickle := folder / peft.PICKLE).exists():
                raise BundleError(
                    f"{pickle} is a pickle, which may run any code when it is read; save the "
                    f"adapter with PEFT as {peft.WEIGHTS} (safe_serialization=True)"
                )
        if is_peft and not config.exists():
            raise BundleError(f"{path}: there is no {config.name}, which says PEFT's lora_alpha")
        check_adapter(path)
        if not path.exists() and not config.exists():
            raise BundleError(
                f"{path} cannot be read: it is not there. An adapter is a run that has saved, or "
                f"a folder with {mlx_lm.WEIGHTS} or {peft.WEIGHTS}"
            )
        return cls(path, config, is_peft, manifest)

    @property
    def hint(self) -> str:
        """The end of a message if no configuration describes the tensors."""
        return "" if self.config.exists() else f"; there is no {mlx_lm.CONFIG} that describes it"

    def stated(self) -> Stated | None:
        """The content of the configuration; None if there is none.

        Raises:
            BundleError: it is damaged, of another kind of adapter, or of other tensors.
        """
        if not self.config.exists():
            return None
        own: dict[str, Any] = {}
        scale, layers = None, None
        try:
            config = _read_config(self.config)
            if not isinstance(config, dict):
                raise ValueError("it holds no settings by name")
            if self.is_peft:
                stated, layers = peft.stated_in(config), peft.layers_in(config)
                with self._file() as file:
                    peft.check_patterns(config, file.keys())
                    peft.check_targets(config, file.keys())
            else:
                kind, own = config.get(mlx_lm.KIND, "lora"), config.get("ondevice", {})
                if kind == mlx_lm.PREFIX:
                    return self._prefix(own)
                if kind != "lora":
                    raise BundleError(
                        f"{self.config}: its {mlx_lm.KIND} is {kind!r:.80}; only lora is "
                        f"supported; {MERGE}"
                    )
                stated = mlx_lm.stated_in(config)
                scale = number(mlx_lm.parameters_of(config)["scale"], "scale")
                if not own and self.manifest is not None:
                    with self._file() as file:
                        mlx_lm.check_targets(config, file.keys(), len(self.manifest.layers))
            weights = own.get("weights_sha256")
            # where nothing else decides, the tensors say which modules are adapted
            fields = own.get("lora") or {**stated, "targets": [], "layers": 1}
            lora = as_type(fields, LoraSettings)
        except peft.UnsupportedError as problem:
            raise BundleError(f"{self.config}: {problem}; {MERGE}") from None
        except KeyError as problem:
            raise BundleError(f"{self.config} is damaged: it has no {problem}") from None
        except _DAMAGE as problem:
            raise BundleError(f"{self.config} is damaged: {problem}") from None
        if lora.problem or lora.prefix:
            raise BundleError(f"{self.config}: {lora.problem or 'a LoRA adapter has no prefix'}")
        if scale is not None and not math.isclose(scale, lora.scale):
            raise BundleError(
                f"{self.config}: its scale is {scale:g}, that of its settings {lora.scale:g}"
            )
        if "lora" not in own:
            lora = self._completed(lora, layers)
        return Stated(lora, weights)

    def _prefix(self, own: dict[str, Any]) -> Stated:
        """The content of a prefix's configuration, all of which is ours."""
        lora = as_type(own["lora"], LoraSettings)
        if lora.problem or not lora.prefix:
            raise BundleError(f"{self.config}: {lora.problem or 'a prefix has no rows'}")
        return Stated(lora, own.get("weights_sha256"))

    def _completed(self, lora: LoraSettings, layers: set[int] | None) -> LoraSettings:
        """The settings with the targets and layers that the tensors have.

        `layers` are their numbers by the configuration, where it states them.
        """
        with self.opened(lora.rank) as tensors:
            coverage = tensors.coverage
        if coverage.rank != lora.rank:
            raise BundleError(
                f"{self.weights} has adapters of rank {coverage.rank}, and {self.config} says rank "
                f"{lora.rank}: one of the two files belongs to another adapter"
            )
        assert self.manifest is not None, "tensors are read for a model"
        with_targets = {
            number
            for number, block in enumerate(self.manifest.layers)
            if any(
                name.split(".")[-1] in coverage.targets for name in self.manifest.adaptable(block)
            )
        }
        adapted = with_targets.intersection(range(coverage.first, coverage.last + 1))
        if layers is not None and with_targets & layers != adapted:
            raise BundleError(
                f"{self.weights} has adapters in {coverage.where}, and {self.config} says "
                f"layers_to_transform {sorted(layers)}: one of the two files belongs to another "
                "adapter, or delete the setting"
            )
        count = coverage.counted(len(self.manifest.layers))
        return msgspec.structs.replace(lora, targets=coverage.targets, layers=count)

    @contextmanager
    def opened(self, rank: int) -> Iterator[AdapterTensors]:
        """The tensors, whose names and shapes are checked, of adapters of this rank.

        Raises:
            BundleError: the file is damaged, or its tensors are not those of an adapter.
        """
        with self._file() as file:
            assert self.manifest is not None, "tensors are read for a model"
            yield AdapterTensors(self.weights, file, self.manifest, rank)

    def _file(self) -> Any:
        """The open file of the tensors. Raises BundleError where it cannot be read."""
        try:
            require_file(self.weights)
            return safe_open(self.weights, framework="numpy")
        except (OSError, SafetensorError) as problem:
            raise BundleError(
                f"{self.weights} cannot be read: {problem}; fetch or save it again, as .safetensors"
            ) from None


class AdapterTensors:
    """The tensors of an open adapter file by our names, with our shapes, as float32.

    Raises:
        BundleError: a tensor has another type, or a name that no tensor of an adapter has, or
            PEFT's modules are no matrices of the model.
    """

    def __init__(self, path: Path, file: Any, manifest: Manifest, rank: int) -> None:
        self._path, self.file = path, file
        self._pieces: dict[str, list[Piece]] = {}
        self._stored: dict[str, str] = {}
        self.shapes: dict[str, Shape] = {}
        self.base = sorted(filter(peft.is_base, file.keys()))  # see `base_weights`
        names = sorted({*file.keys()} - {*self.base})
        if towers := [name for name in names if is_of_tower(name)]:
            raise BundleError(
                f"{path}: {len(towers)} of its {len(names)} tensors adapt what sees or hears, such "
                f"as {towers[0]!r:.200}, and a bundle holds the language model alone; train the "
                "adapter on that alone, or delete these tensors, which text does not pass through"
            )
        if any(file.get_slice(stored).get_dtype() == "BF16" for stored in (*names, *self.base)):
            import ml_dtypes  # noqa: F401 - gives NumPy the type; other files need it not
        self._is_peft = any(map(peft.is_stored_name, names))
        for stored in names:
            name, part = self._own_name(stored), file.get_slice(stored)
            if (dtype := part.get_dtype()) not in TYPES:
                raise BundleError(
                    f"{path}: {stored} has type {dtype}; supported are {', '.join(TYPES)}"
                )
            shape = tuple(part.get_shape())
            if name in self._stored:
                raise BundleError(f"{path}: {stored} and {self._stored[name]} are both {name}")
            self._stored[name] = stored
            self.shapes[name] = shape[::-1] if self._is_peft else shape
        if self._is_peft:
            self._rename(manifest, rank)
            if manifest.owner(manifest.blocks[-1]) == manifest.blocks[0]:
                self._join_tied(*manifest.embedding_names)

    def _rename(self, manifest: Manifest, rank: int) -> None:
        """Name the adapters of transformers' modules by the matrices of which these are made."""
        try:
            pieces = pieces_of(self.shapes, manifest, rank, self._named)
        except ValueError as problem:
            raise BundleError(f"{self._path}: {problem}; {MERGE}") from None
        theirs = {piece.module for parts in pieces.values() for piece in parts}
        others = {n: s for n, s in self.shapes.items() if n.rpartition(".")[0] not in theirs}
        for own, parts in pieces.items():
            (inputs, ranks), (_, outputs) = (
                self.shapes[f"{parts[0].module}.{part}"] for part in (A, B)
            )
            ranks = len(range(ranks)[parts[0].ranks])
            outputs = sum(
                len(range(self.shapes[f"{piece.module}.{B}"][1])[piece.rows]) for piece in parts
            )
            others |= {f"{own}.{A}": (inputs, ranks), f"{own}.{B}": (ranks, outputs)}
            self._pieces |= {f"{own}.{A}": parts, f"{own}.{B}": parts}
        self.shapes = others

    def _join_tied(self, first: str, second: str) -> None:
        """Make one of PEFT's two adapters of a matrix that is both the embedding and the head's.

        Raises:
            BundleError: there is one for the lookup or the head alone, or the two differ.
        """
        head = [name for name in (f"{peft.HEAD}.{A}", f"{peft.HEAD}.{B}") if name in self.shapes]
        both = bool(head) == (first in self.shapes)
        if both and len(head) == 2 and second in self.shapes:
            a, b = map(self.read, head)
            both = np.array_equal(a.T, self.read(second)) and np.array_equal(b.T, self.read(first))
        if not both:
            raise BundleError(
                f"{self._path}: the model's head multiplies by its embedding, and PEFT has adapted "
                "one of the two, or both otherwise; a matrix has one adapter here, which PEFT "
                f"makes with ensure_weight_tying=True; {MERGE}"
            )
        for name in head:
            del self.shapes[name]

    def _own_name(self, stored: str) -> str:
        if not self._is_peft:
            return mlx_lm.own_name(stored)
        try:
            return peft.own_name(stored)
        except peft.UnsupportedError as problem:
            raise BundleError(f"{self._path}: {problem}; {MERGE}") from None

    @property
    def coverage(self) -> Coverage:
        """The rank, targets and layers. Raises BundleError where they cannot be told so."""
        if not self.shapes:
            raise BundleError(f"{self._path}: it holds no tensors")
        try:
            return coverage_of(self.shapes)
        except ValueError as problem:
            raise BundleError(f"{self._path}: {problem}") from None

    def check_fits(self, expected: Mapping[str, Shape], hint: str = "") -> None:
        """Compare names and shapes with those that the model and the settings imply.

        Raises:
            BundleError: they differ.
        """
        if self.shapes == expected:
            return
        if (prefix := is_prefix(self.shapes)) != is_prefix(expected):
            kinds = ("LoRA adapters", "a prefix of keys and values")
            raise BundleError(
                f"{self._path} does not fit: it holds {kinds[prefix]}, and {kinds[not prefix]} "
                f"{'are' if prefix else 'is'} expected{hint}; to train with it, give --trainable "
                f"{'prefix' if prefix else 'lora'}, and for other uses keep its {mlx_lm.CONFIG} "
                "beside it"
            )
        stored, wanted = self.coverage, coverage_of(expected)
        if prefix and stored.rank != wanted.rank:
            raise BundleError(
                f"{self._path} does not fit: its prefix has {stored.rank} rows, and {wanted.rank} "
                f"are expected{hint}; to train with it, give --prefix-length {stored.rank}, or "
                "start with a new prefix (without --adapter)"
            )
        if expected and stored.rank != wanted.rank:
            raise BundleError(
                f"{self._path} does not fit: its adapters have rank {stored.rank}, and rank "
                f"{wanted.rank} is expected{hint}; to train with it, give --lora-rank "
                f"{stored.rank}, or start with new adapters (without --adapter)"
            )
        more, fewer = (
            sorted(a.keys() - b) for a, b in ((self.shapes, expected), (expected, self.shapes))
        )
        if more or fewer:
            odd = " and ".join(
                f"{len(names)} tensors are {state}, such as {names[0]}"
                for names, state in ((more, "not expected"), (fewer, "missing"))
                if names
            )
            raise BundleError(
                f"{self._path} does not fit the bundle: it has {stored.where}, expected are "
                f"{wanted.where}; {odd}; all of the last layers have adapters on the same linear "
                f"layers, as far as they have these{hint or f'; {MERGE}'}"
            )
        name = next(name for name, shape in expected.items() if self.shapes[name] != shape)
        raise BundleError(
            f"{self._path}: {name} is {self.shapes[name]}, expected {expected[name]}{hint}"
        )

    def read(self, name: str) -> F32:
        """A tensor with our shape, as a fresh array.

        Raises:
            BundleError: it holds values that are not finite.
        """
        if name not in self._pieces:
            return self._named(name)
        try:
            return joined(name, self._pieces[name], self._named)
        except ValueError as problem:
            raise BundleError(f"{self._path}: {problem}; {MERGE}") from None

    def _named(self, name: str) -> F32:
        """A tensor by its name in the file as ours are formed."""
        stored = self._stored[name]
        value = self.file.get_tensor(stored)
        if not np.isfinite(value).all():
            raise BundleError(f"{self._path}: {stored} holds values that are not finite")
        value = value.T if self._is_peft else value
        return np.ascontiguousarray(value, np.float32)


def _read_config(path: Path) -> Any:
    """The content of adapter_config.json.

    Raises:
        BundleError: it is large.
        ValueError, OSError: it cannot be read.
    """
    return from_json(read_small(path, MOST_CONFIG_BYTES, "a configuration of an adapter"))


def _is_peft(config: Path) -> bool:
    """Whether a configuration is PEFT's; a damaged one is reported where it is read."""
    try:
        return peft.KIND in _read_config(config)
    except (OSError, ValueError, TypeError):
        return False
