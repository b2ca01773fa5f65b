"""How long attention takes on a rank, with what cp moves in memory for it.

[Note: attention in pieces] A kernel is as efficient as its rows are long. With a ring of R ranks it sees the
rows of one of them, and its results are merged in float32; Ulysses brings rows together, and packs heads by
rank. The bytes are those that `fourfold.sequence.ring` and `ulysses` read and write, of one document in a
row: a rank has as many queries for the keys of others as it gets keys.
"""

from fourfold.flops import flops_of_a_pair, row_pairs
from fourfold.outline import Step
from fourfold.planner.machine import Machine
from fourfold.traffic import keys_sent

ATTENTION_BACKWARD = 2.5
"""FLOPs of fused attention's backward by its forward's: five products in place of two."""


def attention_seconds(step: Step, machine: Machine, *, rate: float = 1.0) -> tuple[float, float]:
    """The time of a layer's fused attention on a microbatch, forward and backward.

    ``rate`` is that of the kernels by that of the newest.
    """
    pairs = step.rows * row_pairs((step.sequence_length,), step.spec.sliding_window)
    flops = flops_of_a_pair(step.spec) * pairs / step.layout.size("cp", "tp") / rate
    length = min(step.spec.sliding_window or step.sequence_length, step.sequence_length)
    length = max(1, length // _ring(step))
    forward = machine.attention_seconds(flops, length, step.dtype)
    backward = machine.attention_seconds(ATTENTION_BACKWARD * flops, length, step.dtype, backward=True)
    moved, moved_backward = moved_bytes(step)
    return forward + machine.memory_seconds(moved), backward + machine.memory_seconds(moved_backward)


def moved_bytes(step: Step) -> tuple[float, float]:
    """What cp reads and writes in memory for a layer's attention on a microbatch, forward and backward.

    See [Note: attention in pieces].
    """
    sizes, ring = step.sizes, _ring(step)
    head = sizes.tokens * step.spec.head_dim
    queries, keys = head * sizes.heads, 2 * head * sizes.kv_heads * max(1, sizes.ulysses // sizes.kv_heads)
    low, high = step.itemsize, sizes.high
    # Parts by rank are put side by side, then one after another to be sent, then side by side as they come.
    packed = 6 * low * (2 * queries + keys) if sizes.ulysses > 1 else 0
    steps = keys_sent(ring, step.window_share)
    cast = low + high if low < high else 0
    forward = queries * (5 * high + cast) + keys * 2 * low  # both scaled, and added; keys into a message
    backward = queries * (2 * high + low) + keys * (6 * high + 5 * low)  # zeroed, added, cast, added; keys
    return packed + steps * forward, packed + steps * backward


def unfused_attention_seconds(step: Step, machine: Machine) -> tuple[float, float]:
    """The same with all scores of a square, written and read around a softmax in one kernel."""
    rows = step.rows * step.sizes.heads
    tokens, width = step.sequence_length // step.layout.cp, step.spec.head_dim
    shapes = (tokens, step.sequence_length, width), (tokens, width, step.sequence_length)
    products = sum(machine.product_seconds(*shape, step.dtype, count=rows) for shape in shapes)
    scores = rows * tokens * step.sequence_length * step.itemsize
    # Written, read and written by the softmax, read; backward twice the reads.
    return products + machine.memory_seconds(4 * scores), 2 * products + machine.memory_seconds(6 * scores)


def _ring(step: Step) -> int:
    return step.layout.cp // step.sizes.ulysses
