"""The command line in this process, or in others without the seconds in which each would import torch.

Those are copies of the process that the ranks of the tests are copies of. What has to be seen from the very
start of a process, or through the launcher of local ranks, is started by ``subprocess`` instead.
"""

import multiprocessing
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path

from typer.testing import CliRunner, Result

from fourfold.cli import app
from tests.ranks import warm_context

RUN = """
layout = "dp2"
[model]
preset = "tiny"
vocab_size = 257
[data]
source = "corpus.txt"
sequence_length = 16
held_out = 0.1
[training]
steps = 3
batch = 4
[optimizer]
learning_rate = 1e-3
"""
"""A run file whose corpus, model and steps are small."""


def fourfold_(*arguments: str) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


class Command:
    """``fourfold ARGUMENTS`` in a folder, with the names of ``subprocess.Popen`` for what they do there.

    Args:
        folder: the current one of the process.
        arguments: after ``fourfold``.
        variables: of its environment, over those of this process.
        largest_file_bytes: writing more than this to a file fails.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        *,
        largest_file_bytes: int | None = None,
    ):
        descriptor, self._said = tempfile.mkstemp(dir=folder, prefix=".said-")
        os.close(descriptor)
        self._process = warm_context().Process(
            target=_run,
            args=(str(folder), tuple(arguments), {**os.environ, **variables}, self._said, largest_file_bytes),
        )
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """The exit status, negative after a signal, None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end and return what it wrote to stdout and to stderr."""
        self._process.join(timeout)
        if self.returncode is None:
            self.kill()
            raise TimeoutError(f"it still runs after {timeout:g} s; stderr:\n{Path(self._said).read_text()}")
        return Path(f"{self._said}.out").read_text(), Path(self._said).read_text()


def joined(
    folder: Path | Sequence[Path],
    *arguments: str,
    variables: Mapping[str, str],
    each: Sequence[Sequence[str]] = ((), ()),
    local: bool = True,
) -> list[Command]:
    """Start the ranks of a job as torchrun does, on one machine or on one each, each with its own words.

    All are in one folder, or each in its own.
    """
    folders = [folder] * len(each) if isinstance(folder, Path) else folder
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    job = {"WORLD_SIZE": str(len(each)), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    commands = []
    for rank, own in enumerate(each):
        place = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)}
        if local:
            place = {"LOCAL_RANK": str(rank)}
        own_variables = {**variables, **job, **place, "RANK": str(rank)}
        commands.append(Command(folders[rank], [*arguments, *own], own_variables))
    return commands


def _end_with_the_tests() -> None:
    """A test that fails may leave this process to itself."""
    session = multiprocessing.parent_process()
    assert session is not None
    session.join()
    os._exit(1)


def _run(
    folder: str,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    said: str,
    largest_file_bytes: int | None,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # else that of the server
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, path in ((1, f"{said}.out"), (2, said)):
        with open(path, "w") as file:
            os.dup2(file.fileno(), descriptor)
    if largest_file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file_bytes, largest_file_bytes))
    threading.Thread(target=_end_with_the_tests, daemon=True).start()
    sys.argv = ["fourfold", *arguments]
    # The server that this process is a fork of forks its ranks, too, which have torch at once.
    forkserver.ForkServer.ensure_running = lambda _: None
    forkserver.ensure_running = lambda: None

    from fourfold.cli import main

    main()
