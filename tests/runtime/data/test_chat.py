"""Chat templates: where they are found, where the answer begins, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.chat_encoders import said
from support.token_rows import EOS, chat_bundle, ids, listed, read

from runtime.core.errors import DataError
from runtime.data.chat import ChatTemplate
from runtime.data.source import Reading

MARKED = """{{- bos_token }}
{%- for message in messages %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {%- if role == 'system' and not loop.first %}
        {{- raise_exception('a system message comes first') }}
    {%- endif %}
    {{- '<' + role + '>\\n' + message.content | trim + '</' + role + '>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<model>\\n' }}
{%- endif %}
"""
BLOCKS = """{% if tools %}
tools: {% for tool in tools %}{{ tool | tojson(indent=2) }}{% endfor %}

{% endif %}
{% set seen = namespace(users=0) %}
{% for message in messages %}
    {% if message['role'] == 'note' %}
        {% continue %}
    {% endif %}
    {% if message['role'] == 'user' %}
        {% set seen.users = seen.users + 1 %}
Q{{ seen.users }}: {{ message['content'] }}
    {% elif message['role'] == 'assistant' %}
A: {% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}

    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
A: {% endif %}
"""
ANSWERED = said("two and two?", "four")
QUESTION = ANSWERED[:1]


def opened(folder: Path, template: object) -> ChatTemplate:
    return ChatTemplate(chat_bundle(folder, template) / "tokenizer")


@pytest.mark.parametrize(
    ("template", "prompt", "answer", "ending"),
    [
        (MARKED, "<bos><user>\ntwo and two?</user>\n<model>\n", "four</model>", "</model>"),
        (BLOCKS, "Q1: two and two?\nA: ", "four<eos>", "<eos>"),
    ],
)
def test_a_conversation_is_cut_where_the_answer_begins(
    tmp_path: Path, template: str, prompt: str, answer: str, ending: str
) -> None:
    chat = opened(tmp_path, template)
    text, ((start, stop),) = chat.answered(ANSWERED, None, [1])
    assert (text[:start], text[start:stop]) == (prompt, answer)
    assert chat.prompt(QUESTION) == prompt
    assert chat.ending == ending


def test_the_template_is_found_where_checkpoints_keep_it(tmp_path: Path) -> None:
    folder = chat_bundle(tmp_path, None) / "tokenizer"
    with pytest.raises(DataError, match="has no chat template; export from a checkpoint"):
        ChatTemplate(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "older"}))
    assert ChatTemplate(folder).prompt(QUESTION) == "older"
    (folder / "chat_template.jinja").write_text("own")
    assert ChatTemplate(folder).prompt(QUESTION) == "own"
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "other"}]
    assert opened(tmp_path / "named", named).prompt(QUESTION) == "one"
    with pytest.raises(DataError, match="has no chat template"):
        opened(tmp_path / "other", named[1:])


NESTED = "{% for i in x %}" * 30 + "{% endfor %}" * 30
LONG = "{{ 1" + "+1" * 9999 + "}}"


@pytest.mark.parametrize(
    "template", ["{% if %}", "{{ open", 5, [3], NESTED, LONG, "{{ 9 ** 9 ** 9 }}"]
)
def test_a_template_that_is_none_is_refused(tmp_path: Path, template: object) -> None:
    with pytest.raises(DataError, match=r"the chat template in .* cannot be read"):
        opened(tmp_path, template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{{ open('/etc/passwd') }}",
        "{{ 'a' * 100000000000 }}",
        "{{ 100000000000 * [messages] }}",
        "{{ '\\ud800' }}",
    ],
)
def test_a_hostile_template_reaches_nothing(tmp_path: Path, template: str) -> None:
    with pytest.raises((ValueError, DataError), match=r"template refuses|takes more than \d"):
        opened(tmp_path, template).prompt(QUESTION)


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ONE_LONG_CALL = "{{ range(99999) | slice(1000000000) | list }}"


@pytest.mark.parametrize("long", [LOOPS, ONE_LONG_CALL], ids=["loops", "one call"])
def test_a_template_that_computes_for_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long: str
) -> None:
    chat = opened(tmp_path, "{% if messages | length > 1 %}" + long + "{% endif %}x")
    monkeypatch.setattr("runtime.data.chat.MOST_SECONDS", 0.1)
    with pytest.raises(DataError, match=r"of bundle takes more than 0\.1 s of the CPU for one"):
        chat.prompt([*ANSWERED, *QUESTION])
    assert chat.prompt(QUESTION) == "x"  # and the limit is gone


GROWING = "{% set n = namespace(x='a' * 999) %}{% for i in range(99) %}{% set n.x = "
TAKES_TOO_MUCH = {
    "'%*d'": "{{ '%*d' | format(2000000000, 1) }}",
    "ljust": "{{ 'x'.ljust(2000000000) }}",
    "center": "{{ 'x' | center(2000000000) }}",
    "join": "{{ range(99999) | join('x' * 99999) }}",
    "replace": GROWING + "n.x.replace('a', 'aaaa') %}{% endfor %}",
    "batch": "{{ range(9) | batch(2000000000, 'x') | list }}",
    "products of ranges": "{{ (range(99999) | list) * 100000 }}",
    "much text": "{{ 'ab' * 1000000 }}",
}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits address space")
@pytest.mark.parametrize("way", TAKES_TOO_MUCH)
def test_a_template_that_fills_memory_is_ended(tmp_path: Path, way: str) -> None:
    """As a template that takes too much, and not as a row that could be left out."""
    bundle = chat_bundle(tmp_path, TAKES_TOO_MUCH[way])
    complaint = r"takes more than [\d,]+ bytes \(RLIMIT_AS\)|writes [\d,]+ characters for a conver"
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 1: the chat template .* {complaint}"):
        read(bundle, {"messages": ANSWERED}, reading=Reading(skip_bad_rows=True))


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ("hello", "not a list"),
        ([], "not a list with messages"),
        ([3], "message 1 has no role"),
        ([{"content": "x"}], "message 1 has no role"),
        ([*QUESTION, {"role": "assistant"}], "message 2 has no content"),
        ([*QUESTION, {"role": "assistant", "content": None}], "message 2 has no content"),
        (
            [{"role": "user", "content": {"a": 5}}, ANSWERED[1]],
            "message 1 has no content that is text",
        ),
        (
            [{"role": "user", "content": [{"type": "image", "url": "x"}]}, ANSWERED[1]],
            "message 1 has a part that is not text",
        ),
        ([*QUESTION, {"role": "assistant", "tool_calls": 5}], "tool_calls that are no list"),
        ([*QUESTION, {"role": "assistant", "tool_calls": [5]}], "a tool call that is no object"),
        (ANSWERED[1:], "nothing that it answers"),
        ([*QUESTION, {"role": "system", "content": ""}, *ANSWERED], "a system message comes first"),
    ],
)
def test_messages_that_cannot_be_learnt_are_refused_with_their_line(
    tmp_path: Path, messages: object, complaint: str
) -> None:
    bundle, rows = chat_bundle(tmp_path, MARKED), [{"messages": m} for m in (ANSWERED, messages)]
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 2: .*{complaint}"):
        read(bundle, *rows)


def test_an_answer_that_its_prompt_does_not_begin_is_refused(tmp_path: Path) -> None:
    odd = "A{% if add_generation_prompt %}nswer: {% else %}{{ messages | length }}{% endif %}"
    with pytest.raises(
        ValueError, match=r"the chat template of bundle writes .* so that message 2, an answer"
    ):
        opened(tmp_path, odd).answered(ANSWERED, None, [1])


def test_messages_are_read_as_the_formats_of_others_hold_them(tmp_path: Path) -> None:
    """Parts of text, fields that are null, arguments and tools as JSON text."""
    chat = opened(
        tmp_path, "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "clock", "arguments": '{"zone": "CET"}'}}
    given = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "12", "tool_calls": None},
    ]
    function = {"name": "clock", "arguments": {"zone": "CET"}}
    called = [{"type": "function", "function": function}]
    assert chat.prompt(given, '[{"name": "clock"}]') == "".join(
        map(
            json.dumps,
            [
                [{"name": "clock"}],
                {"role": "user", "content": "ab"},
                {"role": "assistant", "tool_calls": called, "content": ""},
                {"role": "tool", "content": "12"},
            ],
        )
    )
    for wrong in ("5", 5, ["clock"]):
        with pytest.raises(ValueError, match="tools is not a list of declarations"):
            chat.prompt(QUESTION, wrong)


def test_tools_are_shown_by_the_template_for_them(tmp_path: Path) -> None:
    both = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    chat = opened(tmp_path, both)
    assert chat.prompt(QUESTION) == chat.prompt(QUESTION, []) == "plain"
    assert chat.prompt(QUESTION, [{"name": "clock"}]) == "tools"


def test_special_tokens_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    folder = chat_bundle(tmp_path, "{{ bos_token }}{{ pad_token }}") / "tokenizer"
    (folder / "special_tokens_map.json").write_text('{"bos_token": "not", "pad_token": "<pad>"}')
    assert ChatTemplate(folder).prompt(QUESTION) == "not<pad>"  # as transformers reads them
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {"0": {"content": "<bos>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "image_token": "<img>"}))
    chat = ChatTemplate(folder)
    assert chat.prompt(QUESTION) == "<bos>"
    with pytest.raises(ValueError, match="may not hold 'image_token'"):
        chat.having({"image_token": "other"})


def test_conversations_become_rows_with_every_answer_scored(tmp_path: Path) -> None:
    longer = [*ANSWERED, *said("the cat", "s")]
    bundle, given = chat_bundle(tmp_path, BLOCKS), [{"messages": m} for m in (ANSWERED, longer)]
    rows = listed(read(bundle, *given))
    prompt, answer = ids("Q1: two and two?\nA: "), [*ids("four"), EOS]
    first = list(range(len(prompt) - 1, len(prompt) + len(answer) - 1))
    # no special tokens but the template's own, and none twice
    assert rows[0] == ([*prompt, *answer, *ids("\n")], first)
    before = [*prompt, *answer, *ids("\nQ2: the cat\nA: ")]
    last = [len(before) - 1, len(before)]
    assert rows[1] == ([*before, *ids("s"), EOS, *ids("\n")], [*first, *last])
    assert listed(read(bundle, *given, reading=Reading(loss_on="last")))[1][1] == last
    tokens, scored = listed(read(bundle, *given, reading=Reading(loss_on="all")))[1]
    assert scored == list(range(len(tokens) - 1))
