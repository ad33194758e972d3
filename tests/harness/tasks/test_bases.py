"""The same task from several bundles: runs, the dense run beside them, and the picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.layouts import LAYOUTS, relaid
from support.text_bundle import text_bundle

from harness.peers.whole_model import relative_error
from harness.tasks import bases
from harness.tasks.examples import Example, write_jsonl
from runtime.methods.adapters import Adapters
from tests.oracles import dense

OPTIONS = ("--steps=4", "--eval-every=2", "--eval-rows=3", "--learning-rate=1e-2", "--budget=2GB")


def test_curves_of_bases_and_of_the_dense_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = text_bundle(tmp_path, "")
    plain, other = bundle.path, relaid(bundle, tmp_path / "other", LAYOUTS["mixed"]).path
    data, out, picture = tmp_path / "data", tmp_path / "films", tmp_path / "curves.png"
    data.mkdir()
    for name, first in (("train", 0), ("valid", 20)):
        films = range(first, first + 8)
        write_jsonl(data / f"{name}.jsonl", [Example(f"film {n}:", f" is {n}") for n in films])
    command = ["train", str(plain), str(other), f"--data={data}", "-o", str(out), "--seeds=0,1"]
    command += OPTIONS
    bases.main(command)
    runs = [out / f"{path.name}-{seed}" for path in (plain, other) for seed in (0, 1)]
    before = [(run / "summary.json").stat().st_mtime_ns for run in runs]
    bases.main(command)  # nothing is left to do
    assert before == [(run / "summary.json").stat().st_mtime_ns for run in runs]
    monkeypatch.setattr(sys, "argv", ["dense", str(runs[0])])
    dense.main()
    exact, ours = (Adapters.load(bundle.manifest, one) for one in (runs[0] / "dense", runs[0]))
    for name, value in exact.tensors.items():
        assert relative_error(ours.tensors[name], value) < 1e-3
    bases.main(["draw", str(out), "-o", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(picture.with_suffix(".json").read_text())["films"]
    assert list(found) == [*sorted((plain.name, other.name)), bases.DENSE]
    for run in runs:
        saved = json.loads((run / "evaluations.json").read_text())
        keys = {"before": "0", "2": "2", "after": "4"}
        losses = {keys[key]: one["loss"] for key, one in saved.items()}
        assert list(losses) == ["0", "2", "4"]
        assert losses in found[run.name.rpartition("-")[0]]
    (curve,) = found[bases.DENSE]
    same = found[plain.name][0]
    assert list(curve) == list(same) == ["0", "2", "4"]
    assert same == pytest.approx(curve, rel=1e-4)
    assert found[other.name][0] != pytest.approx(curve, rel=1e-4)


def test_what_cannot_be_drawn_or_told_apart_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            bases.main(arguments)
        assert ended.value.code == 2
        return capsys.readouterr().err

    assert "no finished run" in refused("draw", str(tmp_path), "-o", str(tmp_path / "x.png"))
    assert not (tmp_path / "x.png").exists()
    assert "unknown: --steps=3" in refused("draw", str(tmp_path), "-o", "x.png", "--steps=3")
    twice = ("draw", "a/films", "b/films", "-o", "x.png")
    assert "one name" in refused(*twice)
    assert "invalid" in refused("train", "a", "--data=x", "-o", "out", "--seeds=0,one")
    (tmp_path / "films" / "model-0").mkdir(parents=True)
    (tmp_path / "films" / "model-0" / "summary.json").touch()
    assert "no held-out loss" in refused("draw", str(tmp_path / "films"), "-o", "x.png")
    same = ("train", "a/model", "b/model", "--data=random:0", "-o", str(tmp_path / "out"))
    assert "one name" in refused(*same)
