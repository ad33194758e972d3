"""Datasets of the hub: what names one, what becomes of its splits, and what is said without it.

A module stands for the library `datasets`; the last test asks the real one for a dataset on disk.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.bundles import runnable
from support.runs import here, json_of, ondevice, succeeds, summary_of, train_arguments
from support.shared import Shared
from support.text_bundle import text_bundle

from runtime.bundle.store import Bundle
from runtime.core.errors import DataError
from runtime.data import hub
from runtime.data.hub import HubDataset, hub_dataset, located
from runtime.data.run_rows import absolute
from runtime.run.folder import RunFolder

LIBRARY = """
import datetime, os

def rows(*texts):
    return [{"text": text, "day": datetime.date(2026, 1, 2)} for text in texts]

KNOWN = {
    ("some/texts", None): {
        "train": rows("the cat", "a hat", "the rat"), "validation": rows("the bat"),
        "test": rows("the hat"), "extra": rows("no"),
    },
    ("some/texts", "short"): {"train": rows("a b")},
    ("some/odd", None): {"left": rows("a b"), "right": rows("a b")},
}

def load_dataset(name, config=None, split=None):
    with open(os.environ["ASKED"], "a") as file:
        file.write(f"{name} {config} {split}\\\\n")
    if (name, config) not in KNOWN:
        raise ConnectionError(f"Couldn't reach '{name}' on the Hub")
    return KNOWN[name, config] if split is None else KNOWN[name, config][split]
""".replace("\\\\n", "\\n")
NAME = "some/texts"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library is there; the file gets a line for each dataset that is loaded."""
    folder = tmp_path / "library"
    folder.mkdir()
    (folder / "datasets.py").write_text(LIBRARY)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    (tmp_path / "asked").touch()
    return tmp_path / "asked"


@pytest.fixture(scope="module")
def bundle(shared: Shared) -> Bundle:
    return runnable(shared("a bundle for text", lambda path: text_bundle(path, "x")) / "bundle")


@pytest.mark.parametrize(
    ("data", "dataset"),
    [
        ("some/texts", HubDataset("some/texts")),
        ("some/texts:short", HubDataset("some/texts", "short")),
        ("some/texts:short:train", HubDataset("some/texts", "short", "train")),
        ("some/texts::test", HubDataset("some/texts", None, "test")),
        ("some/texts::train[:10%]", HubDataset("some/texts", None, "train[:10%]")),
        ("some-one/a.b_c", HubDataset("some-one/a.b_c")),
        ("texts", None),
        ("random:3", None),
        ("some/texts.jsonl", None),
        ("some/more/texts", None),
        ("/some/texts", None),
        ("./some", None),
        ("../some", None),
        ("~/some", None),
    ],
)
def test_what_names_a_dataset(data: str, dataset: HubDataset | None) -> None:
    assert hub_dataset(data) == dataset


def test_a_path_that_exists_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_dataset(NAME) is not None and absolute(NAME) == NAME
    Path(NAME).mkdir(parents=True)
    assert hub_dataset(NAME) is None and absolute(NAME) == str(tmp_path / NAME)
    assert located(NAME, tmp_path) == NAME


def texts(file: Path) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text().splitlines()]


def test_splits_become_files(asked: Path, tmp_path: Path) -> None:
    folder = Path(located(NAME, tmp_path))
    assert sorted(file.name for file in folder.iterdir()) == [
        "test.jsonl", "train.jsonl", "valid.jsonl",
    ]  # fmt: skip
    assert texts(folder / "train.jsonl") == ["the cat", "a hat", "the rat"]
    assert texts(folder / "valid.jsonl") == ["the bat"]
    assert located(NAME, tmp_path) == str(folder)
    assert asked.read_text() == f"{NAME} None None\n"  # once
    file = Path(located(f"{NAME}::extra", tmp_path))
    assert file.is_file() and texts(file) == ["no"]
    hub.forget(tmp_path)
    assert not folder.exists() and not file.exists()


def test_a_run_trains_from_a_dataset_and_goes_on_without_it(
    asked: Path, bundle: Bundle, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    given = train_arguments(bundle.path, run, 3, data=NAME)
    given.remove("--max-seq-length=24")
    succeeds(*given)
    data = summary_of(run)["data"]
    assert data["train"]["kept"] == 3 and data["valid"]["kept"] == 1
    assert not list(run.glob("dataset-*")) and asked.read_text() == f"{NAME} None None\n"
    assert f'data = "{NAME}"' in (run / "config.toml").read_text()
    succeeds("train", "--resume", run, "--steps", 4)
    assert asked.read_text() == f"{NAME} None None\n"  # its tokens are there
    after = summary_of(run)
    assert after["data"] == data and "3" in after["eval"]


def test_other_commands_read_datasets(asked: Path, bundle: Bundle) -> None:
    shown = json_of("data", NAME, "--bundle", bundle.path, by=here)["data"]
    kept = {name: split["kept"] for name, split in shown.items()}
    assert kept == {"train": 3, "valid": 1, "test": 1}
    assert json_of("eval", bundle.path, "--data", f"{NAME}::train")["rows"] == 3


def test_what_cannot_be_loaded_is_said(
    asked: Path, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, said in (
        ("some/nothing", "cannot be loaded: Couldn't reach 'some/nothing' on the Hub; check its"),
        ("some/odd", "has the splits left, right and none of train, validation and test; name one"),
        (f"{NAME}:short", ""),
    ):
        run = tmp_path / "run"
        done = ondevice(*train_arguments(bundle.path, run, 1, data=name))
        assert done.returncode == (4 if said else 0), done.stderr
        assert said in done.stderr and "Traceback" not in done.stderr
        assert run.exists() == (not said)
    monkeypatch.setitem(sys.modules, "datasets", None)  # an import of it fails
    with pytest.raises(DataError, match=r"no file or folder some/texts.*'ondevice-tune\[datasets"):
        hub.load(HubDataset(NAME))


def test_a_leftover_of_a_killed_run_is_removed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    (folder.path / "dataset-some-texts").mkdir(parents=True)
    with folder.created():
        assert not (folder.path / "dataset-some-texts").exists()


def test_the_real_library_writes_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset on disk stands for one of the hub, of which the library knows the same."""
    datasets = pytest.importorskip("datasets")
    rows = {"prompt": ["a", "b"], "completion": ["c", "d"]}
    made = datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows)})
    made.save_to_disk(str(tmp_path / "saved"))
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *given, **more: datasets.load_from_disk(tmp_path / "saved")
    )
    hub.write(hub.load(HubDataset("some/thing")), tmp_path / "out")
    lines = (tmp_path / "out" / "train.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"prompt": "a", "completion": "c"}, {"prompt": "b", "completion": "d"},
    ]  # fmt: skip
