"""Conversations of two turns: does each turn get its own answer, or does the last one win?

`python -m harness.tasks.two_turns BUNDLE -o FOLDER` trains the same conversations twice, with a
loss on every answer and with one on the last answer alone. It then asks about cities that are in no
conversation, and reports how many of them get the right answer in each turn.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.measure.command import ondevice
from harness.measure.provenance import machine, provenance
from runtime.core.errors import OnDeviceError
from runtime.core.files import write_atomic
from runtime.machine.backend import prepare

if TYPE_CHECKING:
    from runtime.data.text_encoder import TextEncoder
    from runtime.methods.adapters import Adapters
    from runtime.run.generate import Generator

LOSS_ON = ("assistant", "last")
SETTINGS = {
    "budget": "400MB",
    "steps": 30,
    "batch-size": 4,
    "learning-rate": 1e-3,
    "lr-schedule": "linear",
    "warmup-steps": 5,
    "save-every": 0,
}
MAX_TOKENS = 12  # of an answer; right ones have fewer
QUESTIONS = ("How is the weather in {}?", "And tomorrow?")
ANSWERS = ("Sunny in {}", "Rain in {}")
UNSEEN = 30  # cities that are asked about, and not trained
_CITIES = (
    "Paris Berlin Madrid Rome Tokyo London Oslo Vienna Lisbon Chicago Boston Sydney Cairo Toronto "
    "Dublin Prague Athens Warsaw Budapest Helsinki Stockholm Copenhagen Brussels Amsterdam Zurich "
    "Geneva Milan Naples Venice Florence Turin Munich Hamburg Cologne Frankfurt Dresden Leipzig "
    "Lyon Marseille Nice Bordeaux Toulouse Seville Valencia Barcelona Porto Krakow Riga Vilnius "
    "Tallinn Moscow Kyiv Istanbul Ankara Beirut Amman Baghdad Tehran Delhi Mumbai Chennai Kolkata "
    "Bangkok Hanoi Manila Jakarta Singapore Seoul Busan Osaka Kyoto Nagoya Beijing Shanghai Taipei "
    "Melbourne Perth Brisbane Auckland Lima Bogota Santiago Havana Miami Dallas Houston Denver "
    "Seattle Portland Phoenix Atlanta Detroit Montreal Vancouver Nairobi Lagos Accra Dakar Tunis "
    "Algiers"
)
CITIES = tuple(_CITIES.split())
TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {{- message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}
"""
"""Turns as Gemma's chat template writes them: GGUF files of a base model have none."""


def conversation(city: str) -> list[dict[str, str]]:
    """Both questions about a city, with their answers."""
    return [
        {"role": role, "content": text.format(city)}
        for pair in zip(QUESTIONS, ANSWERS, strict=True)
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def split(seed: int) -> tuple[list[str], list[str]]:
    """The cities to train on, and the unseen ones; which these are depends on the seed alone."""
    cities = random.Random(f"two turns/{seed}").sample(CITIES, len(CITIES))
    return cities[UNSEEN:], cities[:UNSEEN]


def with_template(bundle: Path, folder: Path) -> Path:
    """A copy of the bundle with the chat template; the bundle itself where it has one."""
    from runtime.data.chat import has_template

    if has_template(bundle / "tokenizer"):
        return bundle
    copy = folder / "bundle"
    if not copy.exists():
        shutil.copytree(bundle, copy)
        (copy / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    return copy


def said(generator: Generator[TextEncoder], adapters: Adapters, city: str) -> list[str]:
    """The model's answer to each question, after the right answers to those before it."""
    from runtime.data.prompts import chat_prompt

    messages = conversation(city)
    prompts = [messages[: 2 * turn + 1] for turn in range(len(QUESTIONS))]
    return [
        generator.text(chat_prompt(generator.encoder, some), adapters, MAX_TOKENS).strip()
        for some in prompts
    ]


def shares(answers: dict[str, list[str]]) -> dict[str, Any]:
    """The share of cities whose turns are answered right: each turn, and both.

    `first_gets_second` is the share of first turns whose answer begins as the second turn's.
    """
    right = {
        city: [text == form.format(city) for text, form in zip(texts, ANSWERS, strict=True)]
        for city, texts in answers.items()
    }
    count = len(answers)
    return {
        "first": sum(one[0] for one in right.values()) / count,
        "second": sum(one[1] for one in right.values()) / count,
        "both": sum(all(one) for one in right.values()) / count,
        "first_gets_second": sum(
            texts[0].startswith(ANSWERS[1].format(city)) for city, texts in answers.items()
        )
        / count,
    }


def run(bundle: Path, folder: Path, seed: int) -> dict[str, Any]:
    """Train both ways and ask; the report, which `main` writes."""
    from runtime.data.text_encoder import load_encoder
    from runtime.run.generate import Generator
    from runtime.run.open import open_checked

    folder.mkdir(parents=True, exist_ok=True)
    bundle = with_template(bundle, folder)
    trained, unseen = split(seed)
    data = folder / "train.jsonl"
    rows = [json.dumps({"messages": conversation(city)}) for city in trained]
    write_atomic(data, "".join(f"{row}\n" for row in rows).encode())
    generator = Generator(open_checked(str(bundle)), load_encoder(bundle))
    report: dict[str, Any] = {
        **provenance(), "machine": machine(), "seed": seed, "settings": SETTINGS,
        "trained_cities": len(trained), "unseen_cities": len(unseen),
    }  # fmt: skip
    base = generator.adapters(None)
    asked = {"untrained": {city: said(generator, base, city) for city in unseen}}
    del base
    for loss_on in LOSS_ON:
        output = folder / loss_on
        shutil.rmtree(output, ignore_errors=True)
        options = [f"--{name}={value}" for name, value in SETTINGS.items()]
        summary = json.loads(
            ondevice(
                "train", str(bundle), f"--data={data}", f"--output={output}", f"--seed={seed}",
                f"--loss-on={loss_on}", "--json", *options,
            )
        )  # fmt: skip
        report.setdefault("training", {})[loss_on] = {
            name: summary[name] for name in ("step_s_median", "peak_footprint_bytes", "steps")
        }
        adapters = generator.adapters(output)
        asked[loss_on] = {city: said(generator, adapters, city) for city in unseen}
    return {**report, "shares": {name: shares(one) for name, one in asked.items()}, "said": asked}


def to_text(report: dict[str, Any]) -> str:
    """The shares, one line for each way of training."""
    lines = [f"answered right, of {report['unseen_cities']} unseen cities:"]
    for name, one in report["shares"].items():
        lines.append(
            f"{name:>10}: first turn {one['first']:.0%} ({one['first_gets_second']:.0%} begin "
            f"with the second's answer), second turn {one['second']:.0%}, both {one['both']:.0%}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path, help="bundle of a model whose turns are Gemma's")
    parser.add_argument("-o", "--output", type=Path, default=Path("two-turns"))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    prepare()
    try:
        report = run(given.bundle, given.output, given.seed)
    except OnDeviceError as problem:
        print(f"ondevice: {problem}", file=sys.stderr)
        sys.exit(problem.exit_code)
    write_atomic(given.output / "two-turns.json", (json.dumps(report, indent=1) + "\n").encode())
    print(to_text(report))


if __name__ == "__main__":
    main()
