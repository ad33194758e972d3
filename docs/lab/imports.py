"""A picture of which folders import which, floor by floor, and how large each floor is.

    python docs/lab/imports.py OUT.svg [CHECKOUT]

An arrow goes from what imports to what is imported; from a lower floor it is red. Left out are
arrows that follow from others, and those between a package's own files and its folders.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path

import grimp

FLOORS = ("ondevice", "harness", "export", "runtime")
WIDTH, LEFT, ROW, GAP = 784, 96, 54, 14
FORMS = "svg { font: 13px system-ui, sans-serif; } .floor { font-size: 15px; font-weight: 600; }"
PAINTS = """
.paper, .box {{ fill: {0}; }} .band {{ fill: {1}; }} .box, .down {{ stroke: {2}; }}
#down path {{ fill: {2}; }} text {{ fill: {3}; }} .up {{ stroke: {4}; }} #up path {{ fill: {4}; }}
"""
LIGHT = PAINTS.format("#fff", "#f1f3f5", "#6b7178", "#1b1b1b", "#c8102e")
DARK = PAINTS.format("#16181b", "#22262a", "#9aa1a8", "#e8e8e8", "#ff6b6b")
STYLE = f"{FORMS}{LIGHT}@media (prefers-color-scheme: dark) {{{DARK}}}"
HEAD = """<marker id="{}" refX="6" refY="3" markerWidth="6" markerHeight="6" orient="auto">
<path d="M0 0L6 3L0 6z"/></marker>"""
SVG = f"""<svg xmlns="http://www.w3.org/2000/svg" width="{{0}}" height="{{1}}" role="img">
<title>Imports between folders</title><style>{{2}}</style>
<defs>{HEAD.format("down")}{HEAD.format("up")}</defs>
<rect class="paper" width="100%" height="100%"/>{{3}}
</svg>
"""
BOX = """<g transform="translate({:.1f} {})">
<rect class="box" x="-48" y="-13" width="96" height="26" rx="4"/>
<text y="5" text-anchor="middle">{}</text></g>"""
ARROW = '<path class="{0}" marker-end="url(#{0})" d="M{1:.1f} {2}L{3:.1f} {4}"/>'
Edge = tuple[str, str]  # a folder that imports, and a folder that is imported


def floor_of(folder: str) -> int:
    return FLOORS.index(folder.partition(".")[0])


def is_upward(edge: Edge) -> bool:
    return floor_of(edge[1]) < floor_of(edge[0])


def imports_of(root: Path) -> Counter[Edge]:
    """How many modules each folder imports of another one."""

    def folder_of(module: str) -> str:
        package, *rest = module.split(".")
        return f"{package}.{rest[0]}" if rest and (root / package / rest[0]).is_dir() else package

    sys.path.insert(0, str(root))
    graph = grimp.build_graph(*FLOORS, cache_dir=None)
    pairs = ((m, n) for m in graph.modules for n in graph.find_modules_directly_imported_by(m))
    edges = ((folder_of(m), folder_of(n)) for m, n in pairs)
    return Counter((importer, imported) for importer, imported in edges if importer != imported)


def reduced(edges: set[Edge]) -> set[Edge]:
    """The edges of an acyclic graph that do not follow from others."""

    @cache
    def below(folder: str) -> frozenset[str]:
        direct = [imported for importer, imported in edges if importer == folder]
        return frozenset(direct).union(*map(below, direct))

    return edges - {(a, c) for a, b in edges for c in below(b)}


def centres(edges: set[Edge]) -> Iterator[tuple[str, tuple[float, float]]]:
    """The centre of each folder's box; what it imports of its own floor is further down."""

    @cache
    def order(folder: str) -> tuple[int, int]:  # its floor, and minus its height above the ground
        same = [b for a, b in edges if a == folder and floor_of(a) == floor_of(b)]
        return floor_of(folder), min((order(b)[1] for b in same), default=0) - 1

    folders = sorted(sorted({name for edge in edges for name in edge}), key=order)
    for row, ((floor, _), level) in enumerate(groupby(folders, order)):
        names = list(level)
        for index, name in enumerate(names):  # alone on neighbouring rows: left, then right
            share = (index + 0.5) / len(names) if len(names) > 1 else (0.3, 0.7)[row % 2]
            x = LEFT + share * (WIDTH - LEFT - GAP)
            yield name, (x, (row + 0.5) * ROW + (floor + 1) * GAP)


def drawn(edges: set[Edge]) -> str:
    at = dict(centres(edges))
    height = max(y for _, y in at.values()) + ROW / 2 + GAP
    parts = []
    for number, floor in enumerate(FLOORS):
        ys = [y for name, (_, y) in at.items() if floor_of(name) == number]
        top, size = min(ys) - ROW / 2, max(ys) - min(ys) + ROW
        parts.append(f'<rect class="band" x="6" y="{top}" width="772" height="{size}" rx="6"/>')
        parts.append(f'<text class="floor" x="14" y="{top + 22}">{floor}</text>')
    for edge in sorted(edges, key=lambda edge: (is_upward(edge), edge)):
        (x, y), (to_x, to_y) = at[edge[0]], at[edge[1]]
        kind, side = ("up", -13) if is_upward(edge) else ("down", 13)
        lean = max(-40, min(40, 0.25 * (to_x - x)))
        parts.append(ARROW.format(kind, x + lean, y + side, to_x - lean, to_y - side))
    for name, (x, y) in at.items():
        parts.append(BOX.format(x, y, name.partition(".")[2] or f"{name}/*.py"))
    return SVG.format(WIDTH, height, STYLE, "\n".join(parts))


def main(out: Path, root: Path) -> None:
    imports = imports_of(root)
    up = {edge for edge in imports if is_upward(edge)}
    own_files = {(a, b) for a, b in imports if floor_of(a) == floor_of(b) and {a, b} & {*FLOORS}}
    out.write_text(drawn(reduced({*imports} - up - own_files) | up))
    for floor in (*FLOORS, "tests"):
        lengths = [len(path.read_text().splitlines()) for path in (root / floor).rglob("*.py")]
        print(f"| `{floor}` | {len(lengths)} | {sum(lengths):,} |")
    print(f"imports from a lower floor: {sum(imports[edge] for edge in up)} of {imports.total()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else ".").resolve())
