"""`python -m tests.fuzz`: runs cases of some kinds, and adds what it finds to a file of counts."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # where `support` and `fuzz` are
    from fuzz.command import main

    sys.exit(main())
