"""Suggestions for commands and options that do not exist."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.config.elsewhere import ADVICE, COMMAND_ADVICE, COMMANDS_ELSEWHERE, FLAGS_ELSEWHERE


def alike(word: str, words: Sequence[str]) -> list[str]:
    """The word that is most like another, if one is."""
    import difflib  # a quarter of a megabyte, which training would have to hold

    return difflib.get_close_matches(word, words, n=1)


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


def not_known(words: Sequence[str], there: Sequence[str], command: str) -> str:
    """The message for arguments that a command does not have; `there` are its long flags."""
    flags = [word.partition("=")[0].replace("_", "-") for word in words if word.startswith("-")]
    for flag in flags:
        if flag in ADVICE:
            return f"{flag}: {ADVICE[flag]}"
    if words and not flags and "--prompt" in there:
        return f"unrecognized arguments: {' '.join(words)}; a prompt is given by --prompt TEXT"
    near = [name for flag in flags for name in _meant(flag, there)]
    meant = f"did you mean {' or '.join(dict.fromkeys(near))}?"
    hint = meant if near else f"see: {command} --help"
    return f"unrecognized arguments: {' '.join(words)}; {hint}"


def unknown_key(key: str, there: Sequence[str]) -> str:
    """The message for a key that a configuration does not have; `there` are those that it has."""
    flag = _flag(key)
    if flag in ADVICE:
        return f"unknown key {key!r}: {ADVICE[flag]}"
    near = _meant(flag, [_flag(name) for name in there])
    hint = f"; did you mean {near[0].removeprefix('--').replace('-', '_')}?" if near else ""
    return f"unknown key {key!r}{hint}"


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _meant(flag: str, there: Sequence[str]) -> list[str]:
    """The flag that is meant, if any of those that there are is."""
    named = [flag, *FLAGS_ELSEWHERE.get(flag, ())]
    return [name for name in named if name in there][:1] or alike(flag, there)
