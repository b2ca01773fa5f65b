"""Teams of rank processes that take turns, so that contestants are measured interleaved in one call.

Each contestant has its own rank processes, all alive at once; only one team works at a time, the others wait
on a pipe. So memory is each contestant's own, and what crosses the loopback device while a team works is
that team's traffic.
"""

import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.contestants import Contestant
from benchmarks.workloads import Workload
from fourfold.models import Decoder, Microbatch
from fourfold.specs import ModelSpec

Build = Callable[[int, int], Contestant]
"""From rank and number of ranks to a contestant."""


@dataclass
class Score:
    """What was measured of one contestant.

    Attributes:
        step_seconds: each step's time, of its slowest rank.
        bytes: sent per rank and step, read off the loopback device.
        peak_bytes: the most memory of a rank, above what it had after its imports and a step of a tiny model.
        losses: of each step, mean over the tokens of the global batch.
    """

    step_seconds: list[float] = field(default_factory=list)
    bytes: float = 0.0
    peak_bytes: int = 0
    losses: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The median step."""
        return statistics.median(self.step_seconds)

    def ratio(self, peer: "Score") -> tuple[float, float, float]:
        """The quartiles of the steps' times as multiples of the peer's in the same round; the middle one is
        the result, the others say how sure it is."""
        ratios = [ours / theirs for ours, theirs in zip(self.step_seconds, peer.step_seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        return low, middle, high


class Team:
    """Rank processes that hold one contestant."""

    def __init__(self, build: Build, ranks: int):
        self.ranks = ranks
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._store = store
        context = mp.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(theirs, build, rank, ranks, store.port), daemon=True
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers()

    def step(self, k: int) -> tuple[float, float, float]:
        """Run step ``k``; return its seconds, the sum of the token losses, and the bytes sent per rank."""
        before = _loopback_bytes()
        for pipe in self._pipes:
            pipe.send(k)
        seconds, losses = zip(*self._answers(), strict=True)
        return max(seconds), sum(losses), (_loopback_bytes() - before) / self.ranks

    def close(self) -> int:
        """End the processes; return the peak memory of the largest rank."""
        for pipe in self._pipes:
            pipe.send(None)
        peak = max(self._answers())
        for process in self._processes:
            process.join(10)
        return peak

    def _answers(self) -> list:
        return [pipe.recv() for pipe in self._pipes]


WARM_UP = 3
"""Steps before the first one that counts."""


def interleaved(
    builds: dict[str, Build], ranks: int, *, rounds: int | None, workload: Workload
) -> dict[str, Score]:
    """Let the contestants step in turns, one step each a round, in an order that changes from round to round.

    Step i of one contestant and step i of another ran within seconds of each other, so their ratio says more
    than that of two medians: see `Score.ratio`.
    """
    teams = {name: Team(build, ranks) for name, build in builds.items()}
    scores = {name: Score() for name in builds}
    names = list(teams)
    for k in range(WARM_UP + (rounds or workload.rounds)):
        first = k % len(names)
        order = names[first:] + names[:first]
        for name in order if k // len(names) % 2 else order[::-1]:
            seconds, loss, sent = teams[name].step(k)
            scores[name].losses.append(loss / workload.tokens)
            if k >= WARM_UP:
                scores[name].step_seconds.append(seconds)
                scores[name].bytes = sent
    for name, team in teams.items():
        scores[name].peak_bytes = team.close()
    return scores


def _rank_main(pipe: Connection, build: Build, rank: int, ranks: int, port: int) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        store = dist.TCPStore("127.0.0.1", port)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
        )
    _warm_up()
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    contestant = build(rank, ranks)
    pipe.send(None)
    while (k := pipe.recv()) is not None:
        if ranks > 1:
            dist.barrier()
        start = time.perf_counter()
        loss = contestant.step(k)
        pipe.send((time.perf_counter() - start, loss))
    pipe.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) * 1024)
    pipe.close()
    os._exit(0)  # gloo may abort while the interpreter winds down


def _warm_up() -> None:
    """Train a tiny model for a step: the code of kernels is read from disk at its first use, and is no memory
    of a contestant's.
    """
    model = Decoder(ModelSpec.preset("tiny"))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    rows = torch.zeros(1, 16, dtype=torch.long)
    model.loss_sum(Microbatch(rows, rows, rows, ((16,),))).backward()
    optimizer.step()


def _loopback_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    return 0
