"""A new method is one file and one line: nothing else names it, plans it, trains it or resumes it.

The packages are copied, a method is added to the copy, and the commands are run from there.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support.bundles import Tiny
from support.runs import MAIN, adapter, copied_program, python

DUMMY = '''
"""Plain gradient descent with the gradients of MeBP, written without the optimizer."""

from dataclasses import dataclass

from runtime.methods.mebp import Backprop
from runtime.methods.protocol import StepLoss, StepResult
from runtime.plan.demand import Demand
from runtime.storage.activations import Activations


@dataclass
class Dummy:
    models: object
    adapters: object
    activations: Activations
    steps: int = 0
    keeps_log = False
    whole = False

    def step(self, number, rate, parts):
        rows = [row for part in parts for row in part]
        model = self.models(max(len(row.inputs) for row in rows))
        tokens = sum(len(row.targets) for row in rows)

        def update(block, gradients):
            for name, pair in gradients.items():
                for suffix, gradient in zip(("lora_a", "lora_b"), pair):
                    full = f"{block.tensor(name)}.{suffix}"
                    self.adapters.tensors[full] = self.adapters.tensors[full] - gradient * rate

        loss = StepLoss(0.0, 0, 0)
        loss += Backprop(model, self.adapters, self.activations).gradients(rows, tokens, update)
        self.steps += 1
        return StepResult(loss, len(rows))

    def settle(self):
        pass

    def write(self, path):
        path.write_text(str(self.steps))

    def read(self, path):
        self.steps = int(path.read_text())

    def log_header(self):
        raise AssertionError


def demand(config):
    rows = config.batch_size * config.grad_accumulation
    return Demand(rows=rows, hidden_states=rows, backward=True)


def start(config, begin):
    rows = config.batch_size * config.grad_accumulation
    shape = begin.activation_shape
    return Dummy(
        begin.models,
        begin.adapters,
        Activations(begin.scratch, len(begin.adapters.manifest.blocks), rows, shape),
    )
'''
LINE = '    "dummy": Method("runtime.methods.dummy"),\n'


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program with one file and one line more."""
    folder = copied_program(tmp_path_factory.mktemp("program"))
    (folder / "runtime" / "methods" / "dummy.py").write_text(DUMMY)
    table = folder / "runtime" / "config" / "methods.py"
    text = table.read_text()
    last = text.index("\n}\n", text.index("METHODS: dict")) + 1
    table.write_text(text[:last] + LINE + text[last:])
    return folder


def run(copy: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    done = python(MAIN, *arguments, program=copy)
    assert done.returncode == 0, done.stderr
    return done


def test_a_method_is_one_file_and_one_line(tiny: Tiny, tmp_path: Path, copy: Path) -> None:
    common = ["--max-seq-length=24", "--batch-size=2", "--budget=200MB"]
    bundle, out = tiny("qwen2").path, tmp_path / "run"
    assert "dummy" in run(copy, "train", "--help").stdout
    planning = ("plan", bundle, *common, "--json")
    plan, like = (
        json.loads(run(copy, *planning, f"--method={method}").stdout)
        for method in ("dummy", "mebp")
    )
    assert plan["live_bytes"] == like["live_bytes"] and plan["gradient_bytes"] > 0
    assert plan["scratch_disk_bytes"] < like["scratch_disk_bytes"]  # it has no moments

    train = ["train", bundle, "--data=random:5", "--method=dummy", "--learning-rate=0.3", *common]
    train += ["--lr-schedule=constant"]  # a schedule depends on the number of steps
    done = run(copy, *train, "--steps=3", f"--output={out}", "--json")
    summary = json.loads(done.stdout)
    assert summary["method"] == "dummy" and summary["steps"] == 3
    (save,) = (out / "saves").iterdir()
    assert (save / "method.bin").read_text() == "3"

    resumed = run(copy, "train", "--resume", out, "--steps=5")
    assert "resuming after step 3 of 5" in resumed.stderr
    whole, sgd = tmp_path / "whole", tmp_path / "sgd"
    run(copy, *train, "--steps=5", f"--output={whole}")
    assert adapter(out) == adapter(whole)

    flags = ["--data=random:5", "--max-seq-length=24", "--json"]
    untrained = json.loads(run(copy, "eval", bundle, *flags).stdout)
    trained = json.loads(run(copy, "eval", bundle, *flags, f"--adapter={out}").stdout)
    assert trained["loss"] < untrained["loss"]
    # what it computes is what MeBP does with plain SGD
    known = [*train, "--method=mebp", "--optimizer=sgd", "--steps=5", f"--output={sgd}"]
    run(copy, *(argument for argument in known if argument != "--method=dummy"))
    beside = json.loads(run(copy, "eval", bundle, *flags, f"--adapter={sgd}").stdout)
    assert trained["loss"] == pytest.approx(beside["loss"], rel=1e-5)
