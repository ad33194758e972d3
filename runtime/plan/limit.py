"""The memory that the system lets the process take, such as a container's limit, and the budget."""

from __future__ import annotations

from runtime.core.errors import BudgetError
from runtime.core.units import format_bytes
from runtime.machine.machine import Machine

# Bytes that the kernel counts beyond a process's footprint and cannot drop: page tables, stacks,
# its own buffers, and the file pages that are in use at that moment. With 4 MB beside a peak of
# 38 MB it killed a run, with 8 MB it did not.
KERNEL_BYTES = 8_000_000


def check_limit(machine: Machine, budget_bytes: int, minimum_bytes: int) -> None:
    """Refuse a budget that the system would not let the process take.

    minimum_bytes: the smallest budget that fits.

    Raises:
        BudgetError: the machine's limit is lower.
    """
    limit_bytes = machine.limit_bytes
    if limit_bytes is None or budget_bytes <= limit_bytes:
        return
    raise BudgetError(
        f"budget {format_bytes(budget_bytes)} > {format_bytes(limit_bytes)}, the memory limit "
        f"under which this process runs (of its container or control group): the system would "
        f"kill it; {_ways_out(limit_bytes, budget_bytes, minimum_bytes)}"
    )


def limit_warning(limit_bytes: int | None, budget_bytes: int, minimum_bytes: int) -> str:
    """The warning where a limit leaves less beside the budget than the kernel takes; else empty."""
    if limit_bytes is None or limit_bytes - budget_bytes >= KERNEL_BYTES:
        return ""
    return (
        f"the memory limit under which this process runs (of its container or control group), "
        f"{format_bytes(limit_bytes)}, leaves {format_bytes(limit_bytes - budget_bytes)} beside "
        f"the budget of {format_bytes(budget_bytes)}; the kernel takes up to "
        f"{format_bytes(KERNEL_BYTES)} for the process, and may kill it: "
        f"{_ways_out(limit_bytes, budget_bytes, minimum_bytes)}"
    )


def _ways_out(limit_bytes: int, budget_bytes: int, minimum_bytes: int) -> str:
    lower_bytes = limit_bytes - KERNEL_BYTES
    least = format_bytes(budget_bytes + KERNEL_BYTES, up=True)
    if lower_bytes >= minimum_bytes:
        return f"give --budget {format_bytes(lower_bytes)} or less, or raise the limit to {least}"
    smallest = format_bytes(minimum_bytes, up=True)
    return f"raise the limit to {least}; the smallest budget that fits is {smallest}"
