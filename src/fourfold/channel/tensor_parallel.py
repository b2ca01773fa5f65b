"""Tensor parallelism: a plain module cut by a plan, in place, with two collectives a branch and direction.

[Note: enter and leave] The residual stream enters a branch (attention, MLP) on every rank, and each computes
its own heads or channels of it; the results are partial sums, which add up where the stream leaves. Without
sequence parallelism every rank holds the whole stream: entering sends nothing forward and sums the gradients
backward, leaving sums forward and sends nothing backward (f and g of Shoeybi et al. 2019). With it each rank
holds the stream of S / tp tokens: entering gathers the tokens, leaving sums and scatters them, and each is
the other's backward. The bytes are the same, and norms and residuals are computed once and kept once
(Korthikanti et al. 2022).

All of it stands in hooks around modules: the modules compute with the weights that they find, know nothing
of it, and their parameters keep their names.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.channel.checked_plan import checked_cuts, mark_as_cut_
from fourfold.channel.cuts import Cut
from fourfold.channel.dropout import refuse_dropout_
from fourfold.channel.parts import part
from fourfold.channel.plans import Branch, Plan
from fourfold.channel.regather import entered, gathered_again, stream_name
from fourfold.channel.vocabulary import look_up_own_rows_
from fourfold.collectives.differentiable import all_gather, copy_to, reduce_from, reduce_scatter
from fourfold.errors import UserError
from fourfold.mesh import Axis
from fourfold.models.parameters import parameter_sites

SEQUENCE_DIM = 1
"""Of activations (B, S, C)."""


class TensorParallel:
    """What a model became on the tp axis.

    Attributes:
        axis: the ranks.
        cuts: of every parameter, by name.
        sequence_parallel: whether the residual stream is cut by tokens.
        regather: whether what enters a branch is gathered again in the backward, where the stream is cut.
    """

    def __init__(
        self, axis: Axis, cuts: Mapping[str, Cut], *, sequence_parallel: bool, regather: bool = False
    ):
        self.axis = axis
        self.cuts = cuts
        self.sequence_parallel = sequence_parallel
        self.regather = regather

    def __deepcopy__(self, memo: object) -> "TensorParallel":
        """Itself: it says how ranks work together, which a copy of a cut module does as the module does."""
        return self

    @contextmanager
    def whole_sequence(self) -> Iterator[None]:
        """Compute on whole sequences inside, for lengths that the ranks do not divide. Without gradients."""
        before, self.sequence_parallel = self.sequence_parallel, False
        try:
            with torch.no_grad():
                yield
        finally:
            self.sequence_parallel = before

    def enter(self, x_BSC: Tensor) -> Tensor:
        """The stream for every rank to do its own with, (B, S, C); see [Note: enter and leave]."""
        if self.sequence_parallel:
            return all_gather(x_BSC, self.axis, dim=SEQUENCE_DIM)
        return copy_to(x_BSC, self.axis)

    def leave(self, partial_BSC: Tensor) -> Tensor:
        """The sum of the ranks' partial results: (B, S / tp, C) of it with sequence parallelism."""
        if self.sequence_parallel:
            return reduce_scatter(partial_BSC, self.axis, dim=SEQUENCE_DIM)
        return reduce_from(partial_BSC, self.axis)


def tensor_parallel_(
    model: nn.Module, plan: Plan, axis: Axis, *, sequence_parallel: bool, regather: bool = False
) -> TensorParallel:
    """Cut ``model`` by ``plan``, in place: this rank keeps its part of every parameter.

    Args:
        model: any module, with weights or on the meta device. Logits come out cut by vocabulary: take the
            loss with `fourfold.channel.vocabulary.vocabulary_parallel_cross_entropy_sum`.
        plan: what is cut.
        axis: the tp axis.
        sequence_parallel: cut the residual stream by tokens; the ranks must divide the sequence, and nothing
            outside of the plan's branches may mix tokens or depend on where they stand.
        regather: with sequence parallelism, see [Note: what entered] in `fourfold.channel.regather`.

    Before it starts it raises UserError for all that the plan names and is not there, that the ranks do not
    divide, or that would compute something else than one process; see `fourfold.channel.checked_plan`. A
    copy of a cut module (`copy.deepcopy`) is a cut module of its own.
    """
    if regather and not sequence_parallel:
        raise UserError(
            "regather=True (Channel axis): without sequence parallelism nothing is gathered; "
            "use sequence_parallel=True, or regather=False"
        )
    cuts = checked_cuts(model, plan, ranks=axis.size, sequence_parallel=sequence_parallel)
    sites = parameter_sites(model)
    for name, parameter in list(model.named_parameters()):
        if not cuts[name].is_whole:
            held = part(parameter.detach(), cuts[name], axis.rank).clone()
            local = nn.Parameter(held, requires_grad=parameter.requires_grad)
            for module, attribute in sites[name]:
                setattr(module, attribute, local)
                _tell_sizes_(module)
    parallel = TensorParallel(axis, cuts, sequence_parallel=sequence_parallel, regather=regather)
    for name, module in model.named_modules():
        if branch := plan.branch(name):
            _surround_(module, branch, parallel, transposed=plan.transposed)
    if plan.embedding is not None:
        embedding = model.get_submodule(plan.embedding)
        assert isinstance(embedding, nn.Embedding)
        cut = cuts[f"{plan.embedding}.weight"]
        look_up_own_rows_(embedding, cut.runs[axis.rank][0][0], vocab_size=cut.shape[0])
        embedding.register_forward_hook(lambda _module, _args, out: parallel.leave(out))
    if plan.last_norm is not None:
        norm = model.get_submodule(plan.last_norm)
        norm.register_forward_hook(lambda _module, _args, out: parallel.enter(out))
    if axis.size > 1:
        refuse_dropout_(model)
    mark_as_cut_(model)
    return parallel


def _tell_sizes_(module: nn.Module) -> None:
    """Let a module's own sizes be those of its weight."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = weight.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings = weight.shape[0]
    elif hasattr(module, "nf"):  # Hugging Face's Conv1D, which shapes its output by it
        setattr(module, "nf", weight.shape[1])  # noqa: B010 - a plain number, unknown to nn.Module


def _surround_(module: nn.Module, branch: Branch, parallel: TensorParallel, *, transposed: bool) -> None:
    """Put the two collectives around a branch, and the row-wise biases behind the second one."""
    if parallel.regather:
        module.forward = gathered_again(module, parallel.enter)
    else:
        _enter_at_(module, parallel)
    rows = {name: module.get_submodule(name) for name in branch.rows}
    biased = [name for name, row in rows.items() if getattr(row, "bias", None) is not None]
    for name in biased:
        rows[name].forward = partial(_product, rows[name], transposed)

    def after(module: nn.Module, _args: object, out: Any) -> Any:
        stream, *rest = out if isinstance(out, tuple) else (out,)
        stream = parallel.leave(stream)
        for name in biased:  # by name: a copy of the module has biases of its own
            stream = stream + torch.as_tensor(module.get_submodule(name).bias)
        return (stream, *rest) if isinstance(out, tuple) else stream

    module.register_forward_hook(after)
    for attribute in branch.scaled:
        setattr(module, attribute, getattr(module, attribute) // parallel.axis.size)
    if branch.groups is not None and hasattr(module, branch.groups):
        queries, keys = (branch.columns[name].groups or 1 for name in ("q_proj", "k_proj"))
        setattr(module, branch.groups, (queries // parallel.axis.size) // max(1, keys // parallel.axis.size))


def _product(row: nn.Module, transposed: bool, x: Tensor) -> Tensor:
    """What a row-wise projection gives without its bias, which counts once, after the sum over ranks."""
    weight = row.weight
    assert isinstance(weight, Tensor)
    return x @ weight if transposed else F.linear(x, weight)


def _enter_at_(module: nn.Module, parallel: TensorParallel) -> None:
    """Let the stream, the first argument of ``module``, enter there."""

    name = stream_name(module)

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return entered(args, kwargs, name, parallel.enter)[:2]

    module.register_forward_pre_hook(before, with_kwargs=True)
