"""The keys of records and messages that are read, or that change nothing of what is learnt.

Any other key is named, with the number of its rows, in the report of the data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

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
"""Keys of KTO's rows, in any format: false marks an answer that is not to be learnt."""
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


def not_read(keys: Iterable[object], read: Collection[object]) -> list[str]:
    """The keys that are neither read nor neutral."""
    return [str(key) for key in keys if key not in NEUTRAL and key not in read]
