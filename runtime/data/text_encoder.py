"""A bundle's tokenizer for data and prompts; a training process never loads it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from unicodedata import combining

from tokenizers import AddedToken, Tokenizer, models

from runtime.core.errors import DataError
from runtime.data.chat import ChatTemplate, has_template
from runtime.data.tokenizer_files import (
    FLAGS,
    RANDOM,
    VOCABULARY,
    MoreToken,
    Special,
    missing,
    special_of,
    tokenizer_files,
)


@dataclass(frozen=True)
class TextEncoder:
    """A bundle's tokenizer: text to ids without special tokens, and the ids of those it adds.

    `encode_places` also gives the range of characters that each token stands for.
    `decode` leaves `special` tokens out, `show` writes them, and `special_text` finds them in text.
    `borders` are the tokens that are found in a text from left to right before all others, wherever
    they stand: text before one, and from one on, has the tokens that it has alone.
    `ends` are the tokens that end generation, according to the checkpoint. `size` is how many
    tokens there are, and `name_of` gives each one's name in the vocabulary. `unknown_in` gives
    the characters of a text that have no token, or only the one for unknown text; where words have
    tokens as wholes, these words. `chat` reads the chat template, which only conversations need;
    `has_template` says whether there is one.
    """

    encode: Callable[[str], list[int]]
    encode_places: Callable[[str], tuple[list[int], list[tuple[int, int]]]]
    decode: Callable[[Sequence[int]], str]
    show: Callable[[Sequence[int]], str]
    bos: int | None
    eos: int | None
    ends: frozenset[int]
    special: frozenset[int]
    borders: frozenset[int]
    special_text: re.Pattern[str]
    size: int
    name_of: Callable[[int], str]
    unknown_in: Callable[[str], list[str]]
    chat: Callable[[], ChatTemplate]
    has_template: bool

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end generation, EOS among them."""
        return self.ends if self.eos is None else self.ends | {self.eos}

    @cached_property
    def end_texts(self) -> list[str]:
        """The texts of those of them that the vocabulary has."""
        there = sorted(token for token in self.end_tokens if 0 <= token < self.size)
        names = {token: self.name_of(token) for token in there}
        return [name for token, name in names.items() if self.encode(name) == [token]]


def load_encoder(bundle_dir: Path) -> TextEncoder:
    """The tokenizer of a bundle. Raises DataError if it has none or it cannot be read."""
    folder = bundle_dir / "tokenizer"
    if not (folder / VOCABULARY).is_file():
        raise DataError(
            f"bundle {bundle_dir} has no tokenizer (tokenizer/tokenizer.json); export from a "
            "checkpoint that has one (random:SEED is data that needs none)"
        )
    try:
        files = tokenizer_files(folder)
        # not from_file: its error for a file that is not UTF-8 is no OSError
        tokenizer = Tokenizer.from_str(files.pop(VOCABULARY).decode())
        special = special_of(files)
        complete(tokenizer, special)
        ids = {name: tokenizer.token_to_id(text) for name, text in special.named.items()}
        if dropout := getattr(tokenizer.model, "dropout", None):
            raise ValueError(RANDOM.format(dropout))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises plain Exception, and panics
        raise DataError(f"the tokenizer of bundle {bundle_dir} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    bos = ids.get("bos_token")
    # where no file says so, the tokenizer's own encoding of an empty text decides
    adds_bos = special.adds_bos
    if adds_bos is None:
        adds_bos = tokenizer.encode("").ids[:1] == [bos]
    added = tokenizer.get_added_tokens_decoder()
    special_text = _any_of(token.content for token in added.values() if token.special)
    return TextEncoder(
        encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        encode_places=partial(_encode_places, tokenizer),
        decode=lambda tokens: str(tokenizer.decode(tokens)),
        show=lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=False)),
        bos=bos if adds_bos else None,
        eos=ids.get("eos_token"),
        ends=special.ends,
        special=frozenset(number for number, token in added.items() if token.special),
        borders=frozenset(
            number for number, token in added.items() if not (token.normalized or token.single_word)
        ),
        special_text=special_text,
        size=tokenizer.get_vocab_size(),
        name_of=lambda token: str(tokenizer.id_to_token(token)),
        unknown_in=Unknown(tokenizer, _unknown_token(tokenizer, ids), special_text).parts,
        chat=cache(partial(ChatTemplate, folder)),
        has_template=has_template(folder),
    )


def complete(tokenizer: Tokenizer, special: Special) -> None:
    """Give a tokenizer the tokens of its small files that tokenizer.json lacks."""
    there = [
        MoreToken(
            token.content, token.special, {name: getattr(token, name) for name in FLAGS}, number
        )
        for number, token in tokenizer.get_added_tokens_decoder().items()
    ]
    more = missing(special, there)
    if more:
        tokenizer.add_tokens(
            [AddedToken(token.content, special=token.special, **token.flags) for token in more]
        )


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds any of the texts, the longest first; without texts it finds nothing."""
    ordered = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or "(?!)")


def _unknown_token(tokenizer: Tokenizer, ids: Mapping[str, int | None]) -> int | None:
    """The token for text that the vocabulary lacks, by the small files or the model itself."""
    if (named := ids.get("unk_token")) is not None:
        return named
    text = getattr(tokenizer.model, "unk_token", None)
    return tokenizer.token_to_id(text) if isinstance(text, str) else None


class Unknown:
    """Finds the parts of texts for which a tokenizer has no token.

    unknown: the token that stands for such parts, if there is one.
    """

    def __init__(self, tokenizer: Tokenizer, unknown: int | None, special: re.Pattern[str]) -> None:
        self._tokenizer, self._unknown, self._special = tokenizer, unknown, special
        self._has_none = cache(self._is_unknown)

    def parts(self, text: str) -> list[str]:
        """The parts of a text that are unknown, but for those of special tokens, each once."""
        by_words = isinstance(self._tokenizer.model, models.WordLevel | models.WordPiece)
        if not by_words and not any(map(self._has_none, set(text))):
            return []
        text = self._special.sub(" ", text)
        if by_words:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
            places = zip(encoding.ids, encoding.offsets, strict=True)
            return sorted(
                {text[slice(*place)] for token, place in places if token == self._unknown}
            )
        normal = set(self._normal(text))  # in which an accent may have joined its letter
        lost = {char for char in set(text) - normal if not (self._normal(char) or combining(char))}
        made = {char for char in normal - set(text) if char.isalnum()}
        return sorted(filter(self._has_none, {*normal.intersection(text), *lost, *made}))

    def _is_unknown(self, character: str) -> bool:
        if character.isspace():
            return False
        tokens = self._tokenizer.encode(character, add_special_tokens=False).ids
        # a space that the tokenizer puts before text may be all that there is
        return (
            self._unknown in tokens
            or not self._tokenizer.decode(tokens, skip_special_tokens=False).strip()
        )

    def _normal(self, text: str) -> str:
        normalizer = self._tokenizer.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))


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
