"""The table of training methods: the name that users type, and the module that implements it.

A module has two functions, `demand` and `start` (see `runtime.methods.protocol.Implementation`). No
other file compares these names: a new method is a file and a line here.
"""

from __future__ import annotations

METHODS: dict[str, str] = {
    "mebp": "runtime.methods.mebp",
    "mezo": "runtime.methods.mezo",
}
