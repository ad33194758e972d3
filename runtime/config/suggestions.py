"""Suggestions for commands and options that do not exist."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from runtime.config.base import flag as flag_of
from runtime.config.elsewhere import (
    ADVICE,
    COMMAND_ADVICE,
    COMMANDS_ELSEWHERE,
    FLAGS_ELSEWHERE,
    VALUE_ADVICE,
    VALUES_ELSEWHERE,
)

_QUOTED = re.compile("`[^`]*`")
_FLAG = re.compile(r"(?<!\w)--[a-z][a-z-]*")


def alike(word: str, words: Sequence[str], least: float = 0.6) -> list[str]:
    """The word that is most like another, if one is; `least` of their letters are the same."""
    import difflib  # a quarter of a megabyte, which training would have to hold

    return difflib.get_close_matches(word, words, n=1, cutoff=least)


def no_command(word: str, names: Sequence[str]) -> str:
    """The message for a command that does not exist."""
    name = word.lower().replace("_", "-")
    if name in COMMAND_ADVICE:
        return f"no command {word!r}: {COMMAND_ADVICE[name]}"
    meant = COMMANDS_ELSEWHERE.get(name, "")
    if meant.split(" ")[0] not in (*names, "--help", "--version"):
        meant = next(iter(alike(word.lower(), names)), "")
    hint = f"did you mean {meant}?" if meant else f"there are {', '.join(names)}"
    return f"no command {word!r}; {hint}"


def not_known(
    words: Sequence[str],
    there: Sequence[str],
    command: str,
    others: Callable[[str], Sequence[str]] = lambda flag: (),
) -> str:
    """The message for arguments that a command does not have; `there` are its long flags.

    others: the names of the commands that have a flag.
    """
    values = _values(words)
    near = []
    for flag, value in values.items():
        meant, advice = _meant(flag, there, command)
        is_slip = flag != meant and flag not in FLAGS_ELSEWHERE
        ours_advice = VALUE_ADVICE.get(meant, {}).get(value.lower())
        if ours_advice and not is_slip:
            return f"{flag} {value}: {ours_advice}"
        if advice:
            return f"{flag}: {advice}"
        ours = VALUES_ELSEWHERE.get(meant, {}).get(value.lower())
        near += [f"{meant} {ours or ''}".strip()] if meant else []
    if words and not values and "--prompt" in there:
        return f"unrecognized arguments: {' '.join(words)}; a prompt is given by --prompt TEXT"
    meant = f"did you mean {' or '.join(dict.fromkeys(near))}?"
    of_others = [
        f"{flag} is an option of {', '.join(names)}; " for flag in values if (names := others(flag))
    ]
    hint = meant if near else f"{''.join(of_others)}see: {command} --help"
    return f"unrecognized arguments: {' '.join(words)}; {hint}"


def value_meant(name: str, value: object) -> str:
    """What a value that an option does not take may mean, as the end of a message; often empty."""
    flag, theirs = flag_of(name), str(value).lower()
    if advice := VALUE_ADVICE.get(flag, {}).get(theirs):
        return f"; {advice}"
    ours = VALUES_ELSEWHERE.get(flag, {}).get(theirs)
    return f"; did you mean {ours}?" if ours else ""


def _values(words: Sequence[str]) -> dict[str, str]:
    """The flags among arguments, each with its value, which is empty where there is none."""
    values: dict[str, str] = {}
    flag = ""
    for word in words:
        if word.startswith("-"):
            flag, _, value = word.partition("=")
            flag = flag.replace("_", "-")
            values[flag] = value
        elif flag and not values[flag]:
            values[flag] = word
    return values


def unknown_key(key: str, there: Sequence[str], command: str) -> str:
    """The message for a key that a configuration does not have; `there` are those that it has."""
    flag, flags = flag_of(key), [flag_of(name) for name in there]
    meant, advice = _meant(flag, flags, command)
    if advice:
        return f"unknown key {key!r}: {advice}"
    hint = f"; did you mean {meant.removeprefix('--').replace('-', '_')}?" if meant else ""
    return f"unknown key {key!r}{hint}"


def _meant(flag: str, there: Sequence[str], command: str) -> tuple[str, str]:
    """Our flag that is meant, if the command has one; else the way to the same end, if known.

    That way is told where the command has all flags that stand outside its commands in backquotes.
    A name that other programs have is no slip of the pen, and is like no other.
    """
    ours = [name.removeprefix(f"{command} ") for name in FLAGS_ELSEWHERE.get(flag, ())]
    for name in (flag, *ours):
        if name in there:
            return name, ""
    way = next((ADVICE[name] for name in (flag, *ours) if name in ADVICE), "")
    if way and {*_FLAG.findall(_QUOTED.sub("", way))} <= {*there}:
        return "", way
    return "" if ours else next(iter(alike(flag, there, least=0.8)), ""), ""
