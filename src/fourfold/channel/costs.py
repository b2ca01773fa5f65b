"""What tensor parallelism sends: the collectives of each block, forward and backward."""

from collections.abc import Sequence
from dataclasses import dataclass

from fourfold.memory import tokens_of_logits
from fourfold.traffic import Event


@dataclass(frozen=True)
class ChannelCosts:
    """The collectives of segments on the tp axis.

    Attributes:
        blocks: the names of each segment's blocks, in order: ``embed``, ``layer.0``..., ``head``.
        tokens: of each microbatch, B x S.
        hidden_size: channels of the residual stream.
        vocab_size: of the whole vocabulary.
        dtype: what computation runs in, and ``itemsize`` its bytes.
        statistics_dtype: of the loss, and ``statistics_itemsize`` its bytes.
        ranks: of the tp axis.
        sequence_parallel: whether the residual stream is cut by tokens.
    """

    blocks: Sequence[Sequence[str]]
    tokens: Sequence[int]
    hidden_size: int
    vocab_size: int
    dtype: str
    itemsize: int
    statistics_dtype: str
    statistics_itemsize: int
    ranks: int
    sequence_parallel: bool

    def forward(self, segment: int, microbatch: int) -> list[Event]:
        """The collectives of a segment's forward, in order."""
        enter = [self._stream("all_gather", microbatch)] if self.sequence_parallel else []
        leave = [self._stream("reduce_scatter" if self.sequence_parallel else "all_reduce", microbatch)]
        loss = [self._statistics(tokens) for tokens in self._chunks(microbatch)]
        return self._over_blocks(
            self.blocks[segment], embed=leave, layer=2 * (enter + leave), head=enter + loss
        )

    def backward(self, segment: int, microbatch: int) -> list[Event]:
        """The collectives of a segment's input gradient, in order: each is another's backward."""
        enter = [self._stream("reduce_scatter" if self.sequence_parallel else "all_reduce", microbatch)]
        leave = [self._stream("all_gather", microbatch)] if self.sequence_parallel else []
        again = [self._statistics(tokens) for tokens in self._chunks(microbatch)[-2::-1]]
        return self._over_blocks(
            self.blocks[segment][::-1], embed=leave, layer=2 * (leave + enter), head=again + enter
        )

    def _chunks(self, microbatch: int) -> list[int]:
        """The tokens of each chunk of the loss; see [Note: logits of one chunk] in `fourfold.models.loss`."""
        at_once = tokens_of_logits(self.vocab_size, itemsize=self.itemsize, ranks=self.ranks)
        whole, rest = divmod(self.tokens[microbatch], at_once)
        return [at_once] * whole + [rest] * (rest > 0)

    def _statistics(self, tokens: int) -> Event:
        """Two numbers a token and rank; see `fourfold.channel.vocabulary`."""
        size = 2 * tokens * self.ranks * self.statistics_itemsize
        return Event("all_gather", "tp", size, self.statistics_dtype)

    def _stream(self, op: str, microbatch: int) -> Event:
        """A collective on the whole residual stream of a microbatch."""
        return Event(op, "tp", self.tokens[microbatch] * self.hidden_size * self.itemsize, self.dtype)

    def _over_blocks(
        self, names: Sequence[str], *, embed: list[Event], layer: list[Event], head: list[Event]
    ) -> list[Event]:
        kinds = {"embed": embed, "head": head}
        return [event for name in names for event in kinds.get(name, layer)] if self.ranks > 1 else []
