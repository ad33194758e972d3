"""Runs scripts in forks of a process that has imported modules: an own interpreter's.

python forking.py MODULE ...   reads lines with a list, of a script and its words; answers each by a
line with a list, of the script's exit code and of what it said. Importing PEFT takes longer than
most scripts do.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import tempfile
import traceback
from typing import NoReturn


def run(words: list[str], said: int) -> NoReturn:
    """Run a script in this process, a fork, which ends; it says all to the file `said`."""
    os.dup2(said, 1)
    os.dup2(said, 2)
    code = 1
    try:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
        code = 0
    except BaseException:  # a fork must end, and says why
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


answers = os.fdopen(os.dup(1), "w")  # before modules say something
os.dup2(2, 1)
for name in sys.argv[1:]:
    importlib.import_module(name)
for line in sys.stdin:
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if not child:
            run(json.loads(line), said.fileno())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        answers.write(json.dumps([code, said.read().decode(errors="replace")]) + "\n")
        answers.flush()
