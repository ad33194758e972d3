"""Prompts for a model: of text, or of a conversation by the chat template of a bundle.

A process of its own writes them, so no process that holds a model runs the template.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from runtime.core.errors import DataError, UsageError
from runtime.data.limits import Limits
from runtime.data.process import call

if TYPE_CHECKING:
    from runtime.data.text_encoder import TextEncoder


_NO_TEMPLATE = (
    "the bundle has no chat template; export from a checkpoint that has one (instruction-tuned "
    "models do), or continue text, which takes none: ondevice generate BUNDLE --prompt TEXT"
)


@dataclass(frozen=True)
class Prompt:
    """Tokens to continue; `ends` are the tokens that end it, and `ending` the text that does.

    unknown: the characters of its text for which the tokenizer has no token.
    """

    tokens: list[int]
    ends: frozenset[int]
    ending: str = ""
    unknown: list[str] = field(default_factory=list)


def text_prompt(encoder: TextEncoder, text: str) -> Prompt:
    """A prompt of text, with the tokenizer's BOS before it."""
    head = [] if encoder.bos is None else [encoder.bos]
    unknown = encoder.unknown_in(text)
    return Prompt(head + encoder.encode(text), encoder.end_tokens, unknown=unknown)


def chat_prompt(encoder: TextEncoder, messages: object) -> Prompt:
    """The prompt for the model's answer to a conversation, by the bundle's chat template.

    Raises:
        DataError: there is no template, or it takes too much.
        UsageError: the template refuses the messages.
    """
    if not encoder.has_template:
        raise DataError(_NO_TEMPLATE)
    template = encoder.chat()
    try:
        text = template.prompt(messages)
        tokens, unknown = encoder.encode(text), encoder.unknown_in(text)
        ending = template.ending
    except ValueError as error:
        raise UsageError(str(error)) from error
    first = encoder.encode(ending)[:1]
    if encoder.special.issuperset(first):  # which an answer never holds itself
        return Prompt(tokens, encoder.end_tokens.union(first), unknown=unknown)
    return Prompt(tokens, encoder.end_tokens, ending, unknown)


def confined_prompt(bundle_dir: Path, said: object, pieces: Path | None = None) -> Prompt:
    """As `text_prompt` for a text, else as `chat_prompt`, in a process of its own under limits.

    That process also writes the table of `runtime.data.pieces` to the file `pieces`, if the
    tokenizer allows it.

    Raises:
        DataError, UsageError: as `chat_prompt`.
    """
    limits = Limits.of_data(len(msgspec.json.encode(said)))
    function, task = "runtime.data.prompts.prompt_of", "writing the prompt"
    written = call(function, task, bundle_dir, said, pieces, limits=limits)
    return msgspec.json.decode(written, type=Prompt)


def prompt_of(bundle_dir: Path, said: Any, pieces: Path | None) -> Prompt:
    """See `confined_prompt`; in the process that is limited."""
    from runtime.data.pieces import write_pieces
    from runtime.data.text_encoder import load_encoder

    encoder = load_encoder(bundle_dir)
    prompt = text_prompt(encoder, said) if isinstance(said, str) else chat_prompt(encoder, said)
    if pieces is not None:
        write_pieces(encoder, pieces)
    return prompt
