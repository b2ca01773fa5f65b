"""One rank, as the function that runs on it sees it."""

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from fourfold.launch.job import JobEnvironment
from fourfold.place import HERE

if TYPE_CHECKING:
    from torch.distributed import Store

    from fourfold.launch.watch_together import TogetherWatch

Result = TypeVar("Result")

# How long a rank 0 that failed serves the store on, so that the others hear of it.
_HEARD_SECONDS = 1.0

DEFAULT_TIMEOUT_SECONDS = 600.0
"""How long no rank may move: a slow rank is waited for, a lost one closes its connection."""

LOOKS_TO_HEAR = 4
"""Within so many looks of the watchdog something new is heard of a rank that is there."""

WATCHDOG_FIRST_SECONDS = 30.0
"""So much longer a collective may take, since the watchdog tells more than its error does."""


class Rank:
    """This process's place in the run, and its way to the other ranks.

    A rank's function calls ``connect`` before it makes a mesh.

    Args:
        job: gives the place.
        is_watched: whether a launcher of ours looks after it; else the ranks look after each other.
    """

    def __init__(self, job: JobEnvironment, *, is_watched: bool = False):
        self.job = job
        self._is_watched = is_watched
        self._store: Store | None = None
        self._watch: TogetherWatch | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which reports and writes."""
        return self.job.rank == 0

    def connect(
        self,
        *,
        device_type: str,
        agree_on: Mapping[str, object],
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        """Meet the other ranks, agree on ``agree_on`` with them, and make the process group.

        Where no rank moves for ``timeout_seconds``, the run is over. One rank alone needs none of this. See
        ``fourfold.launch.connect`` for the errors.
        """
        if self.job.world_size == 1:
            return
        from fourfold.launch.connect import another_client, connect
        from fourfold.launch.watch_together import TogetherWatch

        self._store = connect(
            self.job,
            device_type=device_type,
            agree_on=agree_on,
            timeout_seconds=timeout_seconds + WATCHDOG_FIRST_SECONDS,
        )
        if not self._is_watched:
            job, own = self.job, another_client(self.job)
            self._watch = TogetherWatch(own, job.rank, job.world_size, timeout_seconds=timeout_seconds)
            self._watch.start()

    def agree(self, name: str, items: Mapping[str, object]) -> None:
        """Agree with the other ranks on more items, once they can be known; ``name`` is used once.

        The other ranks may come much later, so this waits as long as for a task. Raises UserError on all
        ranks, naming what differs.
        """
        if self._store is not None:
            from fourfold.launch.connect import TASK_SECONDS, agree

            agree(self._store, self.job, items, seconds=TASK_SECONDS, name=name)

    def cause_of_loss(self) -> str:
        """Return which rank it was that this one lost the connection to, and where that was.

        Empty where a launcher of ours finds it, or where it does not come to be known.
        """
        if self._watch is None:
            return ""
        from fourfold.launch.loss import cause_of_loss

        job, watch = self.job, self._watch
        seconds = LOOKS_TO_HEAR * watch.look_seconds
        return cause_of_loss(watch.store, job.rank, job.world_size, hear_seconds=seconds, first=watch.first)

    def failed(self, word: str = "") -> None:
        """Tell ranks that wait for something of this one that it will not come, and why if it is known."""
        if self._store is not None:
            from fourfold.launch.connect import FAILED
            from fourfold.launch.loss import leave_word

            # The store may be gone with rank 0; then nobody waits at it any more.
            with contextlib.suppress(RuntimeError):
                if self._watch is not None:
                    leave_word(self._store, self.job.rank, word)
                self._store.set(FAILED, str(self.job.rank))
        if self.is_first and self.job.world_size > 1 and not self.job.store_is_served:
            time.sleep(_HEARD_SECONDS)  # the store ends with this process

    def on_first(self, name: str, task: Callable[[], Result]) -> Result | None:
        """Run the task on rank 0 and return its result there, None on the others, which wait for its end.

        ``name`` says what the task does: ``making the run folder``. The wait is on the store and as long as
        the task, so no collective's timeout runs meanwhile; now and then one rank tells of it. Raises
        RunStopped on the waiting ranks when a rank fails.
        """
        return self._once(name, task, worker="rank 0", place=self.job.rank)

    def once_per_node(self, name: str, task: Callable[[], Result]) -> Result | None:
        """Run the task on the first rank of every node, as ``on_first`` does on rank 0."""
        worker = f"the first rank of node {self.job.node}"
        return self._once(name, task, worker=worker, place=self.job.local_rank)

    def _once(self, name: str, task: Callable[[], Result], *, worker: str, place: int) -> Result | None:
        """Run the task where ``place`` is 0; elsewhere wait for it, where ``place`` is 1 not in silence."""
        HERE.begin(f"while {name}")
        if self._store is None:
            return task()
        key = f"{name}, {worker}"
        if place == 0:
            result = task()
            self._store.set(key, "done")
            return result
        from fourfold.launch.connect import TASK_SECONDS, wait_for

        what = f"{worker}, which is {name}"
        wait_for(self._store, key, seconds=TASK_SECONDS, what=what, aloud=place == 1)
        return None


def leave_group() -> None:
    """Destroy the process group, if there is one."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
