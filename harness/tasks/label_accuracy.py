"""Accuracy of label words: how often the right word has the highest logit of all label words.

It runs the blocks forward and computes the logits of the label words only, from their rows of the
LM head. Invariant: a prompt is tokenized as in training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from runtime.system.backend import prepare

prepare()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
import numpy.typing as npt  # noqa: E402

from harness.tasks.examples import Example  # noqa: E402
from ondevice.bundle.store import Bundle  # noqa: E402
from ondevice.errors import DataError  # noqa: E402
from runtime.data.text_encoder import TextEncoder, load_encoder  # noqa: E402
from runtime.engine.model import Model  # noqa: E402
from runtime.methods.adapters import Adapters  # noqa: E402
from runtime.run.budget import plan_evaluation  # noqa: E402
from runtime.run.lora import to_apply  # noqa: E402
from runtime.run.open import open_checked, open_session  # noqa: E402

BUDGET_BYTES = 1_000_000_000  # of the plan; the tokenizer in this process is not counted
TOGETHER = 8  # rows that visit a block together, so that its weights are read less often

Tokens = npt.NDArray[np.int64]


def label_accuracy(
    path: str, adapter: Path | None, rows: Sequence[Example], words: Sequence[str]
) -> dict[str, Any]:
    """Accuracy over `rows`, whose completions are among `words`, and each word's share of them.

    Raises:
        DataError: the bundle has no tokenizer, a word is more than one token, a prompt is too long.
    """
    bundle = to_apply(adapter, open_checked(path))
    encoder = load_encoder(bundle.path)
    labels = word_tokens(encoder, words)
    prompts = [prompt_tokens(encoder, row.prompt, bundle) for row in rows]
    longest = max(map(len, prompts))
    session = open_session(bundle, plan_evaluation(bundle, BUDGET_BYTES, longest))
    adapters = Adapters.applied(bundle.manifest, adapter)
    expected = np.array([words.index(row.completion) for row in rows])
    found: list[npt.NDArray[np.float32]] = []
    for some in _groups(prompts):
        model = session.model(max(map(len, some)))
        found.append(word_logits(model, adapters, some, labels))
    chosen = np.concatenate(found).argmax(axis=1)
    return {
        "label_accuracy": float((chosen == expected).mean()),
        "rows": len(rows),
        "labels": {word: float((expected == at).mean()) for at, word in enumerate(words)},
        "answers": {word: float((chosen == at).mean()) for at, word in enumerate(words)},
    }


def word_tokens(encoder: TextEncoder, words: Sequence[str]) -> Tokens:
    """The token of each word. Raises DataError if a word has several."""
    tokens = [encoder.encode(word) for word in words]
    for word, one in zip(words, tokens, strict=True):
        if len(one) != 1:
            raise DataError(f"the label word {word!r} has {len(one)} tokens here; it must have one")
    return np.array([one[0] for one in tokens], np.int64)


def prompt_tokens(encoder: TextEncoder, prompt: str, bundle: Bundle) -> Tokens:
    """The tokens of a prompt as in training, with BOS first where the tokenizer has it."""
    head = [] if encoder.bos is None else [encoder.bos]
    tokens = head + encoder.encode(prompt)
    longest = bundle.manifest.buckets[-1]
    if not 0 < len(tokens) <= longest:
        raise DataError(
            f"a prompt has {len(tokens)} tokens, the bundle takes 1 to {longest}: {prompt[:60]!r}; "
            "export with longer --seq-lens"
        )
    return np.array(tokens, np.int64)


def word_logits(
    model: Model, adapters: Adapters, prompts: Sequence[Tokens], labels: Tokens
) -> npt.NDArray[np.float32]:
    """The logits (N, L) of the L tokens `labels` after each of N prompts."""
    hidden = [model.embed(tokens) for tokens in prompts]
    model.release(model.blocks[0])
    for block in model.blocks[1:-1]:
        loras = adapters.loras(block)
        for index in range(len(hidden)):
            hidden[index] = model.forward(block, hidden[index], loras)
        model.release(block)
    manifest = model.bundle.manifest
    head = model.blocks[-1]
    (name,) = manifest.block_types[head.type].operations[-1].matrices(head.tensor)
    rows = model.matrices.rows(manifest.matrices[name], labels)
    ends = [np.array([len(tokens) - 1]) for tokens in prompts]
    last = [model.hidden(x, end) for x, end in zip(hidden, ends, strict=True)]
    model.release(head)
    return np.array(mx.concatenate(last) @ rows.T)


def _groups(prompts: Sequence[Tokens]) -> Iterator[Sequence[Tokens]]:
    for start in range(0, len(prompts), TOGETHER):
        yield prompts[start : start + TOGETHER]
