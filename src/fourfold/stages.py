"""The stages of a pipeline, and the segments that each computes in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from fourfold.batch.units import master_dtype
from fourfold.channel.cuts import Cut
from fourfold.layer.schedules import schedule_of
from fourfold.mesh import Mesh
from fourfold.models import Decoder, Piece, join
from fourfold.models.parameters import parameter_users
from fourfold.outline import blocks_of_stages, dealt
from fourfold.program.program import Program


@dataclass(frozen=True)
class Stages:
    """The blocks of a model, dealt to the stages of a pipeline.

    Attributes:
        order: the schedule: in which order the stages' forwards and backwards run.
        blocks: the names of the blocks of each stage.
        pieces: what computes as one: the segments of each stage.
        before_head: the blocks that are joined with the head to the last segment.
    """

    order: Program
    blocks: Sequence[Sequence[str]]
    pieces: Sequence[Sequence[Piece]]
    before_head: Sequence[Piece]

    @property
    def segments(self) -> list[Piece]:
        """Those of all stages, in model order."""
        return [piece for stage in self.pieces for piece in stage]

    @property
    def rank_of_segment(self) -> list[int]:
        """The pipeline rank of each segment."""
        ranks = zip(self.order.rank_of_segment, self.pieces, strict=True)
        return [rank for rank, stage in ranks for _ in stage]


def cut_layers(
    model: Decoder,
    mesh: Mesh,
    *,
    microbatches: int,
    sequence_length: int,
    dtype: torch.dtype,
    cuts: Mapping[str, Cut],
    joined: bool,
) -> Stages:
    """Deal the model's blocks to pipeline stages, and join small neighbours of a stage to segments.

    Args:
        model: the blocks.
        mesh: how many stages there are, and in which order they run.
        microbatches: of a step.
        sequence_length: tokens of a row.
        dtype: what computation runs in.
        cuts: what the ranks of tp hold of each parameter; empty where tp is 1.
        joined: see `fourfold.outline.dealt`.
    """
    blocks = model.pieces()
    order = schedule_of(mesh.layout, microbatches=microbatches, layers=max(len(blocks) - 2, 1))
    itemsize = master_dtype(dtype).itemsize
    owned = parameter_users(model, [block.modules for block in blocks])
    numel = {name: prod(cut.shape) // mesh.tp.size for name, cut in cuts.items()}
    numel = numel or {name: parameter.numel() for name, parameter in model.named_parameters()}
    counts = [len(blocks)]  # of any model; what is cut into stages is a decoder
    if order.num_segments > 1:
        counts = blocks_of_stages(model.spec, sequence_length, stages=order.num_segments)
    spans_of_stages = dealt(
        [sum(numel[name] * itemsize for name in parameters) for parameters in owned],
        counts=counts,
        joined=joined,
        layout=mesh.layout,
    )
    return Stages(
        order,
        [[blocks[index].name for span in spans for index in span] for spans in spans_of_stages],
        [[join(blocks[span.start : span.stop]) for span in spans] for spans in spans_of_stages],
        blocks[spans_of_stages[-1][-1].start : -1],
    )
