"""A continued prompt, or a message with its answer, and what that took.

Nothing here imports MLX.
"""

from __future__ import annotations

import msgspec


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """A continued prompt, or a message with its answer.

    text: the continuation alone.
    stopped: why it is over: "end" (the model's), "max_tokens" or "context"; else "".
    prompt_tokens_per_s: tokens of the prompt that were read each second.
    tokens_per_s: tokens generated each second after the first; None if there was no second.
    """

    prompt: str
    text: str
    prompt_tokens: int
    generated_tokens: int
    stopped: str
    prompt_tokens_per_s: float | None
    tokens_per_s: float | None
    budget_bytes: int
    predicted_peak_bytes: int
    peak_footprint_bytes: int
