"""The tensors of checkpoints by the names that transformers gives them as it loads them: FILE.

FILE.json holds configurations by type. FILE.out.json gets for each type the names of a checkpoint's
tensors of two axes, as transformers saves it, and with each what it is called in the model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightRenaming,
    apply_renamings,
    revert_weight_conversion,
)

path = Path(sys.argv[1])
names = {}
for model_type, settings in json.loads(path.read_text()).items():
    config = CONFIG_MAPPING[settings["model_type"]].from_dict(settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    saved = revert_weight_conversion(model, model.state_dict())
    renamings = [
        one
        for one in get_model_conversion_mapping(model, add_legacy=False)
        if isinstance(one, WeightRenaming) and not isinstance(one, PrefixChange)
    ]
    names[model_type] = {
        name: apply_renamings(name, renamings) for name, one in saved.items() if one.ndim == 2
    }
path.with_suffix(".out.json").write_text(json.dumps(names))
