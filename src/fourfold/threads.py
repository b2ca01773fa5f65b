"""How the threads of a rank share cores with one another and with those of other ranks, on a CPU."""

import os
from contextlib import suppress
from pathlib import Path

_OF_THIS_PROCESS = Path("/proc/self/task")


def let_each_other_finish() -> None:
    """Have the threads of this process, and those that they start, not pushed aside by one that wakes up.

    They are scheduled as batch work (sched(7), SCHED_BATCH): a thread that a message wakes goes on when a
    core is free or another's time slice ends. For that no privilege is needed. A thread whose policy somebody
    chose is left as it is, and so is every thread where there is no such policy: on other systems than Linux,
    or where a sandbox forbids it.

    [Note: the lock that is tried for] By default whoever wakes up may take the core of the thread that woke
    it. A send through gloo on one machine wakes the receiver's thread in the middle of the system call, while
    the sender holds the lock of its connection. gloo's own thread of the sender takes that lock only by
    trying: from the next message on the connection until the sender has a core again it asks, finds the lock
    taken and asks again, without a pause. Where ranks have no cores to spare, that takes them: 4 ranks on 2
    cores ask 100,000 times a step of a small model, and lose 5 % of a pipeline's step and a fifth of that of
    tensor parallelism.
    """
    if not hasattr(os, "SCHED_BATCH") or not _OF_THIS_PROCESS.is_dir():
        return
    for thread in map(int, os.listdir(_OF_THIS_PROCESS)):
        with suppress(OSError):  # it has ended, or this is forbidden
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
