"""Logs of runs: fields that one descent, noise or estimator writes, steps, and older logs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from support.bundles import Tiny
from support.estimators import config_of, started
from support.models import model_of

from runtime.core.errors import BundleError
from runtime.methods.adapters import Adapters
from runtime.methods.full.weights import FullWeights
from runtime.methods.log import OWNERS, check_fields, read_log, rebuild
from runtime.methods.log_header import COMMON, Header, Part
from runtime.methods.noise import Noise
from runtime.methods.zeroth.descent import Averages, Sgd, Update
from runtime.methods.zeroth.hizoo import HessianDescent
from runtime.methods.zeroth.layer_scales import ScaledDescent
from runtime.methods.zeroth.zo_act import Coefficients

PLAIN = Header(3, "gaussian", 0.1, "a" * 64, "b" * 64)

VALID: list[tuple[type[Part], dict[str, Any]]] = [
    (Averages, {"optimizer": "adam", "window": 2}),
    (Averages, {"optimizer": "momentum", "window": 1000}),
    (HessianDescent, {"hessian_smoothing": 1e-6}),
    (ScaledDescent, {"scaling": "parameter-norm", "scaled": "variance"}),
    (ScaledDescent, {"scaling": "gradient-norm", "scaled": "expectation"}),
    (Noise, {"pool": 16}),
    (Coefficients, {"frozen": "lora_a"}),
    (FullWeights, {"trained": "full"}),
]
INVALID: list[tuple[type[Part], dict[str, Any], str]] = [
    (Averages, {"optimizer": ["adam"], "window": 2}, r"its optimizer is \['adam'\]"),
    (Averages, {"optimizer": "adagrad", "window": 2}, "its optimizer is 'adagrad'"),
    (Averages, {"optimizer": "adam"}, "its window is None"),
    (Averages, {"window": 3}, "its optimizer is None"),
    (Averages, {"optimizer": "adam", "window": 0}, "its window is 0"),
    (Averages, {"optimizer": "adam", "window": 10**9}, "its window is 1000000000"),
    (Averages, {"optimizer": "adam", "window": 2.0}, "its window is 2.0"),
    (Averages, {"optimizer": "adam", "window": True}, "its window is True"),
    (HessianDescent, {"hessian_smoothing": 1.0}, "its smoothing of the Hessian is 1.0"),
    (HessianDescent, {"hessian_smoothing": -1e-6}, "its smoothing"),
    (HessianDescent, {"hessian_smoothing": "1e-6"}, "its smoothing"),
    (ScaledDescent, {"scaling": "norm", "scaled": "variance"}, "scales of 'norm'"),
    (ScaledDescent, {"scaling": "gradient-norm"}, "for None"),
    (ScaledDescent, {"scaled": "variance"}, "scales of None"),
    (Noise, {"pool": -1}, "its pool of directions is -1"),
    (Noise, {"pool": "16"}, "its pool"),
    (Noise, {"pool": 1 << 40}, "its pool"),
    (Coefficients, {"frozen": "lora_b"}, "does not train 'lora_b'"),
    (FullWeights, {"trained": "lora"}, "what it trains is 'lora'"),
    (FullWeights, {"trained": "full", "frozen": "lora_a"}, "all weights, and has frozen"),
    (FullWeights, {"trained": "full", "hessian_smoothing": 0.1}, "has hessian_smoothing"),
    (FullWeights, {"trained": "full", "optimizer": "adam", "window": 2}, "has optimizer, window"),
]


def test_every_field_has_one_owner_whose_checks_are_tested() -> None:
    names = [name for owner in OWNERS for name in owner.log_fields]
    assert len(names) == len(set(names)) and not set(names) & COMMON
    assert {owner for owner, *_ in VALID} == {owner for owner, *_ in INVALID} == set(OWNERS)
    assert {name for _, fields in VALID for name in fields} == set(names)


@pytest.mark.parametrize(("owner", "fields"), VALID)
def test_an_owner_takes_its_fields(owner: type[Part], fields: dict[str, Any]) -> None:
    owner.check_fields(fields)
    check_fields(fields)


@pytest.mark.parametrize(("owner", "fields", "said"), INVALID)
def test_an_owner_refuses_a_field_that_is_wrong(
    owner: type[Part], fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        owner.check_fields(fields)
    with pytest.raises(ValueError, match=said):
        check_fields(fields)


def log_of(path: Path, fields: dict[str, Any], *lines: str) -> Path:
    text = structs.replace(PLAIN, more=fields).line() + "".join(f"{line}\n" for line in lines)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"more": 1}, "has the field 'more', unknown to ondevice .*another version"),
        ({"noise": "uniform"}, r"gaussian.* - at `\$.noise`, which is 'uniform'"),
        ({"seed": -1}, r"`int` >= 0 - at `\$.seed`, which is -1"),
        ({"seed": "1"}, r"got `str` - at `\$.seed`, which is '1'"),
        ({"weight_decay": -0.1}, r"at `\$.weight_decay`, which is -0.1"),
        ({"weight_decay": float("nan")}, r"at `\$.weight_decay`"),
        ({"format": "ondevice-trajectory-2"}, "its format"),
        ({"initial_sha256": 3}, r"got `int` - at `\$.initial_sha256`"),
        ({"lora": {"rank": 0}}, "its LoRA"),
        ({"lora": {"rank": "2"}}, r"at `\$.rank`, which is '2'"),
        (
            {"lora": {"rank": 0, "alpha": 1.0, "targets": "all-linear"}},
            "its LoRA rank is 0, not from 1 to 4096",
        ),
        (
            {"optimizer": "adam", "window": 2, "hessian_smoothing": 0.1},
            "several descents: optimizer, window, hessian_smoothing",
        ),
        (
            {"scaling": "gradient-norm", "scaled": "variance", "hessian_smoothing": 0.1},
            "several descents: hessian_smoothing, scaling, scaled",
        ),
    ],
)
def test_a_log_with_another_header_is_refused(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(BundleError, match=f"can be replayed: line 1, its header: .*{said}"):
        read_log(log_of(tmp_path / "log", fields))


@pytest.mark.parametrize("name", sorted(COMMON - {"lora", "format"}))
def test_a_log_without_a_common_field_is_refused(tmp_path: Path, name: str) -> None:
    facts = json.loads(PLAIN.line())
    del facts[name]
    (tmp_path / "log").write_text(json.dumps(facts) + "\n")
    with pytest.raises(BundleError, match=f"its header: .*`{name}`"):
        read_log(tmp_path / "log")


CURVED = {"hessian_smoothing": 0.1}
SCALED = {"scaling": "parameter-norm", "scaled": "variance"}


def test_a_descent_says_what_follows_the_gradients(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert read_log(log_of(log, {}, "[0.1, [1.0, 2.0]]"))[1] == [Update(0, 0.1, (1.0, 2.0), 0.1)]
    _, updates = read_log(log_of(log, CURVED, "[0.1, [1.0, 2.0], [3.0, -4.0]]", "[0.1, null]"))
    assert updates == [Update(0, 0.1, (1.0, 2.0), 0.1, (3.0, -4.0)), None]
    lines = ("[0.1, null]", "[0.1, [1.0], [3.0]]", "[0.1, [1.0]]")
    _, updates = read_log(log_of(log, SCALED, *lines))
    assert [update and update.extras for update in updates] == [None, (3.0,), ()]


@pytest.mark.parametrize(
    ("fields", "line", "said"),
    [
        ({}, "[0.1, [1.0], [2.0]]", "it holds more than projected gradients"),
        ({}, "[0.1, null, [2.0]]", ""),
        ({}, "3", "a list of a rate"),
        ({}, '["a", [1.0]]', "it holds 'a', which is no finite number"),
        ({}, "[0.1, []]", "an empty list"),
        ({}, "[0.1, [1.0], []]", "an empty list"),
        ({}, "[0.1, [1e999]]", "no finite number"),
        ({}, "[" * 200_000, ""),
        ({}, "[0.1, [" + "9" * 400 + "]]", ""),
        (CURVED, "[0.1, [1.0]]", "no second difference for each gradient"),
        (CURVED, "[0.1, [1.0], [2.0, 3.0]]", "no second difference for each gradient"),
        (CURVED, "[0.1, [1.0], [1e999]]", "no finite number"),
        (CURVED, "[0.1, [1.0], null]", ""),
        (CURVED, "[0.1, null, null]", ""),
        (SCALED, "[0.1, [1.0], []]", "an empty list"),
        (SCALED, "[0.1, [1.0], [0.0]]", "the scale 0.0, which is no number above 0"),
        (SCALED, '[0.1, [1.0], ["a"]]', "no finite number"),
        (SCALED, "[0.1, [1.0], [2.0], [2.0]]", "one more list at most"),
    ],
)
def test_a_step_with_other_numbers_is_refused(
    tmp_path: Path, fields: dict[str, Any], line: str, said: str
) -> None:
    where = f"line 3, of step 2, is '{re.escape(line[:20])}"
    with pytest.raises(BundleError, match=f"can be replayed: {where}.*{said}"):
        read_log(log_of(tmp_path / "log", fields, "[0.1, null]", line))


def test_scales_are_those_of_the_bundles_layers(tiny: Tiny, tmp_path: Path) -> None:
    manifest = tiny("qwen2").manifest
    initial = Adapters.initial(manifest, 3)
    lines = {"[0.1, [1.0], [3.0]]": "1 scales for", "[0.1, [1.0]]": "before any scales"}
    for line, said in lines.items():
        header, updates = read_log(log_of(tmp_path / "log", SCALED, line))
        belongs = structs.replace(
            header, weights_sha256=manifest.weights_sha256, initial_sha256=initial.digest()
        )
        with pytest.raises(BundleError, match=f"step 0 of the trajectory: .*{said}"):
            rebuild(belongs, updates, initial)


# Logs as version 1 of the format has had them from the beginning: what follows the common fields,
# the steps, and of the adapters after these the first values of the first A and B, and the sum of
# all values' magnitudes. The seed is 3, the weight decay 0.1, the bundle that of tiny-qwen2.
HEADER = (
    '{"seed": 3, "noise": "gaussian", "weight_decay": 0.1, "weights_sha256": "WEIGHTS", '
    '"initial_sha256": "INITIAL", "lora": {"rank": 8, "alpha": 16.0, "targets": "all-linear", '
    '"layers": -1, "dropout": 0.0, "rslora": false}, "format": "ondevice-trajectory-1"'
)
LOGS: dict[str, tuple[dict[str, Any], str, list[str], list[float], float]] = {
    "adam": (
        {"zo_window": 2},
        ', "optimizer": "adam", "window": 2}',
        [
            "[0.001, [-5.964088439941229, 3.0700683593751776]]",
            "[0.001, [-5.464235941568862, 1.3933181762695312]]",
            "[0.001, [5.368232727050781, 1.8415451049804688]]",
        ],
        [-0.047565802931785583, 0.011175114661455154, 0.002849040785804391, 0.0027156355790793896],
        677.4822218182671,
    ),
    "hizoo": (
        {},
        ', "hessian_smoothing": 0.001}',
        [
            "[0.01, [-1.1703968048095703, 1.499176025390625], "
            "[-63.65776062011719, -96.32110595703125]]",
            "[0.01, [-1.7841339111326349, 2.282714843750089], "
            "[-119.40002441424014, -14.877319335582229]]",
            "[0.01, [0.7691383361816406, 4.736661911010742], "
            "[117.77877807617188, 77.48603820800781]]",
        ],
        [-0.08145354688167572, -0.006917310878634453, 0.01764848083257675, 0.03473495692014694],
        1017.8209323427145,
    ),
    "gradient-norm": (
        {},
        ', "scaling": "gradient-norm", "scaled": "expectation"}',
        [
            "[0.01, [1.3096332550048828, 0.029802322387695312], "
            "[4.128456115722656, 0.7824897766113281]]",
            "[0.01, [2.898534138997544, -4.047075907389175]]",
            "[0.01, [-0.030279159545898438, 0.0972747802734375]]",
        ],
        [-0.012927427887916565, -0.0367470420897007, 0.00504051661118865, -0.01169716939330101],
        1005.0399814324373,
    ),
    "zo-act": (
        {},
        ', "frozen": "lora_a"}',
        [
            "[0.01, [-1.6025543212889737, 0.08087158203151645]]",
            "[0.01, [2.506065368652166, -13.71002197265625]]",
            "[0.01, [0.7314682006835938, -3.4360885620117188]]",
        ],
        [-0.04596535488963127, 0.008992977440357208, 0.03830413147807121, -0.04350771754980087],
        1478.5801484984986,
    ),
    "kzoo": (
        {"queries": 2},
        ', "pool": 16}',
        [
            "[0.01, [8.801460266113281, 8.424441019693862]]",
            "[0.01, [7.983922958374023, 7.983922958374023]]",
            "[0.01, [-6.627321243286133, -1.7273426055908203]]",
        ],
        [-0.03614606708288193, 0.0597306564450264, 0.032145678997039795, -0.14220477640628815],
        2240.35113281745,
    ),
}


@pytest.mark.parametrize("case", LOGS)
def test_logs_of_earlier_versions_are_replayed_and_still_written(
    tiny: Tiny, tmp_path: Path, case: str
) -> None:
    options, more, steps, values, magnitudes = LOGS[case]
    bundle = tiny("qwen2")
    initial = Adapters.initial(bundle.manifest, 3)
    header = HEADER.replace("WEIGHTS", bundle.manifest.weights_sha256) + more
    header = header.replace("INITIAL", initial.digest())
    (tmp_path / "log").write_text("\n".join([header, *steps, ""]))
    rebuilt = rebuild(*read_log(tmp_path / "log"), initial)
    arrays = [np.array(tensor, np.float64) for tensor in rebuilt.tensors.values()]
    first = [*arrays[0].ravel()[:2], *arrays[1].ravel()[:2]]
    assert first == pytest.approx(values, rel=1e-5)
    assert sum(np.abs(array).sum() for array in arrays) == pytest.approx(magnitudes, rel=1e-6)

    config = config_of(case, 3, weight_decay=0.1, **options)
    method = started(config, model_of(bundle, 16), initial, tmp_path, 1, 4, fresh=False)
    assert method.log_header() == header + "\n"
    records = [json.dumps(update and update.record) for update in read_log(tmp_path / "log")[1]]
    assert records == steps


def test_a_part_that_names_fields_and_does_not_write_them_fails_when_it_is_defined() -> None:
    with pytest.raises(TypeError, match="Lacking has log_fields and no check_fields"):

        class Lacking(Sgd):
            log_fields = ("lacking",)

            def header(self) -> dict[str, Any]:
                return {"lacking": 1}
