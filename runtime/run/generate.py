"""Greedy generation from a bundle, with a full forward per token, to see what training has changed.

There is no key-value cache; the cost of a token is that of a row. For serving, hand the adapters
to mlx-lm.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ondevice.errors import UsageError
from runtime.engine.model import Model
from runtime.methods.adapters import Adapters
from runtime.run.budget import plan_evaluation
from runtime.run.lora import to_apply
from runtime.run.open import open_checked, open_session

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


def generate(
    path: str, prompt: str, adapter: Path | None, max_tokens: int, chat: bool = False
) -> Iterator[str]:
    """Yield the continuation of `prompt`, piece by piece, up to an end token or `max_tokens`.

    With `chat` the prompt is what a user says, and the continuation the answer, by the chat
    template of the bundle.

    Raises:
        DataError: the bundle has no tokenizer, or no chat template where one is wanted.
        UsageError: the prompt is not valid Unicode or is longer than the longest sequence bucket.
    """
    from runtime.data.text_encoder import load_encoder

    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UsageError(f"the prompt {prompt!r:.80} is not valid UTF-8") from None
    bundle = to_apply(adapter, open_checked(path))
    encoder = load_encoder(bundle.path)
    ends, ending = {encoder.eos, *encoder.ends}, ""
    if chat:
        template = encoder.chat()
        try:
            tokens = encoder.encode(template.prompt([{"role": "user", "content": prompt}]))
            ending = template.ending
        except ValueError as error:
            raise UsageError(str(error)) from error
        first = encoder.encode(ending)[:1]
        if encoder.special.issuperset(first):  # which an answer never holds itself
            ends.update(first)
            ending = ""
    else:
        tokens = ([] if encoder.bos is None else [encoder.bos]) + encoder.encode(prompt)
    if not tokens:
        raise UsageError("the prompt has no tokens")
    if max(tokens) >= bundle.manifest.vocab_size:
        raise UsageError(f"the prompt has token {max(tokens)}, which the model does not embed")
    longest = bundle.manifest.buckets[-1]
    if len(tokens) >= longest:
        raise UsageError(f"the prompt has {len(tokens)} tokens; the bundle's longest is {longest}")
    length = min(longest, len(tokens) + max_tokens)
    plan = plan_evaluation(bundle, BUDGET_BYTES, length)
    session = open_session(bundle, plan)
    adapters = Adapters.applied(bundle.manifest, adapter)
    shown = encoder.decode(tokens)
    while len(tokens) < length:
        token = next_token(session.model(len(tokens)), adapters, tokens)
        if token in ends:
            break
        tokens.append(token)
        text = encoder.decode(tokens)
        end = text.find(ending, len(shown)) if ending else -1
        if end >= 0:
            yield text[len(shown) : end]
            return
        # hold back incomplete characters, and text that may become the ending
        if not text.endswith("�") and not _begins(ending, text):
            yield text[len(shown) :]
            shown = text
    if rest := encoder.decode(tokens)[len(shown) :]:
        yield rest


def _begins(ending: str, text: str) -> bool:
    """Whether `text` ends in a part of `ending`."""
    return any(text.endswith(ending[:size]) for size in range(1, len(ending)))
