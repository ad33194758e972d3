"""The peer PyTorch + PEFT: LoRA training of transformers' own model, with gradient checkpointing.

    python -m harness.peers.torch_trainer RESULT --preset qwen2.5-0.5b --dtype bfloat16

The model has a preset's shapes and transformers' random initialization; attention is PyTorch's
fused one, LoRA is PEFT's on every linear layer of the blocks (with float32 adapters over a bfloat16
base, as PEFT makes them), and BLAS is PyTorch's own. Invariant: as many targets are scored per step
as in our rows, and a step leaves nothing in memory but the adapters and the optimizer's state.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

from export.sources.random import PRESETS
from harness.peers.trainer import (
    ALPHA,
    LEARNING_RATE,
    RANK,
    Steps,
    main,
    token_rows,
    versions,
)


def train(arguments: argparse.Namespace, steps: Steps) -> dict[str, Any]:
    """Build the model and take the steps."""
    import torch

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model = build(arguments.preset, arguments.dtype)
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    vocabulary = int(PRESETS[arguments.preset]["vocab_size"])
    rows = torch.from_numpy(token_rows(vocabulary, arguments.steps, arguments.tokens))
    steps.begin()
    for row in rows:
        with steps.step() as losses:
            losses.append(step(model, optimizer, row[None]))
    return {
        "trainable_parameters": sum(value.numel() for value in trained),
        "threads": torch.get_num_threads(),
        "blas": blas(torch.__config__.show()),
        "versions": versions(("torch", "peft", "transformers")),
    }


def build(preset: str, dtype: str) -> Any:
    """The model with its adapters, ready to train."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = dict(PRESETS[preset])
    config = AutoConfig.for_model(raw.pop("model_type"), **raw, use_cache=False)
    model = AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    lora = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules="all-linear",
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, lora).train()


def step(model: Any, optimizer: Any, row: Any) -> float:
    """One step over tokens (1, T + 1); returns its loss, of float32 logits as in transformers."""
    import torch.nn.functional as functional

    logits = model(input_ids=row[:, :-1], use_cache=False).logits  # (1, T, V)
    loss = functional.cross_entropy(logits.float().flatten(0, 1), row[:, 1:].flatten())
    del logits  # the graph holds all that the backward pass needs
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.item())


def blas(build_settings: str) -> str:
    """The libraries that multiply matrices, as `torch.__config__.show()` lists them."""
    libraries = []
    for pattern, name in (
        (r"BLAS_INFO=(\w+)", ""),
        (r"MKL-DNN v([\w.]+)", "oneDNN "),
        (r"CPU capability usage: (\S+)", ""),
    ):
        match = re.search(pattern, build_settings)
        libraries += [name + match[1]] if match else []
    return ", ".join(libraries) or "unknown"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")


if __name__ == "__main__":
    sys.exit(main(__doc__, train, options))
