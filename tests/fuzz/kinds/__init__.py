"""All kinds of input, by name."""

from __future__ import annotations

from fuzz.kind import Kind
from fuzz.kinds.adapters import Adapters
from fuzz.kinds.bundles import Bundles, Graphs, Manifests
from fuzz.kinds.checkpoints import GGUF, Safetensors
from fuzz.kinds.data import Data
from fuzz.kinds.resealed import Resealed
from fuzz.kinds.saves import Saves
from fuzz.kinds.settings import Settings
from fuzz.kinds.templates import Templates
from fuzz.kinds.token_files import TokenFiles
from fuzz.kinds.tokenizers import Tokenizers

KINDS: dict[str, type[Kind]] = {
    kind.name: kind
    for kind in (
        Manifests,
        Graphs,
        Bundles,
        GGUF,
        Safetensors,
        Data,
        TokenFiles,
        Saves,
        Resealed,
        Adapters,
        Templates,
        Tokenizers,
        Settings,
    )
}
