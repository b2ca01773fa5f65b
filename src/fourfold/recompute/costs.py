"""Time and bytes of a decoder's blocks, for the planner."""

from fourfold.block_memory import BlockMemory, BlockSizes
from fourfold.flops import forward_flops
from fourfold.program.liveness import Block


def decoder_blocks(sizes: BlockSizes) -> list[Block]:
    """The embedding, each layer and the head of a decoder, on one microbatch of a rank.

    Rows are taken as one document each. Times are in FLOPs.
    """
    flops = forward_flops(sizes.spec, sizes.sequence_length)
    layer = _block(flops.layer, sizes.layer())
    return [
        _block(flops.embed, sizes.embed()),
        *[layer] * sizes.spec.num_hidden_layers,
        _block(flops.head, sizes.head()),
    ]


def _block(flops: int, memory: BlockMemory) -> Block:
    tape = memory.tape + memory.logits
    deferred = memory.deferred + memory.deferred_logits
    return Block(flops, memory.input, tape, deferred, memory.kept)
