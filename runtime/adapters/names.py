"""The names of an adapter's tensors here, and the rank, layers and targets that these show.

Ours are mlx-lm's: `model.layers.N.PATH.lora_a` (in, r) and `.lora_b` (r, out); (V, r) and (r, D) of
an embedding. Those of a prefix of m rows are `model.layers.N.ATTENTION.prefix_keys` (m, K D) and
`.prefix_values` (m, K E).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, cast

A, B = "lora_a", "lora_b"
KEYS, VALUES = "prefix_keys", "prefix_values"  # of an attention, both (m, ...)
OTHER = "whose tensors are there: one of the two files belongs to another adapter"
Shape = tuple[int, ...]

# prefixes of a language model's names inside a model that also sees -> the prefixes here
_INSIDE = {"model.language_model.": "model.", "language_model.": ""}
_HEADLESS = "layers."  # of a model that was loaded without its head
# parts of names that torch adds to those of modules which it wraps
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_PARALLEL = "module."  # before all names
# parts of names in towers that see or hear, and in what joins them to the language model
_TOWERS = frozenset(
    {
        *("vision_tower", "vision_model", "visual", "vision_encoder", "vision_embed_tokens"),
        *("multi_modal_projector", "mm_projector", "aligner", "connector", "embed_vision"),
        *("audio_tower", "embed_audio"),
    }
)


class Coverage(NamedTuple):
    """The part of a model with adapters: the modules `targets` in layers `first` to `last`.

    A layer need not have all of them. The embedding and the head may be among the targets; where
    they alone are, the layers are none.
    """

    rank: int
    targets: tuple[str, ...]
    first: int
    last: int

    def counted(self, layers: int) -> int:
        """How many of a model's `layers` from the last one have targets; 1 where none has one."""
        return max(1, layers - self.first) if self.first <= self.last else 1

    @property
    def where(self) -> str:
        """The layers in words."""
        if self.first < self.last:
            return f"layers {self.first} to {self.last}"
        return f"layer {self.last}" if self.first == self.last else "no layer"


def is_prefix(names: Iterable[str]) -> bool:
    """Whether tensors with these names of ours are those of a prefix, and not of LoRA adapters."""
    return any(name.endswith((f".{KEYS}", f".{VALUES}")) for name in names)


def inner_name(name: str) -> str:
    """A tensor's or module's name in the language model alone."""
    outer = next((outer for outer in _INSIDE if name.startswith(outer)), None)
    inner = name if outer is None else _INSIDE[outer] + name.removeprefix(outer)
    return f"model.{inner}" if inner.startswith(_HEADLESS) else inner


def unwrapped(name: str) -> str:
    """A name without what torch adds to it, such as `_orig_mod` of torch.compile."""
    inner = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    return inner.removeprefix(_PARALLEL)


def is_of_tower(name: str) -> bool:
    """Whether a name is of a part that sees or hears, which a language model has not."""
    return not _TOWERS.isdisjoint(name.split("."))


def outer_name(name: str, outer: str) -> str:
    """The name inside a larger model, whose language model is at `outer`, a key of `_INSIDE`."""
    return outer + name.removeprefix(_INSIDE[outer])


def number(value: object, name: str) -> float:
    """A setting that must be a number. Raises TypeError; True and text that reads so are none."""
    if type(value) not in (int, float):
        raise TypeError(f"{name} is {value!r:.80}, not a number")
    return float(cast(float, value))


def whole(value: object, name: str) -> int:
    """A setting that must be a whole number. Raises TypeError."""
    if type(value) is not int:
        raise TypeError(f"{name} is {value!r:.80}, not a whole number")
    return value


def is_names(value: object) -> bool:
    """Whether a setting is a list of texts."""
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def ends_with_any(module: str, names: Iterable[str]) -> bool:
    """Whether a module has one of these names, or ends with one."""
    return any(f".{module}".endswith(f".{name}") for name in names)


def coverage_of(shapes: Mapping[str, Shape]) -> Coverage:
    """The coverage of tensors with our names and these shapes; of none, rank 0 and no layer.

    Raises:
        ValueError: in words, if that is not one rank, or a name is no tensor of an adapter.
    """
    modules = {name.rpartition(".")[0] for name in shapes}
    ranks: dict[int, str] = {}
    for module in sorted(modules):
        ranks.setdefault(_rank(module, shapes), module)
    if len(ranks) > 1:
        examples = ", ".join(f"{rank} in {module}" for rank, module in sorted(ranks.items())[:3])
        raise ValueError(f"its modules have different ranks ({examples}); only one is supported")
    layers = {layer for module in modules if (layer := layer_of(module)) is not None}
    targets = sorted({module.rpartition(".")[2] for module in modules})
    first, last = min(layers, default=0), max(layers, default=-1)
    return Coverage(next(iter(ranks), 0), tuple(targets), first, last)


def layer_of(module: str) -> int | None:
    """The layer of a module such as `model.layers.3.self_attn.q_proj`; None of one outside."""
    parts = module.split(".")
    number = next((i for i, part in enumerate(parts) if part.isascii() and part.isdecimal()), None)
    if number is None:
        return None
    if number + 1 == len(parts) or len(parts[number]) > 9:
        raise ValueError(f"it adapts {module}; only linear layers and embeddings are supported")
    return int(parts[number])


def _rank(module: str, shapes: Mapping[str, Shape]) -> int:
    """Of A (C, r) and B (r, D) the rank, of keys (P, C) and values (P, D) of a prefix its rows."""
    is_prefix = f"{module}.{KEYS}" in shapes
    parts, shared = ((KEYS, VALUES), 0) if is_prefix else ((A, B), 1)
    first, second = (shapes.get(f"{module}.{part}") for part in parts)
    if first is None and second is None:
        name = next(name for name in shapes if name.rpartition(".")[0] == module)
        raise ValueError(f"it holds {name!r:.200}, which is no tensor of an adapter")
    if first is None or second is None:
        raise ValueError(f"{module} has only one of its two tensors")
    if len(first) != 2 or len(second) != 2 or first[shared] != second[0]:
        raise ValueError(f"the two tensors of {module} do not fit each other: {first} and {second}")
    return second[0]
