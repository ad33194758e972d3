"""`python -m tests.model_types`: tries every model type and writes docs/models.md."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # where `support` and `model_types` are
    from model_types.command import main

    sys.exit(main(sys.argv[1:]))
