"""The option --parallel: how several processes share the work, started together or one by one."""

from __future__ import annotations

from typing import Any, NamedTuple

from runtime.config.base import Group, expanded, option, readable

MOST_WORKERS = 1024
FOLDER, JOIN = "folder", "join"


class Grid(NamedTuple):
    """So many workers share the rows, and so many the perturbations of each row."""

    data: int = 1
    perturb: int = 1

    @property
    def size(self) -> int:
        return self.data * self.perturb


def grid_of(text: str | None) -> Grid:
    """The grid in "data=2,perturb=2"; a single worker without one. Raises ValueError."""
    if text is None:
        return Grid()
    pairs = [part.partition("=")[::2] for part in text.split(",")]
    counts = {name.strip(): int(count) for name, count in pairs}
    grid = Grid(**counts) if len(counts) == len(pairs) and {*counts} <= {*Grid._fields} else None
    if grid is None or min(grid) < 1 or grid.size > MOST_WORKERS:
        raise ValueError(text)
    return grid


def shared_folder(text: str | None) -> tuple[str, str] | None:
    """FOLDER or JOIN, and the folder, in "folder=DIR" or "join=DIR"; None for what is a grid."""
    word, _, path = (text or "").partition("=")
    return (word, path) if word in (FOLDER, JOIN) and path else None


def _with_whole_path(text: str) -> str:
    shared = shared_folder(text)
    return text if shared is None else f"{shared[0]}={expanded(shared[1])}"


def parallel_field(
    *names: str, processes: str = "that mpirun has started", folder: bool = False
) -> Any:
    """The field for how many processes share what; `names` are those of a `Grid` that may be.

    folder: whether devices that come and go may also share the work through a folder.
    """
    example = ",".join(f"{name}=2" for name in names)
    through = f"; or by a folder: {FOLDER}=DIR trains a run, {JOIN}=DIR helps" if folder else ""
    return option(
        None,
        f"how the processes {processes} share the work, such as {example}: "
        + " and ".join({"data": "rows (data)", "perturb": "perturbations"}[name] for name in names)
        + f"{through}; see docs/several-machines.md",
        readable(
            lambda text: (folder and shared_folder(text)) or _grid_over(text, names),
            f"numbers of workers such as {example}" + (f", or {FOLDER}=DIR" if folder else ""),
            _with_whole_path,
        ),
        Group.MEMORY,
        metavar=",".join(f"{name}=N" for name in names) + (f"|{FOLDER}=DIR" if folder else ""),
    )


def _grid_over(text: str, names: tuple[str, ...]) -> Grid:
    """The grid, if it shares nothing but `names`. Raises ValueError."""
    grid = grid_of(text)
    if any(count > 1 and name not in names for name, count in grid._asdict().items()):
        raise ValueError(text)
    return grid
