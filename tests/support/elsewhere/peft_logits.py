"""Writes the logits of transformers' model with an adapter that PEFT loads: an own interpreter's.

python peft_logits.py MODEL ADAPTER TOKENS OUTPUT.npy DTYPE SCALE ...   ADAPTER may be "-"

Six words are one model with one adapter; there may be several.

SCALE: "own", or "bfloat16" for Gemma's embedding with the factor rounded so.
"""

import sys

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText


def logits(model_path: str, adapter: str, tokens: str, dtype: str, scale: str) -> np.ndarray:
    kinds = AutoModelForCausalLM, AutoModelForImageTextToText
    known = [
        AutoConfig.from_pretrained(model_path).__class__ in kind._model_mapping for kind in kinds
    ]
    kind = kinds[known.index(True)]
    model = kind.from_pretrained(model_path, dtype=getattr(torch, dtype))
    model.eval()
    embedding = model.get_input_embeddings()
    if scale == "bfloat16" and hasattr(embedding, "embed_scale"):
        # Gemma was trained with this factor in bfloat16, and mlx-lm rounds it so in every type
        embedding.embed_scale.fill_(embedding.embed_scale.to(torch.bfloat16).item())
    if adapter != "-":
        model = PeftModel.from_pretrained(model, adapter)
        model.eval()
    with torch.no_grad():
        found = model(torch.tensor([list(map(int, tokens.split(",")))])).logits
    return found[0].float().numpy()


words = iter(sys.argv[1:])
for model_path, adapter, tokens, output, dtype, scale in zip(*[words] * 6, strict=True):
    np.save(output, logits(model_path, adapter, tokens, dtype, scale))
