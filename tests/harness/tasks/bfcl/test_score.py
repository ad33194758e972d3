"""Verdicts, and `ondevice eval --task bfcl` on a tiny model that has learnt three answers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from support.runs import NO_OTHERS, here
from support.text_bundle import text_bundle

from harness.tasks.bfcl import __main__ as command
from harness.tasks.bfcl import package, score
from harness.tasks.bfcl.package import Question
from harness.tasks.bfcl.prompt import completion_of
from harness.tasks.bfcl.rows import CallRow, read_rows
from harness.tasks.bfcl.score import Verdict, answers_file, judge, summarize
from runtime.core.errors import DataError, UsageError


@pytest.fixture
def installed() -> None:
    pytest.importorskip("bfcl_eval", reason="bfcl-eval is not installed")


def test_where_no_call_is_wanted_any_other_answer_is_right() -> None:
    for category in ("irrelevance", "live_irrelevance"):
        question = Question("x", category, [], [], [])
        assert [judge(question, text)[0] for text in ("[]", "No.", "[f(a=1)]", "f()")] == [
            *("right", "right", "wrong", "wrong")
        ]
    question = Question("x", "live_relevance", [], [], [])
    assert [judge(question, text)[0] for text in ("[]", "No.", "[f(a=1)]", "f()")] == [
        *("wrong", "malformed", "right", "right")
    ]


@pytest.mark.usefixtures("installed")
def test_calls_are_judged_by_the_checker(monkeypatch: pytest.MonkeyPatch) -> None:
    question = package.questions("simple_python")[0]
    for text, verdict in {
        "[calculate_triangle_area(base=10, height=5)]": "right",
        'calculate_triangle_area(height=5, base=10, unit="Units")': "right",
        "[calculate_triangle_area(base=10, height=6)]": "wrong",
        '[calculate_triangle_area(base="10", height=5)]': "wrong",
        "[calculate_triangle_area(base=10, height=5), f()]": "wrong",
        "The area is 25.": "malformed",
    }.items():
        found, why = judge(question, text)
        assert found == verdict and bool(why) == (verdict != "right"), text

    def failing(*given: object) -> list[str]:
        raise TypeError("unhashable")

    monkeypatch.setattr(score.package, "check", failing)
    assert judge(question, "f()") == ("unjudged", "the checker failed: TypeError('unhashable')")


def test_live_categories_are_weighted_by_their_questions() -> None:
    def some(category: str, *verdicts: str) -> list[Verdict]:
        return [Verdict("", category, "", one) for one in verdicts]

    found = summarize(
        some("live_simple", "right", "wrong", "malformed")
        + some("live_multiple", "right")
        + some("simple_python", "right", "wrong", "right", "right")
        + some("multiple", "wrong", "unjudged")
        + some("irrelevance", "right")
    )
    assert found["live"]["accuracy"] == 0.5 and found["live"]["malformed"] == 1
    assert found["non_live"]["accuracy"] == (0.75 + 0) / 2
    assert (found["questions"], found["right"], found["unjudged"]) == (11, 6, 1)
    assert list(found["categories"]) == [
        *("simple_python", "multiple", "live_simple", "live_multiple", "irrelevance")
    ]
    assert summarize(some("irrelevance", "right"))["live"] is None


@pytest.mark.usefixtures("installed")
def test_a_checker_that_is_not_there_is_said_before_anything_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "_CHECKER", "bfcl_eval.no_such_checker")
    package._checker.cache_clear()
    (tmp_path / "valid.jsonl").write_text('{"id": "simple_python_0", "prompt": "x"}')
    done = here("eval", tmp_path, f"--data={tmp_path}", "--task=bfcl")
    assert done.returncode == 4 and "the checker of bfcl-eval" in done.stderr


def shortest(category: str, taken: int) -> list[Question]:
    found = sorted(package.questions(category), key=lambda one: len(completion_of(one)))
    return found[:taken]


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_a_model_that_has_learnt_its_answers_gets_all_right(tmp_path: Path) -> None:
    bundle = text_bundle(tmp_path, "", (48,)).path
    asked = [
        *shortest("simple_python", 1),
        *shortest("live_multiple", 1),
        *shortest("irrelevance", 1),
    ]
    rows = [
        CallRow(one.name, f"{'abc'[at]}:\n", completion_of(one)) for at, one in enumerate(asked)
    ]
    data = tmp_path / "valid.jsonl"
    data.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    assert max(len(row.completion) for row in rows) < 40
    trained = here(
        *("train", bundle, f"--data={data}", f"--output={tmp_path / 'run'}", "--steps=40"),
        *("--batch-size=3", "--learning-rate=1e-2", "--lr-schedule=linear"),
        *("--budget=400MB", "--save-every=0", NO_OTHERS),
    )
    assert trained.returncode == 0, trained.stderr
    given = ("eval", bundle, f"--data={data}", "--task=bfcl", "--max-tokens=44")
    kept = tmp_path / "answers.jsonl"
    done = here(*given, f"--adapter={tmp_path / 'run'}", f"--answers={kept}", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["accuracy"] == found["live"]["accuracy"] == 1 and found["malformed"] == 0
    said = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [(one["id"], one["answer"], one["verdict"]) for one in said] == [
        (row.id, row.completion, "right") for row in rows
    ]
    before = tmp_path / "before.jsonl"
    text = here(*given, f"--answers={before}").stdout
    assert "live_multiple" in text and "0 of 1" in text and "malformed" in text
    said = [json.loads(line) for line in before.read_text().splitlines()]
    assert all(one["verdict"] == "malformed" and one["cut"] for one in said[:2])


def test_answers_replace_no_questions(tmp_path: Path) -> None:
    questions = tmp_path / "valid.jsonl"
    questions.write_text("{}")
    (tmp_path / "link.jsonl").symlink_to(questions)
    for name, said in (
        ("", "is a folder; give a file"),
        ("valid.jsonl", "is the file of the questions"),
        ("link.jsonl", "is the file of the questions"),
        ("none/answers.jsonl", "there is no folder"),
    ):
        with pytest.raises(UsageError, match=said):
            answers_file(tmp_path / name, questions)
    answers = tmp_path / "answers.jsonl"
    assert answers_file(answers, questions) == answers


@pytest.mark.usefixtures("installed")
def test_questions_that_cannot_be_asked_are_refused(tmp_path: Path) -> None:
    bundle = text_bundle(tmp_path, "").path
    data, given = tmp_path / "valid.jsonl", ("eval", bundle, f"--data={tmp_path}", "--task=bfcl")
    given += ("--max-seq-length=40",)
    for rows, code, said in (
        ([{"id": "simple_python_0", "prompt": "x" * 60}], 4, "simple_python_0 has 61 tokens"),
        ([{"id": "simple_python_9999", "prompt": "x"}], 4, "1 of 1 questions, such as 'simple_py"),
        ([{"id": "simple_java_0", "prompt": "x"}], 4, "supported categories are simple_python"),
        ([{"prompt": "x", "completion": "y"}], 4, "line 1: a question has an id and a prompt"),
        ([], 4, "holds no questions"),
    ):
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        done = here(*given)
        assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    done = here(*given, f"--answers={tmp_path / 'no' / 'x.jsonl'}")
    assert done.returncode == 2 and "there is no folder" in done.stderr
    data.write_text("not JSON")
    with pytest.raises(DataError, match="holds no questions"):
        read_rows(data)


@pytest.mark.usefixtures("installed")
def test_rows_are_prepared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of characters as tokens, so few questions are short enough."""
    bundle = text_bundle(tmp_path, "").path
    written = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        out = tmp_path / name
        options = ["--max-seq-length=900", "--train-rows=9", "--train-categories=parallel"]
        options += ["--valid-categories=live_parallel,live_relevance", f"--seed={seed}"]
        assert command.main(["prepare", str(bundle), "-o", str(out), *options]) == 0
        written[name] = [(out / f"{one}.jsonl").read_bytes() for one in ("train", "valid")]
    assert written["a"] == written["b"] != written["c"]
    counts = json.loads((tmp_path / "a" / "rows.json").read_text())
    train, valid = (read_rows(tmp_path / "a" / f"{one}.jsonl") for one in ("train", "valid"))
    found = counts["train"]["parallel"]
    assert len(train) == found["rows"] == 9
    assert found["rows"] + found["too_long"] + found["not_drawn"] == found["questions"] == 200
    assert len(valid) == sum(one.get("rows", 0) for one in counts["valid"].values())
    assert all(row.id.startswith("parallel_") and len(row.prompt) < 900 for row in train)
    assert "parallel: 200 questions" in capsys.readouterr().out
    options = ["--max-seq-length=30", "--train-categories=parallel"]
    assert command.main(["prepare", str(bundle), "-o", str(tmp_path / "d"), *options]) == 4
    assert "fits; give a longer --max-seq-length" in capsys.readouterr().err
