"""A trained LoRA adapter as its writers take it: the model's manifest, and the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from export.sources.source import INSIDE
from export.stored import F32
from runtime.adapters.names import A, B
from runtime.bundle.manifest import Manifest


@dataclass(frozen=True)
class Adapter:
    """A trained adapter.

    manifest: of its model, with the adapter's settings.  tensors: by our names, `.lora_a` (in, r)
    and `.lora_b` (r, out).
    """

    manifest: Manifest
    tensors: Mapping[str, F32]

    @property
    def modules(self) -> dict[str, tuple[F32, F32]]:
        """Both tensors of every adapted module, by its name."""
        names = [name.removesuffix(f".{A}") for name in self.tensors if name.endswith(f".{A}")]
        return {name: (self.tensors[f"{name}.{A}"], self.tensors[f"{name}.{B}"]) for name in names}

    @property
    def paths(self) -> list[str]:
        """The names of the adapted modules from their layer on, such as `self_attn.q_proj`."""
        layers = self.manifest.layers
        return sorted({name for block in layers for name in self.manifest.adapted(block)})

    @property
    def lookup(self) -> str:
        """The name of the embedding, if it is adapted; its tensors are (V, r) and (r, D)."""
        return next(iter(self.manifest.adapted(self.manifest.blocks[0])), "")

    @property
    def outside(self) -> list[str]:
        """The names of the adapted modules outside of layers."""
        ends = self.manifest.blocks[0], self.manifest.blocks[-1]
        return [name for block in ends for name in self.manifest.adapted(block)]

    @property
    def tied(self) -> bool:
        """Whether the model's head multiplies by its embedding."""
        return self.manifest.owner(self.manifest.blocks[-1]) == self.manifest.blocks[0]

    @property
    def layers(self) -> range:
        """The numbers of the adapted layers."""
        count = len(self.manifest.layers)
        return range(self.manifest.lora.first_layer(count), count)

    @property
    def sees(self) -> bool:
        """Whether the model is the language model of one that sees or hears besides."""
        return INSIDE in self.manifest.provenance


def base_model(provenance: Mapping[str, Any]) -> tuple[str, str | None]:
    """The name by which a bundle's source is known, and its revision if it came from the hub."""
    revision = provenance.get("revision")
    return str(provenance.get("name", "")), None if revision is None else str(revision)
