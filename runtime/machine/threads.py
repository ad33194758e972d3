"""Threads that share compiled work, and wait for it briefly before they sleep.

Work is a function in LLVM's language of the addresses of a job and of a thread's own memory; it
takes part after part of the job until none is left, counting in the job's first number. A thread
that comes late, or that the system runs elsewhere, is not waited for unless it has begun a part.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import cache, partial

import numpy as np
import numpy.typing as npt

from runtime.machine.machine_code import Function, compile_all, function

SPINS = 4000  # of some 40 ns, before a thread sleeps: to wake it takes 50 us
PATIENCE = 100_000  # spins before the caller sleeps
LATE_CYCLES = 10_000_000  # some 4 ms, for which a job waits besides the time that it took
CODE, LATE = 2, 5
MOST_ALONE = 1000
FIRST = 8  # where a job begins in the numbers that threads share: on a line of the cache of its own
MOST = 24
MOST_THREADS = 1024

# Shared numbers: the ticket, which is odd while a job can be begun; the threads inside it; where
# its code is; the threads that sleep until the ticket changes; whether the caller sleeps until
# none is inside; whether it waited too long. A thread counts itself in, and looks at the ticket
# again. Whoever sleeps says so before the system compares the number for which it waits (futex).
FUTEX = """call i64 asm sideeffect "syscall", "={{rax}},{{rax}},{{rdi}},{{rsi}},{{rdx}},{{r10}},{{r8}},{{r9}},~{{rcx}},~{{r11}},~{{memory}}"(i64 202, ptr {at}, i64 {operation}, i64 {value}, i64 0, i64 0, i64 0)"""  # noqa: E501
WAIT, WAKE = (partial(FUTEX.format, operation=operation) for operation in (128, 129))
LEAD = f"""define void @lead(ptr %shared, ptr %own) {{
begin:
  %inside_at = getelementptr i64, ptr %shared, i64 1
  %code_at = getelementptr i64, ptr %shared, i64 2
  %asleep_at = getelementptr i64, ptr %shared, i64 3
  %waits_at = getelementptr i64, ptr %shared, i64 4
  %late_at = getelementptr i64, ptr %shared, i64 5
  %code = load ptr, ptr %code_at
  %job = getelementptr i64, ptr %shared, i64 8
  %opened = atomicrmw add ptr %shared, i64 1 seq_cst
  %asleep = load atomic i64, ptr %asleep_at seq_cst, align 8
  %awake = icmp eq i64 %asleep, 0
  br i1 %awake, label %run, label %wake
wake:
  %woken = {WAKE(at="%shared", value=MOST_THREADS)}
  br label %run
run:
  %began = call i64 @llvm.readcyclecounter()
  call void %code(ptr %job, ptr %own)
  %ended = call i64 @llvm.readcyclecounter()
  %closed = atomicrmw add ptr %shared, i64 1 seq_cst
  br label %wait
wait:
  %left = phi i64 [{PATIENCE}, %run], [%fewer, %spin], [{PATIENCE}, %sleep]
  %inside = load atomic i64, ptr %inside_at seq_cst, align 8
  %none = icmp eq i64 %inside, 0
  br i1 %none, label %end, label %spin
spin:
  call void @llvm.x86.sse2.pause()
  %fewer = sub i64 %left, 1
  %more = icmp ne i64 %fewer, 0
  br i1 %more, label %wait, label %sleep
sleep:
  store atomic i64 1, ptr %waits_at seq_cst, align 8
  %slept = {WAIT(at="%inside_at", value="%inside")}
  store atomic i64 0, ptr %waits_at seq_cst, align 8
  br label %wait
end:
  %took = sub i64 %ended, %began
  %soon = add i64 %took, {LATE_CYCLES}
  %now = call i64 @llvm.readcyclecounter()
  %waited = sub i64 %now, %ended
  %is_late = icmp ugt i64 %waited, %soon
  %late = zext i1 %is_late to i64
  store i64 %late, ptr %late_at
  ret void
}}
declare i64 @llvm.readcyclecounter()
declare void @llvm.x86.sse2.pause()
"""
SERVE = f"""define void @serve(ptr %shared, ptr %own, i64 %spins) {{
begin:
  %inside_at = getelementptr i64, ptr %shared, i64 1
  %code_at = getelementptr i64, ptr %shared, i64 2
  %asleep_at = getelementptr i64, ptr %shared, i64 3
  %waits_at = getelementptr i64, ptr %shared, i64 4
  %job = getelementptr i64, ptr %shared, i64 8
  br label %look
look:
  %left = phi i64 [%spins, %begin], [%fewer, %idle], [%spins, %sleep], [%spins, %left_it]
  %last = phi i64 [0, %begin], [%last, %idle], [%last, %sleep], [%ticket, %left_it]
  %ticket = load atomic i64, ptr %shared seq_cst, align 8
  %odd = trunc i64 %ticket to i1
  %new = icmp ne i64 %ticket, %last
  %begins = and i1 %odd, %new
  br i1 %begins, label %enter, label %idle
idle:
  call void @llvm.x86.sse2.pause()
  %fewer = sub i64 %left, 1
  %more = icmp ne i64 %fewer, 0
  br i1 %more, label %look, label %sleep
sleep:
  %seen = and i64 %ticket, 4294967295
  %lies = atomicrmw add ptr %asleep_at, i64 1 seq_cst
  %slept = {WAIT(at="%shared", value="%seen")}
  %wakes = atomicrmw sub ptr %asleep_at, i64 1 seq_cst
  br label %look
enter:
  %entered = atomicrmw add ptr %inside_at, i64 1 seq_cst
  %again = load atomic i64, ptr %shared seq_cst, align 8
  %same = icmp eq i64 %again, %ticket
  br i1 %same, label %run, label %leave
run:
  %code = load ptr, ptr %code_at
  call void %code(ptr %job, ptr %own)
  br label %leave
leave:
  %were = atomicrmw sub ptr %inside_at, i64 1 seq_cst
  %waits = load atomic i64, ptr %waits_at seq_cst, align 8
  %waited = icmp ne i64 %waits, 0
  br i1 %waited, label %tell, label %left_it
tell:
  %told = {WAKE(at="%inside_at", value=1)}
  br label %left_it
left_it:
  br label %look
}}
declare void @llvm.x86.sse2.pause()
"""


class Team:
    """So many threads, the caller's included; each has `own` float32 values of its own.

    Where other programs keep a thread from its core, the caller does some jobs alone: 16, then
    twice as many each time that it waits too long again: for longer than its own work took.
    """

    def __init__(self, threads: int, own: int) -> None:
        self.threads = threads
        self._shared = np.zeros(FIRST + MOST, np.int64)
        self._memory = [_aligned(own) for _ in range(threads)]
        self._one_job = threading.Lock()
        self._alone, self._next_alone = 0, 16
        self._lead = function(LEAD, 2)
        function(SERVE, 3)
        for memory in self._memory[1:]:
            threading.Thread(target=self._serve, args=(memory,), daemon=True).start()

    def _serve(self, memory: npt.NDArray[np.float32]) -> None:
        """Never ends, and so keeps what it shares with the caller in memory."""
        function(SERVE, 3)(self._shared.ctypes.data, memory.ctypes.data, SPINS)

    def run(self, work: Function, job: Sequence[int], parts: int) -> None:
        """Do a job of at most `MOST` numbers, the first of which is 0, and of so many parts."""
        shared = self._shared
        with self._one_job:
            shared[FIRST : FIRST + len(job)] = job
            if parts == 1 or self.threads == 1 or self._alone:
                self._alone = max(0, self._alone - 1)
                work(shared.ctypes.data + 8 * FIRST, self._memory[0].ctypes.data)
                return
            shared[CODE] = work.address
            self._lead(shared.ctypes.data, self._memory[0].ctypes.data)
            if shared[LATE]:
                self._alone = self._next_alone
                self._next_alone = min(MOST_ALONE, 2 * self._next_alone)
            elif self._next_alone > 16:
                self._next_alone -= 1


def _aligned(count: int) -> npt.NDArray[np.float32]:
    """Memory at a multiple of 64 bytes, the widest vector."""
    memory = np.zeros(count + 16, np.float32)
    first = -memory.ctypes.data % 64 // memory.itemsize
    return memory[first : first + count]


@cache
def team(threads: int, own: int) -> Team:
    """The threads of this process."""
    return Team(threads, own)


def prepare() -> None:
    """Compile what threads take."""
    compile_all((LEAD, SERVE))


os.register_at_fork(after_in_child=team.cache_clear)
