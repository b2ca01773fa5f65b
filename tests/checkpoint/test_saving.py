"""Saving while training goes on: one step's numbers, whole or not at all, and nobody waits unheard."""

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fourfold.checkpoint.saving as saving_module
from fourfold.checkpoint import Saver, Saving, load_newest_, save
from fourfold.cli.checkpoints import Checkpoints
from fourfold.collectives import CollectiveMismatch, agreement
from fourfold.errors import RankFailed, RunStopped
from fourfold.training import Trainer
from tests.checkpoint.trainers import SIZES, differing, fill_, run_spec, trainer_of
from tests.ranks import RankPool


@contextmanager
def held_up() -> Iterator[threading.Event]:
    """Let no writing begin before the event is set."""
    gate, write = threading.Event(), saving_module.write_own

    def late(*args: Any) -> None:
        assert gate.wait(30)
        write(*args)

    saving_module.write_own = late  # type: ignore[assignment]
    try:
        yield gate
    finally:
        saving_module.write_own = write


@contextmanager
def full_disk(is_mine: bool) -> Iterator[None]:
    """Let this process write files of 10,000 bytes at most: the write after that fails, really."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000 if is_mine else before[0], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def changed_while_saved(layout: str, folder: str) -> tuple[list[str], list[str], set[str]]:
    """Save, and change everything before a byte is written."""
    checkpoints = Path(folder)
    trainer, told = trainer_of(run_spec(layout)), list[str]()
    parallel, update = trainer.parallel, trainer.update
    saver = Saver(Saving(checkpoints, {}, {}), parallel.mesh, told.append)
    fill_(trainer, 4)
    with held_up() as gate:
        saver.begin(parallel, update, 4)
        fill_(trainer, 5)
        saver.after_step()
        names = names_in(checkpoints)
        gate.set()
        flight = saver._flight
        assert flight is not None
        assert flight.task is not None
        wait_until(lambda: flight.task.has_ended)
    saver.after_step()
    assert flight.all_wrote, "all hear of it in the same step"
    saver.finish()
    names += names_in(checkpoints)
    assert load_newest_(parallel, update, checkpoints, run={}) == 4
    return names, told, differing(trainer, 4)


@pytest.mark.parametrize("layout", ["dp1", "fsdp2", "dp2"])
def test_a_snapshot_is_of_one_step(layout: str, ranks: RankPool, tmp_path: Path):
    """CK-09, seen in pytorch/pytorch#144657: weights of a later step."""
    results = ranks(1 if layout == "dp1" else 2, changed_while_saved, layout, str(tmp_path))
    for rank, (names, told, wrong) in enumerate(results):
        assert names == ["step-000004.part", "step-000004"]
        assert not wrong
        assert [line.split(":")[0] for line in told] == (["saved step-000004"] if rank == 0 else [])
    assert "GB/s), training stood still for 0." in results[0][1][0]


def test_the_host_copies_are_used_again():
    trainer = trainer_of(run_spec("dp1"))
    parts = list(saving_module.held(trainer.parallel, trainer.update, divided=True))
    snapshot = saving_module.Snapshot()
    first = [part.values.data_ptr() for part in snapshot.of(parts)]
    assert first == [part.values.data_ptr() for part in snapshot.of(parts)]
    assert not {part.values.data_ptr() for part in parts} & set(first)


def test_a_checkpoint_is_complete_without_anybody_waiting(tmp_path: Path):
    trainer, told = trainer_of(run_spec("dp1")), list[str]()
    saver = Saver(Saving(tmp_path, {}, {}), trainer.parallel.mesh, told.append)
    saver.begin(trainer.parallel, trainer.update, 1)

    def is_told() -> bool:
        saver.after_step()
        return bool(told)

    wait_until(is_told)
    assert names_in(tmp_path) == ["step-000001"]
    saver.finish()
    assert len(told) == 1, "once"


def test_a_save_waits_for_the_one_before(tmp_path: Path):
    trainer, told, shown = trainer_of(run_spec("dp1")), list[str](), list[tuple[int, int, float]]()

    def progress(*how_far: Any) -> None:
        shown.append(how_far)

    saver = Saver(Saving(tmp_path, {}, {}, keep=2), trainer.parallel.mesh, told.append, progress)
    with held_up() as gate:
        fill_(trainer, 1)
        saver.begin(trainer.parallel, trainer.update, 1)
        fill_(trainer, 2)
        threading.Timer(0.2, gate.set).start()
        began = time.monotonic()
        saver.begin(trainer.parallel, trainer.update, 2)
        assert time.monotonic() - began > 0.15
        assert (tmp_path / "step-000001").exists()
    saver.finish()
    assert [line.split(":")[0] for line in told] == ["saved step-000001", "saved step-000002"]
    paused = float(told[1].rpartition("for ")[2].split()[0])
    assert paused > 0.15, "the wait counts as time in which training stood still"
    total_bytes = 3 * 4 * sum(SIZES.values())
    assert shown[0][:2] == (0, total_bytes), "weights and two moments of AdamW"
    assert shown[-1][:2] == (total_bytes, total_bytes)
    assert shown[0][2] > 0
    assert load_newest_(trainer.parallel, trainer.update, tmp_path, run={}) == 2
    assert not differing(trainer, 2)
    (tmp_path / "step-000002").rename(tmp_path / "away")
    assert load_newest_(trainer.parallel, trainer.update, tmp_path, run={}) == 1
    assert not differing(trainer, 1)


def full_on_one(folder: str) -> tuple[list[str], dict[int, str], list[list[str]]]:
    """Three saves; the second meets a full disk on rank 1, and training goes on."""
    checkpoints = Path(folder)
    trainer, told = trainer_of(run_spec("dp2")), list[str]()
    parallel, update = trainer.parallel, trainer.update
    saver = Saver(Saving(checkpoints, {}, {}, keep=9), parallel.mesh, told.append)
    names = []
    for step in (8, 9, 10):
        fill_(trainer, step)
        with full_disk(is_mine=step == 9 and parallel.mesh.rank == 1):
            saver.begin(parallel, update, step)
            saver.finish()
        names.append(names_in(checkpoints))
        torch.distributed.barrier()
    with pytest.raises(RunStopped) as caught, full_disk(is_mine=parallel.mesh.rank == 1):
        save(parallel, update, Saving(checkpoints, {}, {}, keep=9), step=11)
    torch.distributed.barrier()
    assert load_newest_(parallel, update, checkpoints, run={}) == 10
    assert not differing(trainer, 10)
    return told, {**saver.failures, 11: str(caught.value)}, names


def test_a_full_disk_on_one_rank_is_heard_of_and_loses_nothing(ranks: RankPool, tmp_path: Path):
    [(told, failures, names), (silent, same, _)] = ranks(2, full_on_one, str(tmp_path))
    expected = {
        step: f"no checkpoint after step {step}: cannot write {tmp_path}/step-{step:06}.part/"
        "rank-00001.safetensors: File too large"
        for step in (9, 11)
    }
    assert failures == same == expected
    assert names == [["step-000008"], ["step-000008"], ["step-000008", "step-000010"]]
    assert told[1] == expected[9]
    assert (len(told), silent) == (3, [])


def hung_on_one(folder: str) -> tuple[str, list[str], list[tuple[int, int, float]]]:
    """A save whose last call of the system on rank 1 comes back too late."""
    trainer, told, shown = trainer_of(run_spec("dp2")), list[str](), list[tuple[int, int, float]]()
    parallel, gate, fsync = trainer.parallel, threading.Event(), os.fsync

    def hang(_: int) -> None:
        assert gate.wait(30)

    saving = Saving(Path(folder), {}, {})
    saver = Saver(saving, parallel.mesh, told.append, lambda *now: shown.append(now), timeout_seconds=1.0)
    if parallel.mesh.rank == 1:
        os.fsync = hang  # type: ignore[assignment]
    try:
        saver.begin(parallel, trainer.update, 1)
        with pytest.raises(RankFailed) as caught:
            saver.finish()
    finally:
        gate.set()
        os.fsync = fsync
    return str(caught.value), told, shown


def test_a_write_that_hangs_ends_the_run(ranks: RankPool, tmp_path: Path):
    """The ranks that wait for it ask each other all the time, so to the watchdogs they move."""
    [(message, told, shown), (same, silent, _)] = ranks(2, hung_on_one, str(tmp_path), limit_seconds=20)
    place = f"rank 1 is still at {tmp_path}/step-000001.part/rank-00001.safetensors"
    assert message == same == f"no byte was written for 1 s: {place}"
    assert (told, silent) == ([f"warning: no byte was written for 0.5 s: {place}"], [])
    assert shown[-1][0] == shown[-1][1] > 0, "rank 0 has written"


def saved_by_one(folder: str) -> tuple[str, list[str]]:
    """Rank 0 alone saves, as under ``if rank == 0``; rank 1 goes on to the next step."""
    trainer = trainer_of(run_spec("dp2"))
    saving = Saving(Path(folder), {}, {})
    acts = (partial(save, trainer.parallel, trainer.update, saving, step=1), partial(trainer.step, 0))
    with agreement(), pytest.raises(CollectiveMismatch) as caught:
        acts[trainer.parallel.mesh.rank]()
    return str(caught.value), names_in(Path(folder))


def test_a_save_that_not_all_ranks_call_is_named_at_once(ranks: RankPool, tmp_path: Path):
    """CK-03, seen in huggingface/transformers#48569: it would hang until a timeout."""
    for message, names in ranks(2, saved_by_one, str(tmp_path), limit_seconds=20):
        assert "ranks disagree on axis dp" in message
        assert "rank 0: all_gather" in message, message
        assert "step-000001" not in names


@pytest.mark.parametrize("broken", ["weights", "folder", "thread", "memory"])
def test_what_keeps_a_save_from_its_end_is_told(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whatever it is; the older checkpoint stays, and what was begun is gone."""
    trainer, told = trainer_of(run_spec("dp1")), list[str]()
    parallel, update = trainer.parallel, trainer.update
    saver = Saver(Saving(tmp_path, {}, {}), parallel.mesh, told.append)
    saver.begin(parallel, update, 1)
    saver.finish()

    def fail(*_: object, **__: object) -> None:
        raise {"folder": RunStopped("no room"), "memory": RuntimeError("out of memory\nat")}.get(
            broken, KeyError("what")
        )

    if broken == "weights":
        dict(parallel.named_masters())["model.layers.1.self_attn.q_proj.weight"].view(-1)[5] = torch.nan
    elif broken == "memory":
        saver._snapshot._copies.clear()
        monkeypatch.setattr(torch, "empty_like", fail)
    else:
        monkeypatch.setattr(saving_module, "begin_" if broken == "folder" else "finish", fail)
    saver.begin(parallel, update, 2)
    saver.finish()
    reason = {
        "weights": "weights are not finite, first in model.layers.1.self_attn.q_proj.weight",
        "folder": "no room",
        "thread": "KeyError: 'what'",
        "memory": "no host memory for a snapshot: out of memory",
    }[broken]
    assert told[1:] == [saver.failures[2]]
    assert told[1].startswith(f"no checkpoint after step 2: {reason}")
    assert names_in(tmp_path) == ["step-000001"]


def checkpoints_of(trainer: Trainer, folder: Path, told: list[str], steps: int) -> Checkpoints:
    run = run_spec("dp1", steps=steps).model_copy(
        update={"checkpoint": run_spec("dp1").checkpoint.model_copy(update={"every": 1, "keep": 9})}
    )
    return Checkpoints(
        run, folder, trainer.parallel.mesh, must_stay={}, files={}, resume=False, tell=told.append
    )


def test_a_run_goes_on_without_a_checkpoint_but_does_not_end_without_one(tmp_path: Path):
    trainer, told = trainer_of(run_spec("dp1")), list[str]()
    for steps, fails in ((3, 2), (5, 5)):
        told.clear()
        checkpoints = checkpoints_of(trainer, tmp_path / str(steps), told, steps)
        for step in range(1, steps):
            with full_disk(is_mine=step == fails):
                checkpoints.after_step(trainer, step)
                checkpoints.settle()
        if fails == steps:
            with (
                full_disk(is_mine=True),
                pytest.raises(RunStopped, match="no checkpoint after step 5: cannot"),
            ):
                checkpoints.after_step(trainer, steps)
        else:
            checkpoints.after_step(trainer, steps)
            assert told[-1].startswith("there was no checkpoint after step 2: cannot write "), "once more"
        there = [f"step-{step:06}" for step in range(1, steps + 1) if step != fails]
        assert names_in(tmp_path / str(steps) / "checkpoints") == there
