"""A job on two machines: network namespaces of this one, joined by a cable that can be cut.

Where namespaces cannot be made, both ranks are on this machine, and a frozen process stands for a cut cable.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.test_runs import SECONDS_TO_END
from tests.commands import RUN
from tests.launch.test_faults import LONG

SCRIPT = """
set -e
ip link set lo up
ip link add bridge type bridge
ip link set bridge up
for number in 1 2; do
  unshare -n sleep 600 &
  echo $! > node-$number
  while [ $(readlink /proc/$!/ns/net) = $(readlink /proc/self/ns/net) ]; do sleep 0.02; done
  ip link add cable-$number type veth peer name eth0 netns $!
  ip link set cable-$number master bridge up
  nsenter -t $! -n ip addr add 10.9.0.$number/24 dev eth0
  nsenter -t $! -n ip link set eth0 up
  nsenter -t $! -n ip link set lo up
done
touch ready
read line
"""
"""Makes the nodes and ends with its standard input."""
PORT = 29500
PATIENCE_SECONDS = 120.0
ENTER = ["nsenter", "-U", "--preserve-credentials", "-n", "-t"]


class Nodes:
    """Two machines in a folder that they share.

    Args:
        folder: of both.
        bridge: the process that made them; None for one machine in their place.

    Attributes:
        are_apart: whether there is a cable to cut.
    """

    def __init__(self, folder: Path, bridge: subprocess.Popen[str] | None):
        self.folder = folder
        self.are_apart = bridge is not None
        self._bridge = bridge
        self._ranks: dict[int, subprocess.Popen[str]] = {}

    def start(self, number: int, name: str, *arguments: str) -> subprocess.Popen[str]:
        """Start rank ``number`` of two, on its own machine."""
        job = {
            "RANK": number,
            "WORLD_SIZE": 2,
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
            "GROUP_RANK": number,
            "MASTER_ADDR": "10.9.0.1" if self._bridge else "localhost",
            "MASTER_PORT": PORT,
            "GLOO_SOCKET_IFNAME": "eth0" if self._bridge else "lo",
            "RES_OPTIONS": "attempts:1 timeout:1",  # there is no name server
            "FOURFOLD_CACHE": self.folder / f"cache-{number}",
        }
        inside = []
        if self._bridge:
            inside = [*ENTER, (self.folder / f"node-{number + 1}").read_text().strip()]
        words = ["train", "run.toml", "--resume", "--set", f"folder={name}", *arguments]
        self._ranks[number] = subprocess.Popen(
            [*inside, sys.executable, "-m", "fourfold", *words],
            cwd=self.folder,
            env={**os.environ, **{key: str(value) for key, value in job.items()}},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self._ranks[number]

    def cut(self, number: int) -> None:
        """Pull the cable of a machine out."""
        if self._bridge is None:
            self._ranks[number].send_signal(signal.SIGSTOP)
            return
        cable = ["ip", "link", "set", f"cable-{number + 1}", "down"]
        subprocess.run([*ENTER, str(self._bridge.pid), *cable], check=True)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "corpus.txt").write_text("def main(): return 1\n" * 400)
    if subprocess.run(["unshare", "-rn", "ip", "link"], capture_output=True, check=False).returncode:
        yield Nodes(tmp_path, None)
        return
    with subprocess.Popen(
        ["unshare", "-rn", "sh", "-c", SCRIPT], cwd=tmp_path, stdin=subprocess.PIPE, text=True
    ) as bridge:
        wait_until(lambda: (tmp_path / "ready").exists() or bridge.poll() is not None)
        yield Nodes(tmp_path, bridge)
        for number in (1, 2):
            os.kill(int((tmp_path / f"node-{number}").read_text()), signal.SIGKILL)
        bridge.communicate("\n", timeout=10)


def steps_of(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []  # the last may be half written
    return [line["step"] for line in map(json.loads, lines) if "loss" in line]


def test_a_machine_comes_late_is_lost_comes_back_and_loses_its_cable(nodes: Nodes):
    """The first waits for the second; when that is gone, it ends; both go on from the newest checkpoint.

    A cable that is cut closes no connection: the ranks notice that they hear nothing, within the timeout.
    """
    run = nodes.folder / "shared"
    first = nodes.start(0, "shared", *LONG)
    wait_until(lambda: listens(first.pid))
    time.sleep(2.0)
    assert first.poll() is None
    assert not run.exists(), "it waits, and begins nothing alone"
    second = nodes.start(1, "shared", *LONG)
    wait_until(lambda: (run / "checkpoints" / "step-000060").exists())
    began = time.monotonic()
    second.kill()
    output, errors = first.communicate(timeout=SECONDS_TO_END)
    second.communicate()
    assert time.monotonic() - began < 10
    assert first.returncode == 1
    gone = r"rank 0: error: rank 1 is gone: .*; when last heard of rank 1 was (in|after) step \d+"
    assert re.search(rf"{gone}.*\nrank 0 lost the connection to another rank (in|after) step \d+", errors), (
        errors
    )
    newest = steps_of(run)[-1]
    again = [nodes.start(number, "shared", *LONG, "--timeout", "4") for number in (0, 1)]
    wait_until(lambda: steps_of(run)[-1] > newest + 3)
    began = time.monotonic()
    nodes.cut(1)
    output, errors = again[0].communicate(timeout=SECONDS_TO_END)
    assert time.monotonic() - began < 30
    assert again[0].returncode == 1
    start = int(re.search(r"going on after step (\d+)", output)[1])
    assert start >= 60
    assert start % 20 == 0
    assert steps_of(run) == list(range(1, steps_of(run)[-1] + 1)), "no step is missing, none is there twice"
    assert "rank 1 is not heard of any more: frozen, or its machine or link is gone" in errors, errors
    assert re.search(r"rank 0 (in|after) step \d+, .*waiting for all_reduce on axis dp", errors), errors
    if nodes.are_apart:  # a frozen process sees nothing
        output, errors = again[1].communicate(timeout=SECONDS_TO_END)
        assert again[1].returncode == 1
        assert "rank 0 is not heard of any more: frozen, or its machine or link is gone" in errors, errors
        assert re.search(r"rank 1 (in|after) step \d+, .*waiting for all_reduce on axis dp", errors), errors
    again[1].kill()
    again[1].communicate()


def listens(pid: int) -> bool:
    """Whether somebody waits at the port of the job on the machine of this process."""
    tables = (Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6"))
    return any(re.search(rf":{PORT:04X} \S+ 0A ", table) for table in tables)


def wait_until(condition: Callable[[], bool]) -> None:
    """Four commands start here, each with all imports: on a busy machine that takes its time."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
