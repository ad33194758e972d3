"""The memory that the system lets the process take, such as a container's limit, and the budget."""

from __future__ import annotations

from ondevice.errors import BudgetError
from ondevice.units import format_bytes
from runtime.system.machine import Machine

# What the kernel counts for a process beyond its footprint and cannot drop: page tables, stacks and
# buffers of its own, and the file pages that are in use at that moment.
KERNEL_BYTES = 8_000_000
HOW = "raise the limit of the container or control group"


def check_limit(machine: Machine, budget_bytes: int) -> None:
    """Refuse a budget that the system would not let the process take.

    Raises:
        BudgetError: the machine's limit is lower.
    """
    limit_bytes = machine.limit_bytes
    if limit_bytes is None or budget_bytes <= limit_bytes:
        return
    least = format_bytes(budget_bytes + KERNEL_BYTES, up=True)
    lower_bytes = limit_bytes - KERNEL_BYTES
    lower = f"give --budget {format_bytes(lower_bytes)} or less, or " if lower_bytes > 0 else ""
    raise BudgetError(
        f"budget {format_bytes(budget_bytes)} > {format_bytes(limit_bytes)}, the memory limit "
        f"under which this process runs: the system would kill it; {lower}{HOW} to {least}"
    )


def limit_warning(limit_bytes: int | None, budget_bytes: int) -> str:
    """What to say where a limit leaves less beside the budget than the kernel takes."""
    if limit_bytes is None or limit_bytes - budget_bytes >= KERNEL_BYTES:
        return ""
    return (
        f"the memory limit under which this process runs, {format_bytes(limit_bytes)}, leaves "
        f"{format_bytes(limit_bytes - budget_bytes)} beside the budget of "
        f"{format_bytes(budget_bytes)}; the kernel takes up to {format_bytes(KERNEL_BYTES)} for "
        f"the process, and may kill it: give --budget "
        f"{format_bytes(max(0, limit_bytes - KERNEL_BYTES))}, or {HOW}"
    )
