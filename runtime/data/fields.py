"""The formats of data, which are recognised by the fields of a record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runtime.core.documents import from_json

Record = dict[str, Any]

EXPECTED = (
    'expected {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": '
    '"..."}]}, {"prompt": "...", "completion": "..."}, {"text": "..."}, Alpaca\'s {"instruction", '
    '"input", "output"} or ShareGPT\'s {"conversations"}; name other fields by --columns, as in '
    "--columns prompt=question,completion=answer"
)
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


@dataclass(frozen=True)
class Conversation:
    """Messages, and declarations of tools; answers count from message `first` on."""

    messages: object
    tools: object = None
    first: int = 0


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
    """An example, and the name of the format that it was read from."""

    format: str
    example: Example


def recognise(record: object, columns: dict[str, str], has_template: bool) -> Recognised:
    """The example in a record, whose fields `columns` renames (our name: theirs).

    Alpaca's rows become conversations if the model has a chat template, and else Alpaca's own
    prompt. Raises ValueError where no format fits.
    """
    if not isinstance(record, dict):
        raise ValueError(EXPECTED)
    row = _renamed(record, columns)
    if row.get("messages") is not None:
        messages = _from_json(row["messages"])
        return Recognised("messages", Conversation(messages, row.get("tools")))
    if row.get("conversations") is not None:
        return _sharegpt(row)
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        both = Conversation([*prompt, *completion], row.get("tools"), len(prompt))
        return Recognised("prompt and completion, as messages", both)
    if isinstance(prompt, str) and isinstance(completion, str):
        return Recognised("prompt and completion", Completion(prompt, completion))
    if isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str):
        return _alpaca(row, has_template)
    if isinstance(row.get("text"), str):
        return Recognised("text", PlainText(row["text"]))
    raise ValueError(EXPECTED)


def _renamed(record: Record, columns: dict[str, str]) -> Record:
    missing = [theirs for theirs in columns.values() if theirs not in record]
    if missing:
        raise ValueError(
            f"it has no field {missing[0]!r}, which --columns names; it has "
            f"{', '.join(map(repr, list(record)[:9])) or 'none'}"
        )
    return {**record, **{ours: record[theirs] for ours, theirs in columns.items()}}


def _from_json(value: object) -> object:
    """A value, decoded if it is JSON text: a cell of a table is text.

    Raises ValueError for a list in another notation.
    """
    if not isinstance(value, str):
        return value
    try:
        return from_json(value)
    except ValueError as error:
        if value.lstrip().startswith("["):
            raise ValueError(
                f"its list of messages is text that is no JSON ({error}); where it has Python's "
                "single quotes, write it with json.dumps, or all rows as .jsonl"
            ) from error
        return value


def _sharegpt(row: Record) -> Recognised:
    turns = _from_json(row["conversations"])
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError("conversations is not a list of messages")
    messages = []
    if isinstance(row.get("system"), str) and row["system"]:
        messages.append({"role": "system", "content": row["system"]})
    for number, turn in enumerate(turns, 1):
        if "from" not in turn:
            messages.append(turn)
            continue
        speaker = turn["from"]
        if not isinstance(speaker, str) or speaker not in _SPEAKERS:
            raise ValueError(
                f"message {number} is from {speaker!r}; known are {', '.join(_SPEAKERS)}"
            )
        messages.append({"role": _SPEAKERS[speaker], "content": turn.get("value")})
    return Recognised("ShareGPT", Conversation(messages, row.get("tools")))


def _alpaca(row: Record, has_template: bool) -> Recognised:
    instruction, given, output = row["instruction"], row.get("input") or "", row["output"]
    if has_template:
        messages = [
            {"role": "user", "content": f"{instruction}\n\n{given}" if given else instruction},
            {"role": "assistant", "content": output},
        ]
        if isinstance(row.get("system"), str) and row["system"]:
            messages.insert(0, {"role": "system", "content": row["system"]})
        return Recognised("Alpaca, as conversations", Conversation(messages))
    context = ", paired with an input that provides further context" if given else ""
    written = f"\n\n### Input:\n{given}" if given else ""
    prompt = (
        f"Below is an instruction that describes a task{context}. Write a response that "
        "appropriately completes the request.\n\n"
        f"### Instruction:\n{instruction}{written}\n\n### Response:\n"
    )
    return Recognised("Alpaca, in Alpaca's prompt", Completion(prompt, output))
