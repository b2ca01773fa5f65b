"""Bytes that a rank holds: what they are for, and how many logits there are at once."""

from enum import StrEnum


class Category(StrEnum):
    """What memory is held for; the same names where it is predicted, measured and printed."""

    WEIGHTS = "weights"
    """Master weights that the rank owns, and the weights that it keeps between steps to compute with."""

    GRADIENTS = "gradients"
    """Sums that stay, and whole gradients while they are computed and reduced."""

    OPTIMIZER = "optimizer"
    """The moments of what the rank owns."""

    GATHERED = "gathered"
    """Weights that were brought from other ranks for a use, until they are freed."""

    ACTIVATIONS = "activations"
    """What forwards left for backwards, what goes between segments, and what a block computes with."""

    LOGITS = "logits"
    """Those of one chunk of tokens, and what the loss computes of them."""

    COMMUNICATION = "communication"
    """What is received, sent or added up and is in no other category yet."""

    BATCH = "batch"
    """Tokens, labels, positions and rotary angles of a step's microbatches."""


LOGITS_BYTES = 256 * 2**20
"""The most that the logits of a microbatch take at once on a rank."""


def tokens_of_logits(vocab_size: int, *, itemsize: int, ranks: int = 1) -> int:
    """Return for how many tokens logits are made at once: what fits `LOGITS_BYTES`, one at least.

    Args:
        vocab_size: of the whole vocabulary.
        itemsize: bytes of one logit.
        ranks: over how many the vocabulary is cut. All of them come to the same number.
    """
    columns = -(-vocab_size // ranks)
    return max(1, LOGITS_BYTES // (columns * itemsize))
