"""Data in runs: what is said before training and kept after it, and what `ondevice data` shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.runs import here, ondevice
from support.text_bundle import text_bundle

from runtime.bundle.store import Bundle
from runtime.data.rows import TokenRows

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
    given = ["--max-seq-length=32", "--steps=2", "--budget=300MB", "--json"]
    return ["train", bundle.path, f"--data={data}", f"--output={run}", *given, *more]


def test_a_run_says_and_keeps_what_it_read(bundle: Bundle, tmp_path: Path) -> None:
    rows = [{"messages": TURNS}, {"messages": TURNS[:1]}, {"prompt": "a", "completion": 5}]
    rows += [{"text": f"row {number}"} for number in range(17)]
    data = write(tmp_path / "rows.jsonl", rows)
    run = tmp_path / "run"
    refused = ondevice(*train(bundle, data, run))
    assert refused.returncode == 4 and "rows.jsonl, line 3: expected" in refused.stderr
    assert "--skip-bad-rows leaves such rows out" in refused.stderr
    options = ("--skip-bad-rows", "--valid-split=25%")
    done = ondevice(*train(bundle, data, run, *options))
    assert done.returncode == 0, done.stderr
    kept = json.loads((run / "summary.json").read_text())["data"]
    train_rows, valid_rows = kept["train"], kept["valid"]
    assert train_rows["read"] == valid_rows["read"] == 20
    assert (train_rows["held_out"], valid_rows["held_out"]) == (5, 15)
    assert train_rows["kept"] + valid_rows["kept"] == 18
    assert train_rows["skipped"] + valid_rows["skipped"] == 1
    assert sum(train_rows["dropped"].values()) + sum(valid_rows["dropped"].values()) == 1
    assert "rows.jsonl: 20 rows read" in done.stderr and "up to 16 tokens" in done.stderr
    assert json.loads(done.stdout)["eval"]["after"]["scored_tokens"] == valid_rows["scored"]
    resumed = ondevice("train", "--resume", run, "--json")  # reads the token files again
    assert json.loads(resumed.stdout)["data"] == kept


def test_a_run_is_as_long_as_its_data(bundle: Bundle, tmp_path: Path) -> None:
    """Without --max-seq-length; a run that is refused then leaves nothing behind either."""
    data = write(tmp_path / "rows.jsonl", [{"text": "abc"}])
    run = tmp_path / "run"
    command = ["train", bundle.path, f"--data={data}", f"--output={run}", "--steps=1"]
    refused = ondevice(*command, "--budget=10MB")
    assert refused.returncode == 3 and "at 16 tokens" in refused.stderr
    assert not run.exists()
    done = ondevice(*command, "--budget=300MB")
    assert done.returncode == 0, done.stderr
    assert json.loads((run / "plan.json").read_text())["bucket"] == 16
    assert "max_seq_length = 16\n" in (run / "config.toml").read_text()
    flags = [f"--data={data}", "--budget=300MB", "--json"]
    assert ondevice("eval", bundle.path, *flags).returncode == 0


def test_the_rows_of_a_step_need_the_same_length(bundle: Bundle, tmp_path: Path) -> None:
    """A batch is padded to its longest row, so short rows and long ones go apart."""
    rows = [{"text": "x" * (4 if number % 2 else 20)} for number in range(12)]
    data = write(tmp_path / "rows.jsonl", rows)
    run = tmp_path / "run"
    done = ondevice(*train(bundle, data, run, "--batch-size=3", "--steps=4"))
    assert done.returncode == 0, done.stderr
    lines = (run / "metrics.jsonl").read_text().splitlines()
    found = sorted(json.loads(line)["tokens"] for line in lines)
    assert found == [3 * 5] * 2 + [3 * 21] * 2  # with BOS before and EOS after the text


def test_which_answers_have_a_loss(bundle: Bundle, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", [{"messages": TURNS}])
    counts = {}
    for loss_on in ("assistant", "last", "all"):
        run = tmp_path / loss_on
        done = ondevice(*train(bundle, data, run, f"--loss-on={loss_on}"))
        assert done.returncode == 0, done.stderr
        lines = (run / "metrics.jsonl").read_text().splitlines()
        counts[loss_on] = json.loads(lines[0])["scored_tokens"]
    rows = TokenRows(tmp_path / "all" / "train.tokens", bundle.manifest.vocab_size)
    # "no" and its end, "the" (one token) and its end
    assert counts == {"assistant": 5, "last": 2, "all": len(rows.row(0)[0]) - 1}


def test_each_turn_gets_its_own_answer(bundle: Bundle, tmp_path: Path) -> None:
    """Learning the last turn alone leaves the first question without its answer."""
    turns = {
        place: [
            {"role": "user", "content": f"sun {place}"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": f"rain {place}"},
            {"role": "assistant", "content": "no"},
        ]
        for place in "abcd"
    }
    data = write(tmp_path / "rows.jsonl", [{"messages": one} for one in turns.values()])
    exact = {}
    for loss_on in ("assistant", "last"):
        run = tmp_path / loss_on
        hard = ["--steps=40", "--batch-size=4", "--learning-rate=0.01", f"--loss-on={loss_on}"]
        trained = ondevice(*train(bundle, data, run, *hard))
        assert trained.returncode == 0, trained.stderr
        for asked in ("assistant", "last"):
            flags = [f"--data={data}", f"--adapter={run}", f"--loss-on={asked}", "--json"]
            done = ondevice("eval", bundle.path, "--max-seq-length=32", *flags)
            exact[loss_on, asked] = json.loads(done.stdout)["exact"]
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
    done = here(*train(bundle, data, tmp_path / "run", *options))
    assert done.returncode == 2 and complaint in done.stderr
    assert not (tmp_path / "run").exists()


def test_data_are_shown_without_training(bundle: Bundle, tmp_path: Path) -> None:
    long = [{"role": "user", "content": "x" * 50}, TURNS[1]]
    rows = [{"messages": TURNS}, {"messages": TURNS[:3]}, {"messages": long}]
    data = write(tmp_path / "rows.jsonl", rows)
    command = ["data", data, f"--bundle={bundle.path}"]
    done = here(*command)
    assert done.returncode == 0, done.stderr
    shown = done.stdout.splitlines()
    assert shown[0].startswith("train: rows.jsonl: 3 rows read (messages), 2 kept, 1 dropped (what")
    assert any(line.startswith("  up to 16 tokens") for line in shown)
    assert "warning: rows.jsonl, line 3: dropped: what is scored begins after 32 tokens" in shown
    assert "this bundle cuts the longest" in done.stdout and "--seq-lens 16,64" in done.stdout
    assert shown[-1].replace(" ", "") == "u:xa:⟦no<eos>⟧u:ya:⟦the<eos>⟧"
    facts = json.loads(here(*command, "--json", "--row=1", "--loss-on=all").stdout)
    assert facts["data"]["train"]["kept"] == 3 and facts["recommended"] == [16, 64]
    assert [scored for _, scored in facts["row"]] == [False, True]
    assert facts["buckets"] == [16, 32]


def test_the_splits_of_a_folder_are_shown(bundle: Bundle, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train", "valid", "test"):
        write(folder / f"{name}.jsonl", [{"text": name}])
    done = here("data", folder, f"--bundle={bundle.path}")
    assert done.returncode == 0, done.stderr
    names = [line.partition(":")[0] for line in done.stdout.splitlines() if "read (text)" in line]
    assert names == ["train", "valid", "test"]
    split = here("data", folder, f"--bundle={bundle.path}", "--valid-split=5%")
    assert split.returncode == 2 and "data without validation rows" in split.stderr


@pytest.mark.parametrize(
    ("data", "options", "code", "complaint"),
    [
        ("none.jsonl", (), 4, "no data at "),
        ("rows.doc", (), 4, "is not a .txt, .jsonl"),
        ("rows.jsonl", ("--row=5",), 2, "there is no row 5: 1 are kept"),
        ("random:3", (), 2, "has no rows to show"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    bundle: Bundle, tmp_path: Path, data: str, options: tuple[str, ...], code: int, complaint: str
) -> None:
    for name in ("rows.jsonl", "rows.doc"):
        write(tmp_path / name, [{"text": "abc"}])
    path = data if data.startswith("random:") else tmp_path / data
    done = here("data", path, f"--bundle={bundle.path}", *options)
    assert done.returncode == code and complaint in done.stderr
    assert "Traceback" not in done.stderr
