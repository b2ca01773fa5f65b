"""What a run may change beside its layout: kernels, overlap, and the dtypes of what is kept and sent."""

from dataclasses import dataclass

from fourfold.planner.stages import Dealt


@dataclass(frozen=True)
class Practice:
    """What a run may change beside its layout.

    Attributes:
        products: the dtype of matrix products, ``float8`` for example; None for the step's own.
        compiled: whether chains of element-wise kernels are compiled to one.
        attention: the rate of attention kernels by that of the newest; FlashAttention 2 on Hopper is 0.67.
        fused_attention: False where scores go through memory, as before FlashAttention.
        tp_hidden: the share of tp's collectives that travels behind the products that they are cut along.
        logits_again: whether the head's backward makes logits a second time, as ours does, for less memory.
        reduced_itemsize: bytes of an element of a gradient while it is summed over ranks.
        gradient_bytes: of a parameter's gradients while they are kept; ours are float32. Besides,
            ``owned_gradient_bytes`` where the optimizer has its own copy of those that it needs.
        sends_wait: whether ranks of a pipeline stand still while a message is on its way between them.
        messages_cut: whether ranks of tp that hold the same stream send a piece each and gather it behind.
        sums_wait: whether the sums of gradients, and gathers of new weights, come when all is computed, as in
            DeepSpeed's pipelines, and not behind the last backward and the first forward.
        owners_broadcast: whether each owner sends its new weights by itself, one after another, as textbook
            ZeRO does, when all are updated; ours go in one gather a unit.
        steps_overlap: whether a pipeline rank goes on to the next step while others are at this one, as with
            the post-validation of arXiv:2401.10241.
        dealt: how layers come to stages.
        launch_seconds: between two kernels that the host starts, where it is slower than the machine says.
        launches_wait: whether the host waits for each kernel before it starts the next one, as with
            ``CUDA_LAUNCH_BLOCKING=1``: what starting them takes comes on top of what they take.
        fragmentation: the share that an allocator reserves beyond what is allocated: 0.02 to 0.05 with
            expandable segments, 0.05 to 0.2 without.
    """

    products: str | None = None
    compiled: bool = False
    attention: float = 1.0
    fused_attention: bool = True
    tp_hidden: float = 0.0
    logits_again: bool = True
    reduced_itemsize: int = 4
    gradient_bytes: int = 4
    owned_gradient_bytes: int = 0
    sends_wait: bool = False
    messages_cut: bool = False
    sums_wait: bool = False
    owners_broadcast: bool = False
    steps_overlap: bool = False
    dealt: Dealt = "by work"
    launch_seconds: float | None = None
    launches_wait: bool = False
    fragmentation: float = 0.04


OURS = Practice()
