"""Attention over ranks as an op: inside a compiled graph, and kept by name through a recomputation."""

import gc
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fourfold.collectives import record
from fourfold.mesh import Mesh
from fourfold.models import Decoder, Microbatch
from fourfold.sequence.attention import ContextAttention
from fourfold.sequence.decoder import cut_sequences_
from fourfold.sequence.ops import context_attention, context_attention_backward
from fourfold.specs import Layout, ModelSpec
from fourfold.traffic import Event
from tests.ranks import RankPool

DOCUMENTS = ((5, 11), (16,))


def context(ulysses: int) -> ContextAttention:
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    ring, near = Mesh(Layout(cp=size)).split("cp", ulysses)
    return ContextAttention(ring=ring, ulysses=near)


def inputs(tokens: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, tokens, heads, 6, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for heads in (4, 2, 2)
    ]


def compiled_and_not(layout: str) -> tuple[list[list[Tensor]], list[list[Event]]]:
    """Output and gradients of a whole layer, and its messages: first as it is, then as one graph."""
    spec = ModelSpec.preset("tiny-qwen3")
    torch.manual_seed(0)
    model = Decoder(spec).double()
    attend = cut_sequences_(model, Mesh(Layout.parse(layout)))
    assert attend is not None
    layer, tokens = model.model.layers[0], torch.zeros(2, 16, dtype=torch.int64)
    positions = torch.stack([torch.cat([torch.arange(size) for size in row]) for row in DOCUMENTS])
    batch = Microbatch(tokens, tokens, positions, DOCUMENTS).take(attend.columns(DOCUMENTS))
    cos, sin = model.rotary(batch, torch.float64)
    x_BSC = torch.randn(*cos.shape[:2], spec.hidden_size, dtype=torch.float64, requires_grad=True)
    found, messages = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch, about how it compiles a norm of ours
        for run in (layer, torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager")):
            with record() as events:
                out = run(x_BSC, cos, sin, DOCUMENTS)
                found.append([out, *torch.autograd.grad(out.square().sum(), [x_BSC, *layer.parameters()])])
            messages.append(list(events))
    return [[tensor.detach() for tensor in tensors] for tensors in found], messages


def test_torch_compile_takes_a_layer_whole(ranks: RankPool) -> None:
    """In one graph, forward and backward: the same numbers and the same messages."""
    for (plain, compiled), (expected, events) in ranks(2, compiled_and_not, "cp2:ulysses"):
        assert events == expected
        assert len(events) == 4
        for mine, right in zip(compiled, plain, strict=True):
            torch.testing.assert_close(mine, right, rtol=0, atol=1e-12)


def test_its_gradients_are_those_of_finite_differences() -> None:
    mesh = Mesh(Layout())
    attend = ContextAttention(ring=mesh.cp, ulysses=mesh.cp)
    tensors = [tensor[:, :4, :, :2].detach().requires_grad_() for tensor in inputs(4)]
    call = partial(attend, documents=((1, 3), (4,)), window=2, scale=0.7)
    torch.autograd.gradcheck(call, tensors)
    sinks = torch.linspace(-1, 2, tensors[0].shape[2], dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda q, k, v, sinks_H: call(q, k, v, sinks_H=sinks_H), (*tensors, sinks))


def test_the_backward_needs_nobody_to_hold_the_ranks() -> None:
    """A loss may outlive the object that attended."""
    mesh = Mesh(Layout())
    attend = ContextAttention(ring=mesh.cp, ulysses=mesh.cp)
    tensors = inputs(16)
    out = attend(*tensors, documents=DOCUMENTS, window=None, scale=0.3)
    expected = torch.autograd.grad(out.sum(), tensors, retain_graph=True)
    del attend
    gc.collect()
    for found, right in zip(torch.autograd.grad(out.sum(), tensors), expected, strict=True):
        assert torch.equal(found, right)


def said_and_done(ulysses: int, has_sinks: bool) -> None:
    """What the ops are said to return, without data, is what they return: shapes, strides and dtypes."""
    attend = context(ulysses)
    q, k, v = inputs(sum(len(run) for run in attend.columns(DOCUMENTS)[0]), torch.bfloat16)
    sinks = torch.ones(4) if has_sinks else None
    rest = (attend.place.number, [length for row in DOCUMENTS for length in row], None, 0.3, sinks)

    def same(op: Callable[..., tuple[Tensor, ...]], *arguments: Any) -> tuple[Tensor, ...]:
        done = op(*arguments)
        with FakeTensorMode() as mode, record() as events:
            said = op(*(mode.from_tensor(each) if isinstance(each, Tensor) else each for each in arguments))
        assert not events
        for one, other in zip(done, said, strict=True):
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        return done

    with torch.no_grad():
        out, lse, exchanged, attended = same(context_attention, q, k, v, *rest)
        kept = (q, k, v, out) if ulysses == 1 else (*attend.place.split(exchanged, 4, 2), attended)
        same(context_attention_backward, out, *kept, lse, 2, *rest)


@pytest.mark.parametrize(
    ("world_size", "ulysses", "has_sinks"), [(1, 1, True), (2, 1, False), (2, 2, True), (4, 4, False)]
)
def test_shapes_are_known_without_data(
    ranks: RankPool, world_size: int, ulysses: int, has_sinks: bool
) -> None:
    ranks(world_size, said_and_done, ulysses, has_sinks)


def events_with_recomputation(ulysses: int, kept: bool) -> tuple[list[Tensor], int]:
    """Gradients, and how many messages there were, of a piece that is computed again for its backward."""
    attend = context(ulysses)
    tensors = inputs(sum(len(run) for run in attend.columns(DOCUMENTS)[0]))

    def piece(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q * 2, k.sin(), v, documents=DOCUMENTS, window=None, scale=0.3).exp()

    def policy(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        is_kept = kept and op == torch.ops.fourfold.context_attention.default
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    with record() as events:
        out = checkpoint(piece, *tensors, use_reentrant=False, context_fn=contexts)
        gradients = torch.autograd.grad(out.sum(), tensors)
    return list(gradients), len(events)


@pytest.mark.parametrize(("ulysses", "forward", "backward"), [(1, 2, 4), (2, 2, 2)])
def test_kept_by_name_it_sends_nothing_again(
    ranks: RankPool, ulysses: int, forward: int, backward: int
) -> None:
    """On 2 ranks: keys there and here; an exchange before and one behind. Gradients are the same bits."""
    again, kept = (ranks(2, events_with_recomputation, ulysses, kept) for kept in (False, True))
    for (found, messages), (right, fewer) in zip(again, kept, strict=True):
        assert (messages, fewer) == (2 * forward + backward, forward + backward)
        assert all(torch.equal(mine, other) for mine, other in zip(found, right, strict=True))
