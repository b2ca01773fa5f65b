"""How activation checkpointing is named: ``full``, ``every:2``, ``slots:3``, ``selective:attention+q_proj``.

What stands after a colon is the policy's one choice: a number, or the names of the results that stay. What a
policy does is in `fourfold.recompute.plan`.
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
        names: what the names mean that may be given, None where there are none.
    """

    about: str
    number: str | None = None
    example: str = ""
    is_whole: bool = True
    names: str | None = None


RECOMPUTE_RULES = {
    "none": RecomputeRule("keep everything"),
    "full": RecomputeRule("keep the input of every block, compute each block twice"),
    "every": RecomputeRule("keep every k-th block's input", number="every how many blocks", example="2"),
    "sqrt": RecomputeRule("every:k with k the root of a stage's blocks"),
    "selective": RecomputeRule("as full, but what is dear to compute is kept", names="results kept"),
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


KEPT_NAMES = {
    "attention": "attention's output with its statistics; with cp its communication",
    "q_proj": "queries before norm and rotation",
    "k_proj": "keys before them",
    "v_proj": "values",
    "o_proj": "attention's output as it goes into the stream; with tp a rank's part of the sum",
    "gate_proj": "of the feed-forward: what goes into the activation",
    "up_proj": "of the feed-forward: what is multiplied with it",
    "sum": "with tp: what goes into the stream, summed over the ranks",
    "gather": "with tp: the stream, gathered for a branch",
}
"""What ``selective`` may keep of a layer, by name."""

_DEAR = frozenset({"attention", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"})
"""Kept by default: attention, and all matrix products but the last one, which no tape needs."""


@dataclass(frozen=True, slots=True)
class RecomputeName:
    """A policy by name, with its number or its names where it has some."""

    name: str
    number: float | None = None
    names: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "RecomputeName":
        """Read what `str` prints. Raises `UserError`."""
        name, colon, written = text.partition(":")
        rule = RECOMPUTE_RULES.get(name)
        if rule is None:
            hint = nearest(name, RECOMPUTE_RULES)
            raise UserError(f"recompute='{text}' does not exist.{hint} Use {choices(written_policies())}")
        if rule.names is not None:
            return cls(name, names=_kept_names(text, written) if colon else ())
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
        if self.names:
            return f"{self.name}:{'+'.join(self.names)}"
        return self.name + ("" if self.number is None else f":{self.number:g}")

    @property
    def is_none(self) -> bool:
        """Whether nothing is computed again."""
        return self.name == "none"

    def keeps(self, *, tp: int) -> frozenset[str]:
        """The names of the results of a layer that stay; none where everything is computed again.

        By default, of a sum over the ranks of tp the sum stays, not a rank's part of it.
        """
        if self.name != "selective":
            return frozenset()
        names = frozenset(self.names) or (_DEAR if tp == 1 else _DEAR | {"sum"})
        return names - self.unread(tp=tp)

    def not_again(self, *, tp: int) -> frozenset[str]:
        """The names of the results of a layer that are not computed again."""
        return self.keeps(tp=tp) | self.unread(tp=tp)

    def unread(self, *, tp: int) -> frozenset[str]:
        """The names of the results of a layer that are neither kept nor computed again.

        What it adds to the stream last; and where a sum over the ranks of tp stays, a rank's part of it.
        """
        if self.name != "selective":
            return frozenset()
        summed = tp > 1 and (not self.names or "sum" in self.names)
        return frozenset({"down_proj", "o_proj"} if summed else {"down_proj"})


def _kept_names(text: str, written: str) -> tuple[str, ...]:
    """Read names that are joined by plus signs."""
    names = tuple(written.split("+"))
    for name in names:
        if name not in KEPT_NAMES:
            raise UserError(
                f"recompute='{text}': '{name}' is nothing that can be kept.{nearest(name, KEPT_NAMES)} "
                f"Use {choices(KEPT_NAMES)}, joined by +: e.g. selective:attention+q_proj"
            )
    return tuple(dict.fromkeys(names))


NO_RECOMPUTATION = RecomputeName("none")


def written_policies() -> list[str]:
    """Every policy as a user may write it."""
    return [name + (f":{rule.example}" if rule.number else "") for name, rule in RECOMPUTE_RULES.items()]
