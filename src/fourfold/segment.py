"""A piece of the model with an explicit forward and backward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from fourfold.kept import KeptResults
from fourfold.models import Microbatch, Piece
from fourfold.weight_gradients import WeightGradients


class _Moment:
    """What a forward depends on beside its input and its weights: random generators and buffers.

    [Note: the same forward again] A forward that runs again draws the same random numbers, reads its buffers
    as they were, and leaves both as it found them. Buffers are exchanged for copies, not written to: a tape
    may hold them.

    Args:
        device: where the segment runs.
        modules: those that it runs.
    """

    def __init__(self, device: torch.device, modules: Sequence[nn.Module]):
        self._device = device
        self._random = torch.get_rng_state()
        on_device = device.type not in ("cpu", "meta")
        self._device_random = torch.get_device_module(device).get_rng_state(device) if on_device else None
        self._buffers = [(owner, name, buffer.clone()) for owner, name, buffer in _buffers(modules)]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Let a forward run as at that moment, and put back what there is now."""
        now = [(owner, name, getattr(owner, name)) for owner, name, _ in self._buffers]
        for owner, name, buffer in self._buffers:
            setattr(owner, name, buffer.clone())  # it may have to run once more
        try:
            with self._randomness():
                yield
        finally:
            for owner, name, buffer in now:
                setattr(owner, name, buffer)

    @contextmanager
    def _randomness(self) -> Iterator[None]:
        devices = [] if self._device_random is None else [self._device]
        with torch.random.fork_rng(devices, device_type=self._device.type if devices else "cuda"):
            torch.set_rng_state(self._random)
            if self._device_random is not None:
                torch.get_device_module(self._device).set_rng_state(self._device_random, self._device)
            yield


def _buffers(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Every buffer of the modules with the module that holds it and its name there."""
    for module in modules:
        for owner in module.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                yield owner, name, buffer


def _runs_our_code_alone(modules: Sequence[nn.Module]) -> bool:
    """Whether the modules are of our classes, without hooks or forwards that others have put there.

    What a foreign one reads is not known: a hook on a layer's output may keep which of it was positive.
    """
    parts = [part for module in modules for part in module.modules()]
    return (
        not (_global_forward_hooks or _global_forward_pre_hooks)
        and all(type(part) is nn.Linear or _is_ours(type(part)) for part in parts)
        and all(_is_ours(code) for part in parts for code in _put_there(part))
    )


def _put_there(part: nn.Module) -> Iterator[object]:
    """What runs around a module's forward, or in its place."""
    yield from part._forward_hooks.values()
    yield from part._forward_pre_hooks.values()
    if "forward" in vars(part):
        yield part.forward


def _is_ours(code: object) -> bool:
    return str(getattr(code, "__module__", "")).startswith("fourfold.")


class Segment:
    """Runs one `Piece` forward and backward, microbatch by microbatch.

    [Note: explicit backward] The input of a segment is a detached leaf, so the autograd graph of a segment
    ends at its borders. Its backward is called with the gradient of its output and returns the gradient of
    its input: nothing runs because of a hook, and the order of everything is the program's.

    Args:
        piece: the part of the model.
        weight_gradients: where the linear layers of the model put their weight gradients.
        keeps: the names of the results that stay where a forward runs again; see `fourfold.kept`.
        unread: the names of those that the second run does not need, as long as nothing else reads them.
    """

    def __init__(
        self,
        piece: Piece,
        weight_gradients: WeightGradients,
        *,
        keeps: frozenset[str] = frozenset(),
        unread: frozenset[str] = frozenset(),
    ):
        self.piece = piece
        self._weight_gradients = weight_gradients
        self._keeps, self._unread = keeps, unread
        self._kept: dict[int, KeptResults] = {}
        self._live: dict[int, tuple[Tensor | None, GradientEdge | None]] = {}
        self._deferred: dict[int, list[Callable[[], None]]] = {}
        self._moments: dict[int, _Moment] = {}

    def forward(self, microbatch: int, x: Tensor | None, batch: Microbatch, *, keep: bool = True) -> Tensor:
        """F: compute the output, and keep what the backward needs or what it takes to compute it again.

        Args:
            microbatch: which one; identifies what is kept.
            x: the output of the segment before, None for the first.
            batch: the microbatch's tokens, labels and positions.
            keep: whether the backward needs what this forward computes; else `recompute` comes first.
        """
        if keep:
            return self._taped(microbatch, x, batch)
        self._moments[microbatch] = _Moment(batch.input_ids_BS.device, self.piece.modules)
        if not self._keeps:
            return self.evaluate(x, batch)
        unread = self._unread if _runs_our_code_alone(self.piece.modules) else frozenset[str]()
        kept = self._kept[microbatch] = KeptResults(self._keeps, unread)
        with kept.keeping():  # as for a backward, so that kernels give all that one needs
            return self._with_graph(x, batch)[1].detach()

    def recompute(self, microbatch: int, x: Tensor | None, batch: Microbatch, *, keep: bool) -> Tensor:
        """R: compute the same output as `forward`, which kept nothing. See [Note: the same forward again].

        Args:
            microbatch: as for `forward`.
            x: equal to what `forward` was given.
            batch: as for `forward`.
            keep: whether the backward comes next; else another `recompute`.
        """
        moment = self._moments.pop(microbatch) if keep else self._moments[microbatch]
        with moment.again():
            if not keep:
                return self.evaluate(x, batch)
            with self._kept.pop(microbatch).taking() if self._keeps else nullcontext():
                return self._taped(microbatch, x, batch)

    def _with_graph(self, x: Tensor | None, batch: Microbatch) -> tuple[Tensor | None, Tensor]:
        """The input as a leaf, and the output."""
        leaf = None if x is None else x.detach().requires_grad_()
        with torch.enable_grad():
            return leaf, self.piece.forward(leaf, batch)

    def _taped(self, microbatch: int, x: Tensor | None, batch: Microbatch) -> Tensor:
        leaf, y = self._with_graph(x, batch)
        # The place in the graph, not the tensor: an output that is sent away takes no memory here.
        # Without it where this is the first segment and all of it is frozen.
        self._live[microbatch] = (leaf, get_gradient_edge(y) if y.requires_grad else None)
        return y.detach()

    def backward(self, microbatch: int, gradient: Tensor) -> Tensor | None:
        """B: add the weight gradients and return the gradient of the input (None for the first segment)."""
        leaf, edge = self._live.pop(microbatch)
        if edge is not None:
            torch.autograd.backward(edge, gradient)
        return None if leaf is None else leaf.grad

    def input_gradient(self, microbatch: int, gradient: Tensor) -> Tensor | None:
        """I: return the gradient of the input, and keep the linear layers' weight gradients for later.

        The gradients of norms and embeddings are cheap and are added at once. See
        [Note: deferred weight gradients].
        """
        with self._weight_gradients.deferred() as queue:
            input_gradient = self.backward(microbatch, gradient)
        self._deferred[microbatch] = queue
        return input_gradient

    def weight_gradient(self, microbatch: int) -> None:
        """W: add the weight gradients that `input_gradient` kept."""
        self._weight_gradients.add_deferred_(self._deferred.pop(microbatch))

    def evaluate(self, x: Tensor | None, batch: Microbatch) -> Tensor:
        """Compute the output and keep nothing."""
        with torch.no_grad():
            return self.piece.forward(x, batch)

    @property
    def in_flight(self) -> int:
        """Of how many microbatches activations are kept: until their backward or weight gradient has run."""
        return len(self._live) + len(self._deferred)

    def reset(self) -> None:
        """Drop everything kept, after a step that failed."""
        self._live.clear()
        self._moments.clear()
        self._kept.clear()
        self._deferred.clear()


def gradient_of_mean_loss(loss_sum: Tensor, valid_tokens: int) -> Tensor:
    """The gradient that the backward starts with: that of ``loss_sum / valid_tokens``.

    [Note: the loss is a sum] Segments return the *sum* of the token losses of a microbatch. It is divided
    here, once, by the number of valid tokens of the whole global batch, known before the first backward.
    Gradients are then only ever added: over microbatches and over ranks. With no valid token at all, loss and
    gradients are 0.
    """
    return torch.full_like(loss_sum, 1.0 / max(valid_tokens, 1))
