"""A damaged run is refused, with the file's name and the way out; it never goes on otherwise."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.runs import adapter, check_same, here, refuses, struck, succeeds, train_arguments
from support.shared import Shared
from support.text_bundle import text_bundle

from runtime.storage.saves import Saves

METHODS = ("mebp", "mezo")
STEPS = 6
OPTIONS = {
    "save_every": 2, "keep": 2, "eval_data": "random:9", "eval_rows": 1, "eval_every": 2,
}  # fmt: skip
LATEST, EARLIER = "saves/step-00000004", "saves/step-00000002"


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def arguments(bundle: Path, run: Path, method: str) -> list[str]:
    return train_arguments(bundle, run, STEPS, method=method, **OPTIONS)


@pytest.fixture
def whole(bundle: Path, shared: Shared, method: str) -> Path:
    """A run that nothing interrupted."""

    def train(path: Path) -> None:
        succeeds(*arguments(bundle, path, method))

    return shared(f"a whole run of {method} with saves", train)


@pytest.fixture
def killed(bundle: Path, shared: Shared, method: str, tmp_path: Path) -> Path:
    """A copy of a run that was killed after step 5, with the saves of steps 2 and 4."""

    def train(path: Path) -> None:
        done = struck(signal.SIGKILL, "step 5", *arguments(bundle, path, method))
        assert done.returncode == -signal.SIGKILL, done.stderr

    made = shared(f"a killed run of {method} with saves", train)
    return Path(shutil.copytree(made, tmp_path / "run"))


def digit(data: bytes, rng: np.random.Generator) -> bytes:
    """The data with another digit in one place."""
    places = [place.start() for place in re.finditer(rb"[1-9]", data)]
    at = int(rng.choice(places))
    return data[:at] + str(int(data[at : at + 1]) % 9 + 1).encode() + data[at + 1 :]


def bit(data: bytes, rng: np.random.Generator) -> bytes:
    """The data with another bit in one place."""
    changed = bytearray(data)
    changed[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def contents(run: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()
    }


def refused(run: Path, *said: str) -> None:
    """The run cannot be resumed, which is said, and nothing of it is changed."""
    before = contents(run)
    done = refuses(4, said[0], "train", "--resume", run)
    assert all(text in done.stderr for text in said), (said, done.stderr)
    assert contents(run) == before


def test_a_changed_digit_or_bit_is_refused(
    killed: Path, method: str, rng: np.random.Generator
) -> None:
    """In whatever file resuming reads, and so is the lack of one."""
    files = {
        f"{LATEST}/state.json": digit,
        f"{LATEST}/adapters.safetensors": bit,
        f"{LATEST}/adapter_config.json": digit,
        f"{LATEST}/method.bin": bit,
        "config.toml": digit,
        "plan.json": digit,
        "evaluations.json": digit,
    }
    for name, change in files.items():
        path = killed / name
        data = path.read_bytes()
        path.write_bytes(change(data, rng))
        earlier = f"to go on from {Path(EARLIER).name}, remove {killed / LATEST}"
        refused(killed, str(path), earlier if name.startswith(LATEST) else "")
        if name != "config.toml":  # without it there is no run
            path.unlink()
            refused(killed, str(path))
        path.write_bytes(data)
    sums = (killed / "checksums.json").read_bytes()
    other = {**json.loads(sums), "plan.json": [64 * "0"]}
    for altered in (json.dumps(other).encode(), b"{}", b'{"plan.json": 3}', b"[" * 100_000):
        (killed / "checksums.json").write_bytes(altered)
        refused(killed, "checksums.json")
    (killed / "checksums.json").unlink()
    refused(killed, "checksums.json")


def test_logs_are_compared_before_anything_is_trained(
    killed: Path, method: str, rng: np.random.Generator
) -> None:
    """The part of them that belongs to the save; what comes after it is dropped."""
    logs = ("metrics.jsonl",) if method == "mebp" else ("metrics.jsonl", "trajectory.jsonl")
    for name in logs:
        path = killed / name
        whole = path.read_bytes()
        lines = whole.splitlines(keepends=True)
        saved = lines[:-1]  # that of step 5 is not
        for altered in (
            digit(b"".join(lines[:2]), rng) + b"".join(lines[2:]),
            b"".join([*saved[:-2], saved[-1]]),  # one line less
            b"".join([*saved[1:], lines[-1]]),
            whole[: len(b"".join(saved)) - 3],
            b"",
        ):
            path.write_bytes(altered)
            refused(killed, str(path), f"to go on from {Path(EARLIER).name}")
        path.unlink()
        refused(killed, str(path))
        path.write_bytes(whole)


@pytest.mark.parametrize("method", ["mezo"], indirect=True)
def test_a_save_says_its_own_step(killed: Path, method: str) -> None:
    """A state.json whose checksum was made right too must be that of its folder."""
    place = killed / LATEST
    state = Saves(killed).read(place)
    for step in (2, 5):
        (place / "state.json").write_bytes(msgspec.structs.replace(state, step=step).encode())
        refused(killed, f"is that of step {step}, and its folder is step-00000004")
    whole = state.encode()
    for text in (b'"step":4.0', b'"step":"4"', b'"step":true', b'"step":' + b"9" * 5000):
        (place / "state.json").write_bytes(whole.replace(b'"step":4', text))
        refused(killed, str(place / "state.json"))
    (place / "state.json").write_bytes(whole)
    place.rename(killed / "saves" / "step-00000005")
    refused(killed, "its folder is step-00000005")
    (killed / "saves" / "step-00000005").rename(killed / "saves" / "step-five")
    refused(killed, "step-five is no save")


@pytest.mark.parametrize("method", ["mebp"], indirect=True)
def test_the_way_out_leads_to_the_same_bytes(killed: Path, whole: Path, method: str) -> None:
    """The latest save is damaged, and the run goes on from the one before it."""
    state = killed / LATEST / "state.json"
    state.write_bytes(state.read_bytes()[:-9])
    refused(killed, f"to go on from {Path(EARLIER).name}, remove {killed / LATEST}")
    (killed / ".plan.json.partial").write_text("half")
    half = killed / "saves" / ".step-00000006.partial"
    half.mkdir()
    (half / "method.bin").write_text("half")
    shutil.rmtree(killed / LATEST)
    succeeds("train", "--resume", killed)
    check_same(killed, whole)
    assert not list(killed.rglob(".*.partial"))


@pytest.mark.parametrize("method", ["mezo"], indirect=True)
def test_a_finished_run_goes_on_from_an_earlier_save(whole: Path, tmp_path: Path) -> None:
    """Its evaluation after training is not taken for one of that save's step."""
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    shutil.rmtree(run / "saves" / "step-00000006")
    succeeds("train", "--resume", run)
    check_same(run, whole)


@pytest.mark.parametrize("method", ["mezo"], indirect=True)
def test_a_finished_run_keeps_no_saves_too_many(whole: Path, tmp_path: Path) -> None:
    """As a kill between its last evaluation and the removal of old saves may leave."""
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    kept = sorted(path.name for path in (run / "saves").iterdir())
    shutil.copytree(run / "saves" / kept[0], run / EARLIER)
    succeeds("train", "--resume", run, "--budget", "2GB", by=here)
    assert sorted(path.name for path in (run / "saves").iterdir()) == kept


@pytest.mark.parametrize("method", ["mezo"], indirect=True)
def test_without_an_earlier_save_the_settings_may_train_anew(
    killed: Path, whole: Path, tmp_path: Path
) -> None:
    shutil.rmtree(killed / EARLIER)
    (killed / LATEST / "state.json").unlink()
    command = f"ondevice train --config {killed / 'config.toml'} --output OTHER"
    refused(killed, "no earlier save is left", command)
    words = command.replace("OTHER", str(tmp_path / "anew")).split()[1:]
    succeeds(*words)
    assert adapter(tmp_path / "anew") == adapter(whole)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a tokenizer, to generate with."""
    return text_bundle(tmp_path_factory.mktemp("texts"), "{{ messages }}").path


@pytest.mark.parametrize("method", ["mezo"], indirect=True)
def test_whoever_reads_a_runs_adapter_compares_it(
    bundle: Path, texts: Path, whole: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    random = ("--data", "random:1", "--max-seq-length", 24)
    readers: list[tuple[object, ...]] = [
        ("eval", bundle, *random, "--adapter", run),
        ("eval", bundle, *random, "--adapter", run / "adapters.safetensors"),
        ("generate", texts, "--prompt", "the cat", "--adapter", run),
        ("train", bundle, *random, "--output", tmp_path / "more", "--adapter", run),
        ("replay", run, "--output", tmp_path / "again", "--initial", run),
    ]
    weights, config = run / "adapters.safetensors", run / "adapter_config.json"
    for path, altered in (
        (weights, bit(weights.read_bytes(), rng)),
        (weights, adapter(run / "saves" / "step-00000004")),
        (config, digit(config.read_bytes(), rng)),
        (config, None),
    ):
        data = path.read_bytes()
        if altered is None:
            path.unlink()
        else:
            path.write_bytes(altered)
        for words in readers:
            assert f"--resume {run}" in refuses(4, f"{path} is ", *words).stderr
        path.write_bytes(data)
    succeeds(*readers[0], "--budget=1GB", by=here)
    saved = run / "saves" / "step-00000004" / "adapters.safetensors"
    saved.write_bytes(bit(saved.read_bytes(), rng))
    refuses(4, f"{saved} is altered", "eval", bundle, *random, "--adapter", saved.parent)
    assert not (tmp_path / "more").exists() and not (tmp_path / "again").exists()


@pytest.mark.parametrize("method", ["mezo"], indirect=True)
def test_whoever_reads_a_run_that_is_not_finished_says_where_it_stands(
    bundle: Path, texts: Path, killed: Path, whole: Path, tmp_path: Path
) -> None:
    random = ("--data", "random:1", "--max-seq-length", 24)
    out, little = tmp_path / "out", "--budget=1MB"  # which is refused after the adapter is read
    readers: list[tuple[int, tuple[object, ...]]] = [
        (0, ("adapter", "RUN", "--to", "peft", "--output", out)),
        (0, ("fuse", bundle, "--adapter", "RUN", "--no-quality", "--output", out)),
        (3, ("eval", bundle, *random, "--adapter", "RUN", little)),
        (4, ("generate", texts, "--prompt", "the cat", "--adapter", "RUN")),  # another model
        (3, ("plan", bundle, *random[2:], "--adapter", "RUN", little)),
        (3, ("train", bundle, *random, "--output", out, "--adapter", "RUN", little)),
        (0, ("replay", "RUN", "--output", out)),
    ]
    said = f"{killed} is not finished: its last save is of step 4 of {STEPS}\n"
    for code, words in readers:
        for run, times in ((killed, 1), (whole, 0)):
            done = here(*(run if word == "RUN" else word for word in words))
            shutil.rmtree(out, ignore_errors=True)
            assert done.returncode == code, (words, done.stderr)
            assert done.stderr.count(said) == times, (words, done.stderr)


@pytest.mark.parametrize("name", ["metrics.jsonl", "saves"])
@pytest.mark.parametrize("method", ["mezo"], indirect=True)
def test_a_run_that_leads_elsewhere_is_refused(
    killed: Path, tmp_path: Path, method: str, name: str
) -> None:
    """Nothing outside of it is written or removed."""
    outside = tmp_path / "outside"
    (killed / name).rename(outside)
    (killed / name).symlink_to(outside)
    before = {p: p.read_bytes() for p in [outside, *outside.rglob("*")] if p.is_file()}
    done = here("train", "--resume", killed)
    assert done.returncode in (4, 5), done.stderr
    assert {p: p.read_bytes() for p in [outside, *outside.rglob("*")] if p.is_file()} == before
