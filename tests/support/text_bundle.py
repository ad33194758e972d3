"""A tiny random model that reads text: the small tokenizer's vocabulary, and a chat template."""

from __future__ import annotations

from pathlib import Path

from export.bundle import export_bundle
from runtime.bundle.store import Bundle
from support.bundles import settings
from support.checkpoints import weights_of, write_folder
from support.token_rows import SPECIAL, VOCAB, write_tokenizer


def text_checkpoint(source: Path, template: str) -> Path:
    """A Hugging Face folder."""
    config, arrays = weights_of("tiny-qwen2")
    rows = {n: a[:VOCAB] if a.shape[0] == config["vocab_size"] else a for n, a in arrays.items()}
    write_folder(source, {**config, "vocab_size": VOCAB}, rows)
    write_tokenizer(source, {**SPECIAL, "chat_template": template})
    return source


def text_bundle(folder: Path, template: str, seq_lens: tuple[int, ...] = (16, 32)) -> Bundle:
    """A bundle for these numbers of tokens."""
    source = text_checkpoint(folder / "model", template)
    return export_bundle(settings(source, folder / "bundle", seq_lens=seq_lens))
