"""How often README's quick start answers right: over seeds, BLAS threads and processor kernels.

    python -m harness.tasks.quick_start -o DIR [--json FILE] [--seeds 0,1] [--threads 1,2]

The commands are those of README, with `--seed` and other folders for their output. The kernels are
OpenBLAS' for older and other processors (OPENBLAS_CORETYPE), and what it took is asked of the
library itself. A run that is in the JSON is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from harness.measure.command import ondevice
from harness.measure.process import ROOT
from harness.measure.provenance import provenance
from runtime.core.files import write_atomic

RIGHT = '{"device": "bedroom fan", "set": "off"}'
CORES = ("Haswell", "SkylakeX", "Zen", "Sandybridge", "Prescott")
THREADS_OF, CORE_OF = "OPENBLAS_NUM_THREADS", "OPENBLAS_CORETYPE"
ASK = """
import ctypes
from runtime.machine.backend import prepare
prepare()
name = ctypes.CDLL(None).openblas_get_corename
name.restype = ctypes.c_char_p
print(name().decode())
"""


def commands(readme: str) -> tuple[str, list[str], list[str]]:
    """What comes before training, as a script, then the words of the training and the question.

    Raises ValueError if the quick start has no such commands.
    """
    text = readme.partition("## Quick start")[2]
    for script in re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        before, train, after = script.partition("\nondevice train ")
        if not train:
            continue
        first, *others = after.strip().splitlines()
        ready = before.partition("\nondevice generate ")[0]
        return ready, shlex.split(f"train {first}"), shlex.split(others[-1])[1:]
    raise ValueError("README's quick start has no script that trains")


def measure(folder: Path, train: list[str], ask: list[str], setting: dict[str, Any]) -> Any:
    """Train and ask once, in processes with these settings; what was answered."""
    seed, threads, core = setting["seed"], setting["threads"], setting["core"]
    os.environ[THREADS_OF], os.environ[CORE_OF] = str(threads), core
    kernel = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, check=True, cwd=ROOT
    )
    run = str(folder / f"home-{seed}-{threads}-{core}")
    summary = json.loads(ondevice(*train, f"--seed={seed}", f"--output={run}", "--json"))
    answer = ondevice(*ask, f"--adapter={run}").strip()
    return {
        **setting,
        "kernel": kernel.stdout.strip(),
        "answer": answer,
        "right": answer == RIGHT,
        "final_train_loss": summary["final_train_loss"],
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--json", type=Path, help="default: quick-start.json in the folder")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--threads", default="1,2")
    given = parser.parse_args(argv)
    folder, file = given.output.resolve(), given.json or given.output / "quick-start.json"
    file = file.resolve()
    ready, train, ask = commands((ROOT / "README.md").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)  # README's paths are of an empty directory
    if not Path("gemma").exists():
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        subprocess.run(["bash", "-e", "-c", ready], check=True, env={**os.environ, "PATH": path})
    runs = json.loads(file.read_text())["runs"] if file.exists() else []
    for seed, threads, core in product(given.seeds.split(","), given.threads.split(","), CORES):
        setting = {"seed": int(seed), "threads": int(threads), "core": core}
        if any(setting.items() <= run.items() for run in runs):
            continue
        runs.append(measure(folder, train, ask, setting))
        right = sum(run["right"] for run in runs)
        result = {
            "right": right, "of": len(runs), "train": shlex.join(train), "runs": runs,
            **provenance(),
        }  # fmt: skip
        write_atomic(file, (json.dumps(result, indent=1) + "\n").encode())
        print(f"{right} of {len(runs)}: {json.dumps(runs[-1])}", flush=True)


if __name__ == "__main__":
    main()
