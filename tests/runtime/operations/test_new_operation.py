"""An operation that is new: two files and a line in each table, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from oracles import whole_model as reference
from support.bundles import Rng, Tiny, copied, manifest_of, rewrite
from support.models import CLOSE, LENGTHS, adapters_of, agree, mebp, model_of, rows_of
from support.plans import demand_of
from support.runs import MAIN, copied_program, python, train_arguments

from runtime.bundle.store import Bundle, open_bundle
from runtime.core.errors import BundleError
from runtime.operations.base import Operation
from runtime.operations.gated import Gated
from runtime.plan.block_peaks import PeakModel

OPERATION = '''
"""Scale: a value times a number."""

from __future__ import annotations

import math

from runtime.operations.base import Call, Execution, Operation, Scope, require


class Scale(Operation, frozen=True):
    """y = factor x."""

    inputs: tuple[str]
    outputs: tuple[str]
    factor: float

    @property
    def inputs_read(self) -> tuple[str, ...]:
        return self.inputs

    @property
    def results(self) -> tuple[str, ...]:
        return self.outputs

    @property
    def tokenwise(self) -> bool:
        return True

    def working_bytes(self, call: Call, execution: Execution) -> int:
        return 0

    def check(self, scope: Scope) -> None:
        alike = scope.values[self.inputs[0]] == scope.values[self.outputs[0]]
        require(alike and math.isfinite(self.factor), f"{scope.where}: scale {self.factor}")
'''

KERNEL = '''
"""The kernel of `Scale`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from runtime.operations.dummy import Scale
from runtime.operations.kernel import Run, Tools
from runtime.arrays.values import Gradients, Loras, Values


@dataclass(frozen=True)
class ScaleKernel:
    """y = factor x, and dx = factor dy."""

    tools: Tools

    def forward(self, run: Run, lanes: list[Values], loras: Sequence[Loras]) -> None:
        one = run.operation(Scale)
        for values in lanes:
            values[one.outputs[0]] = values[one.inputs[0]] * one.factor
            mx.eval(values[one.outputs[0]])

    def backward(self, run: Run, values: Values, loras: Loras, gradients: Gradients) -> Values:
        one = run.operation(Scale)
        return {one.inputs[0]: values[f"~{one.outputs[0]}"] * one.factor}
'''

TABLES = {
    "runtime/operations/program.py": (
        ("from runtime.operations.elementwise", "from runtime.operations.dummy import Scale\n"),
        (" | Head\n", " | Scale"),
    ),
    "runtime/operations/kernel_table.py": (
        ("from runtime.operations.elementwise", "from runtime.operations.dummy import Scale\n"),
        (
            "from runtime.operations.elementwise_kernel",
            "from runtime.operations.dummy_kernel import ScaleKernel\n",
        ),
        ("    SlicedMlp: SlicedMlpKernel,\n", "    Scale: ScaleKernel,\n"),
    ),
}

RUN = """
import json, sys
from pathlib import Path
from runtime.machine.backend import prepare
prepare()
import mlx.core as mx
import numpy as np
import runtime, ondevice, harness
from runtime.operations.dummy import Scale
from runtime.methods.adapters import Adapters
from runtime.engine.sample import Row
from runtime.plan.block_peaks import PeakModel
from support.bundles import as_it_lies
from support.models import mebp, model_of
from support.plans import demand_of

mx.set_default_device(mx.cpu)
packages, folder = map(Path, sys.argv[1:3])
assert all(packages in Path(one.__file__).parents for one in (runtime, ondevice, harness))
given = json.loads((folder / "rows.json").read_text())
rows = [Row(np.array(tokens, np.int32), np.array(scored)) for tokens, scored in given]
for name in sys.argv[3:]:
    bundle = as_it_lies(folder / name)
    adapters = Adapters(bundle.manifest, mx.load(str(folder / "adapters.safetensors")))
    found = {}
    for kept, slices in ((0, True), (1, False)):
        model = model_of(bundle, 128, slices=slices)
        assert not model.lowered.slice_columns  # an operation inside an MLP keeps it whole
        peak = PeakModel(bundle.manifest, model.lowered, demand_of("mebp"))
        peaks = peak.block(1, 2)
        loss, gradients = mebp(model, adapters, rows, folder, kept)
        gradients["loss"] = mx.array([loss.loss_sum / loss.scored_tokens])
        gradients["peaks"] = mx.array([peaks.forward_bytes, peaks.backward_bytes])
        found |= {f"{kept}.{key}": value for key, value in gradients.items()}
    mx.save_safetensors(str(folder / f"{name}.safetensors"), found)
"""


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages with one operation more: two new files, and its line in the two tables."""
    folder = copied_program(tmp_path_factory.mktemp("extended"))
    (folder / "runtime/operations/dummy.py").write_text(OPERATION)
    (folder / "runtime/operations/dummy_kernel.py").write_text(KERNEL)
    for file, lines in TABLES.items():
        text = (folder / file).read_text()
        for before, line in lines:
            at = text.index(before)
            at += len(before.rstrip("\n")) if before.startswith(" |") else 0
            text = text[:at] + line + text[at:]
        (folder / file).write_text(text)
    return folder


def with_scales(bundle: Bundle, folder: Path, factors: dict[str, float]) -> Path:
    """A copy of the bundle in whose layers some values are scaled before a linear reads them."""
    path = copied(bundle, folder)
    document = manifest_of(path)
    block_type = document["block_types"]["layer0"]
    for name, factor in factors.items():
        operations, values = block_type["operations"], block_type["values"]
        (at,) = (
            index
            for index, one in enumerate(operations)
            if one["op"] == "linear" and one["inputs"] == [name]
        )
        scaled = f"{name}.scaled"
        values[scaled] = values[name]
        operations[at]["inputs"] = [scaled]
        scale = {"op": "scale", "inputs": [name], "outputs": [scaled], "factor": factor}
        operations.insert(at, scale)
    rewrite(path, document)
    return path


BEFORE_MLP, INSIDE_MLP = "mlp.gate_proj.in", "mlp.down_proj.in"


def test_a_new_operation_is_two_files_and_a_line_in_each_table(
    tiny: Tiny, rng: Rng, extended: Path, tmp_path: Path
) -> None:
    """It is checked, planned and run, forward and backward, also inside an MLP, then not sliced."""
    bundle = tiny("qwen2", seq_lens=LENGTHS)
    assert {block.type for block in bundle.manifest.layers} == {"layer0"}
    adapters, rows = adapters_of(bundle, rng), rows_of(bundle, rng)
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), dict(adapters.tensors))
    written = [(row.tokens.tolist(), row.scored.tolist()) for row in rows]
    (tmp_path / "rows.json").write_text(json.dumps(written))
    first, second = (float(rng.uniform(0.5, 2.5)) for _ in range(2))
    factors = {"same": (1.0, 1.0), "scaled": (first, second)}
    for name, (outside, inside) in factors.items():
        scales = {BEFORE_MLP: outside, INSIDE_MLP: inside}
        path = with_scales(bundle, tmp_path / name, scales)
        with pytest.raises(BundleError, match="scale"):
            open_bundle(path)  # by those who do not know it
    done = python(RUN, extended, tmp_path, *factors, program=extended)
    assert done.returncode == 0, done.stderr
    same, scaled = (dict(mx.load(str(tmp_path / f"{name}.safetensors"))) for name in factors)

    dense = reference.dense_model(bundle, adapters)  # what a factor does, autograd says
    for layer in dense.model.layers:
        norm, up = layer.post_attention_layernorm, layer.mlp.up_proj
        norm.weight = norm.weight * first
        up.linear.weight = up.linear.weight * second
        up.scale = up.scale * second
    loss, expected = reference.gradients(dense, [(row.tokens, row.scored) for row in rows])

    model = model_of(bundle, 128)
    peak = PeakModel(bundle.manifest, model.lowered, demand_of("mebp")).block(1, 2)
    for kept in (0, 1):
        of_one, of_both = (
            {n.removeprefix(f"{kept}."): v for n, v in one.items() if n.startswith(f"{kept}.")}
            for one in (same, scaled)
        )
        plain, gradients = mebp(model, adapters, rows, tmp_path, kept)
        forward, backward = of_one.pop("peaks").tolist()
        assert of_both.pop("peaks").tolist() == [forward, backward]
        assert peak.forward_bytes <= forward < 1.5 * peak.forward_bytes
        assert peak.backward_bytes <= backward < 1.5 * peak.backward_bytes
        unchanged, changed = of_one.pop("loss").item(), of_both.pop("loss").item()
        assert unchanged == np.float32(plain.loss_sum / plain.scored_tokens)
        assert set(of_one) == set(gradients)  # a factor of 1 changes no bit
        assert all(mx.array_equal(of_one[n], value) for n, value in gradients.items())
        assert changed == pytest.approx(loss, rel=CLOSE)
        agree(of_both, expected)


def test_a_new_operation_is_described_planned_and_trained(tiny: Tiny, extended: Path) -> None:
    """By the commands, which need no word about it."""
    bundle = tiny("qwen2", seq_lens=LENGTHS)
    path = with_scales(bundle, extended / "commands", {BEFORE_MLP: 2.0, INSIDE_MLP: 0.5})
    shown = python(MAIN, "inspect", path, program=extended)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("scale -> ") == 2
    trusted = python(MAIN, "trust", path, "--yes", program=extended)  # no model is like this
    assert trusted.returncode == 0, trusted.stderr
    wanted = ("--budget", "200MB", "--max-seq-length", 128)
    plan = python(MAIN, "plan", path, *wanted, program=extended)
    assert plan.returncode == 0, plan.stderr
    for method in ("mebp", "mezo"):
        run = extended / f"run-{method}"
        arguments = train_arguments(path, run, 2, method=method, max_seq_length=128)
        trained = python(MAIN, *arguments, program=extended)
        assert trained.returncode == 0, trained.stderr
        summary = json.loads((run / "summary.json").read_text())
        assert summary["peak_footprint_bytes"] <= 200_000_000
        assert np.isfinite(json.loads((run / "metrics.jsonl").read_text().split("\n")[1])["loss"])


def test_a_wrong_new_operation_is_refused_by_its_own_check(tiny: Tiny, extended: Path) -> None:
    bundle = tiny("qwen2", seq_lens=LENGTHS)
    path = with_scales(bundle, extended / "wrong", {BEFORE_MLP: 1.0})
    document = manifest_of(path)
    operations = document["block_types"]["layer0"]["operations"]
    (scale,) = (one for one in operations if one["op"] == "scale")
    for wrong in ({"factor": 2.0, "more": 1}, {"factor": "2"}, {"inputs": ["x.y"]}):
        kept = dict(scale)
        scale.update(wrong)
        rewrite(path, document)
        refused = python(MAIN, "inspect", path, program=extended)
        assert refused.returncode == 4 and "Traceback" not in refused.stderr
        scale.clear()
        scale.update(kept)
    document["block_types"]["layer0"]["values"][f"{BEFORE_MLP}.scaled"] = [1, "T", 3]
    rewrite(path, document)
    refused = python(MAIN, "inspect", path, program=extended)
    assert refused.returncode == 4 and "scale 1.0" in refused.stderr


def test_an_operation_that_lacks_a_part_fails_when_it_is_built() -> None:
    class Lacking(Operation, frozen=True):
        """It does not say how many bytes it needs."""

    class Counting(Gated, frozen=True):
        """It does not say how large its statistics are."""

        @property
        def statistics(self) -> tuple[str, ...]:
            return ("sum",)

    with pytest.raises(TypeError, match="Lacking has no working_bytes"):
        Lacking()  # type: ignore[abstract]
    with pytest.raises(TypeError, match="Counting has no statistic_bytes"):
        Counting(("a", "b"), ("c",), "silu")
