"""Reading the project's own source for what its rules refuse: names compared, draws, words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Set
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("ondevice", "export", "runtime", "harness")
Found = Iterator[tuple[ast.AST, str]]  # a place, and the source that stands there


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parsed(source: str) -> ast.Module:
    return ast.parse(source)


# --- names of operations and of methods -------------------------------------------------------


def strings_in(node: ast.AST, known: dict[str, Set[str]]) -> Set[str]:
    """The strings that an expression is, or that a display of it holds; names are looked up."""
    if isinstance(node, ast.Constant):
        return {node.value} if isinstance(node.value, str) else set()
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return set().union(*(strings_in(item, known) for item in node.elts))
    if isinstance(node, ast.Dict):
        return set().union(*(strings_in(key, known) for key in node.keys if key is not None))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        builds = node.func.id in {"frozenset", "set", "tuple", "list"}
        return set().union(*(strings_in(item, known) for item in node.args)) if builds else set()
    if isinstance(node, ast.Name):
        return known.get(node.id, set())
    return set()


def constants(tree: ast.Module) -> dict[str, Set[str]]:
    """What the names that a module assigns at its top level stand for, where that is strings."""
    known: dict[str, Set[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        known |= dict.fromkeys(names, strings_in(value, known))
    return known


def names_among(tree: ast.Module, names: Set[str]) -> Found:
    """Variables and parameters with one of the names."""
    for node in ast.walk(tree):
        name = node.id if isinstance(node, ast.Name) else getattr(node, "arg", None)
        if name in names and not isinstance(node, ast.keyword):
            yield node, str(name)


def names_told_apart(tree: ast.Module, names: Set[str]) -> Found:
    """Where code does one thing or another by a name: comparisons, look-ups and tables by name."""
    known = constants(tree)

    def named(*nodes: ast.AST | None) -> bool:
        return any(strings_in(node, known) & names for node in nodes if node is not None)

    def constant(node: ast.AST) -> bool:
        return isinstance(node, ast.Constant) and node.value in names

    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            refused = named(node.left, *node.comparators)
        elif isinstance(node, ast.MatchValue):
            refused = constant(node.value)
        elif isinstance(node, ast.Subscript):
            refused = isinstance(node.ctx, ast.Load) and constant(node.slice)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asks = node.func.attr in {"get", "pop", "startswith", "endswith", "removeprefix"}
            refused = asks and named(*node.args[:1])
        elif isinstance(node, ast.Dict):
            refused = len(strings_in(node, {}) & names) > 1
        else:
            continue
        if refused:
            yield node, ast.unparse(node)


def classes_told_apart(tree: ast.Module, classes: Set[str]) -> Found:
    """Where code does one thing or another by the class of an operation."""

    def named(node: ast.AST) -> bool:
        ids = (n.id if isinstance(n, ast.Name) else getattr(n, "attr", "") for n in ast.walk(node))
        return not classes.isdisjoint(ids)

    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            asks = node.func.id in {"isinstance", "issubclass"} and len(node.args) == 2
            refused = asks and named(node.args[1])
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            typed = any(
                isinstance(side, ast.Call) and dotted(side.func) == "type" for side in sides
            )
            refused = typed and any(map(named, sides))
        elif isinstance(node, ast.MatchClass):
            refused = named(node.cls)
        else:
            continue
        if refused:
            yield node, ast.unparse(node)


# --- draws ------------------------------------------------------------------------------------

RANDOM = re.compile(r"(np|numpy|mx)\.random\.|(random|secrets|uuid)\.|os\.urandom$")
RANDOM_MODULES = {"random", "secrets", "numpy.random", "mlx.core.random", "uuid"}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def last_name(node: ast.AST) -> str:
    return dotted(node).rpartition(".")[2]


def draws_without_the_seed(tree: ast.Module) -> Found:
    """Calls of generators of random numbers to which nothing named `seed` or `rng` is given."""
    imported = {
        name.asname or name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in RANDOM_MODULES
        for name in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = dotted(node.func)
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            inside = {last_name(inner) for value in given for inner in ast.walk(value)}
            if (called in imported or RANDOM.match(called)) and not inside & {"seed", "rng"}:
                yield node, ast.unparse(node)


def calls_of_sleep(tree: ast.Module) -> Found:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func) in ("time.sleep", "sleep"):
            yield node, ast.unparse(node)


# --- imports and words ------------------------------------------------------------------------


def imported_modules(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            yield base
            yield from (f"{base}.{name.name}" for name in node.names)


def lines_with(text: str, pattern: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if pattern.search(line):
            yield number, line.strip()


# --- printing ---------------------------------------------------------------------------------


def calls_of_print(tree: ast.Module) -> Found:
    """Where text is written to stdout or stderr."""
    writing = {"print", "sys.stdout.write", "sys.stderr.write"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func) in writing:
            yield node, ast.unparse(node.func)
