"""Values of a wrong type in a configuration: the setting is named, and nothing is Python's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import weights_of, write_folder

from export.cut.unread import refuse_unread
from export.sources.misread import MisreadError, blamed
from export.sources.open import open_checkpoint
from runtime.core.errors import BundleError

Config = dict[str, Any]
ROPE = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "attention_factor": 1.0}
MORE: Config = {
    **{"rope_scaling": {**ROPE, "original_max_position_embeddings": 64}, "layer_types": None},
    **{"quantization": None, "quantization_config": None, "id2label": {}, "num_labels": 2},
    **{"auto_map": {}, "per_layer_config": None, "torch_dtype": "float32", "eos_token_id": 2},
}
WRONG = [[1], {"x": 1}, "x", True, None]
PYTHON = re.compile(
    r"object (has|is|cannot)|operand|not supported between|NoneType' |argument|unhashable|literal"
)


def read(config: Config) -> None:
    """A class that adds two numbers and divides by the third, which is 2 by default."""
    if "a" not in config:
        raise BundleError("it needs a")
    try:
        (config["a"] + config["inner"]["b"]) / config["inner"].get("c", 2)
    except (TypeError, KeyError, ArithmeticError) as problem:
        raise MisreadError(f"here: {problem}") from problem


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"a": 1, "inner": {"b": "x"}}, "with inner.b = 'x'; correct"),  # which is needed
        ({"a": 1, "inner": {"b": 1, "c": 0}}, "with inner.c = 0; correct"),
        ({"a": [], "inner": {"b": 1}}, r"with a = \[\]; correct"),
        ({"a": 1, "inner": {}}, "here: 'b'"),  # nothing that is there is wrong
    ],
)
def test_the_setting_at_fault_is_named(config: Config, said: str) -> None:
    with pytest.raises(MisreadError) as misread:
        read(config)
    assert re.search(said, str(blamed(config, read, misread.value, "config.json")))


def changed(config: Config) -> Iterator[tuple[str, Config]]:
    """A configuration with a wrong value under each key in turn."""
    for key, before in config.items():
        if isinstance(before, dict):
            yield from ((f"{key}.{n}", {**config, key: c}) for n, c in changed(before))
        yield from ((f"{key} = {value}", {**config, key: value}) for value in WRONG)


def test_no_value_of_a_wrong_type_gives_a_message_of_python(tmp_path: Path) -> None:
    config, arrays = weights_of("tiny-qwen2")
    folder = write_folder(tmp_path / "m", config, arrays)
    config.pop("rope_scaling", None)
    for name, wrong in changed({**config, **MORE}):
        (folder / "config.json").write_text(json.dumps(wrong))
        try:
            checkpoint = open_checkpoint(str(folder))
            refuse_unread(checkpoint.family, checkpoint.config, checkpoint.given, "x")
        except BundleError as problem:
            assert not PYTHON.search(str(problem)), f"{name}: {problem}"
