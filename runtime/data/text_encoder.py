"""A bundle's tokenizer for data and prompts; a training process never loads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from tokenizers import Tokenizer

from runtime.core.documents import from_json
from runtime.core.errors import DataError
from runtime.data.chat import ChatTemplate, has_template


@dataclass(frozen=True)
class TextEncoder:
    """A bundle's tokenizer: text to ids without special tokens, and the ids of those it adds.

    `encode_places` also gives the range of characters that each token stands for.
    `decode` leaves `special` tokens out, `show` writes them. `ends` are the tokens that end
    generation, according to the checkpoint. `size` is how many tokens there are, and `name_of`
    gives each one's name in the vocabulary. `chat` reads the chat template, which only
    conversations need; `has_template` says whether there is one.
    """

    encode: Callable[[str], list[int]]
    encode_places: Callable[[str], tuple[list[int], list[tuple[int, int]]]]
    decode: Callable[[Sequence[int]], str]
    show: Callable[[Sequence[int]], str]
    bos: int | None
    eos: int | None
    ends: frozenset[int]
    special: frozenset[int]
    size: int
    name_of: Callable[[int], str]
    chat: Callable[[], ChatTemplate]
    has_template: bool

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end generation, EOS among them."""
        return self.ends if self.eos is None else self.ends | {self.eos}


def load_encoder(bundle_dir: Path) -> TextEncoder:
    """The tokenizer of a bundle. Raises DataError if it has none or it cannot be read."""
    folder = bundle_dir / "tokenizer"
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise DataError(
            f"bundle {bundle_dir} has no tokenizer (tokenizer/tokenizer.json); export from a "
            "checkpoint that has one (random:SEED is data that needs none)"
        )
    try:
        # not from_file: its error for a file that is not UTF-8 is no OSError
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
        config_file = folder / "tokenizer_config.json"
        ends = _ends(folder)
        config = from_json(config_file.read_bytes()) if config_file.is_file() else {}
        if not isinstance(config, dict):
            raise ValueError("tokenizer_config.json is not a JSON object")
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"the tokenizer of bundle {bundle_dir} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def special(name: str) -> int | None:
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if content is None:
            return None
        try:
            number: int | None = tokenizer.token_to_id(str(content))
        except UnicodeEncodeError:  # half of a surrogate pair is no text
            number = None
        if number is None:
            raise DataError(f"the tokenizer of bundle {bundle_dir} lacks its {name} {content!r}")
        return number

    bos = special("bos_token")
    # without the key, the tokenizer's own encoding of an empty text decides
    adds_bos = config.get("add_bos_token")
    if adds_bos is None:
        adds_bos = tokenizer.encode("").ids[:1] == [bos]
    added = tokenizer.get_added_tokens_decoder()
    return TextEncoder(
        encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        encode_places=partial(_encode_places, tokenizer),
        decode=lambda tokens: str(tokenizer.decode(tokens)),
        show=lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=False)),
        bos=bos if adds_bos else None,
        eos=special("eos_token"),
        ends=ends,
        special=frozenset(number for number, token in added.items() if token.special),
        size=tokenizer.get_vocab_size(),
        name_of=lambda token: str(tokenizer.id_to_token(token)),
        chat=cache(partial(ChatTemplate, folder)),
        has_template=has_template(folder),
    )


def _encode_places(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids, and the first character of each token and the one after its last.

    Tokenizers that leave white space out of these ranges leave tokens of white space alone with
    nothing; such a token gets the characters between its neighbours.
    """
    encoding = tokenizer.encode(text, add_special_tokens=False)
    places: list[tuple[int, int]] = []
    for start, stop in encoding.offsets:
        before = places[-1][1] if places else 0
        places.append((min(before, start), stop) if start == stop else (start, stop))
    return list(encoding.ids), places


def _ends(folder: Path) -> frozenset[int]:
    """The end tokens of generation_config.json, if there is one: an id, several, or none."""
    file = folder / "generation_config.json"
    config = from_json(file.read_bytes()) if file.is_file() else {}
    ids = config.get("eos_token_id", [])
    listed = ids if isinstance(ids, list) else [ids]
    return frozenset(number for number in listed if number is not None)
