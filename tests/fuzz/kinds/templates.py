"""Chat templates, which are programs: hostile ones, and others that damage has made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

from support.mutations import Rng, pick
from support.token_rows import VOCAB, make_bundle

from fuzz.kind import Change, Kind, Read, damage, put_in_place, write
from fuzz.kinds.data import LENGTH, ROWS, TOKENIZER, tokenized
from runtime.data.source import Reading
from runtime.data.token_rows import TokenRows

TEMPLATES = sorted((Path(__file__).parents[2] / "support/chat_templates").glob("*.jinja"))
FILE = "chat_template.jinja"
DATA = "data.jsonl"
SHOW_TOOLS = ("qwen2_5",)

SAY = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
LOOP = "{% for a in range(99999) %}"
# what takes time or memory without bound, each in an expression
COSTLY = (
    "'%*d' % (2147483647, 1)",
    "'%*d'|format(999999999, 1)",
    "'%.999999999f'|format(1.5)",
    "'{:>999999999}'.format(1)",
    "'x'.ljust(2147483647)",
    "'x'.center(999999999)",
    "'x'.zfill(4000000000)",
    "'x' * 4000000000",
    "('x' * 99999).replace('x', 'x' * 99999)",
    "('x' * 99999).join(range(99999)|map('string'))",
    "[0] * 4000000000",
    "range(99999999)|list",
    "range(99999)|slice(99999)|list|string",
    "range(999999999)|sum",
    "(range(99999)|list) * 99999",
    "('x' * 99999)|indent(99999)",
    "('a b ' * 999999)|wordwrap(1)|length",
    "('9' * 99999)|int",
    "(('9' * 4000)|int) * (('9' * 4000)|int)",
    "lipsum(n=999999)",
    "cycler(*range(9999999))",
    "('x' * 999999)|urlize|length",
    "messages|tojson(indent=999999999)",
    "dict(a=range(9999999)|list)|pprint",
    "(1 << 4000000000)",
    "messages|batch(999999999, 'x')|list|string",
    "('x' * 9999)|center(4000000000)",
    "'%s' % ('x' * 99999)|list|join('x' * 9999)",
)
# what reaches for what is not its own
REACHING = (
    "''.__class__.__mro__",
    "messages.__class__.__base__.__subclasses__()",
    "self.__init__.__globals__",
    "cycler.__init__.__globals__.os.system('true')",
    "raise_exception('no')",
    "messages.append(messages[0])",
    "messages.clear()",
    "messages[0].update(content='other')",
    "messages[0].pop('content')",
    "1 / 0",
    "undefined_thing.x",
    "none + 1",
    "'\\ud800'",
)
NESTED = LOOP * 3 + "{{ a }}" + "{% endfor %}" * 3
RECURSIVE = "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}"
DEEP = "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"
DEEP_IF = "{% if true %}" * 3000 + "{% endif %}" * 3000
POWER = "{{ 9 ** 9 ** 9 ** 9 }}"


def _template(text: str) -> Change:
    return write(f"tokenizer/{FILE}", text.encode())


class Templates(Kind):
    """Templates of well-known models, changed; and programs that no model has."""

    name = "templates"
    originals = tuple(path.stem for path in TEMPLATES)
    known: ClassVar[dict[str, Change]] = {
        "nested loops": _template(NESTED + SAY),
        "recursive macro": _template(RECURSIVE + SAY),
        "nested deeply": _template(DEEP + SAY),
        "conditions nested deeply": _template(DEEP_IF + SAY),
        "a power": _template(POWER + SAY),
        "empty": _template(""),
        **{f"costly {text}": _template("{{ " + text + " }}" + SAY) for text in COSTLY},
        **{f"reaching {text}": _template("{{ " + text + " }}" + SAY) for text in REACHING},
    }

    def prepare(self, folder: Path) -> None:
        for path in TEMPLATES:
            make_bundle(folder / path.stem, TOKENIZER)
            (folder / path.stem / "tokenizer" / FILE).write_text(path.read_text())
            # one conversation: each may take its seconds
            row = ROWS["tools" if path.stem in SHOW_TOOLS else "messages"][0]
            (folder / path.stem / DATA).write_text(json.dumps(row) + "\n")

    def change(self, folder: Path, rng: Rng) -> object:
        path = folder / "tokenizer" / FILE
        act = pick(rng, ["bytes", "bytes", "words", "words", "insert", "insert", "place"])
        if act == "place" and rng.random() < 0.2:
            return put_in_place(path, rng)
        text = path.read_text()
        words = text.split(" ")
        at = int(rng.integers(len(words)))
        if act == "words":
            other = int(rng.integers(len(words)))
            words[at], words[other] = words[other], words[at]
            done = f"words {at} and {other} swapped"
        elif act == "insert":
            inserted = pick(rng, (*COSTLY, *REACHING))
            looped = "{% for a in range(99999) %}{{ " + inserted + " }}{% endfor %}"
            done = pick(rng, ("{{ " + inserted + " }}", "{{ (" + inserted + ")|length }}", looped))
            words.insert(at, done)
        else:
            return damage(path, rng)
        path.write_text(" ".join(words))
        return done

    def read(self, folder: Path, original: Path) -> Read:
        output = Path("out.tokens").absolute()
        reading = Reading(skip_bad_rows=True)
        found = tokenized(folder, folder / DATA, output, reading, 4 * LENGTH)
        TokenRows(output, 2 * VOCAB)
        return Read(0, found)
