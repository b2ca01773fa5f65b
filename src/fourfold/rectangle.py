"""Which pairs of query and key attention computes at once."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Some queries of a rank and some keys of a rank, counted in the order in which they hold them.

    Query i and key j of it are ``ahead + i - j`` tokens apart. The query sees the key if that is at least 0,
    where ``causal``, and less than ``window``, if there is one.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    ahead: int
    causal: bool = False
    window: int | None = None

    @property
    def pairs(self) -> int:
        """How many pairs of query and key are computed."""
        keys = self.k_stop - self.k_start
        total = 0
        for i in range(self.q_stop - self.q_start):
            last = min(keys - 1, self.ahead + i) if self.causal else keys - 1
            first = 0 if self.window is None else max(0, self.ahead + i - self.window + 1)
            total += last - first + 1
        return total
