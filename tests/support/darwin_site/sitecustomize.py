"""Python imports this at its start where `support.darwin` has put its folder on the path."""

import importlib.util
from pathlib import Path

place = Path(__file__).parents[1] / "darwin.py"
spec = importlib.util.spec_from_file_location("ondevice_darwin", place)
assert spec is not None and spec.loader is not None
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.pretend()
