"""Data in runs: what is said before training and kept after it, and what `ondevice data` shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.runs import (
    NO_OTHERS,
    here,
    json_of,
    metrics_of,
    ondevice,
    refuses,
    succeeds,
    summary_of,
)
from support.text_bundle import text_bundle

from runtime.bundle.store import Bundle

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{{ eos_token if m.role == 'assistant' else ' ' }}{% endfor %}"
    "{{ 'a:' if add_generation_prompt else '' }}"
)
TURNS = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "no"},
    {"role": "user", "content": "y"},
    {"role": "assistant", "content": "the"},
]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return text_bundle(tmp_path_factory.mktemp("data"), TEMPLATE)


def write(file: Path, rows: list[object]) -> Path:
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def train(bundle: Bundle, data: Path, run: Path, *more: object) -> list[object]:
    given = ["--max-seq-length=32", "--steps=2", "--budget=300MB", "--json", NO_OTHERS]
    return ["train", bundle.path, f"--data={data}", f"--output={run}", *given, *more]


def test_a_run_says_and_keeps_what_it_read(bundle: Bundle, tmp_path: Path) -> None:
    rows = [{"messages": TURNS}, {"messages": TURNS[:1]}, {"prompt": "a"}]
    rows += [{"text": f"row {number}"} for number in range(17)]
    data = write(tmp_path / "rows.jsonl", rows)
    run = tmp_path / "run"
    refused = refuses(4, "rows.jsonl, line 3: expected", *train(bundle, data, run), by=ondevice)
    assert "--skip-bad-rows leaves such rows out" in refused.stderr
    options = ("--skip-bad-rows", "--valid-split=25%")
    done = succeeds(*train(bundle, data, run, *options))
    kept = summary_of(run)["data"]
    train_rows, valid_rows = kept["train"], kept["valid"]
    assert train_rows["read"] == valid_rows["read"] == 20
    assert (train_rows["held_out"], valid_rows["held_out"]) == (5, 15)
    assert train_rows["kept"] + valid_rows["kept"] == 18
    assert train_rows["skipped"] + valid_rows["skipped"] == 1
    assert sum(train_rows["dropped"].values()) + sum(valid_rows["dropped"].values()) == 1
    assert re.search(r"^rows\.jsonl: 20 rows read .*, 5 held out", done.stderr, re.M)
    assert re.search(r"^rows\.jsonl, held out: 20 rows read .*, 15 to train on", done.stderr, re.M)
    assert "up to 16 tokens" not in done.stderr  # with --json the summary has it
    assert json.loads(done.stdout)["eval"]["after"]["scored_tokens"] == valid_rows["scored"]
    assert json_of("train", "--resume", run)["data"] == kept  # the token files are read again


def test_a_run_is_as_long_as_its_data(bundle: Bundle, tmp_path: Path) -> None:
    """Without --max-seq-length; a run that is refused then leaves nothing behind either."""
    data = write(tmp_path / "rows.jsonl", [{"text": "abc"}])
    run = tmp_path / "run"
    command = ["train", bundle.path, f"--data={data}", f"--output={run}", "--steps=1", NO_OTHERS]
    refuses(3, "at 16 tokens", *command, "--budget=10MB", by=ondevice)
    assert not run.exists()
    succeeds(*command, "--budget=300MB")
    assert json.loads((run / "plan.json").read_text())["bucket"] == 16
    assert "max_seq_length = 16\n" in (run / "config.toml").read_text()
    flags = [f"--data={data}", "--budget=300MB", "--json"]
    succeeds("eval", bundle.path, *flags)


def test_epochs_become_steps_and_a_run_goes_on_for_more(bundle: Bundle, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", [{"text": f"row {number}"} for number in range(5)])
    run = tmp_path / "run"
    command = ["train", bundle.path, f"--data={data}", f"--output={run}", "--budget=300MB"]
    done = succeeds(*command, NO_OTHERS, "--epochs=0.5", "--batch-size=2")
    said = "0.5 epochs of 5 rows in batches of 2 = 2 steps"
    assert said in done.stderr and "mebp: 2 steps (0.8 epochs), " in done.stdout
    assert "steps = 2\n" in (run / "config.toml").read_text()
    refuses(2, "--steps 1 < 2, the steps", "train", "--resume", run, "--epochs=0.1", by=ondevice)
    refuses(2, "epochs 2 and steps 3 both", "train", "--resume", run, "--epochs=2", "--steps=3")
    data.unlink()  # a run keeps its rows
    more = succeeds("train", "--resume", run, "--epochs=2")
    assert "2 epochs of 5 rows in batches of 2 = 5 steps" in more.stderr
    assert "resuming after step 2 of 5, on the rows that the run has kept" in more.stderr
    assert summary_of(run)["epochs"] == 2.0


def test_what_a_model_forgets_is_measured(bundle: Bundle, tmp_path: Path) -> None:
    """A tiny model that learns one row by heart becomes worse at other texts."""
    data = write(tmp_path / "rows.jsonl", [{"text": "abc"}])
    other = write(tmp_path / "other.jsonl", [{"text": "we bathe"}, {"text": "the rain"}])
    run = tmp_path / "run"
    command = ["train", bundle.path, f"--data={data}", f"--output={run}", "--budget=300MB"]
    hard = ["--steps=4", "--learning-rate=0.1", "--max-seq-length=32"]
    done = succeeds(*command, *hard, "--also-evaluate=general", f"--also-evaluate={other}")
    measured = summary_of(run)["also_eval"]
    assert list(measured) == ["general", str(other)]
    facts = json_of("eval", bundle.path, f"--data={other}", "--max-seq-length=32")
    assert measured[str(other)]["before"]["loss"] == pytest.approx(facts["loss"], rel=1e-6)
    before, after = (measured["general"][when]["loss"] for when in ("before", "after"))
    said = f"general: loss {before:.4f} before training, {after:.4f} after it"
    assert after > 1.05 * before and said in done.stdout
    assert "the model became worse at general" in done.stdout
    succeeds("report", run, "-o", page := tmp_path / "page.html", by=here)
    assert f"other.jsonl</td><td>{facts['loss']:.4f}</td>" in page.read_text()
    more = json_of("train", "--resume", run, "--steps=5")["also_eval"]["general"]
    assert more["before"]["loss"] == before and more["after"]["loss"] != after


def test_rows_of_other_data_are_mixed_in(bundle: Bundle, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", [{"text": "abc"}] * 4)
    other = write(tmp_path / "other.jsonl", [{"text": f"row {number}"} for number in range(8)])
    run = tmp_path / "run"
    done = succeeds(*train(bundle, data, run, f"--mix={other}:50%"))
    assert f"2 rows of the 8 in {other} are added to 4 rows" in done.stderr
    assert "2 steps in batches of 1 = 0.333 epochs of 6 rows" in done.stderr
    assert summary_of(run)["data"]["mix"]["kept"] == 8
    wrong = train(bundle, data, run, "--mix=other.jsonl")
    refuses(2, "mix is 'other.jsonl'; it must be data and a share below", *wrong)


def test_the_rows_of_a_step_need_the_same_length(bundle: Bundle, tmp_path: Path) -> None:
    """A batch is padded to its longest row, so short rows and long ones go apart."""
    rows = [{"text": "x" * (4 if number % 2 else 20)} for number in range(12)]
    data = write(tmp_path / "rows.jsonl", rows)
    run = tmp_path / "run"
    succeeds(*train(bundle, data, run, "--batch-size=3", "--steps=4"))
    tokens = sorted(step["tokens"] for step in metrics_of(run))
    assert tokens == [3 * 5] * 2 + [3 * 21] * 2  # with BOS before and EOS after the text


def test_each_turn_gets_its_own_answer(bundle: Bundle, tmp_path: Path) -> None:
    """Learning the last turn alone leaves the first question without its answer."""
    said = (("user", "sun"), ("assistant", "yes"), ("user", "rain"), ("assistant", "no"))
    turns = [{"role": role, "content": content} for role, content in said]
    data = write(tmp_path / "rows.jsonl", [{"messages": turns}])
    exact = {}
    for loss_on in ("assistant", "last"):
        run = tmp_path / loss_on
        hard = ["--steps=20", "--learning-rate=0.01", f"--loss-on={loss_on}"]
        succeeds(*train(bundle, data, run, *hard))
        for asked in ("assistant", "last"):
            flags = [f"--data={data}", f"--adapter={run}", f"--loss-on={asked}"]
            facts = json_of("eval", bundle.path, "--max-seq-length=32", *flags)
            exact[loss_on, asked] = facts["exact"]
    assert exact == {
        ("assistant", "assistant"): 1.0,
        ("assistant", "last"): 1.0,
        ("last", "assistant"): 0.0,
        ("last", "last"): 1.0,
    }


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--valid-split=0%"], "valid_split is '0%'; it must be a share such as 5%"),
        (["--valid-split=x"], "valid_split is 'x'; it must be a share such as 5%"),
        (["--columns=prompt"], "columns is 'prompt'; it must be pairs such as"),
        (["--columns=dog=cat"], "columns is 'dog=cat'; it must be pairs such as"),
        (["--loss-on=first"], "loss_on is 'first'; it must be assistant, last or all"),
        (["--valid-split=5%", "--eval-data=random:1"], "is validated by random:1: leave it out"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    bundle: Bundle, tmp_path: Path, options: list[str], complaint: str
) -> None:
    data = write(tmp_path / "rows.jsonl", [{"text": "abc"}])
    refuses(2, complaint, *train(bundle, data, tmp_path / "run", *options))
    assert not (tmp_path / "run").exists()


def test_a_folder_with_validation_rows_is_not_split(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("train", "val", "test"):
        write(tmp_path / "data" / f"{name}.jsonl", [{"text": "abc"}])
    complaint = "data has some: leave it out"
    run = tmp_path / "run"
    refuses(2, complaint, *train(bundle, tmp_path / "data", run, "--valid-split=5%"))


def test_a_folder_s_other_files_are_named_once(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train.jsonl", [{"text": each} for each in ("abc", "no", "the")])
    write(tmp_path / "data" / "more.jsonl", [{"text": "abc"}])
    said = "also has 'more.jsonl', of which nothing is read"
    options = ["--valid-split=50%", "--eval-every=1"]
    done = succeeds(*train(bundle, tmp_path / "data", tmp_path / "run", *options), by=here)
    assert done.stderr.count(said) == 1
    shown = ["data", tmp_path / "data", f"--bundle={bundle.path}", "--valid-split=50%"]
    assert succeeds(*shown, by=here).stdout.count(said) == 1


def test_data_are_shown_without_training(bundle: Bundle, tmp_path: Path) -> None:
    long = [{"role": "user", "content": "x" * 50}, TURNS[1]]
    rows = [{"messages": TURNS}, {"messages": TURNS[:3]}, {"messages": long}]
    data = write(tmp_path / "rows.jsonl", rows)
    command = ["data", data, f"--bundle={bundle.path}"]
    done = succeeds(*command, by=here)
    shown = done.stdout.splitlines()
    assert shown[0].startswith("train: rows.jsonl: 3 rows read (messages), 2 kept, 1 dropped (what")
    assert any(line.startswith("  up to 16 tokens") for line in shown)
    assert "warning: rows.jsonl, line 3: dropped: what is scored begins after 32 tokens" in shown
    assert "this bundle cuts the longest" in done.stdout and "--seq-lens 16,64" in done.stdout
    assert shown[-1].replace(" ", "") == "u:xa:⟦no<eos>⟧u:ya:⟦the<eos>⟧"
    facts = json_of(*command, "--row=1", "--loss-on=all", by=here)
    assert facts["data"]["train"]["kept"] == 3 and facts["recommended"] == [16, 64]
    assert [scored for _, scored in facts["row"]] == [False, True]
    assert facts["buckets"] == [16, 32]


def test_the_splits_of_a_folder_are_shown(bundle: Bundle, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train", "valid", "test"):
        write(folder / f"{name}.jsonl", [{"text": name}])
    done = succeeds("data", folder, f"--bundle={bundle.path}", by=here)
    names = [line.partition(":")[0] for line in done.stdout.splitlines() if "read (text)" in line]
    assert names == ["train", "valid", "test"]
    write(folder / "more.jsonl", [{"text": "abc"}])
    done = succeeds("data", folder, f"--bundle={bundle.path}", by=here)
    assert done.stdout.count("also has 'more.jsonl', of which nothing is read") == 1
    words = ("data", folder, f"--bundle={bundle.path}", "--valid-split=5%")
    refuses(2, "data without validation rows", *words)


@pytest.mark.parametrize(
    ("data", "options", "code", "complaint"),
    [
        ("none.jsonl", (), 4, "no data at "),
        ("rows.doc", (), 4, "is not a .txt, .jsonl"),
        ("empty.csv", (), 4, "empty.csv leaves no row for train, of 0 that were read"),
        ("empty.csv", ("--json",), 4, "empty.csv leaves no row for train, of 0 that were read"),
        ("rows.jsonl", ("--row=5",), 2, "there is no row 5: 1 are kept"),
        ("random:3", (), 2, "has no rows to show"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    bundle: Bundle, tmp_path: Path, data: str, options: tuple[str, ...], code: int, complaint: str
) -> None:
    for name in ("rows.jsonl", "rows.doc"):
        write(tmp_path / name, [{"text": "abc"}])
    (tmp_path / "empty.csv").write_text("text\n")
    path = data if data.startswith("random:") else tmp_path / data
    refuses(code, complaint, "data", path, f"--bundle={bundle.path}", *options)
