"""Repeats a run on the dense model: the same rows, optimizer and steps, without a budget.

`python -m tests.oracles.dense RUN --steps N` repeats a run's steps on mlx-lm's own model, with
every weight dequantized and MLX's autograd over the whole graph, evaluates as the run did, and
writes RUN/dense.json, with the differences to the run. The trained adapters are written to
RUN/dense, a folder for `--adapter`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.machine.backend import prepare

prepare()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import mlx.optimizers as optim  # noqa: E402
import msgspec  # noqa: E402
import numpy as np  # noqa: E402
from mlx.utils import tree_flatten, tree_unflatten  # noqa: E402
from tqdm import tqdm  # noqa: E402

from oracles.whole_model import dense_model, gradients  # noqa: E402
from runtime.bundle.store import open_bundle  # noqa: E402
from runtime.config.base import load  # noqa: E402
from runtime.config.train import TrainConfig  # noqa: E402
from runtime.data.samples import Samples  # noqa: E402
from runtime.data.token_rows import TokenRows  # noqa: E402
from runtime.engine.sample import Row  # noqa: E402
from runtime.methods.adapters import Adapters  # noqa: E402
from runtime.methods.protocol import StepLoss  # noqa: E402
from runtime.run.evaluate import summarize  # noqa: E402
from runtime.run.results import Evaluation, loss_of  # noqa: E402
from runtime.run.trainer import learning_rate  # noqa: E402


@dataclass(frozen=True)
class DenseRun:
    """The loss of every step, and the evaluations before, after, and where the run had some.

    `adapters` are those after the last step.
    """

    losses: list[float]
    before: Evaluation
    after: Evaluation
    by_step: dict[int, Evaluation]
    adapters: Adapters

    def to_json(self) -> dict[str, Any]:
        """What was measured."""
        measured = {name: value for name, value in vars(self).items() if name != "adapters"}
        facts: dict[str, Any] = msgspec.to_builtins(measured, str_keys=True)
        return facts


def evaluate_dense(model: nn.Module, rows: TokenRows, limit: int) -> Evaluation:
    """Loss, perplexity and accuracy of the first `limit` rows (0: all)."""
    count = min(len(rows), limit) if limit else len(rows)
    losses = []
    for index in tqdm(range(count), desc="evaluating", disable=None, leave=False):
        row = Row(*rows.row(index))
        logits = model(mx.array(row.tokens[None, :-1].astype(np.int32)))[0][mx.array(row.scored)]
        targets = mx.array(row.targets.astype(np.int32))
        loss = nn.losses.cross_entropy(logits, targets).sum().item()
        correct = int((logits.argmax(-1) == targets).sum().item())
        losses.append(StepLoss(float(loss), correct, len(row.targets)))
    return summarize(losses)


def run_dense(config: TrainConfig, run: Path, steps: int) -> DenseRun:
    """Train the dense model for `steps` steps of the run's configuration."""
    bundle = open_bundle(config.bundle)
    manifest = bundle.manifest
    adapters = Adapters.initial(manifest, config.seed)
    model = dense_model(bundle, adapters)
    rule: optim.Optimizer = (
        optim.AdamW(1e-4, weight_decay=config.weight_decay, bias_correction=True)
        if config.optimizer == "adamw"
        else optim.SGD(1e-4, weight_decay=config.weight_decay)
    )
    rows = TokenRows(run / "train.tokens", manifest.vocab_size)
    held_out = TokenRows(run / "valid.tokens", manifest.vocab_size)
    before = evaluate_dense(model, held_out, config.eval_rows)
    size = config.batch_size * config.grad_accumulation
    samples = Samples.of(config, manifest, rows)
    losses = []
    by_step: dict[int, Evaluation] = {}
    for step in tqdm(range(steps), desc="dense", disable=None):
        batch = [row for i in range(size) for row in samples.at(step * size + i).rows]
        loss, found = gradients(model, [(row.tokens, row.scored) for row in batch])
        rule.learning_rate = learning_rate(config, step)
        if config.max_grad_norm:
            found, _ = optim.clip_grad_norm(found, config.max_grad_norm)
        rule.update(model, tree_unflatten(list(found.items())))
        mx.eval(dict(tree_flatten(model.trainable_parameters())), rule.state)
        losses.append(loss)
        if config.eval_every and (step + 1) % config.eval_every == 0:
            by_step[step + 1] = evaluate_dense(model, held_out, config.eval_rows)
    after = by_step.get(steps) or evaluate_dense(model, held_out, config.eval_rows)
    trained = Adapters(manifest, dict(tree_flatten(model.trainable_parameters())))
    return DenseRun(losses, before, after, by_step, trained)


def differences(found: DenseRun, run: Path) -> dict[str, float]:
    """The largest difference of a step's loss, and of the final held-out loss if it is known."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    steps = zip(losses, found.losses, strict=False)
    result = {"largest_step_difference": max(abs(a - b) for a, b in steps)}
    summary = run / "summary.json"
    if len(losses) == len(found.losses) and summary.exists():
        after = json.loads(summary.read_text())["eval"]["after"]["loss"]
        result["after_difference"] = abs(after - loss_of(found.after))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int)
    arguments = parser.parse_args()
    config = load(TrainConfig, arguments.run / "config.toml", {})
    result = run_dense(config, arguments.run, arguments.steps or config.steps)
    compared = differences(result, arguments.run)
    folder = arguments.run / "dense"
    folder.mkdir(exist_ok=True)
    result.adapters.save(folder)
    (arguments.run / "dense.json").write_text(
        json.dumps({**result.to_json(), **compared}, indent=1)
    )
    facts = result.to_json()
    print(json.dumps({"before": facts["before"], "after": facts["after"], **compared}))


if __name__ == "__main__":
    main()
