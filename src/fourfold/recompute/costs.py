"""Time and bytes of a decoder's blocks, for the planner."""

from fourfold.flops import forward_flops
from fourfold.memory import tokens_of_logits
from fourfold.program.liveness import Block
from fourfold.specs.model import ModelSpec


def decoder_blocks(
    spec: ModelSpec,
    *,
    rows: int,
    sequence_length: int,
    itemsize: int,
    cp: int = 1,
    tp: int = 1,
    keeps: frozenset[str] = frozenset(),
) -> list[Block]:
    """The embedding, each layer and the head of a decoder, on one microbatch of a rank.

    [Note: what a tape holds] Of T tokens with C channels, H query and K key/value heads of D, and F channels
    in the feed-forward, a layer keeps: its input, the two norms' outputs and the stream between attention and
    feed-forward (4 C); q, k and v as attention reads them, and its output; four tensors of the feed-forward
    (the two projections, the activation and the product), 4 F. In float32 or higher it keeps a number a token
    for each norm, and one a token and head for attention. With norms on q and k, what those read
    comes on top. The head keeps its input, the norm's output, and the logits of one chunk. Rotary angles are
    shared by all layers, labels lie in the batch, and the weights are no part of a tape.

    For its weight gradients a layer needs what its linear layers read (the two norms' outputs, attention's,
    the product) and the gradients of what they gave. For the head these are the norm's output and the
    gradients of the logits of *all* tokens.

    Rows are taken as one document each. On the ranks of tp the channels of the residual stream count whole:
    sequence parallelism keeps less.

    Args:
        spec: the model.
        rows: of a microbatch on a rank.
        sequence_length: tokens of a row, on all ranks of cp.
        itemsize: bytes of an element in the dtype that computation runs in.
        cp: over how many ranks the tokens are cut.
        tp: over how many ranks heads, feed-forward and vocabulary are cut.
        keeps: the names of the results that a layer's forward leaves where it is to run again.
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
    # Of q, k, v and attention's output, and of gate, up and the product; two results go into the stream.
    linear = 4 * stream + tokens * itemsize * (2 * (H + K) * D + 3 * -(-spec.intermediate_size // tp))
    logits = tokens * -(-spec.vocab_size // tp) * itemsize
    queries, inner = tokens * H * D * itemsize, tokens * -(-spec.intermediate_size // tp) * itemsize
    results = {"attention": queries + tokens * H * high, "q_proj": queries, "sum": 2 * stream}
    results |= {"gather": 2 * stream, "o_proj": stream}
    results |= dict.fromkeys(("k_proj", "v_proj"), tokens * K * D * itemsize)
    results |= dict.fromkeys(("gate_proj", "up_proj"), inner)
    kept = sum(results[name] for name in keeps)
    flops = forward_flops(spec, sequence_length)
    return [
        Block(flops.embed, 0, 0),
        *[Block(flops.layer, stream, layer, linear, kept)] * spec.num_hidden_layers,
        Block(flops.head, stream, head, stream + logits),
    ]
