"""Which checkpoints of a run stay: never fewer than one that is complete, and never by the order of names."""

from pathlib import Path

import pytest

import fourfold.checkpoint.folders as folders
import fourfold.checkpoint.writing as writing_module
from fourfold.checkpoint.folders import (
    begin_,
    bring_back_,
    complete_,
    folder_of,
    part_of,
    rotate_,
    set_aside_,
    steps_there,
    superfluous,
)
from fourfold.errors import RunStopped, UserError
from fourfold.specs.sections import CheckpointSection


def save_(step: int, checkpoints: Path, *, keep: int = 1, keep_every: int = 0) -> None:
    folder = folder_of(step, checkpoints)
    begin_(folder)
    (part_of(folder) / "content").write_text(str(step))
    complete_(folder)
    rotate_(checkpoints, written=step, keep=keep, keep_every=keep_every)


def test_the_oldest_by_number_goes(tmp_path: Path):
    """CK-02, seen in huggingface/transformers#27138: sorted as text, 10000 is before 9000."""
    for step in [*range(9000, 10_000, 100), 10_000]:
        save_(step, tmp_path, keep=10)
    assert steps_there(tmp_path) == [10_000, *range(9900, 9000, -100)]
    save_(1_000_000, tmp_path, keep=2)
    assert steps_there(tmp_path) == [1_000_000, 10_000], "seven digits are a number as well"


def test_what_was_just_written_stays(tmp_path: Path):
    """CK-02, seen in huggingface/transformers#37260: a later checkpoint of an older run was there."""
    save_(1000, tmp_path)
    save_(10, tmp_path)
    assert steps_there(tmp_path) == [1000, 10], "a later one is not this run's: it is let alone"
    save_(20, tmp_path)
    assert steps_there(tmp_path) == [1000, 20]


def test_those_of_every_so_many_steps_stay(tmp_path: Path):
    for step in range(1, 8):
        save_(step, tmp_path, keep=2, keep_every=3)
    assert steps_there(tmp_path) == [7, 6, 3]
    assert superfluous([1, 2, 3], written=3, keep=1, keep_every=0) == [2, 1]
    assert superfluous([3], written=3, keep=1, keep_every=0) == []


def test_nothing_is_removed_before_the_new_one_is_complete(tmp_path: Path):
    """CK-02: at no time is there fewer than one complete checkpoint."""
    save_(1, tmp_path)
    begin_(folder_of(2, tmp_path))
    assert steps_there(tmp_path) == [1]
    begin_(folder_of(3, tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000003.part"]
    with pytest.raises(RunStopped, match=r"cannot write .*step-000004: No such file"):
        complete_(folder_of(4, tmp_path))
    assert steps_there(tmp_path) == [1]
    with pytest.raises(UserError, match="keep=0 is too small: use 1 or more"):
        CheckpointSection(keep=0)


def test_an_older_one_that_cannot_be_removed_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> None:
        raise RunStopped("cannot write step-000001: Permission denied")

    monkeypatch.setattr(writing_module, "rotate_", fail)
    saving = writing_module.Saving(tmp_path, {}, {})
    begin_(folder_of(2, tmp_path))
    writing_module.write_own(part_of(folder_of(2, tmp_path)), [], 0, 0.25, lambda _: None)
    written = writing_module.finish(folder_of(2, tmp_path), saving, "dp1", ranks=1, step=2, updates=2)
    assert steps_there(tmp_path) == [2]
    assert str(written).endswith(
        "training stood still for 0.250 s; older ones stay: cannot write step-000001: Permission denied"
    )


def test_one_of_the_same_step_makes_room_and_broken_ones_get_numbers(tmp_path: Path):
    save_(5, tmp_path)
    save_(5, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]
    for number in (1, 2):
        assert set_aside_(folder_of(5, tmp_path)).name == f"step-000005.broken-{number}"
        assert steps_there(tmp_path) == []
        save_(5, tmp_path)


def test_one_that_made_room_for_another_that_never_came_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A kill between the two renames of a save of the same step."""
    save_(5, tmp_path)
    begin_(folder_of(5, tmp_path))
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.suffix == ".part":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            complete_(folder_of(5, tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000005.old", "step-000005.part"]
    begin_(folder_of(6, tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000005", "step-000006.part"]
    assert (tmp_path / "step-000005" / "content").read_text() == "5"


def test_what_was_half_removed_never_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A kill while an older checkpoint is removed, or one that another of its step has replaced."""
    for step in (5, 6):
        save_(5, tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(folders.shutil, "rmtree", lambda *_, **__: None)
            save_(step, tmp_path)
        left = sorted(path.name for path in tmp_path.iterdir())
        assert left == sorted({"step-000005.gone", f"step-{step:06}"})
        bring_back_(tmp_path)
        assert steps_there(tmp_path) == [step]
    begin_(folder_of(7, tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000006", "step-000007.part"]
