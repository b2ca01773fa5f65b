"""Where weights, gradients and optimizer state live: one table for dp, ZeRO-1, ZeRO-2, FSDP and HSDP."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """What is cut into pieces over the fsdp axis, one piece a rank; what is not, every rank holds whole.

    Over the dp axis everything is replicated: ``dp2,fsdp4`` (HSDP) is two replicas of four pieces.

    Attributes:
        weights: between uses a rank holds only its piece; they are gathered for every use, then dropped.
        gradients: they are summed to the owners of the pieces after each microbatch; only a piece stays.
        optimizer: each rank updates its piece alone; the weights are gathered once before they are used.
    """

    weights: bool
    gradients: bool
    optimizer: bool


REPLICATED = Placement(weights=False, gradients=False, optimizer=False)
"""Where fsdp is 1: plain data parallelism."""

PLACEMENTS = {
    None: Placement(weights=True, gradients=True, optimizer=True),
    "zero2": Placement(weights=False, gradients=True, optimizer=True),
    "zero1": Placement(weights=False, gradients=False, optimizer=True),
}
"""By the option of the fsdp axis. None is FSDP (Zhao et al. 2023), or ZeRO-3 (Rajbhandari et al. 2020)."""
