"""Living rank processes for tests: a test hands over a function, every rank runs it and answers.

The processes stay for the whole session, and new ones are copies of one that has imported torch. They form a
gloo process group of the world size that the test asks for; when the next test asks for another size, the
first so many of the processes form a new one.
"""

import contextlib
import faulthandler
import functools
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

MAX_WORLD_SIZE = 8
START_LIMIT_SECONDS = 120.0  # importing torch on a busy machine
GRACE_SECONDS = 2.0  # what the other ranks get to answer after the first one failed
# A rank that waits for one that is gone ends by itself after this, should the test session be killed.
GROUP_TIMEOUT = timedelta(seconds=120)


class RankStuck(Exception):
    """Ranks did not answer within the limit: the message has their stacks."""


class RankDied(Exception):
    """The process of a rank ended in the middle of a function."""


class RankPool:
    """Processes that run functions as ranks of a gloo process group.

    Call it as ``ranks(4, function, *args)``. The function must be importable (defined at the top of a
    module); it, its arguments and its results travel by pickle, tensors as plain bytes.
    """

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._world_size = 0
        self._generation = 0

    def __call__(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        limit_seconds: float = 60.0,
        **kwargs: Any,
    ) -> list[Any]:
        """Run ``function(*args, **kwargs)`` on ranks 0 to ``world_size - 1`` and return the results by rank.

        An exception on a rank is raised here, with the rank and its traceback as a note. After a failure of
        any kind the processes are thrown away, since what the others were waiting for will never come.
        """
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"world_size={world_size}: the pool has 1 to {MAX_WORLD_SIZE} ranks")
        payload = pickle.dumps((function, args, kwargs))
        try:
            self._form_group(world_size)
            answers = self._ask_all(world_size, ("run", sys.path, payload), limit_seconds)
            return [pickle.loads(answer) for answer in answers]
        except BaseException:
            self.close(gently=False)
            raise

    def close(self, *, gently: bool = True) -> None:
        """End the processes: ask them to leave, or kill them."""
        for rank in self._ranks:
            rank.end(gently=gently)
        if self._folder is not None:
            self._folder.cleanup()
        self._ranks, self._folder, self._world_size = [], None, 0

    def _form_group(self, world_size: int) -> None:
        """Make the first ``world_size`` processes one process group."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        while len(self._ranks) < world_size:
            self._ranks.append(_Rank(len(self._ranks), Path(self._folder.name)))
        if world_size == self._world_size:
            return
        if self._world_size:
            self._ask_all(self._world_size, ("leave",), START_LIMIT_SECONDS)
        self._generation += 1
        store = str(Path(self._folder.name) / f"store-{self._generation}")
        self._ask_all(world_size, ("join", world_size, store), START_LIMIT_SECONDS)
        self._world_size = world_size

    def _ask_all(self, world_size: int, request: tuple[Any, ...], limit_seconds: float) -> list[bytes]:
        """Send one request to the first ``world_size`` ranks and collect their answers."""
        ranks = self._ranks[:world_size]
        for rank in ranks:
            with contextlib.suppress(OSError):  # a dead one is found below, by name
                rank.connection.send_bytes(pickle.dumps(request))
        deadline = time.monotonic() + limit_seconds
        answers: dict[int, bytes] = {}
        failures: list[BaseException] = []
        while len(answers) + len(failures) < world_size:
            waiting = [rank for rank in ranks if rank.index not in answers and not rank.failed]
            ready = wait([rank.connection for rank in waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in waiting:
                if rank.connection in ready:
                    outcome = rank.answer()
                    if isinstance(outcome, bytes):
                        answers[rank.index] = outcome
                    else:
                        failures.append(outcome)
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if failures:
            for other in failures[1:]:
                failures[0].add_note(f"Then: {other!r}")
            raise failures[0]
        if len(answers) < world_size:
            stuck = [rank for rank in ranks if rank.index not in answers]
            names = ", ".join(str(rank.index) for rank in stuck)
            stacks = "\n".join(rank.stack() for rank in stuck)
            raise RankStuck(
                f"no answer within {limit_seconds:g} s from rank {names} of {world_size}\n{stacks}"
            )
        return [answers[rank.index] for rank in ranks]


class _Rank:
    """One process, seen from the test session."""

    def __init__(self, index: int, folder: Path) -> None:
        self.index = index
        self.failed = False
        self._output = folder / f"output-{index}"
        self._stacks = folder / f"stacks-{index}"
        self.connection, theirs = Pipe()
        self._process = warm_context().Process(
            target=_serve, args=(theirs, index, str(self._output), str(self._stacks)), daemon=True
        )
        self._process.start()
        theirs.close()

    def answer(self) -> bytes | BaseException:
        """Read what is there: the pickled result, or the failure as an exception."""
        try:
            kind, *rest = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.failed = True
            return RankDied(f"rank {self.index} {self._how_it_ended()}; its last output:\n{self._tail()}")
        if kind == "result":
            return rest[0]
        self.failed = True
        pickled, summary, trace = rest
        try:
            exception = pickle.loads(pickled)
        except Exception:
            exception = RuntimeError(summary)
        exception.add_note(f"on rank {self.index}:\n{trace}")
        return exception

    def stack(self) -> str:
        """Return where the process stands, by asking its fault handler."""
        if self._process.exitcode is not None:
            return f"rank {self.index} {self._how_it_ended()}"
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        text = ""
        while time.monotonic() < deadline and "most recent call first" not in text:
            time.sleep(0.05)
            text = self._stacks.read_text() if self._stacks.exists() else ""
        return f"rank {self.index} stands at:\n{text or '(it does not answer)'}"

    def end(self, *, gently: bool) -> None:
        """Let the process leave within a second, else kill it."""
        self.connection.close()  # it reads the end of the pipe and leaves
        self._process.join(1.0 if gently else 0.0)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()

    def _how_it_ended(self) -> str:
        self._process.join(1.0)
        code = self._process.exitcode
        if code is None:
            return "closed its connection"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"

    def _tail(self) -> str:
        return "\n".join(self._output.read_text(errors="replace").splitlines()[-20:])


# Importing these takes a second or more each: the first optimizer of a process imports torch._dynamo, a run
# draws its pictures at the end.
SLOW_IMPORTS = ("torch", "torch._dynamo", "matplotlib.figure", "matplotlib.backends.backend_agg")
TRANSFORMERS = tuple(
    f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen2", "qwen3", "mistral", "gpt2")
)


@functools.cache
def warm_context() -> ForkServerContext:
    """Start new processes as copies of one that has imported torch already, which takes seconds."""
    context = get_context("forkserver")
    ours = ["fourfold.training", "fourfold.verify", "fourfold.cli.train_rank"]
    # A whole suite imports transformers; the tests of one file mostly do not need to wait for it.
    theirs = ["transformers", *TRANSFORMERS] if "transformers" in sys.modules else []
    context.set_forkserver_preload([*SLOW_IMPORTS, *ours, *theirs])
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR"):
        forkserver.ensure_running()  # it keeps the environment of this moment
    return context


def _serve(connection: Connection, index: int, output: str, stacks: str) -> None:
    """Do what the test session asks until it closes the connection: the main loop of a rank."""
    with open(output, "w", buffering=1) as written:
        os.dup2(written.fileno(), 1)
        os.dup2(written.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)
    _answer(connection, index, stacks)
    # gloo sometimes aborts while the interpreter shuts down; all work is done and reported by now.
    os._exit(0)


def _answer(connection: Connection, index: int, stacks: str) -> None:
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        while True:
            try:
                request = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                return
            try:
                result = None
                if request[0] == "join":
                    _, world_size, store = request
                    dist.init_process_group(
                        "gloo",
                        store=dist.FileStore(store, world_size),
                        rank=index,
                        world_size=world_size,
                        timeout=GROUP_TIMEOUT,
                    )
                elif request[0] == "leave":
                    dist.destroy_process_group()
                else:
                    _, sys.path[:], payload = request
                    result = _run(payload)
                answer = ("result", pickle.dumps(result))
            except BaseException as exception:
                answer = _failure(exception)
            connection.send_bytes(pickle.dumps(answer))


def _run(payload: bytes) -> Any:
    """Call the function with every warning an error, as in the test session."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function, args, kwargs = pickle.loads(payload)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_default_dtype(torch.float32)


def _failure(exception: BaseException) -> tuple[str, bytes, str, str]:
    """Describe an exception so that it can be raised in another process."""
    trace = "".join(traceback.format_exception(exception))
    summary = f"{type(exception).__name__}: {exception}"
    try:
        pickled = pickle.dumps(exception)
        pickle.loads(pickled)  # some exceptions pickle but cannot be made again
    except Exception:
        pickled = b""
    return "failure", pickled, summary, trace
