"""A budget and the system's own limit: refused below it, warned of near it."""

from __future__ import annotations

import msgspec
import pytest
from support.bundles import Tiny
from support.plans import LINUX, PLENTY, plan_of, task_of

from ondevice.cli.describe import describe_plan
from runtime.core.errors import BudgetError
from runtime.plan.limit import KERNEL_BYTES


@pytest.mark.parametrize("beside", [-1, 0, KERNEL_BYTES - 1, KERNEL_BYTES, PLENTY])
def test_a_limit_beside_the_budget(tiny: Tiny, beside: int) -> None:
    manifest = tiny("qwen2").manifest
    machine = msgspec.structs.replace(LINUX, limit_bytes=PLENTY + beside)
    if beside < 0:
        with pytest.raises(BudgetError, match="budget 1 GB > 1 GB, the memory limit under which"):
            plan_of(manifest, task_of(32), PLENTY, machine)
        return
    plan = plan_of(manifest, task_of(32), PLENTY, machine)
    assert bool(plan.warning) == (beside < KERNEL_BYTES)
    assert "memory limit of this process" in describe_plan(plan.to_json())
    free = plan_of(manifest, task_of(32), PLENTY, LINUX)
    assert msgspec.structs.replace(plan, limit_bytes=None) == free
    assert not free.warning
    assert "memory limit" not in describe_plan(free.to_json())


def test_a_limit_below_every_budget_names_none(tiny: Tiny) -> None:
    machine = msgspec.structs.replace(LINUX, limit_bytes=KERNEL_BYTES // 2)
    with pytest.raises(BudgetError) as caught:
        plan_of(tiny("qwen2").manifest, task_of(32), PLENTY, machine)
    assert "--budget" not in str(caught.value)
    assert "raise the limit to 1.01 GB; the smallest budget that fits is" in str(caught.value)
