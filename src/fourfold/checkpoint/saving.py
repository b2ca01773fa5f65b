"""Saving while training goes on: a copy between two steps, written by a thread, complete once all ranks are.

[Note: threads do not talk] The thread that writes calls no collective: it would mix its messages with those
of training. Between two steps the ranks tell each other whether they have written. Once all have, a thread of
rank 0 writes the manifest and gives the checkpoint its name.

[Note: a write that hangs] Ranks that wait for a write ask each other again and again, so to a watchdog they
move. They count the bytes that all have written instead: a slow disk takes some, one that hangs takes none.
"""

import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from fourfold.checkpoint.folders import begin_, folder_of, part_of
from fourfold.checkpoint.progress import Progress
from fourfold.checkpoint.ranks import messages_of_all
from fourfold.checkpoint.state import Held, held
from fourfold.checkpoint.writing import Saving, Written, finish, own_file, write_own
from fourfold.collectives import all_reduce_
from fourfold.errors import RankFailed, RunStopped
from fourfold.mesh import Mesh
from fourfold.optimizer import Update
from fourfold.parallel_model import ParallelModel

Result = TypeVar("Result")
ASK_SECONDS = 0.1
"""How often who waits for a thread looks how far it is."""
MOST_SECONDS = 1.0
"""So much counts at most of the time between two looks: this process may itself have been stopped."""
SHOWN_RANKS = 8
"""Of so many ranks it is said where they write."""
STILL_SECONDS = 600.0
"""How long no rank may write a byte, where nothing else is said."""


class Task(Generic[Result]):
    """A function that runs in a thread of its own. It ends with the process, whatever it is doing.

    Attributes:
        result: what it returned.
        problems: why it could not; empty where it could.
    """

    def __init__(self, function: Callable[[], Result]):
        self.result: Result | None = None
        self.problems: list[str] = []
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[[], Result]) -> None:
        try:
            self.result = function()
        except RunStopped as stopped:
            self.problems = [str(stopped)]
        except Exception as error:  # nobody else would hear of it
            self.problems = [f"{type(error).__name__}: {error}"]

    @property
    def has_ended(self) -> bool:
        """Whether it is over."""
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Wait for its end, so long at most."""
        self._thread.join(seconds)


class Snapshot:
    """Copies of a rank's parts in host memory, which the next snapshot uses again; on CUDA it is pinned."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    def of(self, parts: Iterable[Held]) -> list[Held]:
        """Return the parts as they are now. Raises RunStopped where there is no memory for them."""
        copied, devices = [], set()
        with torch.no_grad():
            for part in parts:
                values, name = part.values, part.tensor.name
                copy = self._copies.get(name)
                if copy is None or copy.numel() != values.numel():
                    try:
                        copy = torch.empty_like(values, device="cpu", pin_memory=values.is_cuda)
                    except RuntimeError as error:
                        reason = str(error).splitlines()[0]
                        raise RunStopped(f"no host memory for a snapshot: {reason}") from None
                    self._copies[name] = copy
                copy.copy_(values, non_blocking=True)
                devices |= {values.device} if values.is_cuda else set()
                copied.append(replace(part, values=copy))
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copied


@dataclass
class _Flight:
    """A save on its way.

    Attributes:
        step: of the checkpoint.
        updates: of the optimizer.
        began: when, on the clock of ``time.perf_counter``.
        task: writes what is this rank's.
        total_bytes: of this rank's tensors.
        written_bytes: so far.
        all_wrote: whether it is known that all ranks have written.
        ending: completes the checkpoint, on rank 0.
        is_told: whether rank 0 has told of it.
    """

    step: int
    updates: int
    began: float
    task: Task[None] | None = None
    total_bytes: int = 0
    written_bytes: int = 0
    all_wrote: bool = False
    ending: Task[Written] | None = None
    is_told: bool = False


def _is_busy(task: Task[None] | Task[Written] | None) -> bool:
    """Whether there is a task that has not ended."""
    return task is not None and not task.has_ended


class Saver:
    """Saves a run while it trains. Every rank has one, and all call its methods alike.

    Args:
        saving: where and how.
        mesh: the ranks.
        tell: is given a line on every checkpoint, or on its failure, on rank 0.
        progress: hears on rank 0 how far its writing is, while training waits for it.
        timeout_seconds: how long no rank may write a byte while all wait for a save.

    Attributes:
        failures: by step, why a checkpoint could not be written; the same on all ranks.
    """

    def __init__(
        self,
        saving: Saving,
        mesh: Mesh,
        tell: Callable[[str], None] = lambda _: None,
        progress: Progress = lambda *_: None,
        *,
        timeout_seconds: float = STILL_SECONDS,
    ):
        self.failures: dict[int, str] = {}
        self._saving = saving
        self._mesh = mesh
        self._tell = tell
        self._progress = progress
        self._timeout_seconds = timeout_seconds
        self._snapshot = Snapshot()
        self._flight: _Flight | None = None

    def begin(self, parallel: ParallelModel, update: Update, step: int, *, copy: bool = True) -> None:
        """Begin to save what is there after ``step`` finished steps; wait for an earlier save first.

        Without ``copy`` weights and moments must stay as they are until `finish`.
        """
        began = time.perf_counter()
        self.finish()
        folder = folder_of(step, self._saving.checkpoints)
        if self._failed(step, self._first(lambda: begin_(folder))):
            return
        flight = self._flight = _Flight(step, update.updates, began)

        def wrote(count: int) -> None:
            flight.written_bytes += count

        # What keeps a rank from copying is heard of when all ask each other, as what keeps it from writing.
        problem = ""
        parts = list(held(parallel, update, divided=True))
        try:
            parts = self._snapshot.of(parts) if copy else parts
        except RunStopped as stopped:
            problem = str(stopped)
        flight.total_bytes = sum(part.values.numel() * part.values.itemsize for part in parts)
        paused = time.perf_counter() - began

        def write() -> None:
            if problem:
                raise RunStopped(problem)
            write_own(part_of(folder), parts, self._mesh.rank, paused, wrote)

        flight.task = Task(write)

    def after_step(self) -> None:
        """Look, between two steps, whether a save has come to its end."""
        flight = self._flight
        if flight is None:
            return
        if not flight.all_wrote:
            if self._summed(_is_busy(flight.task)) == [0]:
                self._hear(flight)
        elif flight.ending is not None and flight.ending.has_ended:
            self._tell_of(flight)

    def finish(self) -> None:
        """Wait until nothing is on its way any more.

        Raises RankFailed on all ranks where none writes a byte for the timeout; after half of it a line is
        told.
        """
        flight = self._flight
        if flight is not None and not flight.all_wrote:
            part = part_of(folder_of(flight.step, self._saving.checkpoints))
            self._wait(flight, flight.task, own_file(part, self._mesh.rank))
            self._hear(flight)
        flight = self._flight
        if flight is None:
            return
        self._wait(flight, flight.ending, folder_of(flight.step, self._saving.checkpoints))
        self._flight = None
        if not self._failed(flight.step, [] if flight.ending is None else flight.ending.problems):
            self._tell_of(flight)

    def _wait(self, flight: _Flight, task: Task[None] | Task[Written] | None, path: Path) -> None:
        """Wait until the tasks of all ranks have ended; this rank's is at ``path``.

        See [Note: a write that hangs]. The clock is rank 0's, so that all hear the same. Nobody waits in a
        collective for long, however long a rank writes: it would time out.
        """
        half_seconds = self._timeout_seconds / 2
        before, told, still_seconds, looked = -1, 0, 0.0, time.monotonic()
        while True:
            if task is not None:
                task.wait(ASK_SECONDS)
            now = time.monotonic()
            still_seconds += min(now - looked, MOST_SECONDS)
            looked = now
            halves = min(int(still_seconds / half_seconds), 2) if self._mesh.rank == 0 else 0
            busy, written_bytes, halves = self._summed(_is_busy(task), flight.written_bytes, halves)
            if self._mesh.rank == 0 and not flight.all_wrote:
                seconds = time.perf_counter() - flight.began
                self._progress(flight.written_bytes, flight.total_bytes, seconds)
            if not busy:
                return
            if written_bytes != before:
                before, told, still_seconds = written_bytes, 0, 0.0
            elif halves > told:
                told = halves
                mine = f"rank {self._mesh.rank} is still at {path}"
                places = messages_of_all([mine] if _is_busy(task) else [], self._mesh)
                shown = [*places[:SHOWN_RANKS], *(["..."] if len(places) > SHOWN_RANKS else [])]
                message = f"no byte was written for {halves * half_seconds:.3g} s: {'; '.join(shown)}"
                if halves == 2:
                    self._flight = None
                    raise RankFailed(message)
                if self._mesh.rank == 0:
                    self._tell(f"warning: {message}")

    def _summed(self, *numbers: int) -> list[int]:
        """Return the sums of numbers over all ranks."""
        return [*map(int, all_reduce_(torch.tensor(numbers, device=self._mesh.device), self._mesh.world))]

    def _hear(self, flight: _Flight) -> None:
        """Hear, once all ranks have ended, how; if they have written, rank 0 completes the checkpoint."""
        assert flight.task is not None
        if self._failed(flight.step, flight.task.problems):
            self._flight = None
            return
        flight.all_wrote = True
        if self._mesh.rank == 0:
            folder, layout = folder_of(flight.step, self._saving.checkpoints), self._mesh.layout
            about = {"ranks": self._mesh.world_size, "step": flight.step, "updates": flight.updates}
            flight.ending = Task(lambda: finish(folder, self._saving, layout, **about))

    def _first(self, task: Callable[[], None]) -> list[str]:
        """Do something on rank 0, and return what kept it from that."""
        try:
            if self._mesh.rank == 0:
                task()
        except RunStopped as stopped:
            return [str(stopped)]
        return []

    def _failed(self, step: int, problems: list[str]) -> bool:
        """Whether any rank has a problem; then what was written is removed, and rank 0 tells of it."""
        found = messages_of_all(problems, self._mesh)
        if found:
            self.failures[step] = f"no checkpoint after step {step}: {'; '.join(found)}"
            if self._mesh.rank == 0:
                # A full disk needs the room.
                shutil.rmtree(part_of(folder_of(step, self._saving.checkpoints)), ignore_errors=True)
                self._tell(self.failures[step])
        return bool(found)

    def _tell_of(self, flight: _Flight) -> None:
        """Tell, once, that a checkpoint is complete; a failure is told of when all ranks hear of it."""
        written = None if flight.ending is None else flight.ending.result
        if written is not None and not flight.is_told:
            flight.is_told = True
            self._tell(str(written))


def save(parallel: ParallelModel, update: Update, saving: Saving, *, step: int) -> Path:
    """Write a checkpoint after ``step`` finished steps, and return its folder. All ranks call it.

    Raises RunStopped on all ranks where one cannot write, or where a weight is not finite, RankFailed where
    a write hangs; the checkpoints that were there are untouched then.
    """
    saver = Saver(saving, parallel.mesh)
    saver.begin(parallel, update, step, copy=False)
    saver.finish()
    if step in saver.failures:
        raise RunStopped(saver.failures[step])
    return folder_of(step, saving.checkpoints)
