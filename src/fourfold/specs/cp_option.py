"""The option of cp, which heads the ranks of Ulysses can deal, and how many of them send least."""

from collections.abc import Sequence

from fourfold.errors import choices, nearest
from fourfold.specs.spec import divisors
from fourfold.traffic import heads_sent


def cp_option(size: int) -> str:
    """The option for groups of Ulysses of so many ranks."""
    return "ring" if size == 1 else f"ulysses{size}"


def cp_problems(degree: int, option: str | None) -> list[str]:
    """What is wrong with an option of cp: it is ``ring``, ``ulysses`` or e.g. ``ulysses2``."""
    if option is None or option in ("ring", "ulysses"):
        return []
    size = option.removeprefix("ulysses")
    if not (option.startswith("ulysses") and size.isascii() and size.isdigit()):
        written = [f"cp{degree}:ring", f"cp{degree}:ulysses"]
        if degree > 2 and degree % 2 == 0:
            written.append(f"cp{degree}:ulysses2 for a ring of pairs")
        return [
            f"option '{option}' of cp does not exist.{nearest(option, ('ring', 'ulysses'))} "
            f"Use {choices(written)}"
        ]
    if int(size) < 1 or degree % int(size):
        fits = choices([f"cp{degree}:{cp_option(value)}" for value in divisors(degree)])
        return [f"option '{option}' of cp: {size} does not divide cp={degree} (Sequence axis): use {fits}"]
    return []


def ulysses_problems(heads: int, kv_heads: int, size: int) -> list[str]:
    """The rules that ``size`` ranks of Ulysses break: whole query heads, and equal copies of the others.

    ``heads`` query heads and ``kv_heads`` key/value heads are what a rank has before the exchange.
    """
    rules = {
        f"does not divide the {heads} query heads of a rank": heads % size == 0,
        f"neither divides the {kv_heads} key/value heads of a rank nor is a multiple": (
            kv_heads % size == 0 or size % kv_heads == 0
        ),
    }
    return [rule for rule, kept in rules.items() if not kept]


def least_sent(
    sizes: Sequence[int], degree: int, heads: int, kv_heads: int, *, window: float | None = None
) -> int:
    """Of groups of Ulysses on so many ranks the size that sends least for long documents, by formula.

    Of two that send as much, the larger: it leaves attention in fewer pieces. The others are arguments of
    `fourfold.traffic.heads_sent`.
    """
    return min(
        sorted(sizes, reverse=True),
        key=lambda size: heads_sent(heads, kv_heads, ring=degree // size, ulysses=size, window=window),
    )
