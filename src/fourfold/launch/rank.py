"""One rank, as the function that runs on it sees it."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fourfold.errors import RunStopped
from fourfold.launch.job import JobEnvironment

if TYPE_CHECKING:
    from torch.distributed import Store

Result = TypeVar("Result")

DEFAULT_TIMEOUT_SECONDS = 600.0
"""How long a collective may take: a slow rank is waited for, a lost one closes its connection."""


class Rank:
    """This process's place in the run, its way to the other ranks, and the step it has come to.

    A rank's function calls ``connect`` before it makes a mesh, and ``finished`` after every step, so that
    a message about this rank can name the step even if the process was killed.
    """

    def __init__(self, job: JobEnvironment, progress: Path | None = None):
        self.job = job
        self.step: int | None = None
        self._store: Store | None = None
        self._progress = os.open(progress, os.O_WRONLY | os.O_CREAT, 0o600) if progress else None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which reports and writes."""
        return self.job.rank == 0

    def finished(self, step: int) -> None:
        """Say that ``step`` steps are finished."""
        self.step = step
        if self._progress is not None:
            os.pwrite(self._progress, b"%d\n" % step, 0)

    def connect(
        self,
        *,
        device_type: str,
        agree_on: Mapping[str, object],
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        """Meet the other ranks, agree on ``agree_on`` with them, and make the process group.

        One rank alone needs none of this. See ``fourfold.launch.connect`` for the errors.
        """
        if self.job.world_size > 1:
            from fourfold.launch.connect import connect

            self._store = connect(
                self.job, device_type=device_type, agree_on=agree_on, timeout_seconds=timeout_seconds
            )

    def agree(self, name: str, items: Mapping[str, object]) -> None:
        """Agree with the other ranks on more items, once they can be known; ``name`` is used once.

        The other ranks may come much later, so this waits as long as for a task. Raises UserError on all
        ranks, naming what differs.
        """
        if self._store is not None:
            from torch.distributed import PrefixStore

            from fourfold.launch.connect import TASK_SECONDS, agree

            agree(PrefixStore(name, self._store), self.job, items, seconds=TASK_SECONDS)

    def failed(self) -> None:
        """Tell ranks that wait for a task of this one that it will not come."""
        if self._store is not None:
            from fourfold.launch.connect import FAILED

            # The store may be gone with rank 0; then nobody waits at it any more.
            with contextlib.suppress(RuntimeError):
                self._store.set(FAILED, str(self.job.rank))

    def on_first(self, name: str, task: Callable[[], Result]) -> Result | None:
        """Run the task on rank 0 and return its result there, None on the others, which wait for its end.

        The wait is on the store and as long as the task, so no collective's timeout runs meanwhile. Raises
        RunStopped on the waiting ranks where the task failed.
        """
        return self._once(name, task, here=self.is_first)

    def once_per_node(self, name: str, task: Callable[[], Result]) -> Result | None:
        """Run the task on the first rank of every node, as ``on_first`` does on rank 0."""
        return self._once(f"{name} on node {self.job.node}", task, here=self.job.local_rank == 0)

    def _once(self, name: str, task: Callable[[], Result], *, here: bool) -> Result | None:
        if self._store is None:
            return task()
        if here:
            try:
                result = task()
            except BaseException:
                self._store.set(name, "failed")
                raise
            self._store.set(name, "done")
            return result
        from fourfold.launch.connect import wait_for

        if wait_for(self._store, name) != b"done":
            raise RunStopped(f"{name} failed on another rank")
        return None


def read_step(progress: Path) -> int | None:
    """Return the last finished step that a rank wrote, or None where it wrote none."""
    try:
        return int(progress.read_text().split()[0])
    except (OSError, IndexError, ValueError):
        return None
