"""Fields and values that rows of others have: each is used, says nothing, or is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.token_rows import SPECIAL, chat_bundle, make_bundle, read, row_texts, tokenize

from runtime.core.errors import DataError
from runtime.data.chat import ChatTemplate
from runtime.data.fields import NEUTRAL, RECORD, VERDICTS
from runtime.data.report import FURTHER, MOST_LOST
from runtime.data.source import Reading
from runtime.data.text_encoder import load_encoder
from runtime.data.token_rows import TokenRows

CHAT = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for d in documents or [] %}[{{ d.text }}]{% endfor %}{{ style }}"
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.thinking %}({{ m.thinking }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}<eos>{% endfor %}{{ 'assistant: ' if add_generation_prompt else '' }}"
)
ASKED = {"role": "user", "content": "a?"}
ANSWER = {"role": "assistant", "content": "yes"}
CHATTED = "user: a?<eos>assistant: yes<eos>"
ZONE = {"name": "clock", "parameters": {"type": "object"}}
CALLED = 'user: a?<eos>assistant: clock{"zone": "CET"}<eos>'
ARGUMENTS = '{"zone": "CET"}'
AS_TEXT = f'{{"name": "clock", "arguments": {ARGUMENTS}}}'
TOOLS = json.dumps([ZONE])
TOOL = {"type": "function", "function": ZONE}
OLDER = {"name": "clock", "arguments": ARGUMENTS}
CALL: dict[str, Any] = {"type": "function", "function": {"name": "clock", "arguments": {}}}
HUMAN = {"from": "human", "value": "a?"}
PAIR = {"prompt": "a", "completion": "b"}
ALPACA = {"instruction": "a?", "output": "yes"}
UNWRITTEN = "which the chat template of bundle does not write"


def chat(*answers: dict[str, Any], **fields: Any) -> dict[str, Any]:
    turns = [turn for answer in answers for turn in (ASKED, {**ANSWER, **answer})]
    return {"messages": turns, **fields}


def calling(arguments: object) -> dict[str, Any]:
    """A conversation whose answer calls the clock with these arguments."""
    call = {"type": "function", "function": {"name": "clock", "arguments": arguments}}
    return chat({"content": None, "tool_calls": [call]})


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return chat_bundle(tmp_path, CHAT)


def texts(rows: TokenRows) -> list[str]:
    return [text for text, _ in row_texts(rows)]


def scored(rows: TokenRows) -> list[str]:
    return [text for _, text in row_texts(rows)]


def texts_counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts of whole conversations that are rendered from here on."""
    rendered: list[str] = []
    text = ChatTemplate.text

    def counted(chat: ChatTemplate, *conversation: Any) -> str:
        rendered.append(text(chat, *conversation))
        return rendered[-1]

    monkeypatch.setattr(ChatTemplate, "text", counted)
    return rendered


@pytest.mark.parametrize(
    "switch",
    [
        *({"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}),
        *({"loss": False}, {"masked": True}, {"mask": 1}, {"train": "false"}),
    ],
    ids=str,
)
def test_an_answer_that_is_switched_off_is_context(bundle: Path, switch: dict[str, Any]) -> None:
    rows = read(bundle, chat({"content": "no", **switch}, {}))
    assert texts(rows) == ["user: a?<eos>assistant: no<eos>" + CHATTED]
    assert scored(rows) == ["yes<eos>"]
    assert (rows.report.lost, rows.report.warned) == ({}, 0)
    said = ({"from": "gpt", "value": "no", **switch}, {"from": "gpt", "value": "yes"})
    turns = [turn for answer in said for turn in (HUMAN, answer)]
    assert scored(read(bundle, {"conversations": turns})) == ["yes<eos>"]
    everything = read(bundle, chat({"content": "no", **switch}, {}), reading=Reading(loss_on="all"))
    assert "no<eos>" not in scored(everything)[0]


def test_a_row_of_many_parts_that_are_not_learnt_is_one_row(bundle: Path) -> None:
    many = {f"field{number}": 1 for number in range(MOST_LOST + 9)}
    rows = read(bundle, chat({}) | many, chat({}) | many)
    assert len(rows.report.lost) == MOST_LOST + 1 and {*rows.report.lost.values()} == {2}
    assert rows.report.warning_lines()[MOST_LOST] == f"2 rows with {FURTHER}"


def test_special_tokens_are_no_characters_without_tokens(tmp_path: Path) -> None:
    end = "<\uff5cend\uff5c>"
    unknown_in = load_encoder(make_bundle(tmp_path / "bundle", {"eos_token": end})).unknown_in
    assert (unknown_in(f"a{end}"), unknown_in(f"a\uff5c{end}")) == ([], ["\uff5c"])


@pytest.mark.parametrize("key", ["thinking", "reasoning_content", "reasoning"])
def test_reasoning_goes_where_the_template_reads_it(bundle: Path, key: str) -> None:
    rows = read(bundle, chat({key: "hm"}))
    assert scored(rows) == ["(hm)yes<eos>"]
    assert rows.report.lost == {}


def test_reasoning_that_the_template_does_not_write_is_counted(tmp_path: Path) -> None:
    template = CHAT.replace("thinking", "other")
    rows = (chat({"reasoning_content": "hm"}), chat({"thinking": "hm"}), chat({}))
    report = read(chat_bundle(tmp_path, template), *rows).report
    assert report.lost == {
        f"'{name}' in a message, {UNWRITTEN}": 1 for name in ("reasoning_content", "thinking")
    }
    assert report.warning_lines()[0].startswith("1 row with 'reasoning_content'")


@pytest.mark.parametrize(
    "row",
    [
        chat({"content": None, "function_call": OLDER}, functions=[ZONE]),
        {"conversations": [HUMAN, {"from": "function_call", "value": AS_TEXT}], "tools": TOOLS},
    ],
)
def test_older_calls_are_todays(bundle: Path, row: dict[str, Any]) -> None:
    rows = read(bundle, row)
    assert texts(rows) == [json.dumps(TOOL) + CALLED]
    assert rows.report.lost == {}


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("", "{}"),
        (" ", "{}"),
        (None, "{}"),
        ("null", "{}"),
        ('{"zone": NaN, "at": null}', '{"at": null}'),
        ("{'zone': 'CET'}", '{"zone": "CET"}'),
        ({"zone": "CET", "day": None, "at": {"hour": None}}, '{"zone": "CET", "at": {}}'),
    ],
    ids=str,
)
def test_arguments_become_an_object(bundle: Path, given: object, written: str) -> None:
    assert scored(read(bundle, calling(given))) == [f"clock{written}<eos>"]


def test_parquet_gives_the_tokens_of_json_lines(bundle: Path) -> None:
    """Arrow gives each object the keys of all the others, with null."""
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is an extra")
    parquet = pytest.importorskip("pyarrow.parquet")

    def row(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        tool = {"name": name, "parameters": {"type": "object", "properties": arguments}}
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        message = {"role": "assistant", "tool_calls": [call]}
        tools = [{"type": "function", "function": tool}]
        return {"messages": [ASKED, message], "tools": tools}

    rows = [row("clock", {"zone": "CET"}), row("lamp", {"state": {"on": "yes"}})]
    lines = texts(read(bundle, *rows))
    table = bundle.parent / "rows.parquet"
    parquet.write_table(arrow.Table.from_pylist(rows), table)
    padded = tokenize(bundle, table, 400, bundle.parent / "out-table")
    assert texts(padded) == lines


def test_cells_that_are_empty_or_numbers(bundle: Path) -> None:
    rows = read(bundle, {**ALPACA, "input": float("nan")}, {**ALPACA, "input": 5, "output": 7})
    assert texts(rows) == [CHATTED, "user: a?\n\n5<eos>assistant: 7<eos>"]


def test_alpacas_history_and_system(bundle: Path) -> None:
    rows = read(bundle, {**ALPACA, "input": "", "system": "s", "history": [["b?", "no"]]})
    assert texts(rows) == ["system: s<eos>user: b?<eos>assistant: no<eos>" + CHATTED]
    assert scored(rows) == ["no<eos>yes<eos>"]


def test_alpacas_own_prompt_has_no_history(tmp_path: Path) -> None:
    row = {**ALPACA, "system": "s", "history": [["b?", "no"]]}
    report = read(make_bundle(tmp_path / "bundle", SPECIAL), row).report
    assert [*report.lost] == [
        f"the field {key!r}, which is not read" for key in ("system", "history")
    ]


def test_answers_that_are_labelled_false_are_dropped(bundle: Path) -> None:
    for key in VERDICTS:
        rows = read(bundle, {**PAIR, key: True}, {**PAIR, key: False}, {**PAIR, key: "False"})
        assert (len(rows), rows.report.lost) == (1, {})
        assert rows.report.dropped == {f"its {key} is false, so its answer is not to be learnt": 2}
    bits = read(bundle, *({**PAIR, "label": bit} for bit in (0, 1, "0", "1", 0.0, 1.0)))
    assert (len(bits), bits.report.lost, [*bits.report.dropped.values()]) == (3, {}, [3])
    for other in ({**PAIR, "label": 3}, {"text": "ab", "label": 0}):
        report = read(bundle, other).report
        assert report.lost == {"the field 'label', which is not read": 1}


def test_what_a_row_has_for_the_template(bundle: Path) -> None:
    row = chat({}, documents=[{"text": "d"}], chat_template_kwargs={"style": "s", "depth": 2})
    rows = read(bundle, row)
    assert texts(rows) == ["[d]s" + CHATTED]
    assert rows.report.lost == {"'depth' for the chat template, which does not read it": 1}


TWICE = '{"zone": "CET", "zone": "UTC"}'
NO_JSON = "message 2 calls 'clock' with arguments that are no JSON"
OPENAI = {"input": {"messages": ASKED}, "preferred_output": ANSWER, "non_preferred_output": []}
PREFERRED = {"prompt": "a", "chosen": "b", "rejected": "c"}
NARRATED = {"messages": [{"role": "narrator", "content": "a?"}, ANSWER]}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (chat({"weight": 0.5}), r"message 2 has weight 0\.5; known are 0 and 1"),
        *((calling(given), NO_JSON) for given in ("zone CET", "[1]", 5, "('a',)")),
        (calling(TWICE), "message 2 calls 'clock' with arguments: it has the key 'zone' twice"),
        (chat({}, tools=f"[{TWICE}]"), "it has the key 'zone' twice"),
        ({"messages": f"[{TWICE}]"}, "it has the key 'zone' twice"),
        ({**ALPACA, "input": "", "history": ["b?"]}, "history is no list of pairs"),
        (PREFERRED, "pairs are not trained on.*--columns completion=chosen"),
        (OPENAI, "not trained on; write its input and the preferred one as"),
        (chat({}, chat_template_kwargs={"messages": []}), "kwargs may not hold 'messages'"),
        (NARRATED, "message 1 has the role 'narrator', which the chat templ"),
        ({**ALPACA, "system": ["s"]}, r"its system is not text: \['s'\]"),
        (chat({}, functions=ZONE), "tools is not a list of declarations"),
    ],
)
def test_rows_that_cannot_be_learnt_are_refused_by_their_cause(
    bundle: Path, row: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        read(bundle, row)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("<bos>a<eos>", "<bos>a<eos>"),
        ("a<eos>\n", "<bos>a<eos>\n"),
        ("<bos>a", "<bos>a<eos>"),
        ("\n<bos>a", "\n<bos>a<eos>"),
    ],
)
def test_what_stands_there_is_not_added_again(bundle: Path, text: str, written: str) -> None:
    at = text.rindex("a")
    pair = {"prompt": text[:at], "completion": text[at:]}
    assert texts(read(bundle, {"text": text}, pair)) == [written, written]


EMPTY: list[dict[str, Any]] = [
    {"messages": [ASKED, {**ANSWER, "content": ""}]},
    {"prompt": "a", "completion": " "},
    {"instruction": "a", "output": ""},
    {"text": ""},
]


@pytest.mark.parametrize("loss_on", ["assistant", "last", "all"])
def test_empty_answers_are_dropped_unless_they_are_kept(bundle: Path, loss_on: str) -> None:
    rows = read(bundle, *EMPTY, chat({}), reading=Reading(loss_on=loss_on))
    assert rows.report.dropped == {"its answer is empty": 3, "it is empty": 1}
    assert len(rows) == 1
    assert len(read(bundle, *EMPTY, reading=Reading(loss_on=loss_on, keep_empty=True))) == 4


def test_an_empty_answer_among_others_is_not_scored(bundle: Path) -> None:
    rows = read(bundle, chat({"content": ""}, {}))
    assert scored(rows) == ["yes<eos>"]
    assert rows.report.lost == {"an answer without text, which is not scored": 1}


@pytest.mark.parametrize("name", ["model", "Assistant", "AI", "bot", "gpt", "ASSISTANT"])
def test_roles_have_many_names(bundle: Path, name: str) -> None:
    turns = [{"role": "Human", "content": "a?"}, {"role": name, "content": "yes"}]
    shared = [{"from": "User", "value": "a?"}, {"from": name, "value": "yes"}]
    rows = read(bundle, {"messages": turns}, {"messages": shared}, {"conversations": shared})
    assert texts(rows) == [CHATTED] * 3


MINIMAL: dict[str, dict[str, Any]] = {
    "messages": chat({}),
    "ShareGPT": {"conversations": [HUMAN, {"from": "gpt", "value": "b"}]},
    "prompt and completion, as messages": {"prompt": [ASKED], "completion": [ANSWER]},
    "prompt and completion": PAIR,
    "Alpaca, as conversations": ALPACA,
    "Alpaca, in Alpaca's prompt": ALPACA,
    "text": {"text": "a"},
}
OTHER = {
    "tools": [TOOL],
    "functions": [ZONE],
    "documents": [{"text": "d"}],
    "chat_template_kwargs": {"style": "s"},
    "system": "s",
    "input": "i",
    "history": [["a", "b"]],
}


@pytest.mark.parametrize("name", RECORD)
def test_each_key_of_a_record_is_used_neutral_or_named(tmp_path: Path, name: str) -> None:
    has_template = name != "Alpaca, in Alpaca's prompt"
    config = {**SPECIAL, "chat_template": CHAT} if has_template else SPECIAL
    bundle, plain = make_bundle(tmp_path / "bundle", config), MINIMAL[name]
    used = sorted(RECORD[name] - set(plain))
    rows = read(bundle, plain, *({**plain, key: OTHER[key]} for key in used))
    assert rows.report.formats == {name: 1 + len(used)}
    assert texts(rows)[0] not in texts(rows)[1:], used
    assert rows.report.lost == {}
    neutral = read(bundle, plain, *({**plain, key: "x"} for key in sorted(NEUTRAL)))
    assert len({*texts(neutral)}) == 1
    assert neutral.report.lost == {}
    strange = read(bundle, {**plain, "strange": 1}, {**plain, "strange": 2})
    assert strange.report.lost == {"the field 'strange', which is not read": 2}


def test_each_key_of_a_message_and_a_call_is_used_neutral_or_named(bundle: Path) -> None:
    call = {"function": {"name": "clock", "arguments": {}, "odd": 1}, "id": "c"}
    rows = read(bundle, chat({"strange": 1, "tool_calls": [call], "name": "x"}), chat({}))
    assert rows.report.lost == {
        "the field 'strange' in a message, which is not read": 1,
        "the field 'odd' in a tool call, which is not read": 1,
    }


WEIGHED = {"type": "text", "text": "yes", "weight": 0}
NOTHING_ELSE = "nothing but the word 'nan'{}, as some programs write an empty cell"
FOREIGN = "'<|im_end|>', which is no token of this model"


@pytest.mark.parametrize(
    ("row", "lost"),
    [
        (chat({"content": [WEIGHED]}), "the field 'weight' in a part of a message, which is not r"),
        (chat({"function_call": OLDER, "tool_calls": [CALL]}), "the field 'function_call' in"),
        (chat({}, tools=[TOOL], functions=[ZONE]), "'functions' beside 'tools', of which only 't"),
        ({"messages": [{**ASKED, **HUMAN, "value": "b"}, ANSWER]}, "the field 'value' in a m"),
        (chat({"content": "yes<eos> "}), "'<eos>' at the end of an answer, where the template wri"),
        (chat({"content": "<bos>yes"}), "the special token '<bos>' in a message, as if the templ"),
        (chat({"content": "yes<|im_end|>b"}), FOREIGN + ", in a message"),
        ({"text": "a<|im_end|>"}, FOREIGN),
        ({**PAIR, "completion": "b<|im_end|>"}, FOREIGN),
        ({"prompt": "a?", "completion": "b"}, "a prompt that its completion follows without a sp"),
        ({"text": "a<bos>b"}, "'<bos>' inside its text"),
        ({"text": "a\u65e5"}, "the character '\u65e5', for which the tokenizer has no token"),
        (chat({"content": "yes \u65e5"}), "the character '\u65e5', for which the tokenizer has"),
        ({**ALPACA, "input": "nan"}, NOTHING_ELSE.format(" as 'input'")),
        ({"prompt": "a", "completion": "nan"}, NOTHING_ELSE.format(" as 'completion'")),
        (chat({"content": "nan"}), NOTHING_ELSE.format(" in a message")),
        (chat({"add_generation_prompt": 1}), "'add_generation_prompt' in a message, which the cha"),
        (chat({"tool_calls": [{**CALL, "style": 1}]}), "'style' in a tool call, which the chat t"),
    ],
)
def test_what_is_not_learnt_as_it_stands_is_counted(
    bundle: Path, row: dict[str, Any], lost: str
) -> None:
    counted = read(bundle, row, chat({})).report.lost
    assert [key for key, rows in counted.items() if key.startswith(lost) and rows == 1]


@pytest.mark.parametrize("empty", [None, [], {}, ""], ids=str)
def test_a_field_without_a_value_is_no_field(bundle: Path, empty: object) -> None:
    """As OpenAI's clients write the fields that a message does not use."""
    names = ("annotations", "tool_calls", "audio", "refusal", "function_call", "name", "style")
    answer = dict.fromkeys(names, empty)
    parts = {**answer, "content": [{"type": "text", "text": "yes", "image_url": empty}]}
    row = chat(answer, parts, images=empty)
    rows = read(bundle, row, {**row, "messages": json.dumps(row["messages"])})
    assert texts(rows) == [CHATTED * 2] * 2
    assert not rows.report.lost and not rows.report.warnings


@pytest.mark.parametrize("content", [None, "", []], ids=str)
def test_a_refusal_in_place_of_an_answer_is_refused(bundle: Path, content: object) -> None:
    row = chat({"content": content, "refusal": "I cannot say."})
    with pytest.raises(DataError, match=r"message 2 has a refusal in place of its content; write"):
        read(bundle, row, chat({}))
    beside = read(bundle, chat({"refusal": "I cannot say."}))
    assert beside.report.lost == {"the field 'refusal' in a message, which is not read": 1}


def test_many_fields_of_a_message_take_no_more_texts_than_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_names = [f"extra{number}" for number in range(40)]
    lines = "".join(f"{{{{ m.{name} }}}}" for name in read_names[:20])
    unread = "".join(f"{{% set x = m.{name} %}}" for name in read_names[20:])
    template = CHAT.replace("{{ m.role }}", "{{ m.role }}" + lines + unread, 1)
    assert template != CHAT
    bundle = chat_bundle(tmp_path, template)
    counts = []
    for names in (read_names[:1], read_names[:20], read_names):
        rendered = texts_counted(monkeypatch)
        asked = {**ASKED, **dict.fromkeys(names, "x")}
        lost = read(bundle, {"messages": [asked, ANSWER]}).report.lost
        assert len(lost) == max(0, len(names) - 20)
        counts.append(len(rendered))
    assert counts == [counts[0], counts[0], counts[0] + 1]


def test_an_answer_has_its_end_once(bundle: Path) -> None:
    rows = read(bundle, chat({"content": "yes<eos>"}), {**ALPACA, "output": "yes<eos>\n"})
    assert texts(rows) == [CHATTED, CHATTED]


def test_what_a_template_writes_of_the_last_turn_alone_is_counted(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {% if loop.last and m.thinking %}({{ m.thinking }})"
        "{% endif %}{{ m.content if loop.last else m.content.split('|')[-1] }}<eos>{% endfor %}"
        "{{ 'assistant: ' if add_generation_prompt else '' }}"
    )
    bundle = chat_bundle(tmp_path, template)
    rows = read(bundle, chat({"thinking": "hm"}, {"thinking": "ho"}), chat({"content": "b|c"}, {}))
    assert rows.report.lost == {
        f"'thinking' in a message, {UNWRITTEN}": 1,
        "a message of which the chat template of bundle does not write all": 1,
    }
    assert read(bundle, chat({}, {"thinking": "ho"})).report.lost == {}


def test_a_switch_that_everything_overrides_is_counted(bundle: Path) -> None:
    row = {"messages": [{**ASKED, "train": False}, ANSWER]}
    assert read(bundle, row).report.lost == {}
    lost = read(bundle, row, reading=Reading(loss_on="all")).report.lost
    assert [*lost] == ["a switch in a message that is no answer, which --loss-on all scores"]


@pytest.mark.parametrize("caller", ["function_call", "tool_call"])
def test_a_call_may_be_a_turn(bundle: Path, caller: str) -> None:
    as_role = {"messages": [ASKED, {"role": caller, "content": AS_TEXT}]}
    rows = read(bundle, as_role, {"conversations": [HUMAN, {"from": caller, "value": AS_TEXT}]})
    assert texts(rows) == [CALLED, CALLED]
    with pytest.raises(DataError, match=rf"a turn of '{caller}' is no call, as .*: 'clock\(\)'"):
        read(bundle, {"messages": [ASKED, {"role": caller, "content": "clock()"}]})


@pytest.mark.parametrize("name", ["model", "human", "bot"])
def test_a_word_of_the_template_is_no_role_of_its_own(tmp_path: Path, name: str) -> None:
    """Gemma's template writes `model` where the role is assistant."""
    template = CHAT.replace(
        "{{ m.role }}", f"{{{{ '{name}' if m.role == 'assistant' else m.role }}}}"
    )
    bundle = chat_bundle(tmp_path, template)
    turns = [{"role": "human", "content": "a?"}, {"role": "model", "content": "yes"}]
    rows = read(bundle, {"messages": turns})
    assert texts(rows) == [f"user: a?<eos>{name}: yes<eos>"]
    assert scored(rows)[0].endswith("yes<eos>")


NAMED = (
    "{% for m in messages %}{% if m.role == 'user' or m.role == 'RESULT' %}{{ m.role }}: "
    "{{ m.content | tojson }}<eos>{% elif m.role == 'assistant' %}assistant: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}<eos>{% endif %}"
    "{% endfor %}{{ 'assistant: ' if add_generation_prompt else '' }}"
)
"""A template that tells roles apart by their names, and reads what it calls `function`."""


@pytest.mark.parametrize("theirs", ["tool", "observation", "ipython"])
@pytest.mark.parametrize("name", ["function", "tool", "observation", "ipython", "Function"])
def test_a_result_has_the_role_that_the_template_names(
    tmp_path: Path, theirs: str, name: str
) -> None:
    template = NAMED.replace("RESULT", theirs)
    bundle = chat_bundle(tmp_path, template)
    called = {"role": "assistant", "content": None, "function_call": OLDER}
    rows = read(bundle, {"messages": [ASKED, called, {"role": name, "content": "ten"}, ANSWER]})
    written = f'user: "a?"<eos>assistant: clock<eos>{theirs}: "ten"<eos>assistant: yes<eos>'
    assert texts(rows) == [written]
    assert "a message" not in str(rows.report.lost)


def test_a_result_keeps_a_role_that_the_template_names_beside_another(tmp_path: Path) -> None:
    template = NAMED.replace("'RESULT'", "'tool' or m.role == 'observation'")
    bundle = chat_bundle(tmp_path, template)
    for name in ("tool", "observation"):
        rows = read(bundle, {"messages": [ASKED, {"role": name, "content": "ten"}, ANSWER]})
        assert f'<eos>{name}: "ten"<eos>' in texts(rows)[0]


def test_a_result_that_the_template_does_not_write_is_counted(tmp_path: Path) -> None:
    bundle = chat_bundle(tmp_path, NAMED)
    rows = read(bundle, {"messages": [ASKED, {"role": "tool", "content": "ten"}, ANSWER]})
    assert rows.report.lost == {f"a message of 'tool', {UNWRITTEN}": 1}


def test_a_field_of_calls_is_counted_beside_a_written_one_of_the_message(tmp_path: Path) -> None:
    """Both have one name."""
    template = (
        "{% for m in messages %}{{ m.content }}{{ m.note }}"
        "{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %}<eos>{% endfor %}"
    )
    bundle = chat_bundle(tmp_path, template)
    called = {"function": {"name": "clock", "arguments": {}, "note": "ten"}}
    asking = {"role": "assistant", "content": "yes", "note": "a", "tool_calls": [called]}
    rows = read(bundle, {"messages": [ASKED, asking, {"role": "tool", "content": "b"}, ANSWER]})
    assert rows.report.lost == {f"'note' in a tool call, {UNWRITTEN}": 1}


@pytest.mark.parametrize("check", ["", "{% if 'mark' in m.content %}{{ refuse() }}{% endif %}"])
def test_of_many_results_those_are_counted_that_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: str
) -> None:
    """Where all are written, one text of them shows it."""
    named = NAMED.replace("'RESULT'", "'tool' and loop.index < 20").replace(
        "{{ m.role", check + "{{ m.role"
    )
    bundle = chat_bundle(tmp_path, named)
    rendered = texts_counted(monkeypatch)
    results = [ASKED, *[{"role": "tool", "content": "ten"}] * 15, ANSWER]
    assert not read(bundle, {"messages": results}).report.lost
    assert len(rendered) < 5
    results[-1:] = [ASKED, ANSWER, ASKED, {"role": "tool", "content": "ten"}, ANSWER]
    (lost,) = read(bundle, {"messages": results}).report.lost
    assert "a message of 'tool', which the chat template" in lost


def test_a_system_is_text(bundle: Path) -> None:
    rows = read(bundle, {**ALPACA, "system": 5}, {"conversations": [HUMAN, ANSWER], "system": 5})
    assert texts(rows) == ["system: 5<eos>" + CHATTED] * 2


def test_blank_tools_are_none(bundle: Path) -> None:
    assert texts(read(bundle, chat({"tool_calls": {}}, tools=" "))) == [CHATTED]


@pytest.mark.parametrize("text", ["\u200b", "\ufeff", "<eos>", "<think>\n\n</think>\n"], ids=ascii)
def test_what_says_nothing_is_an_empty_answer(bundle: Path, text: str) -> None:
    rows = [chat({"content": text}), {"prompt": "a", "completion": text}, {"text": text}]
    dropped = read(bundle, *rows, chat({})).report.dropped
    assert dropped == {"its answer is empty": 2, "it is empty": 1}


def test_ends_that_no_token_has_are_no_texts(bundle: Path) -> None:
    ends = {"eos_token_id": [1, 5000, 2**70]}
    (bundle / "tokenizer" / "generation_config.json").write_text(json.dumps(ends))
    rows = read(bundle, chat({"content": "None"}), {"prompt": "a", "completion": "None"})
    assert scored(rows) == ["None<eos>", "None<eos>"]


def test_the_reason_is_said_where_nothing_is_left(bundle: Path) -> None:
    with pytest.raises(DataError, match=r"every row is left out, for what(.|\n)*answer is empty"):
        read(bundle, chat({"content": ""}))
