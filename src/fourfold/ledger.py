"""What tensors a step holds, counted operation by operation as it runs."""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.batch.units import Unit
from fourfold.memory import Category
from fourfold.rank_memory import RankMemory
from fourfold.sequence.ops import INSIDE
from fourfold.traffic import Event

aten = torch.ops.aten


class Ledger(TorchDispatchMode):
    """Counts bytes of live tensors, by category, while it is entered.

    [Note: storages, not tensors] What takes memory is a storage: views share one, and it lives as long as
    any of them, be it a Python variable or autograd's. A storage is entered when the first operation returns
    a tensor on it and leaves when it is freed, which a weak reference tells. So the count knows nothing of
    the code that it watches. What an operation allocates inside of itself and frees again is not seen.

    It counts tensors on one device: real ones as well as those of the meta device, whose storages have sizes
    alone. There the value of a tensor that code asks for is 1: a loss that is finite, a norm.

    Args:
        device: whose tensors are counted.

    Attributes:
        events: the collectives so far; where each is noted right before it starts, what is made between
            that and the start is a buffer of the collective itself.
        peak: bytes by category when they were most in all.
        most: the most bytes of each category, whenever that was.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device
        self._entries: dict[int, _Entry] = {}
        self._resizable: list[_Entry] = []
        self._bytes = dict.fromkeys(Category, 0)
        self._total = 0
        self._born_as = Category.ACTIVATIONS
        self._is_paused = False
        self.events: Sequence[Event] = ()
        self.peak: Mapping[Category, int] = dict(self._bytes)
        self.most = dict(self._bytes)
        self._peak_total = 0

    @property
    def live(self) -> Mapping[Category, int]:
        """Bytes by category now."""
        self._follow_sizes()
        return dict(self._bytes)

    @property
    def memory(self) -> RankMemory:
        """What there is now, and what there was at most."""
        return RankMemory(self.live, dict(self.peak), dict(self.most))

    def add_unit(self, unit: Unit) -> None:
        """Enter a unit's buffers, which change their sizes as they are gathered and freed."""
        kept = Category.GATHERED if unit.placement.weights else Category.WEIGHTS
        for tensor, category in (
            (unit.weights, kept),
            (unit.master, Category.WEIGHTS),
            (unit.gradient, Category.GRADIENTS),
            (unit.summed, Category.GRADIENTS),
        ):
            self._resizable.append(self._enter(tensor, category))

    def add(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Enter tensors that were made before, or without an operation."""
        for tensor in tensors:
            self._enter(tensor, category)
        self._see_peak()

    def mark(self, tensors: Sequence[Tensor], category: Category, *, only_new: bool = False) -> None:
        """Say what tensors are that count as activations so far.

        With ``only_new`` only those that were made since the last collective was noted.
        """
        for tensor in tensors:
            entry = self._entries.get(tensor.untyped_storage()._cdata)
            if entry is None or entry.category is not Category.ACTIVATIONS:
                continue
            if not only_new or entry.noted == len(self.events):
                self._bytes[entry.category] -= entry.bytes
                self._bytes[category] += entry.bytes
                entry.category = category
        self._see_peak()

    @contextmanager
    def born_as(self, category: Category, *, only_what_stays: bool = False) -> Iterator[None]:
        """Have what is made inside count in ``category``.

        With ``only_what_stays`` the peak does not see what is made and freed inside.
        """
        before = self._born_as, self._is_paused
        self._born_as, self._is_paused = category, self._is_paused or only_what_stays
        try:
            yield
        finally:
            self._born_as, self._is_paused = before
            self._see_peak()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype).item()
        if func in INSIDE:
            with self:
                return INSIDE[func](*args, **kwargs)
        result = func(*args, **kwargs)
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.device.type == self._device.type:
                self._enter(tensor, self._born_as)
        self._see_peak()
        return result

    def _enter(self, tensor: Tensor, category: Category) -> "_Entry":
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._entries:
            return self._entries[key]
        gone = weakref.ref(storage, lambda _: self._leave(key))
        entry = _Entry(gone, storage.nbytes(), category, len(self.events))
        self._entries[key] = entry
        self._bytes[category] += entry.bytes
        self._total += entry.bytes
        return entry

    def _leave(self, key: int) -> None:
        entry = self._entries.pop(key)
        self._bytes[entry.category] -= entry.bytes
        self._total -= entry.bytes

    def _follow_sizes(self) -> None:
        for entry in self._resizable:
            storage = entry.storage()
            if storage is not None and (size := storage.nbytes()) != entry.bytes:
                self._bytes[entry.category] += size - entry.bytes
                self._total += size - entry.bytes
                entry.bytes = size

    def _see_peak(self) -> None:
        self._follow_sizes()
        if self._is_paused:
            return
        if self._total >= self._peak_total:
            self._peak_total, self.peak = self._total, dict(self._bytes)
        for category, nbytes in self._bytes.items():
            if nbytes > self.most[category]:
                self.most[category] = nbytes


class _Entry:
    """A live storage."""

    __slots__ = ("bytes", "category", "noted", "storage")

    def __init__(
        self, storage: weakref.ref[torch.UntypedStorage], nbytes: int, category: Category, noted: int
    ):
        self.storage = storage
        self.noted = noted
        self.bytes = nbytes
        self.category = category
