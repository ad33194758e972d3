"""The training methods by name: the words that `--method` takes, and the module of each.

A new method is a module and one line here. The modules are named and not imported, so that
checking a configuration loads neither MLX nor the runtime.
"""

from __future__ import annotations

METHODS: dict[str, str] = {
    "mebp": "runtime.methods.mebp",
    "mezo": "runtime.methods.mezo",
}
