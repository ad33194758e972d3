"""The options of `ondevice generate` and `ondevice chat`, which continue prompts."""

from __future__ import annotations

from dataclasses import MISSING, dataclass

from runtime.config.base import (
    COUNT,
    LEAST,
    NOT_NEGATIVE,
    SEED,
    Group,
    between,
    option,
    refuse,
)
from runtime.config.shared import BudgetOptions, adapter_field, bundle_field, device_field

_SHARE = between(LEAST, 1, "usual are 0.9 to 1")
_PART = between(0, 1, "usual are 0 to 0.1")
_WARM = between(0, 100, "usual are 0.5 to 1")


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(BudgetOptions):
    """The options that generation and chats share."""

    bundle: str = bundle_field()
    adapter: str | None = adapter_field()
    max_tokens: int = option(64, "tokens to generate at most, for each answer", COUNT)
    system: str | None = option(
        None,
        "instructions to the model, which the conversation begins with; `ondevice generate` takes "
        "them with --chat",
        aliases=("--system-prompt",),
    )
    temperature: float = option(
        0.0,
        "0 takes the most likely token each time; above 0, tokens are drawn at random: the higher, "
        "the more evenly",
        _WARM,
        Group.SAMPLING,
        aliases=("--temp",),
    )
    top_k: int = option(
        0, "draw from the N most likely tokens only; 0 for no limit", NOT_NEGATIVE, Group.SAMPLING
    )
    top_p: float = option(
        1.0,
        "draw from the fewest tokens whose probabilities add up to X; 1 for no limit",
        _SHARE,
        Group.SAMPLING,
    )
    min_p: float = option(
        0.0,
        "draw from tokens that are at least X times as likely as the most likely; 0 for no limit",
        _PART,
        Group.SAMPLING,
    )
    seed: int = option(0, "seed of the random numbers", SEED, Group.SAMPLING)
    device: str = device_field()

    def __post_init__(self) -> None:
        super().__post_init__()
        limits = {"--top-k": self.top_k != 0, "--top-p": self.top_p != 1, "--min-p": self.min_p > 0}
        given = [name for name, there in limits.items() if there]
        if given and not self.temperature:
            refuse(
                type(self),
                [
                    f"{', '.join(given)} without --temperature: at temperature 0 the most likely "
                    "token is taken; give --temperature 0.7, for example"
                ],
            )


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(GenerationConfig):
    """The options of `ondevice generate`, which continues a prompt."""

    prompt: str = option(MISSING, "text to continue")
    chat: bool = option(
        False, "take the prompt as a user's message and answer it, by the model's chat template"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.system is not None and not self.chat:
            refuse(type(self), ["--system is for conversations: give --chat"])

    @property
    def said(self) -> object:
        """The text to continue, or the conversation to answer."""
        if not self.chat:
            return self.prompt
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": self.prompt}]


@dataclass(frozen=True, kw_only=True)
class ChatConfig(GenerationConfig):
    """The options of `ondevice chat`, which holds a conversation."""

    max_tokens: int = option(512, "tokens to generate at most, for each answer", COUNT)
    context: int = option(
        4096,
        "tokens that the conversation may have; its keys and values take memory (at most what the "
        "model was made for)",
        COUNT,
        Group.MEMORY,
        aliases=("--ctx-size",),
    )
