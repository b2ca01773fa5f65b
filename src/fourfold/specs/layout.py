"""Layout: how many ways each axis is cut, in one notation, and every rule of what divides what.

``pp2,dp2,fsdp4,cp2,tp2``: an absent axis is 1. Options come after a colon: ``pp4:1f1b``.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fourfold.errors import UserError, choices, nearest
from fourfold.specs.cp_option import cp_option, cp_problems, least_sent, ulysses_problems
from fourfold.specs.model import ModelSpec
from fourfold.specs.placement import PLACEMENTS, REPLICATED, Placement
from fourfold.specs.schedule_name import ScheduleName
from fourfold.specs.spec import divisors, nearby

# From the slowest link to the fastest. Every mesh, folder and table keeps this order.
AXES = ("pp", "dp", "fsdp", "cp", "tp")
# The ranks that see different tokens: gradients are summed over them. dp x fsdp x cp, even where dp = 1.
BATCH_AXES = ("dp", "fsdp", "cp")
# The ranks that get different sequences of the batch.
DATA_AXES = ("dp", "fsdp")
# What an axis cuts, for messages.
AXIS_WORDS = {"pp": "Layer", "dp": "Batch", "fsdp": "Batch", "cp": "Sequence", "tp": "Channel"}
# Options of tp: the residual stream whole on every rank, or by default cut by tokens where they divide; then
# what is gathered of it is kept by default, or gathered again.
TP_OPTIONS = ("allreduce", "regather")

_ENTRY = re.compile(r"(?P<axis>[A-Za-z_]+)(?P<degree>[^:]*)(?::(?P<option>.*))?")


@dataclass(frozen=True)
class Layout:
    """The degree of each axis, and options by axis as they were written."""

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    options: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        problems = [
            f"{axis}={self.size(axis)} is too small: use 1 or more" for axis in AXES if self.size(axis) < 1
        ]
        problems += [_unknown_axis(axis) for axis in self.options if axis not in AXES]
        if self.options.get("fsdp") not in PLACEMENTS:
            problems.append(_unknown_placement(str(self.fsdp), self.options["fsdp"]))
        problems += _schedule_problems(self.options.get("pp"))
        if (option := self.options.get("tp")) not in (None, *TP_OPTIONS):
            problems.append(_unknown_tp_option(option))
        problems += cp_problems(self.cp, self.options.get("cp"))
        if problems:
            raise UserError(*problems)

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Read a layout, its axes in any order. Raises ``UserError`` with every problem at once."""
        problems: list[str] = []
        degrees: dict[str, int] = {}
        options: dict[str, str] = {}
        for entry in text.split(","):
            match = _ENTRY.fullmatch(entry.strip())
            if match is None:
                problems.append(f"'{entry.strip()}' is no axis and degree: write e.g. dp2 or pp2,dp4")
                continue
            axis, degree, option = match.group("axis", "degree", "option")
            if axis not in AXES:
                problems.append(_unknown_axis(axis))
            elif axis in degrees:
                problems.append(f"axis '{axis}' is given twice: write it once")
            elif not (degree.isascii() and degree.isdigit()):
                problems.append(f"'{axis}{degree}' has no whole number after the axis: write e.g. {axis}2")
            elif int(degree) < 1:
                problems.append(f"{axis}=0 is too small: use 1 or more")
            else:
                degrees[axis] = int(degree)
            if option == "":
                problems.append(f"'{entry.strip()}' has no option after the colon: write {axis}{degree}")
            elif axis == "fsdp" and option not in PLACEMENTS:
                problems.append(_unknown_placement(degree, option))
            elif axis == "pp" and (unknown := _schedule_problems(option)):
                problems += unknown
            elif axis == "tp" and option not in (None, *TP_OPTIONS):
                problems.append(_unknown_tp_option(option))
            elif axis == "cp" and degree.isdigit() and (wrong := cp_problems(int(degree), option)):
                problems += wrong
            elif option is not None and axis in AXES:
                options[axis] = option
        if problems:
            raise UserError(*(f"layout '{text}': {problem}" for problem in problems))
        return cls(**degrees, options={axis: options[axis] for axis in AXES if axis in options})

    def __str__(self) -> str:
        parts = []
        for axis in AXES:
            if self.size(axis) > 1 or axis in self.options:
                option = f":{self.options[axis]}" if axis in self.options else ""
                parts.append(f"{axis}{self.size(axis)}{option}")
        return ",".join(parts) or "dp1"

    @property
    def world_size(self) -> int:
        """The number of ranks: the product of all degrees."""
        return self.size(*AXES)

    @property
    def placement(self) -> Placement:
        """Where weights, gradients and optimizer state live on the fsdp axis."""
        return PLACEMENTS[self.options.get("fsdp")] if self.fsdp > 1 else REPLICATED

    @property
    def schedule(self) -> ScheduleName:
        """The order in which pipeline ranks work on microbatches: 1f1b unless said otherwise."""
        return ScheduleName.parse(self.options.get("pp", "1f1b"))

    def ulysses(self, model: ModelSpec) -> int:
        """How many ranks of cp exchange tokens for heads; between the groups of so many is a ring.

        Unless the layout says otherwise, of those that the heads allow the one that sends least, if there is
        no window. Commands ask `fourfold.planner.context` instead, which knows windows, and links where they
        are known, and write its answer into the layout.
        """
        if (option := self.options.get("cp")) is not None:
            return 1 if option == "ring" else int(option.removeprefix("ulysses") or self.cp)
        return least_sent(self.ulysses_sizes(model), self.cp, *self.heads(model))

    def ulysses_sizes(self, model: ModelSpec) -> list[int]:
        """The groups of Ulysses that the heads allow, by their number of ranks; a ring of all is 1."""
        return [size for size in divisors(self.cp) if not self._ulysses_problems(model, size)]

    def with_ulysses(self, size: int) -> "Layout":
        """The same with groups of so many ranks written out."""
        return replace(self, options={**self.options, "cp": cp_option(size)})

    def resolved(self, model: ModelSpec) -> "Layout":
        """The same with the default of cp written out for this model, as ``cp4:ring`` or ``cp4:ulysses4``."""
        is_written = self.cp == 1 or "cp" in self.options
        return self if is_written else self.with_ulysses(self.ulysses(model))

    def heads(self, model: ModelSpec) -> tuple[int, int]:
        """Query heads and key/value heads of a rank of tp."""
        return model.num_attention_heads // self.tp, max(1, model.num_key_value_heads // self.tp)

    def _ulysses_problems(self, model: ModelSpec, size: int) -> list[str]:
        return ulysses_problems(*self.heads(model), size)

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The axes whose ranks own a piece of each unit: where weights are cut, over the cp ranks too."""
        return ("fsdp", "cp") if self.fsdp > 1 else ("fsdp",)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes whose ranks own the same pieces, and compute other summands of their gradients."""
        return tuple(axis for axis in BATCH_AXES if axis not in self.shard_axes)

    def sequence_parallel(self, sequence_length: int) -> bool:
        """Whether tp cuts the residual stream by tokens: unless told not to, where its ranks divide them."""
        tokens, rest = divmod(sequence_length, self.cp)
        is_cut = self.tp > 1 and self.options.get("tp") != "allreduce"
        return is_cut and rest == 0 and tokens % self.tp == 0

    def stream(self, sequence_length: int) -> str:
        """How tp keeps the residual stream, and why, as a sentence; empty without tp."""
        if self.tp == 1:
            return ""
        if self.sequence_parallel(sequence_length):
            return f"tp={self.tp}: the residual stream is cut by tokens (sequence parallelism)"
        tokens = f"{sequence_length} tokens" if self.cp == 1 else f"{sequence_length}/{self.cp} tokens"
        rule = f"tp={self.tp} does not divide {tokens}"
        why = "as asked for" if self.options.get("tp") == "allreduce" else rule
        return f"tp={self.tp}: every rank has the whole residual stream ({why})"

    def size(self, *axes: str) -> int:
        """Return the product of the degrees of these axes."""
        return math.prod(map(vars(self).__getitem__, axes))  # it is asked for very often

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return where a rank stands on each axis: pp changes slowest, tp fastest."""
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, self.size(axis))
        return found

    def axis_name(self, *axes: str) -> str:
        """Return the name of the joint axis: those that are cut, or the first one where none is."""
        return ",".join(axis for axis in axes if self.size(axis) > 1) or axes[0]

    def problems(
        self, model: ModelSpec, *, batch: int, microbatches: int, sequence_length: int, world_size: int | None
    ) -> list[str]:
        """Return every rule that this layout breaks, with values that would work.

        ``batch`` is in sequences a step over all ranks, ``microbatches`` the pieces of one rank's share.
        ``world_size`` is None where the number of ranks is not known yet. A layout that passes can be built
        for this model: no other place divides anything.
        """
        problems = []
        stages_per_rank = self.schedule.stages_per_rank or 1
        if self.pp * stages_per_rank > model.num_hidden_layers:
            problems.append(self._too_many_stages(model.num_hidden_layers, stages_per_rank))
        problems += self._batch_problems(batch, microbatches)
        channel = self._channel_problems(model)
        problems += channel or self._sequence_problems(model)
        if world_size is not None and world_size != self.world_size:
            others = self.world_size // self.dp
            fits = f"use {replace(self, dp=world_size // others)}, or " if world_size % others == 0 else ""
            problems.append(
                f"layout {self} needs {_ranks(self.world_size)}, and there are {world_size}: "
                f"{fits}start {_ranks(self.world_size)}"
            )
        return problems

    def _too_many_stages(self, layers: int, stages_per_rank: int) -> str:
        stages = self.pp * stages_per_rank
        most = layers // stages_per_rank
        each = f" with {stages_per_rank} stages each ({self.schedule}) makes {stages} stages, which"
        fewer = (
            f"use pp={most} or less"
            if most > 1
            else f"use pp{min(self.pp, layers)}:1f1b, with one stage a rank"
        )
        fewer = f"use pp={most} or less" if stages_per_rank == 1 else fewer
        return (
            f"pp={self.pp}{each if stages_per_rank > 1 else ''} is more than num_hidden_layers={layers} "
            f"(Layer axis): {fewer}"
        )

    def _batch_problems(self, batch: int, microbatches: int) -> list[str]:
        """Every rank gets the same number of sequences, in pieces of the same size."""
        ranks = self.size(*DATA_AXES)
        share = ranks * microbatches
        if batch % share == 0:
            return []
        below = batch // share * share
        fixes = [f"batch={choices([value for value in (below, below + share, share * 2) if value][:2])}"]
        cut = [axis for axis in DATA_AXES if self.size(axis) > 1]
        fitting = [value for value in divisors(batch) if batch // value % microbatches == 0]
        if cut and fitting:
            fixes.append(f"{'*'.join(cut)}={nearby(fitting, ranks)}")
        if microbatches > 1 and batch % ranks == 0:
            fixes.append(f"microbatches={nearby(divisors(batch // ranks), microbatches)}")
        sizes = {axis: self.size(axis) for axis in cut}
        if microbatches > 1:
            sizes["microbatches"] = microbatches
        product = f"={'*'.join(str(size) for size in sizes.values())}" if len(sizes) > 1 else ""
        return [
            f"{'*'.join(sizes)}{product}={share} does not divide batch={batch} (Batch axis): "
            f"use {', or '.join(fixes)}"
        ]

    def _channel_problems(self, model: ModelSpec) -> list[str]:
        """Every rank gets whole heads and the same number of MLP channels.

        More ranks than key/value heads are served by copies, each head on the same number of ranks. Of the
        vocabulary a rank gets at least one token.
        """
        heads, kv_heads, inner = model.num_attention_heads, model.num_key_value_heads, model.intermediate_size
        vocabulary = model.vocab_size

        def broken(tp: int) -> list[str]:
            rules = {
                f"does not divide num_attention_heads={heads}": heads % tp == 0,
                f"neither divides num_key_value_heads={kv_heads} nor is a multiple of it": (
                    kv_heads % tp == 0 or tp % kv_heads == 0
                ),
                f"does not divide intermediate_size={inner}": inner % tp == 0,
                f"is more than vocab_size={vocabulary}": tp <= vocabulary,
            }
            return [rule for rule, kept in rules.items() if not kept]

        found = broken(self.tp)
        if not found:
            return []
        fitting = [tp for tp in divisors(heads) if not broken(tp)]
        with_cp = [tp for tp in fitting if not replace(self, tp=tp)._sequence_problems(model)]
        values = nearby(with_cp or fitting, self.tp)
        return [f"tp={self.tp} {', and '.join(found)} (Channel axis): use tp={values}"]

    def _sequence_problems(self, model: ModelSpec) -> list[str]:
        """Where heads are exchanged for tokens, every rank gets whole heads. Sequences have any length."""
        size = self.ulysses(model)
        broken = self._ulysses_problems(model, size)
        if not broken:
            return []
        groups = [f"cp{self.cp}:ulysses{value}" for value in self.ulysses_sizes(model) if value > 1]
        others = choices([*groups, f"cp{self.cp}:ring"])
        return [f"ulysses={size} {', and '.join(broken)} (Sequence axis): use {others}"]


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _schedule_problems(option: str | None) -> list[str]:
    try:
        ScheduleName.parse("1f1b" if option is None else option)
    except UserError as error:
        return [f"option '{option}' of pp: {message}" for message in error.messages]
    return []


def _unknown_tp_option(option: str) -> str:
    return (
        f"option '{option}' of tp does not exist.{nearest(option, TP_OPTIONS)} Use tp4:allreduce to keep the "
        "residual stream whole on every rank, tp4 to cut it by tokens where they divide, or tp4:regather to "
        "keep less of it"
    )


def _unknown_placement(degree: str, option: str) -> str:
    named = [name for name in PLACEMENTS if name]
    written = f"fsdp{degree}" if degree.isdigit() else "fsdp4"
    hint = nearest(option, named) if option != "zero3" else f" ZeRO-3 is written {written}."
    return (
        f"option '{option}' of fsdp does not exist.{hint} "
        f"Use {choices([f'{written}:{name}' for name in named])}, or {written} to cut the weights too"
    )


def _unknown_axis(axis: str) -> str:
    if axis == "zero":
        return "axis 'zero' does not exist: ZeRO-1 is written fsdp4:zero1, ZeRO-2 fsdp4:zero2, ZeRO-3 fsdp4"
    return f"axis '{axis}' does not exist.{nearest(axis, AXES)} Axes: {', '.join(AXES)}"
