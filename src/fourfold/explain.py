"""What a training step would take, before anything runs: memory, FLOPs, messages, the bubble.

Ranks of a pipeline stage do the same with the same sizes, so one of each stage stands for all of them, and a
cluster may have any size. Where they hold unequal parts, it is one that holds most.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from fourfold.block_memory import BlockMemory
from fourfold.channel.costs import ChannelCosts
from fourfold.errors import UserError
from fourfold.events import SegmentCosts, step_events
from fourfold.flops import model_flops
from fourfold.layer.transfers import arrivals
from fourfold.memory import Category
from fourfold.outline import ITEMSIZES, Outline, Step, master_dtype, outline
from fourfold.program.actions import COMPUTE, Action, Kind
from fourfold.program.clock import Timeline, clock, peak_activations
from fourfold.rank_memory import Holdings, RankMemory, rank_memory
from fourfold.sequence.costs import SequenceCosts
from fourfold.sequence.rows import Documents
from fourfold.step_flops import StepFlops, StepWork
from fourfold.traffic import Event, counted, sent_bytes


@dataclass(frozen=True)
class Traffic:
    """The collectives of one op on one axis, of one rank's step.

    Attributes:
        op: which, as in ``all_gather``.
        axis: over which ranks.
        calls: how often.
        message_bytes: of the messages, whatever a rank holds of them; see `fourfold.traffic`.
        sent_bytes: that a rank puts on the wire, by a bandwidth-optimal algorithm.
    """

    op: str
    axis: str
    calls: int
    message_bytes: int
    sent_bytes: float


@dataclass(frozen=True)
class Explanation:
    """What a step takes on the ranks of each pipeline stage.

    Attributes:
        step: what is explained.
        outline: its stages, units and program.
        device_type: ``cuda`` or ``cpu``: whose collectives it is for.
    """

    step: Step
    outline: Outline
    device_type: str = "cuda"

    @cached_property
    def memory(self) -> list[RankMemory]:
        """What a rank of each pipeline stage holds."""
        return [rank_memory(self.holdings(rank)) for rank in range(self.step.layout.pp)]

    def holdings(
        self, rank: int, shard: int | None = None, *, documents: Sequence[Documents] | None = None
    ) -> Holdings:
        """What the memory of a pipeline rank follows from, on the rank of the pieces that owns most.

        Arguments as of `events`.
        """
        step, found = self.step, self.outline
        shard = found.heaviest_shard(rank) if shard is None else shard
        sizes = step.sizes
        packed = [any(len(row) > 1 for row in rows) for rows in documents or ()]
        segments = {is_packed: self._segments(packed=is_packed) for is_packed in {False, *packed}}
        tokens = step.rows * step.sequence_length
        own = sizes.tokens if step.layout.cp > 1 else 0  # a rank's own tokens are copies then
        return Holdings(
            found.program,
            rank,
            found.units_on(rank, shard),
            [segments[is_packed] for is_packed in packed or [False] * step.microbatches],
            optimizer_bytes=found.optimizer_bytes(rank, shard),
            batch_bytes=step.microbatches * 3 * 8 * (tokens + own),
            rotary_bytes=sizes.rotary,
            rotating_bytes=sizes.rotating,
            equal_pieces_are_summed_in_place=self.device_type == "cuda",
            arrived=self._arrivals[rank],
        )

    def _segments(self, *, packed: bool) -> list[list[BlockMemory]]:
        """What the blocks of each segment take; of rows of several documents, or of one each."""
        sizes = replace(self.step.sizes, device_type=self.device_type, packed=packed)
        of_kind = {"embed": sizes.embed(), "head": sizes.head(), "layer": sizes.layer()}
        return [[of_kind[kind] for kind in kinds] for kinds in self._kinds_of_blocks]

    @cached_property
    def _arrivals(self) -> list[dict[Action, tuple[Action, ...]]]:
        return arrivals(self.outline.program)

    @cached_property
    def traffic(self) -> list[list[Traffic]]:
        """What a rank of each pipeline stage sends and receives."""
        return [summed_up(self.events(rank), self.step) for rank in range(self.step.layout.pp)]

    def events(
        self, rank: int, *, shard: int | None = None, documents: Sequence[Documents] | None = None
    ) -> list[Event]:
        """The collectives and messages of a pipeline rank, in order.

        Args:
            rank: the pipeline rank.
            shard: which rank of the pieces; None for the one that owns most.
            documents: of each microbatch, of its whole rows; None where each row is one document.
        """
        step, sizes = self.step, self.step.sizes
        shard = self.outline.heaviest_shard(rank) if shard is None else shard
        return step_events(
            self.outline.program,
            rank=rank,
            layout=step.layout,
            units=self.outline.units_on(rank, shard),
            activation_bytes=[sizes.stream] * step.microbatches,
            inside=segment_costs(step, self.outline.blocks, documents),
        )

    @cached_property
    def flops(self) -> list[StepFlops]:
        """What each pipeline rank computes of its share of the batch, with all its ranks of cp and tp."""
        ranks = self.outline.program.ranks
        return [
            sum((self._flops_of(action) for action in actions if action.kind in COMPUTE), StepFlops())
            for actions in ranks
        ]

    @property
    def model_flops(self) -> int:
        """What the model needs for the whole batch, on all ranks together."""
        return sum(of_rank.model for of_rank in self.flops) * self.step.layout.size("dp", "fsdp")

    @property
    def model_flops_square(self) -> int:
        """The same with attention as if nothing were causal; see `fourfold.flops`."""
        step = self.step
        return model_flops(
            step.spec, batch=step.batch, sequence_length=step.sequence_length, convention="square"
        )

    @property
    def executed_flops(self) -> int:
        """What is computed for the whole batch, on all ranks together; see `fourfold.step_flops`."""
        return sum(of_rank.executed for of_rank in self.flops) * self.step.layout.size("dp", "fsdp")

    def blocks(self, rank: int) -> list[str]:
        """The blocks of a pipeline rank, neighbours as one text: ``embed to layer.7``."""
        holder = self.outline.program.rank_of_segment
        found: list[tuple[str, str]] = []
        before = None
        for segment, names in enumerate(self.outline.blocks):
            if holder[segment] == rank:
                first = found.pop()[0] if before == rank else names[0]
                found.append((first, names[-1]))
            before = holder[segment]
        return [first if first == last else f"{first} to {last}" for first, last in found]

    @cached_property
    def _kinds_of_blocks(self) -> list[tuple[str, ...]]:
        """Of each segment."""
        return [tuple(map(_kind, names)) for names in self.outline.blocks]

    @cached_property
    def _known_flops(self) -> dict[tuple[Kind, tuple[str, ...]], StepFlops]:
        return {}

    def _flops_of(self, action: Action) -> StepFlops:
        """All microbatches and all layers are alike."""
        key = action.kind, self._kinds_of_blocks[action.segment]
        if key not in self._known_flops:
            step = self.step
            work = StepWork(
                step.spec,
                step.layout,
                [key[1]],
                [((step.sequence_length,),) * step.rows],
                step.itemsize,
                keeps=step.recompute.not_again(tp=step.layout.tp),
            )
            self._known_flops[key] = work.of_action(Action(action.kind, 0, 0))
        return self._known_flops[key]

    @cached_property
    def timeline(self) -> Timeline:
        """The step simulated: an action takes as long as its FLOPs, and what is sent takes no time."""
        return clock(self.outline.program, self._duration)

    def _duration(self, action: Action) -> float:
        return float(self._flops_of(action).executed) if action.kind in COMPUTE else 0.0

    @property
    def in_flight(self) -> list[float]:
        """The most microbatches whose forward has run and whose backward has not, on each pipeline rank."""
        return peak_activations(self.outline.order)

    def to_json(self) -> dict[str, Any]:
        """All of it as numbers and texts. Bytes and FLOPs are whole, times are not known and not there."""
        step = self.step
        return {
            "model": {"parameters": step.spec.num_parameters},
            "layout": str(step.layout.resolved(step.spec)),
            "ranks": step.layout.world_size,
            "batch": step.batch,
            "sequence_length": step.sequence_length,
            "sequence_parallel": step.layout.sequence_parallel(step.sequence_length),
            "microbatches": step.microbatches,
            "dtype": step.dtype,
            "recompute": str(step.recompute),
            "device_type": self.device_type,
            "flops": {
                "convention": "pairs",
                "model": self.model_flops,
                "model_square": self.model_flops_square,
                "executed": self.executed_flops,
                "model_per_token": self.model_flops / (step.batch * step.sequence_length),
            },
            "bubble_fraction": self.timeline.bubble,
            "pipeline_ranks": [
                {
                    "blocks": self.blocks(rank),
                    "microbatches_in_flight": self.in_flight[rank],
                    "peak_bytes": self.memory[rank].peak,
                    "memory_at_peak_bytes": _written(self.memory[rank].at_peak),
                    "memory_between_steps_bytes": _written(self.memory[rank].rest),
                    "flops": asdict(self.flops[rank]),
                    "traffic": [asdict(row) for row in self.traffic[rank]],
                }
                for rank in range(step.layout.pp)
            ],
        }


def _written(bytes_by_category: Mapping[Category, int]) -> dict[str, int]:
    return {category.value: nbytes for category, nbytes in bytes_by_category.items()}


def explain(step: Step, *, device_type: str = "cuda", tp_rank: int | None = None) -> Explanation:
    """Predict a step.

    Args:
        step: what is to be trained.
        device_type: whose collectives: ``cuda`` (NCCL) or ``cpu`` (gloo).
        tp_rank: as which rank of tp sees it; by default the last one, which has a largest part of the
            vocabulary.

    Raises:
        UserError: with every rule that the layout breaks.
    """
    if problems := step.problems():
        raise UserError(*problems)
    seen_from = step.layout.tp - 1 if tp_rank is None else tp_rank
    return Explanation(step, outline(step, tp_rank=seen_from), device_type)


def memory_of_rank(
    step: Step, rank: int, *, device_type: str = "cuda", documents: Sequence[Documents] | None = None
) -> RankMemory:
    """Predict what one rank of all holds. Raises UserError with every rule that the layout breaks.

    ``documents`` are those of each of its microbatches; None where each row is one document.
    """
    at = step.layout.coordinates(rank)
    shard = 0
    for axis in step.layout.shard_axes:
        shard = shard * step.layout.size(axis) + at[axis]
    found = explain(step, device_type=device_type, tp_rank=at["tp"])
    return rank_memory(found.holdings(at["pp"], shard, documents=documents))


def summed_up(events: Sequence[Event], step: Step) -> list[Traffic]:
    """The events of a rank's step by op and axis, the most bytes first."""
    sent: dict[tuple[str, str], float] = {}
    for event, times in Counter(events).items():
        key = event.op, event.axis
        sent[key] = sent.get(key, 0.0) + times * sent_bytes(event, step.taking_part(event))
    found = [Traffic(*key, *totals, sent[key]) for key, totals in counted(events).items()]
    return sorted(found, key=lambda row: (-row.message_bytes, row.op, row.axis))


def _kind(block: str) -> str:
    return "layer" if block.startswith("layer.") else block


def segment_costs(
    step: Step, blocks: Sequence[Sequence[str]], documents: Sequence[Documents] | None = None
) -> SegmentCosts:
    """What the segments of a step send while they compute, on the cp and tp axes.

    Args:
        step: what is trained.
        blocks: the names of each segment's blocks.
        documents: of each microbatch, of its whole rows; None where each row is one document.
    """
    return SegmentCosts(
        blocks,
        channel=_channel_costs(step),
        sequence=_sequence_costs(step, documents),
        keeps=step.sizes.keeps,
    )


def _channel_costs(step: Step) -> ChannelCosts | None:
    """What a step sends on the tp axis, None where it has one rank."""
    if step.layout.tp == 1:
        return None
    statistics = master_dtype(step.dtype)
    return ChannelCosts(
        tokens=[step.sizes.tokens] * step.microbatches,
        hidden_size=step.spec.hidden_size,
        vocab_size=step.spec.vocab_size,
        dtype=step.dtype,
        itemsize=step.itemsize,
        statistics_dtype=statistics,
        statistics_itemsize=ITEMSIZES[statistics],
        ranks=step.layout.tp,
        sequence_parallel=step.sizes.sequence_parallel,
        regather=step.sizes.regather,
    )


def _sequence_costs(step: Step, documents: Sequence[Documents] | None) -> SequenceCosts | None:
    """What a step sends on the cp axis, None where it has one rank."""
    if step.layout.cp == 1:
        return None
    sizes = step.sizes
    return SequenceCosts(
        documents=documents or [((step.sequence_length,),) * step.rows] * step.microbatches,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=step.spec.head_dim,
        window=step.spec.sliding_window,
        dtype=step.dtype,
        itemsize=step.itemsize,
        ring=step.layout.cp // sizes.ulysses,
        ulysses=sizes.ulysses,
        rank=0,
    )
