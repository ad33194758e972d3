"""Opening the checkpoint that a user names: a folder, a GGUF file, a hub id, random:PRESET."""

from __future__ import annotations

from pathlib import Path

from export.sources.gguf import GGUFCheckpoint
from export.sources.hf import HFCheckpoint
from export.sources.random import PRESETS, RandomCheckpoint
from export.sources.safetensors_files import INDEX
from export.sources.source import Checkpoint
from export.sources.tokenizer import HUB_FILES
from runtime.core.errors import UsageError
from runtime.core.lookalikes import HUB_ID
from runtime.core.paths import text_path

_RANDOM = "random:"
_HUB_FILES = ["config.json", "model*.safetensors", INDEX, *HUB_FILES]


def open_checkpoint(source: str, *, seed: int = 0) -> Checkpoint:
    """Open a checkpoint. Names and shapes are checked.

    No weights are read yet, but for an output matrix beside an embedding that is said to be tied:
    they are compared.

    Args:
        source: a Hugging Face folder; a .gguf file; "random:PRESET"; or, if there is no such
            path, a hub id "org/name".
        seed: of random weights; other sources do not use it.

    Raises:
        UsageError: there is no such source.
        BundleError: the source is damaged or not supported.
    """
    if source.startswith(_RANDOM):
        return RandomCheckpoint(source.removeprefix(_RANDOM), seed)
    path = text_path(source)
    if path.is_dir():
        return HFCheckpoint(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise UsageError(
                f"{source}: a file must be a .gguf; for safetensors give the folder that holds "
                "them and config.json"
            )
        return GGUFCheckpoint(path)
    if not HUB_ID.fullmatch(source) or path.suffix in (".gguf", ".safetensors"):
        raise UsageError(
            f"{source}: no such folder or file; a source is a checkpoint folder, a .gguf file, "
            f"a hub id org/name, or random:PRESET with PRESET one of {', '.join(PRESETS)}"
        )
    return _from_hub(source)


def _from_hub(repo: str) -> Checkpoint:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repo, allow_patterns=_HUB_FILES))
    except Exception as e:  # the client's transport errors differ from version to version
        reason = next(iter(str(e).splitlines()), type(e).__name__)
        raise UsageError(
            f"{repo}: there is no such folder here, and as a hub id it cannot be fetched "
            f"({type(e).__name__}: {reason}); check name and network, or give a local folder"
        ) from e
    return HFCheckpoint(folder, {"name": repo, "revision": folder.name})
