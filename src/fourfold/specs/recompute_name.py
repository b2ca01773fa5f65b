"""How activation checkpointing is named: ``full``, ``every:2``, ``slots:3``, ``budget:1.5``.

A number after a colon is the policy's one choice. What a policy does is in `fourfold.recompute.plan`.
"""

import math
from dataclasses import dataclass

from fourfold.errors import UserError, choices, nearest


@dataclass(frozen=True, slots=True)
class RecomputeRule:
    """What a policy's name asks for.

    Attributes:
        about: the policy, in a few words.
        number: what the number means, None where there is none.
        example: a number that may be given.
        is_whole: whether the number is a count.
    """

    about: str
    number: str | None = None
    example: str = ""
    is_whole: bool = True


RECOMPUTE_RULES = {
    "none": RecomputeRule("keep everything"),
    "full": RecomputeRule("keep the input of every block, compute each block twice"),
    "every": RecomputeRule("keep every k-th block's input", number="every how many blocks", example="2"),
    "sqrt": RecomputeRule("every:k with k the root of a stage's blocks"),
    "slots": RecomputeRule("keep s inputs, with the fewest forwards", number="inputs kept", example="3"),
    "min": RecomputeRule("keep the stage's input only: slots:1"),
    "budget": RecomputeRule(
        "as few forwards as so many gigabytes of activations allow",
        number="gigabytes (10^9 bytes)",
        example="1.5",
        is_whole=False,
    ),
}  # fmt: skip
"""The policies by name."""


@dataclass(frozen=True, slots=True)
class RecomputeName:
    """A policy by name, with its number where it has one."""

    name: str
    number: float | None = None

    @classmethod
    def parse(cls, text: str) -> "RecomputeName":
        """Read what `str` prints. Raises `UserError`."""
        name, colon, written = text.partition(":")
        rule = RECOMPUTE_RULES.get(name)
        if rule is None:
            hint = nearest(name, RECOMPUTE_RULES)
            raise UserError(f"recompute='{text}' does not exist.{hint} Use {choices(written_policies())}")
        if rule.number is None:
            if colon:
                raise UserError(f"recompute='{text}': {name} takes no number, write {name}")
            return cls(name)
        if not written:
            raise UserError(
                f"recompute='{text}' needs a number ({rule.number}): write e.g. {name}:{rule.example}"
            )
        try:
            number = int(written) if rule.is_whole else float(written)
        except ValueError:
            number = 0
        if not (number >= 1 if rule.is_whole else math.isfinite(number) and number > 0):
            least = "a whole number from 1" if rule.is_whole else "more than 0"
            raise UserError(
                f"recompute='{text}': the number ({rule.number}) must be {least}: "
                f"write e.g. {name}:{rule.example}"
            )
        return cls(name, number)

    def __str__(self) -> str:
        return self.name + ("" if self.number is None else f":{self.number:g}")

    @property
    def is_none(self) -> bool:
        """Whether nothing is computed again."""
        return self.name == "none"


NO_RECOMPUTATION = RecomputeName("none")


def written_policies() -> list[str]:
    """Every policy as a user may write it."""
    return [name + (f":{rule.example}" if rule.number else "") for name, rule in RECOMPUTE_RULES.items()]
