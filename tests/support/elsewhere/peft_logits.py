"""Writes the logits of transformers' model with an adapter that PEFT loads: an own interpreter's.

python peft_logits.py MODEL ADAPTER TOKENS OUTPUT.npy   ADAPTER may be "-"
"""

import sys

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

model_path, adapter, tokens, output = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
model.eval()
embedding = model.get_input_embeddings()
if hasattr(embedding, "embed_scale"):
    # Gemma was trained with this factor in bfloat16, and mlx-lm rounds it so in every type
    embedding.embed_scale = embedding.embed_scale.to(torch.bfloat16).float()
if adapter != "-":
    model = PeftModel.from_pretrained(model, adapter)
    model.eval()
with torch.no_grad():
    found = model(torch.tensor([list(map(int, tokens.split(",")))])).logits
np.save(output, found[0].float().numpy())
