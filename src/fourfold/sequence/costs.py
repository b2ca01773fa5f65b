"""What context parallelism sends: the exchange of Ulysses and the messages of the ring, exactly."""

from collections.abc import Sequence
from dataclasses import dataclass

from fourfold.sequence.partition import partition_of
from fourfold.sequence.rows import Documents, Ring
from fourfold.traffic import Event


@dataclass(frozen=True)
class SequenceCosts:
    """The communication of one layer's attention on the cp axis, as one rank sees it.

    Attributes:
        documents: of each microbatch, of its whole rows.
        heads: query heads that a rank has before any exchange, and ``kv_heads`` key/value heads.
        head_dim: channels of a head.
        window: how far back a token sees, None for all.
        dtype: what computation runs in, and ``itemsize`` its bytes.
        ring: how many ranks the ring has, and ``ulysses`` how many exchange tokens for heads.
        rank: of the cp axis.
    """

    documents: Sequence[Documents]
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    dtype: str
    itemsize: int
    ring: int
    ulysses: int
    rank: int

    def forward(self, microbatch: int) -> list[Event]:
        """Queries, keys and values to their heads; round the ring; the output back to its tokens."""
        tokens, together = self._tokens(microbatch)
        of_q, of_kv = self.heads, 2 * self.kv_heads * self._copies
        steps = [event for step in range(1, self.ring) for event in self._keys(microbatch, step)]
        return [
            *self._exchange(tokens * (of_q + of_kv)),
            *steps,
            *self._exchange(together * of_q // self.ulysses),
        ]

    def backward(self, microbatch: int) -> list[Event]:
        """The output's gradient to its heads; keys again, and their gradients back; all to their tokens."""
        tokens, together = self._tokens(microbatch)
        of_q, of_kv = self.heads, 2 * self.kv_heads * self._copies
        steps = []
        for step in range(self.ring):
            steps += self._keys(microbatch, step + 1) if step + 1 < self.ring else []
            steps += self._gradients(microbatch, step) if step else []
        return [
            *self._exchange(tokens * of_q),
            *steps,
            *self._exchange(together * (of_q + of_kv) // self.ulysses),
        ]

    @property
    def _copies(self) -> int:
        return max(1, self.ulysses // self.kv_heads)

    def _tokens(self, microbatch: int) -> tuple[int, int]:
        """How many tokens of all rows this rank has, and its group of Ulysses together."""
        documents = self.documents[microbatch]
        counts = partition_of(documents[0], self.ring, self.ulysses).counts()
        first = self.rank // self.ulysses * self.ulysses
        together = sum(counts[first : first + self.ulysses])
        return len(documents) * counts[self.rank], len(documents) * together

    def _exchange(self, head_tokens: int) -> list[Event]:
        """An all-to-all of so many tokens of a head each."""
        size = head_tokens * self.head_dim * self.itemsize
        return [Event("all_to_all", "cp", size, self.dtype)] if self.ulysses > 1 else []

    def _keys(self, microbatch: int, step: int) -> list[Event]:
        """Keys and values of the rank ``step`` before this one, and its own to the one as far behind."""
        own = self.rank // self.ulysses
        source, reader = (own - step) % self.ring, (own + step) % self.ring
        return self._messages(microbatch, ("recv", own, source), ("send", reader, own))

    def _gradients(self, microbatch: int, step: int) -> list[Event]:
        """The gradients of the same, the other way."""
        own = self.rank // self.ulysses
        source, reader = (own - step) % self.ring, (own + step) % self.ring
        return self._messages(microbatch, ("recv", reader, own), ("send", own, source))

    def _messages(self, microbatch: int, *wanted: tuple[str, int, int]) -> list[Event]:
        ring = Ring(self.ring, causal=True, window=self.window)
        heads = self.kv_heads * self._copies // self.ulysses
        size_of_token = 2 * heads * self.head_dim * self.itemsize
        found = []
        for op, q_rank, k_rank in wanted:
            if tokens := ring.tokens(self.documents[microbatch], q_rank, k_rank):
                found.append(Event(op, "cp", tokens * size_of_token, self.dtype))
        return found
