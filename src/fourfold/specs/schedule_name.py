"""How a pipeline schedule is named: ``1f1b``, ``interleaved2``, or the path of a file.

A number after the name is the schedule's one choice; it stands after ``pp4:`` in a layout and on the command
line. The schedules themselves are in `fourfold.layer.schedules`.
"""

import re
from dataclasses import dataclass

from fourfold.errors import UserError, choices, nearest


@dataclass(frozen=True, slots=True)
class ScheduleRule:
    """What a schedule's name asks for.

    Attributes:
        about: the schedule, in a few words.
        stages: how many stages each rank holds; None where the number says it, or the schedule finds it.
        number: what the number means, None where there is none.
        needs_number: whether the name stands for nothing without it.
    """

    about: str
    stages: int | None = 1
    number: str | None = None
    needs_number: bool = False


SCHEDULE_RULES = {
    "gpipe": ScheduleRule("all forwards, then all backwards"),
    "1f1b": ScheduleRule(
        "one forward, one backward; the default", number="microbatches in flight on the first rank"
    ),
    "interleaved": ScheduleRule(
        "1F1B over several stages a rank", stages=None, number="stages a rank", needs_number=True
    ),
    "bfs": ScheduleRule(
        "breadth-first over several stages a rank", stages=None, number="stages a rank", needs_number=True
    ),
    "zb-h1": ScheduleRule("zero bubble, activations as 1F1B"),
    "zb-h2": ScheduleRule("zero bubble, twice the activations"),
    "zbv": ScheduleRule("zero bubble, two stages a rank in a V", stages=2),
    "dualpipev": ScheduleRule("both directions at once, two stages a rank in a V", stages=2),
    "auto": ScheduleRule(
        "the best that a search finds", stages=None, number="most microbatches in flight on a rank"
    ),
}
"""The schedules by name."""

FILE_SUFFIXES = (".csv", ".json")
"""A name that ends so is the path of a file that holds a schedule."""


@dataclass(frozen=True, slots=True)
class ScheduleName:
    """A schedule by name, with its number where one is given; or by the path of a file."""

    name: str
    number: int | None = None

    @classmethod
    def parse(cls, text: str) -> "ScheduleName":
        """Read what `str` prints. Raises `UserError`."""
        if text.endswith(FILE_SUFFIXES):
            return cls(text)
        name, number = text, ""
        if text not in SCHEDULE_RULES and (match := re.fullmatch(r"(.*?)(\d+)", text)):
            name, number = match.groups()
        rule = SCHEDULE_RULES.get(name)
        if rule is None:
            hint = nearest(name, SCHEDULE_RULES)
            raise UserError(
                f"there is no schedule '{text}'.{hint} Use {choices(written_names())}, or the path of a file "
                f"that ends in {choices(FILE_SUFFIXES)}"
            )
        if number and rule.number is None:
            raise UserError(f"schedule '{text}': {name} takes no number, write {name}")
        if rule.needs_number and not number:
            raise UserError(f"schedule '{text}' needs a number ({rule.number}): write e.g. {name}2")
        if number and int(number) < 1:
            raise UserError(f"schedule '{text}': the number ({rule.number}) must be at least 1")
        return cls(name, int(number) if number else None)

    def __str__(self) -> str:
        return self.name + ("" if self.number is None else str(self.number))

    @property
    def is_file(self) -> bool:
        """Whether the name is the path of a file."""
        return self.name.endswith(FILE_SUFFIXES)

    @property
    def stages_per_rank(self) -> int | None:
        """How many stages each rank holds; None where only the schedule itself knows."""
        if self.is_file:
            return None
        rule = SCHEDULE_RULES[self.name]
        return self.number if rule.needs_number else rule.stages


def written_names() -> list[str]:
    """Every name as a user may write it."""
    return [f"{name}2" if rule.needs_number else name for name, rule in SCHEDULE_RULES.items()]
