"""Measures what one device computes: matrix products, attention, whole blocks of a model, the update."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fourfold.bench.timing import median_seconds
from fourfold.mesh import Mesh
from fourfold.models import Microbatch
from fourfold.models.attention import attention
from fourfold.optimizer import Update, optimizers
from fourfold.parallel_model import ParallelModel
from fourfold.planner.calibration import (
    MeasuredAttention,
    MeasuredBlock,
    MeasuredUpdate,
    shape_of_block,
)
from fourfold.planner.machine import MeasuredProduct
from fourfold.segment import Segment
from fourfold.specs import Layout, ModelSpec, OptimizerSection
from fourfold.training import initialized
from fourfold.weight_gradients import WeightGradients


@dataclass(frozen=True)
class Shapes:
    """What is measured.

    Attributes:
        spec: the model.
        dtype: of computation.
        sequence: tokens of a whole row.
        rows: of microbatches.
        parts: (cp, tp) pairs: into how many parts tokens and channels are cut.
    """

    spec: ModelSpec
    dtype: str
    sequence: int
    rows: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, spec: ModelSpec, *, dtype: str, sequence: int, ranks: int, rows: Sequence[int]) -> "Shapes":
        """Those that layouts of so many ranks compute."""
        sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
        parts = [
            (cp, tp)
            for tp in sizes
            if not Layout(tp=tp).problems(
                spec, batch=1, microbatches=1, sequence_length=sequence, world_size=None
            )
            for cp in sizes
            if cp * tp <= ranks and sequence % cp == 0
        ]
        return cls(spec, dtype, sequence, tuple(rows), tuple(parts))


def measured_products(shapes: Shapes, device: torch.device) -> Iterator[MeasuredProduct]:
    """The products of a layer's and the head's forward."""
    spec, dtype = shapes.spec, getattr(torch, shapes.dtype)
    sizes = set()
    for cp, tp in shapes.parts:
        hidden, heads, kv_heads, head_dim, inner = shape_of_block(spec, "layer", tp=tp)
        _, vocabulary = shape_of_block(spec, "head", tp=tp)
        for rows in shapes.rows:
            tokens = rows * shapes.sequence // cp
            sizes |= {(tokens, n, hidden) for n in (heads * head_dim, kv_heads * head_dim, inner, vocabulary)}
            sizes |= {(tokens, hidden, heads * head_dim), (tokens, hidden, inner)}
    for m, n, k in sorted(sizes):
        left = torch.randn(m, k, device=device).to(dtype)
        right = torch.randn(n, k, device=device).to(dtype)
        seconds = median_seconds(partial(torch.nn.functional.linear, left, right), device, seconds=0.01)
        yield MeasuredProduct(m, n, k, shapes.dtype, seconds)


def measured_attentions(shapes: Shapes, device: torch.device) -> Iterator[MeasuredAttention]:
    """Fused attention on whole rows with some of the heads, and on pieces of rows."""
    spec, dtype = shapes.spec, getattr(torch, shapes.dtype)
    cases = set()
    for cp, tp in shapes.parts:
        _, heads, kv_heads, _, _ = shape_of_block(spec, "layer", tp=tp)
        for rows in shapes.rows:
            cases.add((rows, shapes.sequence // cp, heads, kv_heads))
            if heads % cp == 0 and kv_heads % cp == 0:  # Ulysses
                cases.add((rows, shapes.sequence, heads // cp, kv_heads // cp))
    for rows, sequence, heads, kv_heads in sorted(cases):
        q, k, v = (
            torch.randn(rows, sequence, count, spec.head_dim, device=device, dtype=dtype).requires_grad_()
            for count in (heads, kv_heads, kv_heads)
        )
        gradient = torch.randn_like(q)
        run = partial(
            attention, q, k, v, documents=((sequence,),) * rows, window=None, scale=spec.head_dim**-0.5
        )
        forward = median_seconds(run, device)
        outs: list[Tensor] = []

        def prepare(run: partial[Tensor] = run, outs: list[Tensor] = outs) -> None:
            outs[:] = [run()]

        def back(outs: list[Tensor] = outs, gradient: Tensor = gradient) -> None:
            outs[0].backward(gradient)

        backward = median_seconds(back, device, before=prepare)
        yield MeasuredAttention(
            rows, sequence, heads, kv_heads, spec.head_dim, shapes.dtype, forward, backward
        )


def measured_blocks(shapes: Shapes, device: torch.device) -> Iterator[MeasuredBlock]:
    """Each kind of block with every part of tokens and channels, forward and backward."""
    for tp in sorted({tp for _, tp in shapes.parts}):
        parallel = _one_layer(shapes, tp, device)
        probes = _Probes(parallel)
        for cp in sorted({cp for cp, other in shapes.parts if other == tp}):
            for rows in shapes.rows:
                sequence = shapes.sequence // cp
                batch = _batch(parallel.model.spec, rows, sequence, device)
                for block, kind, seconds in probes.measured(batch, getattr(torch, shapes.dtype)):
                    shape = shape_of_block(shapes.spec, block, tp=tp)
                    yield MeasuredBlock(block, kind, shape, rows, sequence, shapes.dtype, seconds)


def measured_updates(shapes: Shapes, device: torch.device) -> Iterator[MeasuredUpdate]:
    """The update of a rank that owns an embedding, a layer and a head; and of one with a part of them."""
    for tp in sorted({tp for _, tp in shapes.parts}):
        parallel = _one_layer(shapes, tp, device)
        section = OptimizerSection(learning_rate=1e-6)
        update = Update(parallel, optimizers(parallel, section), clip_norm=section.clip_norm)
        update.learning_rate = 1e-6
        for unit in parallel.units:
            unit.summed.fill_(1e-3)
        elements = sum(unit.summed.numel() for unit in parallel.units)
        loss = torch.zeros((), dtype=torch.float64, device=device)
        yield MeasuredUpdate(elements, median_seconds(partial(update, loss), device))


class _Probes:
    """The three kinds of blocks of a model with one layer, each as a segment."""

    def __init__(self, parallel: ParallelModel):
        self._weight_gradients = WeightGradients()
        self._weight_gradients.attach_(parallel.model)
        self._parameters = list(parallel.model.parameters())
        self._hidden_size = parallel.model.spec.hidden_size
        self._segments = {
            piece.name.partition(".")[0]: Segment(piece, self._weight_gradients)
            for piece in parallel.model.pieces()
        }

    def measured(self, batch: Microbatch, dtype: torch.dtype) -> Iterator[tuple[str, str, float]]:
        """Block, kind of action and seconds. A first F is one that keeps its tape."""
        device = batch.input_ids_BS.device
        x = torch.randn(*batch.input_ids_BS.shape, self._hidden_size, device=device).to(dtype)
        for block, segment in self._segments.items():
            given = None if block == "embed" else x
            gradient = x.new_ones(()).to(torch.promote_types(dtype, torch.float32)) if block == "head" else x
            forward = partial(segment.forward, 0, given, batch)
            tape = partial(self._taped, forward)
            halfway = partial(self._halfway, segment, tape, gradient)
            backward = partial(segment.backward, 0, gradient)
            first_half = partial(segment.input_gradient, 0, gradient)
            second_half = partial(segment.weight_gradient, 0)
            yield block, "F", median_seconds(forward, device, before=segment.reset)
            yield block, "B", median_seconds(backward, device, before=tape)
            yield block, "I", median_seconds(first_half, device, before=tape)
            yield block, "W", median_seconds(second_half, device, before=halfway)
            segment.reset()

    def _taped(self, forward: partial[Tensor]) -> None:
        forward()
        self._weight_gradients.begin_(self._parameters)

    @staticmethod
    def _halfway(segment: Segment, tape: partial[None], gradient: Tensor) -> None:
        tape()
        segment.input_gradient(0, gradient)


def _one_layer(shapes: Shapes, tp: int, device: torch.device) -> ParallelModel:
    """A model of one layer, with the heads, channels and vocabulary of a rank of tp."""
    spec = shapes.spec
    _, heads, kv_heads, head_dim, inner = shape_of_block(spec, "layer", tp=tp)
    part = spec.replace(
        {
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "intermediate_size": inner,
            "vocab_size": shape_of_block(spec, "head", tp=tp)[1],
            "tie_word_embeddings": False,
        }
    )
    mesh = Mesh(Layout(), device.type)
    return initialized(
        part, mesh, microbatches=1, dtype=shapes.dtype, seed=0, sequence_length=shapes.sequence
    )


def _batch(spec: ModelSpec, rows: int, sequence: int, device: torch.device) -> Microbatch:
    tokens = torch.randint(spec.vocab_size, (rows, sequence + 1), device=device)
    return Microbatch(
        tokens[:, :-1].contiguous(),
        tokens[:, 1:].contiguous(),
        torch.arange(sequence, device=device).expand(rows, -1),
        ((sequence,),) * rows,
    )
