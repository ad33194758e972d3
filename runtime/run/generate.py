"""Greedy generation from a bundle, with a full forward per token, to see what training has changed.

There is no key-value cache; the cost of a token is that of a row. For serving, hand the adapters
to mlx-lm.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ondevice.bundle.store import Bundle
from ondevice.errors import UsageError
from ondevice.lora import LoraSettings
from runtime.data.prompts import Prompt, confined_prompt
from runtime.engine.model import Model
from runtime.methods.adapters import Adapters
from runtime.run.budget import plan_evaluation
from runtime.run.lora import to_apply
from runtime.run.open import Session, open_checked, open_session
from runtime.run.traced_graphs import Note, silent
from runtime.system.cgroup import memory_limit_bytes

if TYPE_CHECKING:
    from runtime.data.text_encoder import TextEncoder

BUDGET_BYTES = 1_000_000_000  # for the plan's sizes; the tokenizer in this process comes on top


def next_token(model: Model, adapters: Adapters, tokens: list[int]) -> int:
    """The most likely token after `tokens`."""
    x = model.embed(np.array(tokens, np.int64))
    for block in model.blocks[1:-1]:
        x = model.forward(block, x, adapters.loras(block))
        model.release(block)
    h = model.hidden(x, np.array([len(tokens) - 1]))
    (result,) = model.losses([h], [np.zeros(1, np.int64)], gradient=False, predictions=True)
    model.release(model.blocks[-1])
    assert result.predicted is not None
    return int(result.predicted.item())  # type: ignore[arg-type]


class Generator:
    """A bundle that continues prompts, with the adapter that each is given.

    longest: the most tokens of a prompt and its continuation together.
    """

    def __init__(self, bundle: Bundle, encoder: TextEncoder, longest: int | None = None) -> None:
        self.bundle, self.encoder = bundle, encoder
        self.longest = longest or bundle.manifest.buckets[-1]
        self._sessions: dict[LoraSettings, Session] = {}

    def adapters(self, path: Path | None) -> Adapters:
        """The adapters in a run, folder or file; without one those that change nothing."""
        return Adapters.applied(to_apply(path, self.bundle).manifest, path)

    def _session(self, lora: LoraSettings) -> Session:
        """The model with adapters of these settings."""
        if lora not in self._sessions:
            bundle = self.bundle.with_lora(lora)
            budget_bytes = min(BUDGET_BYTES, memory_limit_bytes() or BUDGET_BYTES)
            plan = plan_evaluation(bundle, budget_bytes, self.longest)
            self._sessions[lora] = open_session(bundle, plan)
        return self._sessions[lora]

    def pieces(self, prompt: Prompt, adapters: Adapters, max_tokens: int) -> Iterator[str]:
        """Yield the continuation of a prompt, up to an end or `max_tokens`."""
        session = self._session(adapters.manifest.lora)
        tokens, decode = list(prompt.tokens), self.encoder.decode
        length = min(self.longest, len(tokens) + max_tokens)
        shown = decode(tokens)
        while len(tokens) < length:
            token = next_token(session.model(len(tokens)), adapters, tokens)
            if token in prompt.ends:
                break
            tokens.append(token)
            text = decode(tokens)
            end = text.find(prompt.ending, len(shown)) if prompt.ending else -1
            if end >= 0:
                yield text[len(shown) : end]
                return
            # hold back incomplete characters, and text that may become the ending
            if not text.endswith("\N{REPLACEMENT CHARACTER}") and not _begins(prompt.ending, text):
                yield text[len(shown) :]
                shown = text
        if rest := decode(tokens)[len(shown) :]:
            yield rest

    def text(self, prompt: Prompt, adapters: Adapters, max_tokens: int) -> str:
        """The whole continuation."""
        return "".join(self.pieces(prompt, adapters, max_tokens))


def generate(
    path: str,
    prompt: str,
    adapter: Path | None,
    max_tokens: int,
    chat: bool = False,
    device: str = "auto",
    note: Note = silent,
) -> Iterator[str]:
    """Yield the continuation of `prompt`, piece by piece, up to an end token or `max_tokens`.

    With `chat` the prompt is what a user says, and the continuation the answer, by the chat
    template of the bundle. For `device` and `note` see `with_graphs`.

    Raises:
        DataError: the bundle has no tokenizer, or no chat template where one is wanted, or one that
            takes more than it may.
        UsageError: the prompt is not valid Unicode or is longer than the longest sequence bucket.
    """
    from runtime.data.text_encoder import load_encoder

    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UsageError(f"the prompt {prompt!r:.80} is not valid UTF-8") from None
    bundle = open_checked(path, device, note)
    encoder = load_encoder(bundle.path)
    said = [{"role": "user", "content": prompt}] if chat else prompt
    given = confined_prompt(bundle.path, said)
    tokens = given.tokens
    if not tokens:
        raise UsageError("the prompt has no tokens")
    if max(tokens) >= bundle.manifest.vocab_size:
        raise UsageError(f"the prompt has token {max(tokens)}, which the model does not embed")
    longest = bundle.manifest.buckets[-1]
    if len(tokens) >= longest:
        raise UsageError(f"the prompt has {len(tokens)} tokens; the bundle's longest is {longest}")
    generator = Generator(bundle, encoder, min(longest, len(tokens) + max_tokens))
    yield from generator.pieces(given, generator.adapters(adapter), max_tokens)


def _begins(ending: str, text: str) -> bool:
    """Whether `text` ends in a part of `ending`."""
    return any(text.endswith(ending[:size]) for size in range(1, len(ending)))
