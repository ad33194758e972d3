"""Writes the logits and losses of transformers' own models in float32: an own interpreter's.

python transformers_logits.py FOLDER   each folder inside has tokens.npy (T,) and a checkpoint, or
settings.json, from which transformers makes a checkpoint with random weights; logits.npy (T, V) and
loss.npy are written there, or refused.txt where transformers itself cannot make or load it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)
EXACT: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}


def make(folder: Path) -> None:
    """Save a model of these settings whose parameters are all random."""
    settings = json.loads((folder / "settings.json").read_text())
    torch.manual_seed(settings.pop("seed"))
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(settings.pop("model_type"), **settings), **EXACT
    )
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim == 2:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
            else:  # around 1 or 0, by which it scales or adds nothing
                parameter.add_(noise / 10)
    model.save_pretrained(folder)


def compute(folder: Path, tokens: np.ndarray) -> None:
    model, loaded = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **EXACT)
    others = [name for name in loaded["missing_keys"] if "vision" not in name]
    others = [name for name in others if "multi_modal" not in name]
    assert not others and not loaded["mismatched_keys"], loaded
    embedding = model.get_input_embeddings()
    if hasattr(embedding, "embed_scale"):  # as mlx-lm rounds it, and bfloat16 weights do
        embedding.embed_scale.fill_(embedding.embed_scale.to(torch.bfloat16).item())
    batch = torch.from_numpy(tokens)[None]
    with torch.no_grad():
        found = model.eval()(batch, labels=batch)
    np.save(folder / "logits.npy", found.logits[0].float().numpy())
    np.save(folder / "loss.npy", found.loss.item())


for tokens_path in sorted(Path(sys.argv[1]).glob("*/tokens.npy")):
    folder = tokens_path.parent
    try:
        if (folder / "settings.json").exists():
            make(folder)
        compute(folder, np.load(tokens_path))
    except Exception as problem:  # whatever it is, the test says whether it was expected
        (folder / "refused.txt").write_text(f"{type(problem).__name__}: {problem}")
