"""A checksum that ranks can take of a piece together, each of the bytes that it reads.

[Note: sums of words] The digest of a piece is the sum of its 32-bit words, each times an odd number that
belongs to its place, modulo 2^64. So it can be taken part by part, in any order, by any ranks, and added up:
who loads on another layout than the one that saved reads only what it owns, and still every byte is checked.
An odd factor has an inverse: a change within one word always changes the digest. Any other change passes with
a chance of about 2^-64, or more where only high bits of words differ, which low bits of the factors do not
reach: about 2^-32 where two words that differ in the top bit alone change places. It finds damage, not
malice.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

WORD_BYTES = 4
BLOCK_WORDS = 2**16
MODULUS = 2**64


def _mixed(number: int) -> int:
    """SplitMix64 (Steele et al. 2014), made odd."""
    z = (number + 1) * 0x9E3779B97F4A7C15 % MODULUS
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % MODULUS
    return (z ^ (z >> 31)) | 1


@cache
def _factors() -> NDArray[np.uint64]:
    """Those of the places in a block."""
    return np.array([_mixed(place) for place in range(BLOCK_WORDS)], np.uint64)


def digest(content: NDArray[np.uint8], first_byte: int) -> int:
    """Return what some bytes of a piece add to its digest.

    Args:
        content: whole words.
        first_byte: where they begin in the piece, at the start of a word.
    """
    words = content.view(np.uint32)
    first, total, position = first_byte // WORD_BYTES, 0, 0
    while position < len(words):
        block, place = divmod(first + position, BLOCK_WORDS)
        count = min(BLOCK_WORDS - place, len(words) - position)
        part = words[position : position + count].astype(np.uint64)
        # A block has a factor of its own, so that words of different blocks cannot change places.
        total += int(np.dot(part, _factors()[place : place + count])) * _mixed(BLOCK_WORDS + block)
        position += count
    return total % MODULUS
