"""Schedules in files: CSV as PyTorch's pipelines write it, or JSON.

A CSV file has a row for each rank and an action in each cell: ``0F0, 0F1, 0B0, ...``, the stage, the kind and
the microbatch; empty cells are time that a schedule's author left out. The number of stages and their ranks
follow from the actions. A JSON file says them: ``{"microbatches": 2, "rank_of_stage": [0, 1], "ranks":
[["0F0", ...], ["1F0", ...]]}``.
"""

import csv
import io
import json
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

from fourfold.errors import UserError
from fourfold.layer.list_scheduling import over_stages
from fourfold.program.actions import COMPUTE, Action, Kind
from fourfold.program.check import check
from fourfold.program.program import Program
from fourfold.specs.schedule_name import ScheduleName


def write_schedule(schedule: Program, path: Path) -> None:
    """Write a schedule to a file, as its suffix says."""
    rows = [[str(action) for action in actions] for actions in schedule.ranks]
    if path.suffix == ".json":
        content = {
            "microbatches": schedule.microbatches,
            "rank_of_stage": list(schedule.rank_of_segment),
            "ranks": rows,
        }
        path.write_text(json.dumps(content) + "\n")
        return
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    path.write_text(text.getvalue())


def read_schedule(path: str | Path, *, ranks: int | None = None, microbatches: int | None = None) -> Program:
    """Read a schedule from a file and check it.

    Args:
        path: a ``.csv`` or ``.json`` file.
        ranks: how many pipeline ranks it must be for, where that is known.
        microbatches: how many microbatches it must be for.

    Raises:
        UserError: with every mistake: what cannot be read, what does not fit, what `check` finds.
    """
    path = Path(path)
    text = _text(path)
    try:
        schedule = _from_json(text) if path.suffix == ".json" else _from_csv(text)
        _check_size(schedule)
        check(schedule)
    except UserError as error:
        raise UserError(*(f"{path}: {message}" for message in error.messages)) from None
    problems = [
        f"{path} is a schedule for {found} {what}: {wanted} were asked for, use {name}={found}"
        for what, name, found, wanted in (
            ("pipeline ranks", "pp", len(schedule.ranks), ranks),
            ("microbatches", "microbatches", schedule.microbatches, microbatches),
        )
        if wanted is not None and found != wanted
    ]
    if problems:
        raise UserError(*problems)
    return schedule


def contents(schedules: Iterable[ScheduleName]) -> dict[str, object]:
    """What ranks must have alike beside the names of their schedules: what the files hold, where some are."""
    texts = [_text(Path(schedule.name)) for schedule in schedules if schedule.is_file]
    hashes = [f"hash {sha256(text.encode()).hexdigest()[:16]}" for text in texts]
    return {"the content of the schedule in layout": ", ".join(hashes)} if texts else {}


def _text(path: Path) -> str:
    """The text of a schedule's file; raises `UserError` where there is none."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(f"cannot read the schedule {path}: {reason}") from error


def _from_csv(text: str) -> Program:
    try:
        rows = [[cell for cell in row if cell.strip()] for row in csv.reader(io.StringIO(text))]
    except csv.Error as error:  # as of a quote that nothing closes
        raise UserError(f"it is not CSV: {error}") from error
    while rows and not rows[-1]:
        rows.pop()
    orders = _actions(rows)
    holder: dict[int, int] = {}
    for rank, actions in enumerate(orders):
        for action in actions:
            holder.setdefault(action.segment, rank)
    placement = _placement(holder)
    microbatches = 1 + max(action.microbatch for actions in orders for action in actions)
    return over_stages(orders, placement, microbatches)


def _placement(holder: dict[int, int]) -> tuple[int, ...]:
    """The rank of each stage, from those that some rank acts on."""
    if not holder:
        raise UserError("there are no actions in it")
    if max(holder) > 2 * len(holder) + 10:  # a slip of the pen, not a list of what is missing
        raise UserError(f"nothing is done on most stages below {max(holder)}: stages are counted from 0")
    missing = sorted(set(range(max(holder) + 1)) - set(holder))
    if missing:
        stages = ", ".join(map(str, missing[:5])) + (
            f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        )
        raise UserError(f"nothing is done on stage {stages}: stages are counted from 0, without gaps")
    return tuple(holder[stage] for stage in range(len(holder)))


def _from_json(text: str) -> Program:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers too long, lists too deep
        raise UserError(f"it is not JSON: {error}") from error
    if not isinstance(content, dict) or set(content) != {"microbatches", "rank_of_stage", "ranks"}:
        raise UserError("it must be an object of 'microbatches', 'rank_of_stage' and 'ranks'")
    microbatches, placement, rows = content["microbatches"], content["rank_of_stage"], content["ranks"]
    problems = []
    if not _is_count(microbatches) or microbatches < 1:
        problems.append(f"'microbatches' is {microbatches!r}: must be a number, at least 1")
    if not (isinstance(rows, list) and rows and all(_is_list_of_text(row) for row in rows)):
        problems.append("'ranks' must be a list that holds, for each rank, a list of actions such as \"0F0\"")
    elif not (isinstance(placement, list) and placement and all(map(_is_count, placement))):
        problems.append("'rank_of_stage' must be a list of the rank of each stage")
    else:
        problems += [
            f"'rank_of_stage' puts stage {stage} on rank {rank}: there are {len(rows)} ranks, counted from 0"
            for stage, rank in enumerate(placement)
            if not 0 <= rank < len(rows)
        ]
    if problems:
        raise UserError(*problems)
    return over_stages(_actions(rows), tuple(placement), microbatches)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def _actions(rows: list[list[str]]) -> list[list[Action]]:
    """The actions of each rank, all of them compute."""
    orders: list[list[Action]] = []
    problems = []
    for rank, row in enumerate(rows):
        orders.append([])
        for text in row:
            try:
                action = Action.parse(text)
            except UserError:
                action = None
            if action is None or action.kind not in COMPUTE - {Kind.RECOMPUTE}:
                problems.append(
                    f"rank {rank}: '{text.strip()}' is not an action of a schedule: write the stage, F, B, I "
                    "or W, and the microbatch, as in 2F0"
                )
            else:
                orders[rank].append(action)
    if problems:
        raise UserError(*problems)
    return orders


def _check_size(schedule: Program) -> None:
    """Refuse a number of microbatches that cannot be meant, before every one of them is missed."""
    actions = sum(len(of_rank) for of_rank in schedule.ranks)
    if schedule.num_segments * schedule.microbatches > actions:
        raise UserError(
            f"{schedule.num_segments} stages and {schedule.microbatches} microbatches, counted from 0, need "
            f"a forward each and a backward, and there are {actions} actions in all"
        )
