"""Function calls as text, [name(argument=value, ...), ...], written and read; nothing is run.

The text is Python's syntax, and is read to the same calls as by the leaderboard's own reader, with
one difference: that one evaluates arithmetic and lambdas of the model's text as a program. Here
arithmetic with numbers is worked out, and anything else of the kind is malformed.
"""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable
from typing import Any

from harness.tasks.bfcl.package import Calls

MOST_CHARACTERS = 20_000  # of an answer; Python's parser takes deep nesting badly
_MOST_DIGITS = 1000  # of a number that arithmetic makes
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def write(calls: Calls) -> str:
    """The text of calls, on one line."""
    written = []
    for call in calls:
        for name, arguments in call.items():
            given = (f"{key}={literal(value)}" for key, value in arguments.items())
            written.append(f"{name}({', '.join(given)})")
    return f"[{', '.join(written)}]"


def literal(value: Any) -> str:
    """A value of JSON as Python writes it, with text in double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{literal(key)}: {literal(item)}' for key, item in value.items())}}}"
    return repr(value)


def read(text: str) -> Calls:
    """The calls in an answer, a list or a single one. Raises ValueError where it is malformed."""
    cleaned = text.strip().strip("'")
    if len(cleaned) > MOST_CHARACTERS:
        raise ValueError(f"{len(cleaned)} characters are more than {MOST_CHARACTERS}")
    try:
        parsed = ast.parse(cleaned, mode="eval").body
        if isinstance(parsed, ast.Call):
            return [_call(parsed)]
        if not isinstance(parsed, ast.List | ast.Tuple | ast.Set):
            raise ValueError("it is neither a call nor a list of calls")
        return [_call(element) for element in parsed.elts]
    except (SyntaxError, TypeError, ArithmeticError, RecursionError, MemoryError) as problem:
        raise ValueError(str(problem) or type(problem).__name__) from None


def _call(node: ast.expr) -> dict[str, Any]:
    if not isinstance(node, ast.Call):
        raise ValueError(f"{ast.unparse(node)[:80]!r} is no call")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("a call has ** among its arguments")
        arguments[keyword.arg] = _value(keyword.value)
    return {_name(node.func): arguments}


def _name(node: ast.expr) -> str:
    """A name with its dots; after an expression that is no name, only the names that follow it."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        parts.append(node.id)
    return ".".join(reversed(parts))


def _value(node: ast.expr) -> Any:
    """A value as the leaderboard reads it: names and calls without arguments are text."""
    match node:
        case ast.Constant():
            return "..." if node.value is ... else node.value
        case ast.UnaryOp(operand=ast.Constant(value=int() | float() | complex() as number)):
            return -number  # whatever the sign is
        case ast.List():
            return [_value(element) for element in node.elts]
        case ast.Tuple():
            return tuple(_value(element) for element in node.elts)
        case ast.Dict():
            return {
                _key(key): _value(element)
                for key, element in zip(node.keys, node.values, strict=True)
            }
        case ast.Name():
            return node.id
        case ast.Call():
            return _call(node) if node.keywords else ast.unparse(node)
        case ast.Subscript():
            return f"{ast.unparse(node.value)}[{ast.unparse(node.slice)}]"
        case ast.BinOp():
            return _arithmetic(node)
    raise ValueError(f"{ast.unparse(node)[:80]!r} is no value")


def _key(node: ast.expr | None) -> Any:
    if node is None:
        raise ValueError("a dictionary has ** in it")
    return _value(node)


def _arithmetic(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _arithmetic(node.left), _arithmetic(node.right)
        result = _OPERATORS[type(node.op)](left, right)
        if isinstance(result, int) and result.bit_length() > 4 * _MOST_DIGITS:
            raise ValueError(f"a number of more than {_MOST_DIGITS} digits")
        return result
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_arithmetic(node.operand)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    raise ValueError(f"{ast.unparse(node)[:80]!r} is no number")
