"""A file that the system does not let us read is not damaged: nothing is done to its checkpoint."""

import errno
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fourfold.checkpoint import load_checkpoint, load_newest_
from fourfold.checkpoint.files import MOST_OPEN, OpenFiles
from fourfold.checkpoint.manifest import MANIFEST
from fourfold.errors import Unreadable
from tests.checkpoint.test_damage import EXPECTED_RUN, saved
from tests.checkpoint.trainers import differing, fill_, run_spec, trainer_of
from tests.ranks import RankPool


def fail_to_read_for_two(folder: str) -> list[str]:
    """Rank 1 gets no bytes of the newest, which is whole; both hear of it, and the next time all is well."""
    trainer = trainer_of(run_spec("fsdp2", pieces="flat"))
    checkpoints, read = Path(folder), os.preadv
    for step in (3, 4):
        saved(trainer, checkpoints, step)
    fill_(trainer, 9)

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    if trainer.parallel.mesh.rank == 1:
        os.preadv = fail
    told: list[str] = []
    try:
        with pytest.raises(Unreadable) as caught:
            load_newest_(trainer.parallel, trainer.update, checkpoints, run=EXPECTED_RUN, tell=told.append)
    finally:
        os.preadv = read
    assert told == []
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000003", "step-000004"]
    assert load_newest_(trainer.parallel, trainer.update, checkpoints, run=EXPECTED_RUN) == 4
    assert not differing(trainer, 4)
    return [str(caught.value)]


def test_what_cannot_be_read_now_is_not_damaged(ranks: RankPool, tmp_path: Path):
    [first, second] = ranks(2, fail_to_read_for_two, str(tmp_path))
    assert first == second
    path = rf"{tmp_path}/step-000004/rank-0000\d\.safetensors"
    assert re.match(
        rf"cannot read {path}: Input/output error: it may be whole, so nothing was changed", *first
    )


@pytest.mark.parametrize("name", [MANIFEST, "config.json"])
def test_a_file_that_is_not_given_to_us(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """All handles are taken, or the name is out of reach: not damage, wherever it is met."""
    trainer = trainer_of(run_spec("dp1"))
    path, opened = saved(trainer, tmp_path, 4) / name, Path.open

    def fail(self: Path, *arguments: Any, **options: Any) -> Any:
        if self == path:
            raise OSError(errno.EMFILE, "Too many open files", str(self))
        return opened(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(Unreadable, match=f"cannot read {path}: Too many open files"):
        load_newest_(trainer.parallel, trainer.update, tmp_path, run=EXPECTED_RUN)
    with pytest.raises(Unreadable, match=f"cannot read {path}: Too many open files"):
        load_checkpoint(path.parent)


def test_more_files_than_a_process_may_have_open(tmp_path: Path):
    """What a thousand ranks wrote is read by one, also back and forth."""
    paths = [tmp_path / str(number) for number in range(MOST_OPEN + 2)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]))
    files, before = OpenFiles(), len(os.listdir("/proc/self/fd"))
    found = np.zeros(1, np.uint8)
    for number in (*range(len(paths)), 0, 1, len(paths) - 1):
        files.read_into(str(paths[number]), found, 0)
        assert found[0] == number
    assert len(os.listdir("/proc/self/fd")) == before + MOST_OPEN
    files.close()
    assert len(os.listdir("/proc/self/fd")) == before
