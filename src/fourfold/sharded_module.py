"""Shard any module on the Batch axis, given the list of its blocks.

    sharded = fourfold.shard(module, blocks=list(module.layers), mesh=Mesh(Layout(fsdp=4)))
    optimizer = torch.optim.AdamW(sharded.parameters())
    for rows, labels in batches:
        (loss_sum(module(rows), labels) / global_count).backward()
        sharded.reduce_gradients()
        optimizer.step()

[Note: blocks are segments in autograd] The forward of a block is replaced by one node of the autograd graph.
It gathers the block's weights, runs the block on detached leaves and frees the weights; its backward gathers
them again and calls the backward of what was kept. What is gathered follows from what is called: no hooks
guess an order. While a block computes, its neighbour in the list of blocks is on its way.

[Note: the same blocks on every rank] A gather is a collective: all ranks run the same blocks in the same
order, forward and backward, whatever their data. Inside a block, and outside of all, they may differ, as in
a parameter that only some ranks use. A gradient that nobody computed is summed as zero.

[Note: a step ends with reduce_gradients] Gradients are summed over ranks, never averaged: divide the loss by
a count of the whole global batch. Where gradients are sharded, a block's are summed to their owners once each
of its forwards has had its backward. The rest is summed by `ShardedModule.reduce_gradients`, once a step,
after the last backward. It leaves a rank only its pieces, so the next step gathers what the optimizer made.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, wraps
from typing import Any, get_args

import torch
from torch import Tensor, nn

from fourfold.autograd_segment import differentiable_inputs, run_as_node
from fourfold.batch.unit_groups import Initialize, UnitGroup, refuse_without_weights, unit_groups
from fourfold.batch.unit_specs import Copies
from fourfold.channel.parts import Parts
from fourfold.channel.tensor_parallel import TensorParallel
from fourfold.errors import UserError, choices
from fourfold.mesh import Mesh
from fourfold.module_gradients import ModuleGradients
from fourfold.module_state import ModuleState
from fourfold.optimizer import clip_, gradient_norm, owned_parameters
from fourfold.refused_steps import is_refused, refuse_steps_
from fourfold.sequence.hugging_face import attends_over_cp
from fourfold.specs import AXIS_WORDS, ShardingSection

PIECES = get_args(ShardingSection.model_fields["pieces"].annotation)
BUILD = "build it from parameters() of what fourfold.shard returns"


class ShardedModule:
    """A module whose weights, gradients and optimizer state live in pieces on the ranks; made by `shard`.

    What sums or reads over the ranks is called by all of them together.

    Attributes:
        module: what was sharded; call it as before. Its parameters have no memory between uses. PyTorch does
            not check that: to read one then may end the process. Read weights by `state_dict`.
        mesh: the ranks.
        units: the flat buffers, those of the blocks in order and then those of the rest.
        decayed: this rank's pieces of matrices, for an optimizer's group with weight decay.
        plain: this rank's pieces of vectors (norms, biases), for one without.
    """

    def __init__(self, module: nn.Module, groups: Sequence[UnitGroup], mesh: Mesh, parts: Parts):
        self.module = module
        self.mesh = mesh
        self._parts = parts
        self.units = [unit for group in groups for unit in group.units]
        self._state = ModuleState(module, self.units, parts)
        owned = owned_parameters(self.units)
        self.decayed, self.plain = owned.decayed, owned.plain
        self._pieces = [*self.decayed, *self.plain]
        self._gradients = ModuleGradients(groups, self._pieces, mesh.layout.placement)
        self._groups = groups
        self._blocks, self._root = groups[:-1], groups[-1]
        # An input that needs a gradient, so that every trained block has a backward.
        self._anchor = torch.empty(0, requires_grad=True)
        self._steps = 0
        for unit in self.units:
            if unit.is_trained:
                refuse_steps_(unit.parameters, f"the optimizer has the module's own parameters: {BUILD}")
        self._attach_()

    def parameters(self) -> list[nn.Parameter]:
        """This rank's pieces as parameters for an optimizer: flat runs, matrices before vectors.

        A rank that owns nothing gets one parameter without elements, since optimizers refuse an empty list.
        What looks at all gradients together must know that these are only a rank's: clip with `clip_`.
        """
        return self._pieces or [nn.Parameter(torch.empty(0, device=self.mesh.device))]

    def reduce_gradients(self) -> None:
        """End a step: sum what is not summed yet, and give the pieces their gradients.

        Called once a step by all ranks, after the last backward, before the norm and the optimizer.
        """
        self._gradients.end_step_()
        for unit in self.units:
            unit.begin_step_()
        self._expire_()

    def gradient_norm(self) -> float:
        """The 2-norm of the whole gradient, each element counted once."""
        self._gradients.check_summed()
        tp = self.mesh.tp
        counted = [unit for unit in self.units if tp.rank % self._parts.copies(unit.slots[0].name) == 0]
        return gradient_norm(counted, self.mesh.joint(*self.mesh.layout.shard_axes, "tp"))

    def clip_(self, max_norm: float) -> float:
        """Scale the gradient to the norm ``max_norm`` where it is larger; return the norm that it had."""
        norm = self.gradient_norm()
        clip_(self.units, norm=norm, max_norm=max_norm)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """All of the module by its own names, on every rank: copies, weights whole and in master precision.

        Each element is gathered once; a tied weight is listed under every name that the module has for it.
        """
        return self._state.whole()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set weights and buffers from a whole state dict, the same on every rank; a rank keeps its pieces.

        Of the names of a tied weight one is enough. Raises UserError for names or shapes that do not fit.
        """
        self._state.load_(state)
        self._expire_()

    def _attach_(self) -> None:
        """Replace the blocks' forwards, and have the rest gathered around the forward of the module."""
        group_of = {
            id(parameter): group
            for group in self._groups
            for unit in group.units
            for parameter in unit.parameters
        }
        for module in self.module.modules():
            needed = {group_of[id(parameter)] for parameter in module.parameters(recurse=False)}
            needed = {group for group in needed if group.module is not module}
            if needed:
                module.register_forward_pre_hook(partial(refuse_without_weights, needed), prepend=True)
        for index, group in enumerate(self._blocks):
            group.module.forward = self._forward_of(index, group.module.forward)
        self.module.register_forward_pre_hook(self._begin_forward_, prepend=True)
        self.module.register_forward_hook(self._end_forward_, always_call=True)

    def _begin_forward_(self, *_: Any) -> None:
        self._root.start_gather()
        if self._blocks:
            self._blocks[0].start_gather()
        self._root.finish_gather()
        if torch.is_grad_enabled():
            self._root.uses += 1
            for unit in self._root.units:
                self._gradients.take_(unit)

    def _end_forward_(self, *_: Any) -> None:
        if not self._root.uses:  # an evaluation while no step is under way
            for group in self._groups:  # a block that was gathered ahead may not have been used
                group.release()

    def _forward_of(self, index: int, original: Callable[..., Any]) -> Callable[..., Any]:
        """What replaces the forward of a block."""
        group = self._blocks[index]
        following = self._blocks[index + 1] if index + 1 < len(self._blocks) else None
        is_trained = any(parameter.requires_grad for parameter in group.module.parameters())

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if group.in_use:  # the block calls itself, or its backward recomputes it
                return original(*args, **kwargs)
            if torch.is_grad_enabled() and (is_trained or differentiable_inputs(args, kwargs)):
                group.uses += 1
                run = partial(self._run_forward, index, original)
                run_back = partial(self._run_backward, index, self._steps)
                return run_as_node(run, run_back, self._anchor, args, kwargs)
            with group.gathered(ahead=following):
                return original(*args, **kwargs)

        return forward

    def _run_forward(self, index: int, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a block that a backward will follow."""
        is_last = index == len(self._blocks) - 1
        following = None if is_last else self._blocks[index + 1]
        # The backward starts with the last block, so that one stays.
        with self._blocks[index].gathered(ahead=following, keep=is_last):
            return original(*args, **kwargs)

    def _run_backward(
        self, index: int, step: int, outputs: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> None:
        """Run the backward of one forward of a block, and start to sum its gradient after the last one."""
        group = self._blocks[index]
        if step != self._steps:
            raise RuntimeError(
                f"the backward of {group.name} came after reduce_gradients(), its forward before"
            )
        before = self._blocks[index - 1] if index and self._blocks[index - 1].uses else None
        for unit in group.units:
            self._gradients.take_(unit)
        with group.gathered(ahead=before):
            if outputs:
                torch.autograd.backward(outputs, gradients)
        group.uses -= 1
        if not group.uses and self.mesh.layout.placement.gradients:
            self._gradients.reduce_([unit for unit in group.units if unit.is_trained])

    def _expire_(self) -> None:
        """Forget all weights and all forwards, since the masters change now."""
        for group in self._groups:
            group.expire()
            group.uses = 0
        self._steps += 1


def shard(
    module: nn.Module,
    *,
    blocks: Sequence[nn.Module],
    mesh: Mesh,
    pieces: str = "auto",
    dtype: torch.dtype | None = None,
    float32: Collection[str] = (),
    initialize: Initialize | None = None,
    tensor_parallel: TensorParallel | None = None,
) -> ShardedModule:
    """Shard ``module`` in place over the fsdp axis of ``mesh``; with dp, over replicas of the same pieces.

    With cp the pieces are over fsdp and cp, and gradients are summed over the tokens of all ranks. With tp
    each rank shards its part, and what several ranks of tp hold is summed where their gradients add up.

    Build the optimizer afterwards, from ``parameters()`` of the result. All ranks make the same call. Buffers
    stay whole and are never summed: running statistics follow a rank's own data.

    Args:
        module: keeps its values, those of the first rank; what is frozen now stays frozen. On the meta device
            it needs ``initialize``, and no rank ever holds it whole.
        blocks: its repeated parts, in the order in which they run. While one computes the next is gathered.
            What is in no block, or in several, is gathered for a whole step. A block must not return its
            weights themselves: they are freed.
        mesh: the ranks. The layout's option says what is cut: ``fsdp4``, ``fsdp4:zero1``, ``fsdp4:zero2``.
        pieces: what a rank owns: ``matrices`` or ``rows``, ``flat`` runs of elements, or ``auto``.
        dtype: what computation reads, None for the parameters' own. Inputs are not cast. Masters, gradients
            and their sums are float32 or higher.
        float32: parameters whose names contain one of these are read in float32, as in ``["norm"]``.
        initialize: called as ``initialize(name, first, target)`` for each run of a parameter that this rank
            owns: ``target`` is flat, ``first`` the index of its first element in the flattened parameter.
            Also for each buffer on the meta device, whole.
        tensor_parallel: what `fourfold.channel.tensor_parallel.tensor_parallel_` made of the module, where tp
            is larger than 1; it was called with the same values on all ranks.

    Raises UserError with all that is wrong with the arguments.
    """
    if problems := _problems(module, mesh, pieces, is_cut=tensor_parallel is not None):
        raise UserError(*problems)
    originals = list(module.parameters())
    parts = Parts(mesh.tp, {} if tensor_parallel is None else tensor_parallel.cuts)
    groups = unit_groups(
        module,
        blocks,
        mesh=mesh,
        pieces=pieces,
        dtype=dtype,
        float32=float32,
        initialize=None if initialize is None else partial(_initialize_runs, initialize, parts),
        copies={name: Copies(cut.copies, cut.adds_up) for name, cut in parts.cuts.items() if cut.copies > 1},
    )
    refuse_steps_(originals, f"the optimizer was built before the module was sharded: {BUILD}")
    return ShardedModule(module, groups, mesh, parts)


def _problems(module: nn.Module, mesh: Mesh, pieces: str, *, is_cut: bool) -> list[str]:
    """What is wrong with the arguments of `shard`; ``is_cut``: whether tensor_parallel_ cut the module."""
    problems = []
    if mesh.pp.size > 1:
        problems.append(
            f"pp={mesh.pp.size} ({AXIS_WORDS['pp']} axis): a module of any kind has no stages; use pp=1"
        )
    if (mesh.tp.size > 1) != is_cut:
        problems.append(
            f"tp={mesh.tp.size} ({AXIS_WORDS['tp']} axis): give what tensor_parallel_ made of the module as "
            "tensor_parallel where tp is larger than 1, and only there"
        )
    if mesh.cp.size > 1 and not attends_over_cp(module):
        problems.append(
            f"cp={mesh.cp.size} ({AXIS_WORDS['cp']} axis): the module attends to this rank's tokens alone; "
            "call fourfold.sequence.hugging_face.context_parallel_ first, or use cp=1"
        )
    if pieces not in PIECES:
        problems.append(f"pieces='{pieces}' does not exist: use {choices(PIECES)}")
    originals = list(module.parameters())
    if any(map(is_refused, originals)):
        problems.append("the module is sharded already")
    if not originals:
        problems.append("the module has no parameters: there is nothing to shard")
    return problems


def _initialize_runs(initialize: Initialize, parts: Parts, name: str, first: int, target: Tensor) -> None:
    """Have a run of this rank's part of a parameter written, by its place in the whole one."""
    for start, run in parts.runs(name, first, target):
        initialize(name, start, run)
