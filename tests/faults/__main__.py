"""`python -m tests.faults`: disturbs runs of several machines, and says how each ended."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # where `support` and `faults` are
    from faults.command import main

    sys.exit(main())
