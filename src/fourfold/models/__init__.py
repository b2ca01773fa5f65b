"""The models: plain modules that know nothing of parallelism."""

from fourfold.models.batch import IGNORE, Microbatch
from fourfold.models.decoder import Decoder, Piece, join

__all__ = ["IGNORE", "Decoder", "Microbatch", "Piece", "join"]
