"""SST-2: reading, drawing, and what `eval` refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.text_bundle import text_bundle

from harness.tasks import sst2
from harness.tasks.examples import write_jsonl
from runtime.core.errors import DataError


def write_tsv(file: Path, count: int, first: int = 0) -> Path:
    lines = [f"it 's film {n}\u2028, really\t{n % 2}" for n in range(first, first + count)]
    file.write_text("\n".join([*lines, *lines[:3]]) + "\n")  # some are in it twice
    return file


def test_rows_are_disjoint_and_drawn_from_the_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, dev = write_tsv(tmp_path / "t.tsv", 40), write_tsv(tmp_path / "d.tsv", 20, 30)
    drawn = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        options = ["--train-rows=25", "--dev-rows=15", f"--seed={seed}"]
        out = tmp_path / name
        assert sst2.main([str(train), str(dev), "-o", str(out), *options]) == 0
        drawn[name] = [(out / f"{split}.jsonl").read_bytes() for split in ("train", "valid")]
    assert drawn["a"] == drawn["b"] != drawn["c"]
    rows, held_out = (sst2.read_jsonl(tmp_path / "a" / f"{s}.jsonl") for s in ("train", "valid"))
    assert len({row.prompt for row in rows + held_out}) == 25 + 15
    for row in rows:
        number = int(row.prompt.split()[3].removesuffix("\u2028"))
        assert row.prompt.endswith(", really It was")
        assert row.completion == (" great" if number % 2 else " terrible")
    assert "25 rows" in capsys.readouterr().out
    assert sst2.main([str(train), str(dev), "-o", str(tmp_path / "d"), "--dev-rows=21"]) == 4
    assert "there are 20 different sentences, not 21" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["no label", "words\t2", "\t1", "words 1", ""])
def test_other_files_are_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "x.tsv"
    file.write_text(f"sentence\tlabel\nfine\t1\n{line}\nfine\t0\n")
    with pytest.raises(DataError, match="line 3"):
        sst2.read_tsv(file)
    for text in ('{"prompt": "a", "completion": " good"}', '{"text": "a"}', "[1]", "x"):
        file.write_text(text)
        with pytest.raises(DataError):
            sst2.read_jsonl(file)


def test_its_accuracy_is_that_of_the_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The words are told apart by their first token, here the letters g and t."""
    bundle = text_bundle(tmp_path, "").path
    rows = [sst2.Example(f"film {n} It was", (" great", " terrible")[n % 3 > 0]) for n in range(6)]
    write_jsonl(tmp_path / "valid.jsonl", rows)
    assert sst2.main(["eval", str(bundle), "--data", str(tmp_path)]) == 4  # " " begins both
    assert "begin with the same token" in capsys.readouterr().err
    rows = [sst2.Example(f"{row.prompt} ", row.completion.strip()) for row in rows]
    write_jsonl(tmp_path / "valid.jsonl", rows)
    assert sst2.main(["eval", str(bundle), "--data", str(tmp_path)]) == 4
    assert "is no label word" in capsys.readouterr().err
