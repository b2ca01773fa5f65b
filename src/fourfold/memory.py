"""Bytes that a rank holds, by formula."""

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
