"""A model that is laid out on a mesh: it trains, evaluates and gives its weights, on all ranks together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fourfold.batch.unit_specs import UnitSpec
from fourfold.batch.units import Unit
from fourfold.build import Sharding, evaluation
from fourfold.channel.cuts import Cut
from fourfold.channel.tensor_parallel import TensorParallel
from fourfold.collectives import all_gather, broadcast_
from fourfold.execute import Executor
from fourfold.mesh import Axis, Mesh
from fourfold.models import Decoder, Microbatch
from fourfold.named_weights import NamedWeights
from fourfold.program.actions import COMPUTE, TRANSFERS
from fourfold.program.program import Program
from fourfold.sequence.attention import ContextAttention
from fourfold.stages import Stages


@dataclass(frozen=True)
class ParallelModel:
    """A model cut into segments on a mesh, with the program of a training step.

    Attributes:
        model: the module itself; its parameters keep their names and are views of the units' buffers. Those
            of other pipeline ranks stay on the meta device. Sharded weights are there while a step uses them,
            or after `gather_`; reading one at another time is an error that PyTorch may not catch. Take them
            from `named_masters`.
        mesh: the ranks.
        stages: which blocks each pipeline stage has, and the segments that they make.
        unit_specs: the units of all pipeline ranks, by number in the program.
        units_by_number: the flat buffers of weights and gradients that this rank holds.
        program: what each pipeline rank does in a training step.
        sharding: how the units are spread on the Batch axis.
        executor: runs it.
        tensor_parallel: how the modules are cut on the tp axis, None where it has one rank.
        context: attention over the ranks of cp, None where it has one.
    """

    model: Decoder
    mesh: Mesh
    stages: Stages
    unit_specs: Sequence[UnitSpec]
    units_by_number: Mapping[int, Unit]
    program: Program
    sharding: Sharding
    executor: Executor
    tensor_parallel: TensorParallel | None
    context: ContextAttention | None

    @property
    def weights(self) -> NamedWeights:
        """The parameters by name, whole."""
        return NamedWeights(self.mesh, self.unit_specs, self.units_by_number, self.cuts)

    @property
    def cuts(self) -> Mapping[str, Cut]:
        """What the ranks of tp hold of each parameter; empty where tp is 1."""
        return {} if self.tensor_parallel is None else self.tensor_parallel.cuts

    @property
    def units(self) -> Sequence[Unit]:
        """The flat buffers of weights and gradients that this rank holds, in model order."""
        return list(self.units_by_number.values())

    @property
    def counted_units(self) -> Sequence[Unit]:
        """The units that this rank counts in the gradient norm: of several holders the first one does."""
        return [
            unit
            for number, unit in self.units_by_number.items()
            if self.unit_specs[number].holders[0] == self.mesh.pp.rank
            and self.mesh.tp.rank % self.unit_specs[number].copies.count == 0
        ]

    @property
    def norm_axis(self) -> Axis:
        """The ranks whose counted units together are the whole model, each parameter once."""
        return self.mesh.joint("pp", *self.mesh.layout.shard_axes, "tp")

    def step(
        self, batches: Sequence[Microbatch], *, valid_tokens: int, update: Callable[[Tensor], None]
    ) -> Tensor:
        """Run one training step on this rank's rows; see `Executor.step`."""
        actions = self.program.ranks[self.mesh.pp.rank]
        return self.executor.step(actions, self.own(batches), valid_tokens=valid_tokens, update=update)

    def own(self, batches: Sequence[Microbatch]) -> Sequence[Microbatch]:
        """This rank's tokens of some rows: all, where the sequence is not cut."""
        if self.context is None:
            return batches
        return [batch.take(self.context.columns(batch.documents)) for batch in batches]

    def evaluate(self, batches: Sequence[Microbatch]) -> Tensor:
        """Return the sum of the token losses of ``batches``, with forwards only. All ranks call it.

        Pipeline ranks without the last segment get 0: add up over pp and the axes of the batch.
        """
        losses = self.executor.forward(self._forwards(len(batches)), self.own(batches))
        zero = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        return sum((loss.double() for loss in losses), start=zero)

    @torch.no_grad()
    def last_logits(self, batch: Microbatch) -> Tensor:
        """Return the logits after the last token of the only row, (V,), on all ranks of pp and tp.

        The weights must be there: see `gather_`. All these ranks call it. The row is whole: where cp is
        larger than 1, attention is not this model's own but one for whole rows, as in `fourfold.generate`.
        """
        with nullcontext() if self.tensor_parallel is None else self.tensor_parallel.whole_sequence():
            found = self.executor.forward(self._one_forward, [batch], head=self._last_logits)
        if found and self.tensor_parallel is not None:
            counts = [stop - start for ((start, stop),) in self.cuts["model.embed_tokens.weight"].runs]
            found = [all_gather(found[0], self.mesh.tp, counts=counts)]
        like = self.units[0].weights
        logits = found[0] if found else like.new_empty(self.model.spec.vocab_size)
        return broadcast_(logits, self.mesh.pp, source=self.program.rank_of_segment[-1])

    def _last_logits(self, x_BSC: Tensor | None, batch: Microbatch) -> Tensor:
        """The last segment with logits in place of the loss."""
        for block in self.stages.before_head:
            x_BSC = block.forward(x_BSC, batch)
        assert x_BSC is not None
        return self.model.last_logits(x_BSC)

    def _forwards(self, microbatches: int) -> Program:
        if microbatches not in self._evaluations:
            self._evaluations[microbatches] = evaluation(
                self.program, microbatches=microbatches, sharding=self.sharding
            )
        return self._evaluations[microbatches]

    @cached_property
    def _evaluations(self) -> dict[int, Program]:
        """By number of microbatches, made when they are first needed."""
        return {}

    @cached_property
    def _one_forward(self) -> Program:
        """Of one microbatch, on weights that are there already."""
        program = self._forwards(1)
        kept = tuple(tuple(a for a in actions if a.kind in COMPUTE | TRANSFERS) for actions in program.ranks)
        return replace(program, ranks=kept)

    @cached_property
    def block_matrices(self) -> frozenset[str]:
        """The names of the matrices of the model's blocks: all but embedding and head."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return frozenset(
            names[id(parameter)]
            for piece in self.model.pieces()[1:-1]
            for module in piece.modules
            for parameter in module.parameters()
            if parameter.ndim == 2
        )

    def named_masters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter's name with its whole master weights, each once.

        All ranks go through it together: a unit that is sharded, or on another pipeline rank, is brought here
        when its turn comes.
        """
        for number in range(len(self.unit_specs)):
            yield from self.weights.whole(number, lambda unit: unit.master)

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Every trained parameter's name with its whole gradient after UPDATE's sums, as `named_masters`."""
        for number, spec in enumerate(self.unit_specs):
            if spec.is_trained:
                yield from self.weights.whole(number, lambda unit: unit.summed)

    def load_(self, weights: Mapping[str, Tensor]) -> None:
        """Set the master weights, and with them the weights that computation reads."""
        self.weights.load_(weights.__getitem__)
        self.publish_()

    def publish_(self) -> None:
        """After the master weights changed: bring the weights that computation reads up to date.

        Where optimizer state is sharded, the next step gathers them.
        """
        for unit in self.units:
            unit.publish_()

    @torch.no_grad()
    def gather_(self) -> None:
        """Bring the weights of this rank's stages to it, to use them outside a step. All ranks call it.

        The next step frees them.
        """
        if self.sharding.placement.optimizer:
            for unit in self.units:
                unit.gather().wait()
