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

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.channel.cuts import Cut, in_parts, vocabulary, whole
from fourfold.channel.parts import part
from fourfold.channel.plans import Branch, Plan
from fourfold.channel.regather import entered, gathered_again, stream_name
from fourfold.channel.vocabulary import look_up_own_rows_
from fourfold.collectives.differentiable import all_gather, copy_to, reduce_from, reduce_scatter
from fourfold.errors import UserError, nearest
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

    Raises UserError where the plan names what is not there, or the ranks do not divide what it cuts.
    """
    _check_names(model, plan)
    sites = parameter_sites(model)
    cuts = _cuts(model, plan, axis, sequence_parallel=sequence_parallel)
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
    return parallel


def _check_names(model: nn.Module, plan: Plan) -> None:
    """Raise `UserError` for every name of the plan that the model does not have."""
    modules = dict(model.named_modules())
    problems = []
    for pattern, branch in plan.branches.items():
        places = [name for name in modules if fnmatchcase(name, pattern)]
        if not places:
            problems.append(f"the plan's branch '{pattern}' is no module of the model")
        for short in (*branch.columns, *branch.rows):
            problems += [
                f"the plan's '{name}' is no module of the model.{nearest(name, modules)}"
                for name in (f"{place}.{short}" for place in places[:1])
                if name not in modules
            ]
    for place in (plan.embedding, plan.head, plan.last_norm):
        if place is not None and place not in modules:
            problems.append(f"the plan's '{place}' is no module of the model.{nearest(place, modules)}")
    if problems:
        raise UserError(*problems)


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


def _cuts(model: nn.Module, plan: Plan, axis: Axis, *, sequence_parallel: bool) -> dict[str, Cut]:
    """The cut of every parameter; see [Note: gradients on the Channel axis] in `fourfold.channel.cuts`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ranks = axis.size
    cuts = {
        name: whole(parameter.shape, ranks, adds_up=sequence_parallel)
        for name, parameter in model.named_parameters()
    }
    problems = []
    out_dim = 1 if plan.transposed else 0

    def cut_(module: nn.Module, attribute: str, make: Callable[[tuple[int, ...]], Cut]) -> None:
        parameter = getattr(module, attribute, None)
        if parameter is not None:
            try:
                cuts[names[id(parameter)]] = make(tuple(parameter.shape))
            except ValueError as error:
                problems.append(f"{names[id(parameter)]}: {error}")

    for place, module in model.named_modules():
        branch = plan.branch(place)
        if branch is None:
            continue
        for name, parameter in module.named_parameters(prefix=place):
            cuts[name] = whole(parameter.shape, ranks, adds_up=True)
        for short, columns in branch.columns.items():
            cut = partial(in_parts, ranks=ranks, groups=columns.groups, fused=columns.fused)
            cut_(module.get_submodule(short), "weight", partial(cut, dim=out_dim))
            cut_(module.get_submodule(short), "bias", partial(cut, dim=0))
        for short in branch.rows:
            cut_(module.get_submodule(short), "weight", partial(in_parts, dim=1 - out_dim, ranks=ranks))
            cut_(module.get_submodule(short), "bias", partial(whole, ranks=ranks, adds_up=sequence_parallel))
    for place in {plan.embedding, plan.head} - {None}:
        assert place is not None
        cut_(model.get_submodule(place), "weight", partial(vocabulary, ranks=ranks))
        cut_(model.get_submodule(place), "bias", partial(vocabulary, ranks=ranks))
    if problems:
        raise UserError(*problems)
    return cuts


def _surround_(module: nn.Module, branch: Branch, parallel: TensorParallel, *, transposed: bool) -> None:
    """Put the two collectives around a branch, and the row-wise biases behind the second one."""
    if parallel.regather and parallel.sequence_parallel:
        module.forward = gathered_again(module, parallel.enter)
    else:
        _enter_at_(module, parallel)
    rows = [module.get_submodule(name) for name in branch.rows]
    biased = [row for row in rows if getattr(row, "bias", None) is not None]
    for row in biased:
        row.forward = partial(_product, row, transposed)

    def after(_module: nn.Module, _args: object, out: Any) -> Any:
        stream, *rest = out if isinstance(out, tuple) else (out,)
        stream = parallel.leave(stream)
        for row in biased:
            stream = stream + torch.as_tensor(row.bias)
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
