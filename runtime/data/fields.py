"""The formats of data, which are recognised by the fields of a record, and the keys that are read.

Any other key, unless it changes nothing of what is learnt, is named in the report of the data, with
the number of its rows.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.core.documents import RepeatedKeyError, from_json_once
from runtime.data.conversation import CALLERS, as_text, cleaned

Record = dict[str, Any]

EXPECTED = (
    'expected {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": '
    '"..."}]}, {"prompt": "...", "completion": "..."}, {"text": "..."}, Alpaca\'s {"instruction", '
    '"input", "output"} or ShareGPT\'s {"conversations"}; name other fields by --columns, as in '
    "--columns prompt=question,completion=answer"
)
_CALL = '{"name": "...", "arguments": {}}'

_CONVERSATION = frozenset({"tools", "functions", "documents", "chat_template_kwargs"})
_SHAREGPT = frozenset({"conversations", "system", *_CONVERSATION})
RECORD = {
    "messages": frozenset({"messages", *_CONVERSATION}),
    "ShareGPT": _SHAREGPT,
    "prompt and completion, as messages": frozenset({"prompt", "completion", *_CONVERSATION}),
    "prompt and completion": frozenset({"prompt", "completion"}),
    "Alpaca, as conversations": frozenset({"instruction", "input", "output", "system", "history"}),
    "Alpaca, in Alpaca's prompt": frozenset({"instruction", "input", "output"}),
    "text": frozenset({"text"}),
}
"""The keys that are read, by the format of the record."""
VERDICTS = ("label", "kto_tag")
"""Keys of KTO's rows, in any format: false marks an answer that is not to be learnt.

Where `--columns` names one of them, it is what the row is read from, and no such mark.
"""
MESSAGE = frozenset({"role", "content", "tool_calls"})
SCORED = ("weight", "train", "training", "loss")
"""Keys of a message that say whether it is scored (OpenAI and Mistral, axolotl, ms-swift)."""
MASKED = ("masked", "mask")
"""Keys of a message that say that it is not scored."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message for what is thought before the answer; a template reads one of them."""
PART = frozenset({"type", "text"})
"""Keys of a part of a message's content."""
CALL = frozenset({"id", "type", "function", "name", "arguments", "index"})
NEUTRAL = frozenset(
    {
        # which row it is
        *("id", "_id", "idx", "index", "uuid", "hash"),
        *("prompt_id", "conversation_id", "message_id"),
        *("__index_level_0__", "Unnamed: 0", ""),  # which pandas adds
        # where it is from
        *("source", "dataset", "subset", "split", "url", "license", "author", "generator", "model"),
        # what others say of it
        *("metadata", "meta", "tags", "category", "topic", "language", "lang", "difficulty"),
        *("created", "created_at", "timestamp", "date", "num_turns", "turns", "token_count"),
        # a message's link to a call, for the templates that write it
        *("name", "tool_call_id"),
    }
)
"""Keys that only describe a row, a message or a call: nothing is lost where they are not read."""
NOTHING = frozenset({"nan", "NaN", "NaT", "None", "null", "NULL", "<NA>", "n/a", "N/A", "#N/A"})
"""Words that other programs write where a cell is empty."""


def not_read(fields: Mapping[Any, object], read: Collection[object]) -> list[str]:
    """The keys that are neither read nor neutral; an empty value is none."""
    return [
        str(key)
        for key, value in fields.items()
        if value not in (None, "", [], {}) and key not in NEUTRAL and key not in read
    ]


@dataclass(frozen=True)
class Conversation:
    """Messages, and declarations of tools; answers count from message `first` on.

    `variables` are further values that a row has for the template, by name.
    """

    messages: object
    tools: object = None
    first: int = 0
    variables: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """A prompt, and the text that is to follow it."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class PlainText:
    """A text, all of which is to be learnt."""

    text: str


Example = Conversation | Completion | PlainText


@dataclass(frozen=True)
class Recognised:
    """An example, and the name of the format that it was read from.

    `lost` names what of the record is not read, and `dropped` is why it is not to be learnt.
    """

    format: str
    example: Example
    lost: tuple[str, ...] = ()
    dropped: str = ""


def recognise(record: object, columns: dict[str, str], has_template: bool) -> Recognised:
    """The example in a record, whose fields `columns` renames (our name: theirs).

    Alpaca's rows become conversations if the model has a chat template, and else Alpaca's own
    prompt. Raises ValueError where no format fits.
    """
    if not isinstance(record, dict):
        raise ValueError(EXPECTED)
    row = cleaned(_renamed(record, columns))
    name, example = _example(row, has_template)
    lost = [
        f"the field {key!r}, which is not read"
        for key in not_read(row, {*RECORD[name], *columns.values(), *VERDICTS})
    ]
    lost += [
        f"nothing but the word {row[key]!r} as {key!r}, as some programs write an empty cell"
        for key in sorted(RECORD[name] & row.keys())
        if isinstance(row[key], str) and row[key].strip() in NOTHING
    ]
    if "tools" in row and "functions" in row and "functions" in RECORD[name]:
        lost.append("'functions' beside 'tools', of which only 'tools' is read")
    dropped = ""
    for key in VERDICTS:
        if key in columns.values():  # it is the answer, say
            continue
        verdict = str(row.get(key, True)).lower()
        if name in _PAIRS:  # of KTO; beside a text, 0 and 1 are classes
            verdict = _BITS.get(verdict, verdict)
        if verdict == "false":
            dropped = f"its {key} is false, so its answer is not to be learnt"
        elif verdict != "true":
            lost.append(f"the field {key!r}, which is not read")
    return Recognised(name, example, tuple(lost), dropped)


_PAIRS = ("prompt and completion", "prompt and completion, as messages")
_BITS = {"0": "false", "0.0": "false", "1": "true", "1.0": "true"}


def _example(row: Record, has_template: bool) -> tuple[str, Example]:
    """The name of the format that fits, and the example."""
    if row.get("messages") is not None:
        messages = _turns(_from_json(row["messages"]))
        return "messages", Conversation(messages, _tools(row), 0, _variables(row))
    if row.get("conversations") is not None:
        return "ShareGPT", _sharegpt(row)
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        both = _turns([*prompt, *completion])
        conversation = Conversation(both, _tools(row), len(prompt), _variables(row))
        return "prompt and completion, as messages", conversation
    prompt, completion = as_text(prompt), as_text(completion)
    if isinstance(prompt, str) and isinstance(completion, str):
        return "prompt and completion", Completion(prompt, completion)
    instruction, output = as_text(row.get("instruction")), as_text(row.get("output"))
    if isinstance(instruction, str) and isinstance(output, str):
        return _alpaca(row, instruction, output, has_template)
    text = as_text(row.get("text"))
    if isinstance(text, str):
        return "text", PlainText(text)
    if "chosen" in row and "rejected" in row:
        raise ValueError(
            "it has a chosen and a rejected answer, and pairs are not trained on; write the chosen "
            "one as an example, as by --columns completion=chosen or --columns messages=chosen"
        )
    if "preferred_output" in row and "non_preferred_output" in row:
        raise ValueError(
            "it has a preferred and another answer, and pairs are not trained on; write its input "
            "and the preferred one as messages"
        )
    if row.keys() & {"mapping", "chat_messages"}:
        raise ValueError(
            "it is a chat as ChatGPT or Claude exports it, which is not read; write its turns as "
            '{"messages": [{"role": "user", "content": "..."}, ...]}'
        )
    raise ValueError(f"{EXPECTED}; it has {shown(row)}")


_NO_TEXT = {dict: " (an object)", list: " (a list)", bool: " (true or false)"}


def shown(record: Record) -> str:
    """The names of a record's fields, for a message; and of those without text, their kind."""
    shown = [f"{key!r:.40}{_NO_TEXT.get(type(value), '')}" for key, value in record.items()]
    return ", ".join(shown[:9]) or "no field with a value"


def _renamed(record: Record, columns: dict[str, str]) -> Record:
    missing = [theirs for theirs in columns.values() if theirs not in record]
    if missing:
        raise ValueError(
            f"it has no field {missing[0]!r}, which --columns names; it has {shown(record)}"
        )
    return {**record, **{ours: record[theirs] for ours, theirs in columns.items()}}


def _from_json(value: object) -> object:
    """A value, decoded if it is JSON text: a cell of a table is text.

    Raises ValueError for a list in another notation, and for a key that an object has twice.
    """
    if not isinstance(value, str):
        return value
    try:
        return from_json_once(value)
    except RepeatedKeyError:
        raise
    except ValueError as error:
        if value.lstrip().startswith("["):
            raise ValueError(
                f"its list is text that is no JSON ({error}); where it has Python's "
                "single quotes, write it with json.dumps, or all rows as .jsonl"
            ) from error
        return value


def _tools(row: Record) -> object:
    """The row's tools; OpenAI's older `functions` are the same without what wraps them."""
    if row.get("tools") is not None:
        return row["tools"]
    functions = _from_json(row.get("functions"))
    return _wrapped(functions) if isinstance(functions, list) else functions


def _wrapped(functions: list[Any]) -> list[Any]:
    """Declarations of functions, as transformers' templates expect them."""
    return [
        {"type": "function", "function": function}
        if isinstance(function, dict) and "function" not in function and "name" in function
        else function
        for function in functions
    ]


def _variables(row: Record) -> dict[str, Any]:
    given = _from_json(row.get("chat_template_kwargs") or {})
    if not isinstance(given, dict):
        raise ValueError("chat_template_kwargs is not an object")
    documents = _from_json(row.get("documents"))
    return {**given, **({} if documents is None else {"documents": documents})}


def _turns(turns: object) -> object:
    """Messages, where ShareGPT's `from` and `value` may stand for `role` and `content`."""
    if not isinstance(turns, list):
        return turns
    return [_turn(turn) if isinstance(turn, dict) else turn for turn in turns]


def _turn(turn: Record) -> Record:
    names = ("role", "content") if "role" in turn else ("from", "value")
    rest = {key: value for key, value in turn.items() if key not in names}
    speaker, value = (turn.get(name) for name in names)
    if speaker in CALLERS:
        return {**rest, "role": "assistant", "tool_calls": _wrapped(_calls(speaker, value))}
    if speaker is None or "role" in turn:
        return turn
    if isinstance(value, dict | list) and speaker in ("observation", "tool", "function_response"):
        value = json.dumps(value, ensure_ascii=False)
    return {**rest, "role": speaker, "content": value}


def _calls(speaker: str, value: object) -> list[Any]:
    """The calls that a turn's text is. Raises ValueError for another text."""
    calls = _from_json(value)
    calls = [calls] if isinstance(calls, dict) else calls
    if isinstance(calls, list) and all(isinstance(call, dict) and "name" in call for call in calls):
        return calls
    raise ValueError(f"a turn of {speaker!r} is no call, as {_CALL} is: {value!r:.80}")


def _sharegpt(row: Record) -> Conversation:
    turns = _from_json(row["conversations"])
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError("conversations is not a list of messages")
    tools = _from_json(_tools(row) or None)
    tools = _wrapped(tools) if isinstance(tools, list) else tools
    return Conversation([*_system(row), *map(_turn, turns)], tools, 0, _variables(row))


def _system(row: Record) -> list[Record]:
    """The message of a row's `system`. Raises ValueError where that is no text."""
    text = as_text(row.get("system"))
    if not isinstance(text, str | None):
        raise ValueError(f"its system is not text: {text!r:.80}")
    return [{"role": "system", "content": text}] if text else []


def _alpaca(row: Record, instruction: str, output: str, has_template: bool) -> tuple[str, Example]:
    given = as_text(row.get("input"))
    if not isinstance(given, str | None):
        raise ValueError("its input is not text")
    if has_template:
        messages = [
            *_system(row),
            *_history(_from_json(row.get("history"))),
            {"role": "user", "content": f"{instruction}\n\n{given}" if given else instruction},
            {"role": "assistant", "content": output},
        ]
        return "Alpaca, as conversations", Conversation(messages)
    context = ", paired with an input that provides further context" if given else ""
    written = f"\n\n### Input:\n{given}" if given else ""
    prompt = (
        f"Below is an instruction that describes a task{context}. Write a response that "
        "appropriately completes the request.\n\n"
        f"### Instruction:\n{instruction}{written}\n\n### Response:\n"
    )
    return "Alpaca, in Alpaca's prompt", Completion(prompt, output)


def _history(history: object) -> list[dict[str, Any]]:
    """Earlier turns as LLaMA-Factory writes them: pairs of a question and its answer."""
    if history is None or history == "":
        return []
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    ):
        raise ValueError("its history is no list of pairs of a question and its answer")
    roles = ("user", "assistant")
    return [
        {"role": role, "content": text}
        for pair in history
        for role, text in zip(roles, pair, strict=True)
    ]
