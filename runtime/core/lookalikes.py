"""Paths at which something else lies than was expected, and the commands that take it."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

LFS_POINTER = b"version https://git-lfs"  # begins what git writes where Git LFS is not installed
ADAPTER_FILES = {"adapter_config.json", "adapters.safetensors", "adapter_model.safetensors"}
_MODEL = re.compile(r"(pytorch_)?model.*\.(safetensors|bin)")
FETCH = "a pointer of Git LFS: fetch the file itself by git lfs pull"


class Kind(StrEnum):
    """The kinds of things at a path, in words."""

    NOTHING = "nothing"
    BUNDLE = "a bundle"
    RUN = "a run"
    COMPARISON = "a comparison"
    ADAPTER = "an adapter"
    BOTH = "a Hugging Face checkpoint and an adapter in one folder"
    CHECKPOINT = "a Hugging Face checkpoint"
    GGUF = "a GGUF file"
    FILE = "a file"
    FOLDER = "a folder"


# which command takes it, by what lies there
_WAYS = {
    Kind.BUNDLE: "a bundle is what `ondevice export` has written, and stands behind the command: "
    "ondevice train {path} --data DATA",
    Kind.RUN: "go on with it by ondevice train --resume {path}, or use it with its bundle: "
    "ondevice generate BUNDLE --adapter {path}",
    Kind.COMPARISON: "its runs are in {path}/runs, and the same ondevice compare goes on with it",
    Kind.ADAPTER: "use it with its bundle: ondevice generate BUNDLE --adapter {path}",
    Kind.BOTH: "move one of them elsewhere: config.json and model*.safetensors are the checkpoint, "
    "to be exported (ondevice export {path} -o BUNDLE), and adapter* is what --adapter takes",
    Kind.CHECKPOINT: "make a bundle of it: ondevice export {path} -o BUNDLE",
    Kind.GGUF: "make a bundle of it: ondevice export {path} -o BUNDLE",
}


def kind_of(path: Path) -> Kind:
    """The kind of a path, judged by the names of its files."""
    if path.is_file():
        return Kind.GGUF if path.suffix.lower() == ".gguf" else Kind.FILE
    if not path.is_dir():
        return Kind.NOTHING
    names = {entry.name for entry in path.iterdir()}
    if "manifest.json" in names:
        return Kind.BUNDLE
    if "config.toml" in names:
        return Kind.COMPARISON if {"runs", "sweep"} <= names else Kind.RUN
    if names & ADAPTER_FILES:
        has_model = "config.json" in names and any(map(_MODEL.fullmatch, names))
        return Kind.BOTH if has_model else Kind.ADAPTER
    return Kind.CHECKPOINT if "config.json" in names else Kind.FOLDER


def is_comparison(path: Path) -> bool:
    """Whether `ondevice compare` has begun there, whose settings have the name of a run's."""
    return kind_of(path) is Kind.COMPARISON


def instead(path: Path, wanted: Kind) -> str:
    """The addition to a message about a path of another kind than wanted; empty if none is known.

    Raises:
        OSError: the path cannot be read.
    """
    kind = kind_of(path)
    if kind is wanted:
        return ""
    if kind is Kind.NOTHING:
        if wanted is Kind.BUNDLE and HUB_ID.fullmatch(str(path)) and not path.parent.exists():
            name = str(path)
            return (
                f"there is no such folder; if {name} is a model id of the Hugging Face hub, make a "
                f"bundle of it: ondevice export {name} -o BUNDLE"
            )
        make = " (a bundle is made by: ondevice export MODEL -o BUNDLE)"
        return f"there is no such folder{make if wanted is Kind.BUNDLE else ''}"
    way = _WAYS.get(kind, "").format(path=path)
    return f"it is {kind}; {way}" if way else ""
