"""Generation from a bundle: prompts continued token by token, with a key-value cache."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Generator as Stream
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from runtime.bundle.positions import longest_by, longest_sequence
from runtime.bundle.store import Bundle
from runtime.config.generate import GenerateConfig, GenerationConfig
from runtime.core.errors import UsageError
from runtime.core.notes import Note, silent, warning
from runtime.core.units import first_of
from runtime.data.pieces import read_pieces
from runtime.data.prompts import Prompt, confined_prompt
from runtime.machine.footprint import Meter
from runtime.methods.adapters import Adapters
from runtime.plan.plan import Plan
from runtime.run.budget import check_budget, plan_decoding
from runtime.run.decoder import Decoder
from runtime.run.lora import to_apply
from runtime.run.results import Generation
from runtime.run.sampling import Sampling
from runtime.run.session import open_checked, open_session

SHOWN_BEFORE = 16  # tokens of a prompt with which its continuation is turned into text


class Decodes(Protocol):
    """Turns tokens into text."""

    def decode(self, tokens: list[int]) -> str: ...


@dataclass
class Answer:
    """How one prompt was continued. It is complete when its pieces have been read.

    prompt_tokens: of the prompt.  read_tokens: of these, those that the cache did not hold.
    tokens: the continuation, without the token that ended it.
    prompt_s: until the first token.  seconds: from then on, in which `timed` tokens came.
    stopped: why it is over: "end" (the model's), "max_tokens" or "context"; else "".
    """

    prompt_tokens: int
    read_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    prompt_s: float = 0.0
    seconds: float = 0.0
    timed: int = 0
    stopped: str = ""

    @property
    def prompt_tokens_per_s(self) -> float | None:
        """Tokens of the prompt that were read each second."""
        return self.read_tokens / self.prompt_s if self.prompt_s else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of the continuation each second, after the first."""
        return self.timed / self.seconds if self.timed else None


class Generator:
    """A bundle with an adapter that continues prompts, and the sequence so far in its cache.

    context: the most tokens of a prompt and its continuation together.
    prompt_tokens: of the longest prompt, if that is known.

    Raises:
        BudgetError: it does not fit the configuration's budget.
    """

    def __init__(
        self,
        config: GenerationConfig,
        bundle: Bundle,
        adapter: Path | None,
        encoder: Decodes,
        context: int,
        note: Note,
        prompt_tokens: int | None = None,
    ) -> None:
        self._encoder, self.context, self._max_tokens = encoder, context, config.max_tokens
        chosen = (config.temperature, config.top_k, config.top_p, config.min_p, config.seed)
        self._sampling = Sampling(*chosen)
        adapters = Adapters.applied(bundle.manifest, adapter)
        self.plan = plan_decoding(bundle, config.budget_bytes, context, prompt_tokens)
        self._decoder = Decoder(open_session(bundle, self.plan, note=note), adapters)
        if self.plan.warning:
            note(warning(self.plan.warning))

    def _tokens(self, prompt: Prompt, answer: Answer) -> Iterator[int | None]:
        """Yield the tokens that continue a prompt, up to an end; `answer` is filled meanwhile.

        The prompt's common beginning with the sequence before is not read again. While more than
        passes at once is read, None is yielded after each pass, so that the caller can stop.
        """
        decoder, max_tokens = self._decoder, self._max_tokens
        room = self.context - len(prompt.tokens)
        if room <= 0:
            answer.stopped = "context"
            return
        start = time.perf_counter()
        given = prompt.tokens[decoder.rewind(prompt.tokens) :]
        answer.read_tokens = len(given)
        *earlier, given = decoder.parts(given)
        for part in earlier:
            decoder.append(part)
            yield None
        for count in range(min(max_tokens, room)):
            logits = decoder.read(given)
            token = self._sampling.choose(logits, len(decoder.tokens))
            del logits  # before the next are computed
            now = time.perf_counter()
            if count:
                answer.seconds, answer.timed = now - start - answer.prompt_s, count
            else:
                answer.prompt_s = now - start
            if token in prompt.ends:
                answer.stopped = "end"
                return
            answer.tokens.append(token)
            yield token
            given = [token]
        answer.stopped = "max_tokens" if max_tokens <= room else "context"

    def pieces(self, prompt: Prompt, answer: Answer) -> Iterator[str]:
        """Yield the continuation of a prompt as text, up to an end or the most tokens.

        `answer` is filled meanwhile. Pieces are empty where there is nothing to show yet, so that
        the caller can stop.
        """
        tokens, decode = list(prompt.tokens[-SHOWN_BEFORE:]), self._encoder.decode
        shown = decode(tokens)
        for token in self._tokens(prompt, answer):
            if token is None:
                yield ""
                continue
            tokens.append(token)
            text = decode(tokens)
            end = text.find(prompt.ending, len(shown)) if prompt.ending else -1
            if end >= 0:
                answer.stopped = "end"
                yield text[len(shown) : end]
                return
            # hold back incomplete characters, and text that may become the ending
            if not text.endswith("\N{REPLACEMENT CHARACTER}") and not _begins(prompt.ending, text):
                yield text[len(shown) :]
                shown = text
            else:
                yield ""
        if rest := decode(tokens)[len(shown) :]:
            yield rest


class Prompts:
    """Prompts for a bundle, each written in a process of its own; use it as a context manager.

    encoder: turns tokens into text, once there has been a prompt.
    """

    def __init__(self, bundle: Bundle, note: Note) -> None:
        self.bundle, self._note = bundle, note
        self._encoder: Decodes | None = None
        self._folder = tempfile.TemporaryDirectory()
        self._unknown: set[str] = set()  # characters that were warned of

    def __enter__(self) -> Prompts:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    @property
    def encoder(self) -> Decodes:
        assert self._encoder is not None
        return self._encoder

    def check(self, messages: object) -> None:
        """Write the prompt for a conversation that is only like the one to come.

        Raises:
            DataError, UsageError: no conversation can be held, for a reason that the message says.
        """
        table = Path(self._folder.name) / "pieces"
        try:
            confined_prompt(self.bundle.path, messages, table)
        except UsageError as problem:
            raise UsageError(
                f"{problem}; no conversation can begin so: leave out --system if it was given, or "
                "correct the template in the checkpoint, and export again"
            ) from problem
        self._encoder = self._read(table)

    def write(self, said: object) -> Prompt:
        """The prompt for a text or a conversation.

        Raises:
            DataError: the bundle has no tokenizer, or no chat template where one is wanted, or one
                that takes more than it may.
            UsageError: the prompt is not valid Unicode, is empty, or is not of the model's tokens.
        """
        try:
            json.dumps(said, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            last = said[-1]["content"] if isinstance(said, list) else said
            raise UsageError(f"the prompt {last!r:.80} is not valid UTF-8") from None
        table = Path(self._folder.name) / "pieces" if self._encoder is None else None
        prompt = confined_prompt(self.bundle.path, said, table)
        self._warn_of([each for each in prompt.unknown if each not in self._unknown])
        if not prompt.tokens:
            raise UsageError("the prompt has no tokens")
        if max(prompt.tokens) >= self.bundle.manifest.vocab_size:
            raise UsageError(
                f"the prompt has token {max(prompt.tokens)}, and the model embeds "
                f"{self.bundle.manifest.vocab_size}: its tokenizer has more than its embedding; "
                "write the prompt without it, or resize the embedding in transformers "
                "(resize_token_embeddings) and export that"
            )
        if table is not None:
            self._encoder = self._read(table)
            self._warn_of_no_end(prompt)
        return prompt

    def _warn_of_no_end(self, prompt: Prompt) -> None:
        """Warn where all tokens that end an answer are beyond those that the model embeds."""
        embedded = self.bundle.manifest.vocab_size
        if prompt.ends and min(prompt.ends) >= embedded:
            self._note(
                warning(
                    f"an answer ends at token {' or '.join(map(str, sorted(prompt.ends)))}, and "
                    f"the model embeds {embedded}: each goes on up to --max-tokens; correct "
                    "eos_token_id in the checkpoint, or resize its embedding, and export again"
                )
            )

    def _warn_of(self, unknown: list[str]) -> None:
        """Warn of characters of a prompt, once of each."""
        self._unknown.update(unknown)
        if unknown:
            shown = first_of(unknown)
            self._note(warning(f"the tokenizer has no token for {shown} in the prompt"))

    def _read(self, table: Path) -> Decodes:
        if table.exists():
            return read_pieces(table)
        from runtime.data.text_encoder import load_encoder

        self._note(
            "what a token of this tokenizer stands for depends on its neighbours: the whole "
            "tokenizer stays in memory"
        )
        return load_encoder(self.bundle.path)


class Generating:
    """The continuation of a prompt, piece by piece, up to an end token or `max_tokens`.

    It is an iterator over the text, and then has the result. With `config.chat` the prompt is a
    user's message, and the continuation the answer, by the chat template of the bundle. `note`
    receives lines for people.

    Raises, while it is read:
        BudgetError: the budget is too small, or was passed.
        DataError, UsageError: as `Prompts.write`; or the prompt is longer than the model's
            longest sequence.
    """

    def __init__(self, config: GenerateConfig, note: Note = silent) -> None:
        self.config = config
        self.answer = Answer(0)
        self._result: Generation | None = None
        self._pieces = self._run(note)

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def close(self) -> None:
        """End it where it is, and the measurement of memory with it."""
        self._pieces.close()

    @property
    def result(self) -> Generation:
        """The text with its speeds and memory, once all of it has been read."""
        assert self._result is not None
        return self._result

    def _run(self, note: Note) -> Stream[str, None, None]:
        config = self.config
        with Meter(budget_bytes=config.budget_bytes) as meter:
            adapter = None if config.adapter is None else Path(config.adapter)
            bundle = to_apply(adapter, open_checked(config.bundle, config.device, note), note)
            with Prompts(bundle, note) as prompts:
                prompt = prompts.write(config.said)
            settings = bundle.manifest.config
            context = _within(settings, len(prompt.tokens), config.max_tokens, note)
            generator = Generator(
                *(config, bundle, adapter, prompts.encoder, context, note), len(prompt.tokens)
            )
            plan = generator.plan
            self.answer.prompt_tokens, pieces = len(prompt.tokens), []
            for piece in generator.pieces(prompt, self.answer):
                pieces.append(piece)
                yield piece
                check_budget(meter, plan, f"generation ended at token {len(self.answer.tokens)}")
            self._result = generation_of(config.prompt, pieces, self.answer, plan, meter)


def generation_of(
    prompt: str, pieces: Sequence[str], answer: Answer, plan: Plan, meter: Meter
) -> Generation:
    """How a prompt was continued, or a message answered, as far as `pieces` have been read."""
    return Generation(
        prompt=prompt,
        text="".join(pieces),
        prompt_tokens=answer.prompt_tokens,
        generated_tokens=len(answer.tokens),
        stopped=answer.stopped,
        prompt_tokens_per_s=answer.prompt_tokens_per_s,
        tokens_per_s=answer.tokens_per_s,
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        peak_footprint_bytes=meter.peak_bytes,
    )


def _within(settings: Mapping[str, Any], prompt: int, max_tokens: int, note: Note) -> int:
    """The context of a prompt and its continuation, cut to the model's longest sequence."""
    limit = longest_sequence(settings)
    if limit is None:
        return prompt + max_tokens
    if prompt >= limit:
        raise UsageError(
            f"the prompt has {prompt} tokens; the model was made for sequences of at most {limit} "
            f"({longest_by(settings)}): shorten it"
        )
    if prompt + max_tokens > limit:
        note(
            warning(
                f"the prompt has {prompt} tokens, and the model was made for sequences of at most "
                f"{limit}: the answer ends after {limit - prompt} tokens, not {max_tokens}"
            )
        )
    return min(limit, prompt + max_tokens)


def _begins(ending: str, text: str) -> bool:
    """Whether `text` ends in a part of `ending`."""
    return any(text.endswith(ending[:size]) for size in range(1, len(ending)))
