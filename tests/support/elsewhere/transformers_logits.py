"""Writes the logits of transformers' own models in float32: an own interpreter's.

python transformers_logits.py FOLDER   each folder inside has a checkpoint and tokens.npy (T,);
logits.npy (T, V) is written there, or refused.txt where transformers itself cannot load it.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)
for tokens_path in sorted(Path(sys.argv[1]).glob("*/tokens.npy")):
    folder = tokens_path.parent
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        others = [name for name in loaded["missing_keys"] if "vision" not in name]
        others = [name for name in others if "multi_modal" not in name]
        assert not others and not loaded["mismatched_keys"], loaded
        embedding = model.get_input_embeddings()
        if hasattr(embedding, "embed_scale"):  # as mlx-lm rounds it, and bfloat16 weights do
            embedding.embed_scale.fill_(embedding.embed_scale.to(torch.bfloat16).item())
        with torch.no_grad():
            found = model.eval()(torch.from_numpy(np.load(tokens_path))[None]).logits
    except Exception as problem:  # whatever it is, the test says whether it was expected
        (folder / "refused.txt").write_text(f"{type(problem).__name__}: {problem}")
        continue
    np.save(folder / "logits.npy", found[0].float().numpy())
