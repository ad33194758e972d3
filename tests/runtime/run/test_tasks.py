"""The tasks of `ondevice eval`: labels and exact rows, by the dense model and by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from oracles import whole_model as reference
from support.runs import NO_OTHERS, here, json_of, refuses, succeeds
from support.text_bundle import text_bundle
from support.token_rows import BOS, ids

from harness.tasks.calls import Example, write_jsonl
from runtime.bundle.store import Bundle

ANSWERS = {"cat": "yes", "sea": "no", "bee": "maybe"}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return text_bundle(tmp_path_factory.mktemp("tasks"), "")


def write(file: Path, rows: list[tuple[str, str]]) -> Path:
    return write_jsonl(file, [Example(f"{asked}? ", answer) for asked, answer in rows])


def test_labels_are_those_of_the_dense_model(
    bundle: Bundle, rng: np.random.Generator, tmp_path: Path
) -> None:
    letters = np.array(list("abcdefgh "))
    rows = [
        ("".join(rng.choice(letters, int(rng.integers(1, 20)))), str(rng.choice(["y", "no", "m"])))
        for _ in range(19)
    ] + [("one", "y"), ("two", "no"), ("three", "m")]
    data = write(tmp_path / "valid.jsonl", rows)
    found = json_of("eval", bundle.path, f"--data={data}", "--task=labels", by=here)
    model = reference.dense_model(bundle)
    tokens = [ids("m")[0], ids("n")[0], ids("y")[0]]
    chosen = []
    for asked, _ in rows:
        logits = np.array(model(mx.array([BOS, *ids(f"{asked}? ")])[None])[0, -1])
        chosen.append(max(tokens, key=lambda token: float(logits[token])))
    expected = [ids(answer)[0] for _, answer in rows]
    right = np.array(chosen) == np.array(expected)
    assert found["label_accuracy"] == pytest.approx(right.mean())
    assert found["labels"] == [
        {
            "token": token,
            "text": text,
            "share": pytest.approx(Counter(expected)[token] / len(rows)),
            "answered": pytest.approx(Counter(chosen)[token] / len(rows)),
        }
        for token, text in zip(tokens, "mny", strict=True)
    ]
    plain = json_of("eval", bundle.path, f"--data={data}", by=here)
    assert {key: found[key] for key in ("loss", "exact", "scored_tokens", "rows")} == {
        key: plain[key] for key in ("loss", "exact", "scored_tokens", "rows")
    }
    assert (found["task"], plain["task"]) == ("labels", "perplexity")


def test_a_model_that_has_learnt_its_answers_gets_all_right(bundle: Bundle, tmp_path: Path) -> None:
    data, run = write(tmp_path / "valid.jsonl", list(ANSWERS.items())), tmp_path / "run"
    succeeds(
        *("train", bundle.path, f"--data={data}", f"--output={run}", "--steps=15"),
        *("--batch-size=3", "--learning-rate=1e-2", "--budget=400MB", "--save-every=0", NO_OTHERS),
        by=here,
    )
    for task, key in (("labels", "label_accuracy"), ("exact", "exact")):
        given = (bundle.path, f"--data={data}", f"--task={task}")
        assert json_of("eval", *given, by=here)[key] < 0.7
        assert json_of("eval", *given, f"--adapter={run}", by=here)[key] == 1.0
        said = here("eval", *given, f"--adapter={run}").stdout
        assert "100.00%" in said.splitlines()[0] and "perplexity" in said
        letter = "'m': right for 33.3% of rows, answered in 33.3%"
        assert (letter in said) == (task == "labels")


@pytest.mark.parametrize(
    ("rows", "said"),
    [([("a", "y"), ("b", "y")], "begin with the same token"), ([("a", "y")], "same token")],
)
def test_rows_without_labels_are_refused(
    bundle: Bundle, tmp_path: Path, rows: list[tuple[str, str]], said: str
) -> None:
    data = write(tmp_path / "valid.jsonl", rows)
    done = refuses(4, said, "eval", bundle.path, f"--data={data}", "--task=labels")
    assert "--task labels: the answers of all rows" in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--task=calls",), "task is 'calls'; it must be perplexity, labels or exact"),
        (("--task=exact", "--source=x"), "compares predictions: leave out --task"),
    ],
)
def test_options_of_other_tasks_are_refused(options: tuple[str, ...], said: str) -> None:
    refuses(2, said, "eval", "nowhere", "--data=none", *options)
