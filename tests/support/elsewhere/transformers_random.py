"""Writes random checkpoints as transformers makes them, and their logits: an own interpreter's.

python transformers_random.py FOLDER SEED [initial]   each folder inside has a config.json; weights
of its dtype, tokens.npy (T,) and logits.npy (T, V), computed in float32, are written there, or
refused.txt where transformers refuses. `initial` weights are those that its classes begin with.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

TOKENS, TOKEN_IDS = 48, 300  # those of images are larger
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)
for path in sorted(Path(sys.argv[1]).glob("*/config.json")):
    folder = path.parent
    torch.manual_seed(int(sys.argv[2]))
    try:
        config = AutoConfig.from_pretrained(folder)
        stored = config.dtype or torch.float32
        sees = type(config) not in AutoModelForCausalLM._model_mapping
        model = (
            (AutoModelForImageTextToText if sees else AutoModelForCausalLM)
            .from_config(config, dtype=torch.float32, attn_implementation="eager")
            .eval()
        )
        saved = {id(value) for value in model.state_dict(keep_vars=True).values()}
        buffers = [b for b in model.buffers() if id(b) in saved and b.is_floating_point()]
        with torch.no_grad():
            for parameter in [*model.parameters(), *buffers]:
                if sys.argv[3:] != ["initial"]:
                    noise, wide = torch.randn_like(parameter), parameter.ndim > 1
                    noise = noise / (parameter.shape[-1] ** 0.5 if wide else 10)
                    parameter.copy_(noise if wide else parameter + noise)
                parameter.copy_(parameter.to(stored))
            most = min(model.get_input_embeddings().num_embeddings, TOKEN_IDS)
            tokens = torch.randint(0, most, (TOKENS,))
            found = model(tokens[None]).logits
        model.to(stored).save_pretrained(folder)
    except Exception as problem:  # whatever it is, the test says whether it was expected
        (folder / "refused.txt").write_text(f"{type(problem).__name__}: {problem}")
        continue
    np.save(folder / "tokens.npy", tokens.numpy())
    np.save(folder / "logits.npy", found[0].float().numpy())
