"""The weight files of a checkpoint folder: a single file, or shards listed by an index or name.

Invariant: every file that is opened lies directly in the folder, and none is missing.
"""

from __future__ import annotations

import re
from pathlib import Path

from export.sources.json_file import read_json
from export.sources.safetensors_file import SafetensorsFile
from runtime.core.errors import BundleError

INDEX = "model.safetensors.index.json"


def open_shards(folder: Path) -> list[SafetensorsFile]:
    """Open all weight files, and check that each holds the tensors that the index puts there."""
    index = folder / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise BundleError(
                f"{index}: has no 'weight_map' from tensors to files; download it again"
            )
        names = sorted({str(value) for value in weight_map.values()})
    else:
        weight_map = {}
        names = sorted(path.name for path in folder.glob("model*.safetensors"))
        for name in list(names):  # without an index, the files' names say how many there are
            if match := re.fullmatch(r"(.+)-\d{5}-of-(\d{5})\.safetensors", name):
                stem, total = match[1], int(match[2])
                whole = {f"{stem}-{i:05}-of-{total:05}.safetensors" for i in range(1, total + 1)}
                names = sorted({*names, *whole})
    if not names:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pth"))
        raise BundleError(
            f"{folder}: no model*.safetensors"
            + ("; pickled weights are not read, convert them to safetensors" if pickled else "")
        )
    files: dict[str, SafetensorsFile] = {}
    for name in names:
        if Path(name).name != name or name in ("", ".", ".."):
            raise BundleError(
                f"{index}: {name!r} is not a plain file name; weights must lie in the folder itself"
            )
        if not (folder / name).is_file():
            raise BundleError(
                f"{folder}: {name} is missing (one of {len(names)} weight files); download it again"
            )
        files[name] = SafetensorsFile(folder / name)
    for tensor, name in weight_map.items():
        if tensor not in files[str(name)].tensors:
            raise BundleError(
                f"{folder}: the index puts {tensor} in {name}, which does not hold it; download "
                "both again"
            )
    return list(files.values())
