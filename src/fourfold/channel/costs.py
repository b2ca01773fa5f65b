"""What tensor parallelism sends: the collectives where the residual stream enters a branch and leaves it."""

from collections.abc import Sequence
from dataclasses import dataclass

from fourfold.memory import tokens_of_logits
from fourfold.traffic import Event


@dataclass(frozen=True)
class ChannelCosts:
    """The collectives on the tp axis, for each microbatch. Backward, each is another's.

    Attributes:
        tokens: of each microbatch on a rank of cp, B x S / cp.
        hidden_size: channels of the residual stream.
        vocab_size: of the whole vocabulary.
        dtype: what computation runs in, and ``itemsize`` its bytes.
        statistics_dtype: of the loss, and ``statistics_itemsize`` its bytes.
        ranks: of the tp axis.
        sequence_parallel: whether the residual stream is cut by tokens.
        regather: whether what entered a branch is then gathered again in its backward.
    """

    tokens: Sequence[int]
    hidden_size: int
    vocab_size: int
    dtype: str
    itemsize: int
    statistics_dtype: str
    statistics_itemsize: int
    ranks: int
    sequence_parallel: bool
    regather: bool = False

    def enter(self, microbatch: int) -> list[Event]:
        """Where the stream enters a branch or the head; and backward, where it left one."""
        return self._stream("all_gather", microbatch) if self.sequence_parallel else []

    def enter_again(self, microbatch: int) -> list[Event]:
        """In a branch's backward, for what it did not keep of its input."""
        return self.enter(microbatch) if self.regather else []

    def leave(self, microbatch: int) -> list[Event]:
        """Where the stream leaves a branch or the embedding; and backward, where it entered one."""
        return self._stream("reduce_scatter" if self.sequence_parallel else "all_reduce", microbatch)

    def loss(self, microbatch: int) -> list[Event]:
        """The statistics of the loss, chunk by chunk; see `fourfold.channel.vocabulary`."""
        return [self._statistics(tokens) for tokens in self._chunks(microbatch)]

    def loss_again(self, microbatch: int) -> list[Event]:
        """Those of the chunks that the backward computes again, the last first."""
        return [self._statistics(tokens) for tokens in self._chunks(microbatch)[-2::-1]]

    def _chunks(self, microbatch: int) -> list[int]:
        """The tokens of each chunk of the loss; see [Note: logits of one chunk] in `fourfold.models.loss`."""
        at_once = tokens_of_logits(self.vocab_size, itemsize=self.itemsize, ranks=self.ranks)
        whole, rest = divmod(self.tokens[microbatch], at_once)
        return [at_once] * whole + [rest] * (rest > 0)

    def _statistics(self, tokens: int) -> Event:
        size = 2 * tokens * self.ranks * self.statistics_itemsize
        return Event("all_gather", "tp", size, self.statistics_dtype)

    def _stream(self, op: str, microbatch: int) -> list[Event]:
        """A collective on the whole residual stream of a microbatch."""
        size = self.tokens[microbatch] * self.hidden_size * self.itemsize
        return [Event(op, "tp", size, self.dtype)]
