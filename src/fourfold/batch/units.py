"""Flat buffers: the parameters that are gathered, reduced and updated together.

[Note: views for ever] A unit has one flat buffer of weights and one of gradients. The parameters are views of
the first and their ``.grad`` are views of the second, from construction on. A buffer is filled and reduced
where it lies: nothing is copied in or out, and the parameter objects never change. Where a buffer is not
needed its
*storage* is resized to nothing and back; the views stay.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fourfold.batch.costs import UnitSize
from fourfold.batch.pieces import Pieces
from fourfold.collectives import Pending, all_gather, all_reduce_, reduce_scatter
from fourfold.collectives.recorder import dtype_name
from fourfold.mesh import Axis
from fourfold.specs.placement import Placement


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one parameter in its unit's flat buffers."""

    name: str
    offset: int
    shape: torch.Size

    def view(self, flat: Tensor) -> Tensor:
        """The parameter's part of a flat buffer, in its shape."""
        return flat[self.offset : self.offset + self.shape.numel()].view(self.shape)


@dataclass(frozen=True)
class Owned:
    """The part of a parameter that a rank owns.

    Attributes:
        name: of the parameter.
        shape: of the whole parameter.
        first: the index of the part's first element in the flattened parameter.
        part: where the part lies in the unit's piece.
    """

    name: str
    shape: torch.Size
    first: int
    part: slice

    @property
    def is_whole(self) -> bool:
        """Whether the rank owns all of the parameter."""
        return self.part.stop - self.part.start == self.shape.numel()


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of master weights, gradients and their reduction: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def slots(shapes: Mapping[str, Sequence[int]], order: Sequence[str]) -> list[Slot]:
    """The places of parameters one after another in ``order``."""
    found: list[Slot] = []
    offset = 0
    for name in order:
        found.append(Slot(name, offset, torch.Size(shapes[name])))
        offset += found[-1].shape.numel()
    return found


class Unit:
    """Some parameters in flat buffers, of which each rank of the fsdp axis owns a piece.

    Args:
        name: what error messages and tables call it, as in ``layer.3``.
        parameters: by name; all trained, or all frozen. Their values are not kept.
        sites: for each parameter, every (module, attribute) that holds it; a tied weight has two.
        pieces: how the buffers are laid out and cut.
        placement: which buffers are whole between uses.
        shards: the ranks that own a piece each.
        replicas: the ranks that own the same piece as this one and compute another summand of its gradient:
            for other sequences; for the other end of the model, where an embedding and a head are one
            parameter; for other tokens or heads on the tp axis.
        dtype: of the weights that computation reads.
        master_dtype: of the weights that the optimizer updates, of gradients and of their reduction.
        device: where the buffers live.

    Attributes:
        weights: flat and whole, in ``dtype``; the parameters are views of it.
        gradient: flat and whole, in ``master_dtype``; the parameters' ``.grad`` are views of it.
        master: this rank's piece of the weights, in ``master_dtype``: a view of ``weights`` where those are
            whole and of the same dtype.
        summed: this rank's piece of the summed gradient: a view of ``gradient`` where that is whole.
        owned: the parts of parameters in this rank's piece, in its order: matrices, then norms and biases.
        num_decayed: elements of matrices in the piece; they come first in it.
    """

    def __init__(
        self,
        name: str,
        parameters: dict[str, nn.Parameter],
        sites: dict[str, list[tuple[nn.Module, str]]],
        *,
        pieces: Pieces,
        placement: Placement,
        shards: Axis,
        replicas: Axis,
        dtype: torch.dtype,
        master_dtype: torch.dtype,
        device: torch.device,
    ):
        self.name = name
        self.placement = placement
        self.counts = pieces.counts
        self.is_trained = next(iter(parameters.values())).requires_grad
        self._shards = shards
        self._replicas = replicas
        self.slots = slots({key: parameter.shape for key, parameter in parameters.items()}, pieces.order)
        start = sum(pieces.counts[: shards.rank])
        self._piece = slice(start, start + pieces.counts[shards.rank])
        self.owned = list(self._owned())
        self.num_decayed = sum(o.part.stop - o.part.start for o in self.owned if len(o.shape) >= 2)

        self._numel = sum(slot.shape.numel() for slot in self.slots)
        # Buffers that are released at once are never written to, so they take no memory meanwhile; and what
        # stays is allocated after they are gone, so that it leaves no holes between the units.
        size = sum(pieces.counts)
        self.weights = _buffer(size, dtype, device, written=not placement.weights)
        self.gradient = _buffer(
            size if self.is_trained else 0, master_dtype, device, written=not placement.gradients
        )
        self.parameters = [self._make_parameter(slot, sites[slot.name]) for slot in self.slots]
        self._is_summing = self._has_sum = False
        own_weights, own_gradient = self.weights[self._piece], self.gradient[self._piece]
        self.free_()
        self.drop_gradient_()
        is_apart = placement.weights or dtype != master_dtype
        self.master = torch.zeros_like(own_weights, dtype=master_dtype) if is_apart else own_weights
        self.summed = torch.zeros_like(own_gradient) if placement.gradients else own_gradient

    def _make_parameter(self, slot: Slot, sites: list[tuple[nn.Module, str]]) -> nn.Parameter:
        # `.data` gives the parameter a version counter of its own. What autograd saves of it for the backward
        # would else look modified once the buffer is freed and gathered again, with the same values.
        parameter = nn.Parameter(slot.view(self.weights.data), requires_grad=self.is_trained)
        if self.is_trained:
            parameter.grad_dtype = self.gradient.dtype
            parameter.grad = slot.view(self.gradient)
        for module, attribute in sites:
            setattr(module, attribute, parameter)
        return parameter

    def _owned(self) -> Iterator[Owned]:
        for slot in self.slots:
            first = max(slot.offset, self._piece.start)
            stop = min(slot.offset + slot.shape.numel(), self._piece.stop)
            if first < stop:
                part = slice(first - self._piece.start, stop - self._piece.start)
                yield Owned(slot.name, slot.shape, first - slot.offset, part)

    @property
    def size(self) -> UnitSize:
        """What the formulas need to know."""
        weight, master = self.weights.dtype, self.master.dtype
        return UnitSize(
            self.counts,
            self._shards.rank,
            dtype_name(weight),
            weight.itemsize,
            dtype_name(master),
            master.itemsize,
            self.is_trained,
            "tp" in self._replicas.name.split(","),
        )

    @property
    def held_bytes(self) -> int:
        """Bytes of weights and gradients on this rank now."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in (self.weights, self.master, self.gradient, self.summed)
        }
        return sum(storages.values())

    def named(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's name with its view of ``flat``, a whole buffer."""
        return ((slot.name, slot.view(flat)) for slot in self.slots)

    def whole(self, piece: Tensor) -> Tensor:
        """Return the whole flat buffer of which every rank holds a piece; all ranks of the axis call it."""
        return piece if self._shards.size == 1 else all_gather(piece, self._shards, counts=self._uneven)

    @torch.no_grad()
    def load_(self, value_of: Callable[[str], Tensor]) -> None:
        """Set this rank's master piece from whole parameters, each asked for once by name, on every rank."""
        for slot in self.slots:
            value = value_of(slot.name)
            for owned in self.owned:
                if owned.name == slot.name:
                    part = self.master[owned.part]
                    part.copy_(value.flatten()[owned.first : owned.first + len(part)])

    @property
    def is_present(self) -> bool:
        """Whether the weights that computation reads are on this rank."""
        return self.weights.untyped_storage().nbytes() > 0

    def gather(self) -> Pending:
        """Start to bring the weights up to date with all ranks' master pieces, in place."""
        _resize(self.weights)
        own = self.weights[self._piece]
        if own.data_ptr() != self.master.data_ptr():
            own.copy_(self.master)
        return all_gather(own, self._shards, out=self.weights, counts=self._uneven, blocking=False)

    def free_(self) -> None:
        """Release the weights, where they are sharded."""
        if self.placement.weights:
            self.weights.untyped_storage().resize_(0)

    def take_gradient_(self) -> bool:
        """Make room for a gradient that is about to be computed; say if it starts anew."""
        is_new = self.is_trained and not self._is_summing
        if is_new:
            _resize(self.gradient)
            self.gradient[self._numel :].zero_()  # not a parameter's, but in the norm
            self._is_summing = True
        return is_new

    def drop_gradient_(self) -> None:
        """Release the whole gradient, where gradients are sharded."""
        self._is_summing = False
        if self.placement.gradients:
            self.gradient.untyped_storage().resize_(0)

    def begin_step_(self) -> None:
        """Forget the gradients of the last step."""
        self._is_summing = self._has_sum = False

    def reduce(self) -> Pending:
        """Start to sum the gradient to the owners of its pieces; `finish_reduce_` comes after its end."""
        self._is_summing = False
        if self._shards.size == 1:
            return all_reduce_(self.gradient, self._replicas, blocking=False)
        out = torch.empty_like(self.summed) if self._has_sum else self.summed
        return reduce_scatter(self.gradient, self._shards, out=out, counts=self._uneven, blocking=False)

    def finish_reduce_(self, result: Tensor) -> None:
        """Keep the result of `reduce` and release the whole gradient where it is not to stay."""
        if self._shards.size > 1 and self._has_sum:
            self.summed.add_(result)
        self._has_sum = True
        self.drop_gradient_()

    def all_reduce(self) -> Pending:
        """Start to sum this rank's piece of the gradient over its replicas."""
        return all_reduce_(self.summed, self._replicas, blocking=False)

    def publish_(self) -> None:
        """Bring the weights that computation reads up to date, where each rank has all master weights."""
        if not self.placement.optimizer and self.weights.data_ptr() != self.master.data_ptr():
            self.weights.copy_(self.master)

    @property
    def _uneven(self) -> tuple[int, ...] | None:
        """The counts for a collective, None where all are equal: backends are fastest then."""
        return None if len(set(self.counts)) == 1 else self.counts


def _buffer(size: int, dtype: torch.dtype, device: torch.device, *, written: bool) -> Tensor:
    make = torch.zeros if written else torch.empty
    return make(size, dtype=dtype, device=device)


def _resize(flat: Tensor) -> None:
    """Give a flat buffer its storage back."""
    storage, nbytes = flat.untyped_storage(), flat.numel() * flat.itemsize
    if storage.nbytes() != nbytes:
        storage.resize_(nbytes)
