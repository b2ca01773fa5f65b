"""Time and bytes of a decoder's blocks, for the planner."""

from fourfold.flops import forward_flops
from fourfold.memory import tokens_of_logits
from fourfold.recompute.plan import Block
from fourfold.specs.model import ModelSpec


def decoder_blocks(
    spec: ModelSpec, *, rows: int, sequence_length: int, itemsize: int, cp: int = 1, tp: int = 1
) -> list[Block]:
    """The embedding, each layer and the head of a decoder, on one microbatch of a rank.

    [Note: what a tape holds] Of T tokens with C channels, H query and K key/value heads of D, and F channels
    in the feed-forward, a layer keeps: its input, the two norms' outputs and the stream between attention and
    feed-forward (4 C); q, k and v as attention reads them, and its output; four tensors of the feed-forward
    (the two projections, the activation and the product), 4 F. In float32 or higher it keeps a number a token
    for each norm, and one a token and head for attention. With norms on q and k, what those read
    comes on top. The head keeps its input, the norm's output, and the logits of one chunk. Rotary angles are
    shared by all layers, labels lie in the batch, and the weights are no part of a tape.

    Rows are taken as one document each. On the ranks of tp the channels of the residual stream count whole:
    sequence parallelism keeps less.

    Args:
        spec: the model.
        rows: of a microbatch on a rank.
        sequence_length: tokens of a row, on all ranks of cp.
        itemsize: bytes of an element in the dtype that computation runs in.
        cp: over how many ranks the tokens are cut.
        tp: over how many ranks heads, feed-forward and vocabulary are cut.
    """
    tokens = rows * -(-sequence_length // cp)
    high = max(itemsize, 4)
    C, D = spec.hidden_size, spec.head_dim
    H, K = -(-spec.num_attention_heads // tp), -(-spec.num_key_value_heads // tp)
    stream = tokens * C * itemsize
    heads = 2 * H + 2 * K + (H + K if spec.qk_norm else 0)
    numbers = 2 * high + high * H + ((H + K) * high if spec.qk_norm else 0)
    layer = 4 * stream + tokens * (itemsize * (heads * D + 4 * -(-spec.intermediate_size // tp)) + numbers)
    chunk = min(tokens, tokens_of_logits(spec.vocab_size, itemsize=itemsize, ranks=tp))
    head = 2 * stream + tokens * high + chunk * -(-spec.vocab_size // tp) * itemsize
    flops = forward_flops(spec, sequence_length)
    return [
        Block(flops.embed, 0, 0),
        *[Block(flops.layer, stream, layer)] * spec.num_hidden_layers,
        Block(flops.head, stream, head),
    ]
