"""What a plan makes of a module, checked before anything is cut."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from torch import Tensor, nn

from fourfold.channel.cuts import Cut, in_parts, vocabulary, whole
from fourfold.channel.dropout import dropout_problems
from fourfold.channel.plans import Branch, Plan, fits
from fourfold.errors import UserError, choices, nearest
from fourfold.models.parameters import parameter_sites

Site = tuple[nn.Module, str]
"""A module and the attribute that holds a parameter."""

_MARK = "_is_cut_on_tp"


def mark_as_cut_(model: nn.Module) -> None:
    """Have `checked_cuts` refuse the model, its parts, and whatever it becomes a part of."""
    for module in model.modules():
        setattr(module, _MARK, True)


def checked_cuts(model: nn.Module, plan: Plan, *, ranks: int, sequence_parallel: bool) -> dict[str, Cut]:
    """The cut of every parameter by its name.

    See [Note: gradients on the Channel axis] in `fourfold.channel.cuts`.

    Args:
        model: uncut.
        plan: what is cut.
        ranks: of the tp axis.
        sequence_parallel: whether the stream is cut by tokens.

    Raises UserError with all that cannot be right.
    """
    if any(hasattr(module, _MARK) for module in model.modules()):
        raise UserError("the model is cut on the tp axis already (Channel axis): cut one that is whole")
    problems = _problems(model, plan)
    if ranks > 1:
        problems += dropout_problems(model)
        if plan.embedding is not None:
            problems += _embedding_problems(dict(model.named_modules()).get(plan.embedding), plan.embedding)
    if sequence_parallel and ranks > 1 and plan.whole_stream is not None:
        problems.append(
            f"sequence_parallel=True (Channel axis): {plan.whole_stream}; use sequence_parallel=False"
        )
    if problems:
        raise UserError(*problems)
    cuts, undivided = _cuts(model, plan, ranks=ranks, sequence_parallel=sequence_parallel)
    if undivided:
        fitting = [
            fewer
            for fewer in range(1, ranks)
            if not _cuts(model, plan, ranks=fewer, sequence_parallel=sequence_parallel)[1]
        ]
        fix = f": use tp={choices(fitting)}" if fitting else ""
        raise UserError(*(f"{problem} (Channel axis){fix}" for problem in undivided))
    return cuts


def _cuts(
    model: nn.Module, plan: Plan, *, ranks: int, sequence_parallel: bool
) -> tuple[dict[str, Cut], list[str]]:
    """The cuts, and what the ranks do not divide or several modules would cut in different ways."""
    makers = dict(_makers(model, plan, ranks=ranks, sequence_parallel=sequence_parallel))
    inside = {
        module for name, branch in model.named_modules() if plan.branch(name) for module in branch.modules()
    }
    names = {module: name for name, module in model.named_modules()}
    cuts, problems = {}, []
    for name, sites in parameter_sites(model).items():
        shape = tuple(getattr(*sites[0]).shape)
        try:
            found = [
                makers[site](shape)
                if site in makers
                else whole(shape, ranks, adds_up=sequence_parallel or site[0] in inside)
                for site in sites
            ]
        except ValueError as error:
            problems.append(f"{name}: {error}")
            continue
        if any(cut != found[0] for cut in found) and ranks > 1:
            others = choices(f"'{names[module]}.{attribute}'" for module, attribute in sites[1:])
            problems.append(f"{name} is also {others}, which the plan treats in another way")
        cuts[name] = found[0]
    for place, module in model.named_modules():
        branch = plan.branch(place)
        problems += [
            f"tp={ranks} does not divide {place}.{attribute}={getattr(module, attribute)}"
            for attribute in (branch.scaled if branch else ())
            if getattr(module, attribute) % ranks
        ]
    return cuts, problems


def _makers(
    model: nn.Module, plan: Plan, *, ranks: int, sequence_parallel: bool
) -> Iterator[tuple[Site, Callable[[tuple[int, ...]], Cut]]]:
    """What makes the cut of a parameter from its shape, for all that the plan names."""
    out_dim = 1 if plan.transposed else 0
    for place, module in model.named_modules():
        branch = plan.branch(place)
        if branch is None:
            continue
        for short, columns in branch.columns.items():
            cut = partial(
                in_parts, ranks=ranks, groups=columns.groups, copied=columns.copied, fused=columns.fused
            )
            yield (module.get_submodule(short), "weight"), partial(cut, dim=out_dim)
            yield (module.get_submodule(short), "bias"), partial(cut, dim=0)
        for short in branch.rows:
            row = module.get_submodule(short)
            yield (row, "weight"), partial(in_parts, dim=1 - out_dim, ranks=ranks)
            yield (row, "bias"), partial(whole, ranks=ranks, adds_up=sequence_parallel)
    for place in (plan.embedding, plan.head):
        if place is not None:
            yield (model.get_submodule(place), "weight"), partial(vocabulary, ranks=ranks)
            yield (model.get_submodule(place), "bias"), partial(vocabulary, ranks=ranks)


def _problems(model: nn.Module, plan: Plan) -> list[str]:
    """What is wrong with the plan for this model, whatever the number of ranks."""
    modules = dict(model.named_modules())
    problems = []
    branches = [name for name in modules if plan.branch(name)]
    for pattern in plan.branches:
        if not any(fits(name, pattern) for name in modules):
            problems.append(f"the plan's branch '{pattern}' is no module of the model")
    for place in branches:
        branch = plan.branch(place)
        assert branch is not None
        problems += _branch_problems(modules, place, branch)
        outer = [other for other in branches if place.startswith(f"{other}.") or other == "" != place]
        problems += [f"the plan's branch '{place}' is inside of its branch '{other}'" for other in outer[:1]]
    for place in (plan.embedding, plan.head, plan.last_norm):
        if place is not None and place not in modules:
            problems.append(f"the plan's '{place}' is no module of the model.{nearest(place, modules)}")
    if (plan.head is None) != (plan.last_norm is None):
        problems.append(
            "the plan's head and last_norm go together: behind last_norm the stream enters the head"
        )
    if plan.embedding in modules and not isinstance(modules[plan.embedding], nn.Embedding):
        kind = type(modules[plan.embedding]).__name__
        problems.append(f"the plan's embedding '{plan.embedding}' is a {kind}: name an nn.Embedding")
    return problems


def _branch_problems(modules: Mapping[str, nn.Module], place: str, branch: Branch) -> list[str]:
    problems = []
    if not (branch.columns and branch.rows):
        problems.append(f"the plan's branch '{place}' needs projections by columns, and by rows")
    for short in (*branch.columns, *branch.rows):
        name = f"{place}.{short}" if place else short
        if name not in modules:
            problems.append(f"the plan's '{name}' is no module of the model.{nearest(name, modules)}")
            continue
        weight = getattr(modules[name], "weight", None)
        if not (isinstance(weight, Tensor) and weight.ndim == 2):
            problems.append(f"the plan's '{name}' has no matrix 'weight' to cut")
    problems += [
        f"the plan's branch '{place}' has no attribute '{attribute}' to divide"
        for attribute in branch.scaled
        if not hasattr(modules[place], attribute)
    ]
    if branch.groups is not None and not {"q_proj", "k_proj"} <= branch.columns.keys():
        problems.append(
            f"the plan's branch '{place}' has groups='{branch.groups}', without q_proj and k_proj"
        )
    return problems


def _embedding_problems(embedding: nn.Module | None, name: str) -> list[str]:
    """What an embedding does that its rows on one of several ranks cannot."""
    if not isinstance(embedding, nn.Embedding):
        return []
    problems = []
    if embedding.max_norm is not None:
        problems.append(
            f"'{name}' has max_norm={embedding.max_norm} (Channel axis): looking up tokens of other ranks "
            "would scale a row of this one; use max_norm=None"
        )
    if embedding.scale_grad_by_freq:
        problems.append(
            f"'{name}' has scale_grad_by_freq=True (Channel axis): tokens of other ranks would count for "
            "a row of this one; use scale_grad_by_freq=False"
        )
    return problems
