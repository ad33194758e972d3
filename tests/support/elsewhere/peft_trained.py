"""Writes an adapter with PEFT itself, with random weights: an own interpreter's.

python peft_trained.py MODEL OUTPUT CONFIG.json DTYPE
"""

import json
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

model_path, output, config, dtype = sys.argv[1:]
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
model = get_peft_model(model, LoraConfig(**json.loads(config)))
for name, value in model.named_parameters():
    if "lora_" in name:
        torch.nn.init.normal_(value, std=0.1)
        value.data = value.data.to(getattr(torch, dtype))
model.save_pretrained(output)
