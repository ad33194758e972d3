"""The peer mlx-lm: its own model, LoRA layers and trainer, with gradient checkpointing.

    python -m harness.peers.mlx_lm_trainer RESULT --preset qwen2.5-0.5b [--prepare] [--bits 4]

The model has a preset's shapes and random float32 weights, which mlx-lm quantizes where `--bits` is
given. As it comes, MLX multiplies with the BLAS that its wheel links (on Linux the reference one);
`--prepare` gives the process our BLAS, allocator settings and run-ahead. Invariant: the steps are
those of `mlx_lm.tuner.trainer.train`, unchanged; its reports are all that is read.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from export.sources.families import build_model, normalise_config
from export.sources.random import PRESETS
from harness.peers.trainer import (
    ALPHA,
    LEARNING_RATE,
    RANK,
    Steps,
    let_mlx_compile,
    main,
    token_rows,
    versions,
)
from runtime.machine.backend import prepare

GROUP_SIZE = 64


def train(arguments: argparse.Namespace, steps: Steps) -> dict[str, Any]:
    """Build the model and let mlx-lm's trainer take the steps."""
    as_it_comes = "Accelerate" if sys.platform == "darwin" else "reference (MLX's wheel)"
    blas = prepare().blas if arguments.prepare else as_it_comes
    # transformers, which mlx-lm imports, would load PyTorch wherever it is installed
    sys.modules["torch"] = None  # type: ignore[assignment]
    import mlx.core as mx
    import mlx.optimizers as optim
    from mlx.utils import tree_flatten
    from mlx_lm.tuner import trainer

    mx.random.seed(0)
    model = build(arguments.preset, arguments.bits)
    let_mlx_compile()
    rows = token_rows(
        int(PRESETS[arguments.preset]["vocab_size"]), arguments.steps, arguments.tokens
    )

    class Listener(trainer.TrainingCallback):  # type: ignore[misc]
        def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
            steps.end(1 / train_info["iterations_per_second"], float(train_info["train_loss"]))

    with tempfile.TemporaryDirectory() as folder:
        settings = trainer.TrainingArgs(
            batch_size=1,
            iters=arguments.steps,
            steps_per_report=1,
            steps_per_save=arguments.steps + 1,
            max_seq_length=arguments.tokens + 1,
            adapter_file=str(Path(folder) / "adapters.safetensors"),
            grad_checkpoint=True,
        )
        optimizer = optim.AdamW(LEARNING_RATE, weight_decay=0.0, bias_correction=True)
        dataset = [(row.tolist(), 0) for row in rows]
        steps.begin()
        trainer.train(model, optimizer, dataset, args=settings, training_callback=Listener())
    trained = tree_flatten(model.trainable_parameters())
    return {
        "trainable_parameters": sum(value.size for _, value in trained),
        "threads": arguments.threads,
        "blas": blas,
        "versions": versions(("mlx", "mlx-lm")),
    }


def build(preset: str, bits: int) -> Any:
    """The model with its adapters; its weights are evaluated one at a time."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers

    raw = PRESETS[preset]
    untied = raw.get("tie_word_embeddings") is False
    config = normalise_config(raw, preset, has_lm_head=untied)
    model = build_model(str(config["model_type"]), config)
    if bits:
        nn.quantize(model, group_size=GROUP_SIZE, bits=bits)
    model.freeze()
    lora = {"rank": RANK, "scale": ALPHA / RANK, "dropout": 0.0}
    linear_to_lora_layers(model, len(model.layers), lora)
    for _, value in tree_flatten(model.parameters()):
        mx.eval(value)
    return model


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prepare", action="store_true", help="with our BLAS and settings")
    parser.add_argument("--bits", type=int, choices=(0, 4, 8), default=0, help="of the base")


if __name__ == "__main__":
    sys.exit(main(__doc__, train, options))
