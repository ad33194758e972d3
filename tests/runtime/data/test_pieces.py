"""The table of what tokens stand for: the tokenizer's own text."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.bundles import Rng
from support.text_bundle import text_bundle
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from runtime.bundle.store import Bundle
from runtime.data.pieces import UNKNOWN, read_pieces, write_pieces
from runtime.data.text_encoder import TextEncoder, load_encoder

WORDS = ["a", "b", "▁the", "▁cat", "▁", UNKNOWN, "é", *(f"<0x{byte:02X}>" for byte in range(256))]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return text_bundle(tmp_path_factory.mktemp("pieces"), "x")


def encoder_of(bundle: Bundle, tokenizer: Tokenizer) -> TextEncoder:
    """The bundle's encoder with another tokenizer."""
    return replace(
        load_encoder(bundle.path),
        encode=lambda text: list(tokenizer.encode(text).ids),
        decode=lambda tokens: str(tokenizer.decode(list(tokens))),
        size=tokenizer.get_vocab_size(),
        name_of=lambda token: str(tokenizer.id_to_token(token)),
    )


def byte_fallback(*more: decoders.Decoder) -> Tokenizer:
    """Tokens as SentencePiece names them: spaces as letters, and bytes."""
    vocabulary = {word: at for at, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    first = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*first, *more])
    return tokenizer


def byte_level() -> Tokenizer:
    """Tokens as GPT-2 names them: bytes as letters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*letters, "Ġthe", "Ã©", "Ã", "he"]
    tokenizer = Tokenizer(models.BPE({name: at for at, name in enumerate(names)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


@pytest.mark.parametrize("kind", ["bundle", "bytes", "stripping", "letters"])
def test_text_is_that_of_the_tokenizer(bundle: Bundle, tmp_path: Path, rng: Rng, kind: str) -> None:
    made = {
        "bundle": lambda: load_encoder(bundle.path),
        "bytes": lambda: encoder_of(bundle, byte_fallback()),
        "stripping": lambda: encoder_of(bundle, byte_fallback(decoders.Strip(" ", 1, 0))),
        "letters": lambda: encoder_of(bundle, byte_level()),
    }
    encoder = made[kind]()
    assert write_pieces(encoder, tmp_path / "pieces")
    pieces = read_pieces(tmp_path / "pieces")
    assert pieces.strips == (kind == "stripping")
    single = [token for token in range(encoder.size) if encoder.name_of(token)[:3] != "<0x"]
    for _ in range(50):
        tokens = [int(one) for one in rng.choice(single, int(rng.integers(1, 20)))]
        # of broken characters there may be more or fewer
        found, expected = (
            re.sub(f"{UNKNOWN}+", UNKNOWN, one.decode(tokens)) for one in (pieces, encoder)
        )
        assert found == expected
    whole = "é".encode()
    if kind in ("bytes", "stripping"):
        tokens = [WORDS.index(f"<0x{byte:02X}>") for byte in whole]
        mixed = [WORDS.index("▁cat"), *tokens, 0, WORDS.index("<0x41>"), *tokens, 1]
        assert pieces.decode(mixed) == encoder.decode(mixed)
        assert pieces.decode(tokens) == "é" and pieces.decode(tokens[:1]) == UNKNOWN
    assert pieces.decode([encoder.size + 5]) == ""


def test_tokens_that_depend_on_their_place_are_not_taken_apart(
    bundle: Bundle, tmp_path: Path
) -> None:
    vocabulary = {"a": 0, "b": 1, "##b": 2, "[UNK]": 3}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    assert not write_pieces(encoder_of(bundle, tokenizer), tmp_path / "pieces")
    assert not (tmp_path / "pieces").exists()
