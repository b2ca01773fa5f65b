"""What a cluster does in a second: the numbers that predicted times follow from.

A `Machine` starts from constants of the catalogue (`fourfold.planner.catalogue`). Each number, or a table of
measured times in place of a formula, may be replaced by what was measured: a calibration file is JSON whose
keys are the fields of `Machine`.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from math import ceil, inf
from pathlib import Path
from typing import Any, TypeGuard

from fourfold.errors import UserError, nearest
from fourfold.planner.calibration import (
    BlockTable,
    MeasuredAttention,
    MeasuredBlock,
    MeasuredUpdate,
    interpolated,
)
from fourfold.traffic import Event, rounds
from fourfold.traffic import seconds as formula_seconds

ALIGNED, MISALIGNED = 8, 3.0
"""Rows of 16-bit operands that are no multiple of 16 bytes: how many times longer a product takes then.

NVIDIA's guide to matrix multiplication has 2 to 4."""


@dataclass(frozen=True)
class Level:
    """One level of the network: neighbouring ranks that a link joins.

    Attributes:
        ranks: how many neighbours; 0 for all ranks, the last level.
        bytes_per_second: that a rank sends in one direction in a large collective.
        latency_seconds: of one round of a collective.
    """

    ranks: int
    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True)
class MeasuredCollective:
    """How long a collective took: ``op`` and ``bytes`` as in `fourfold.traffic.Event`.

    ``ranks`` took part, of which ``near`` neighbours share the first level of the network. ``busy`` is the
    share of a core that each needed meanwhile, where ranks compute on the cores that also send.
    """

    op: str
    ranks: int
    near: int
    bytes: int
    seconds: float
    busy: float = 0.0


@dataclass(frozen=True)
class MeasuredProduct:
    """How long the product of an (m, k) and a (k, n) matrix took, operands of ``dtype``."""

    m: int
    n: int
    k: int
    dtype: str
    seconds: float


@dataclass(frozen=True)
class Machine:
    """Devices, and the network between them.

    Attributes:
        name: for people.
        source: where the numbers are from: ``catalogue``, and what was measured.
        peak_flops: FLOP/s of dense matrix products by dtype: the denominator of MFU.
        product_efficiency: the share of the peak that a large product reaches in training, by dtype.
        attention_efficiency: the same of fused attention forward, with long rows.
        attention_backward_efficiency: and backward, where it computes 2.5 times as much.
        tile: rows and columns of an output tile, and ``processors`` how many tiles are computed at once.
        memory_bytes: of a device that a program sees.
        memory_bytes_per_second: that element-wise work reaches.
        levels: of the network, the nearest first.
        launch_seconds: between two kernels that the host starts.
        overlap: the share of what could hide that does.
        interference: by how much computation slows while something is sent behind it.
        ranks_per_device: ranks that share a device's arithmetic, as processes on the cores of one CPU.
        products: measured products, in place of the formula.
        collectives: measured collectives, in place of the formula.
        blocks: measured actions on whole blocks of a model; with ``attentions`` and ``updates`` see
            `fourfold.planner.calibration`.
    """

    name: str
    peak_flops: Mapping[str, float]
    product_efficiency: Mapping[str, float]
    memory_bytes: float
    memory_bytes_per_second: float
    levels: tuple[Level, ...]
    attention_efficiency: float = 0.5
    attention_backward_efficiency: float = 0.4
    tile: tuple[int, int] = (128, 256)
    processors: int = 1
    launch_seconds: float = 5e-6
    overlap: float = 0.9
    interference: float = 0.08
    ranks_per_device: float = 1.0
    source: str = "catalogue"
    products: tuple[MeasuredProduct, ...] = field(default=(), repr=False)
    collectives: tuple[MeasuredCollective, ...] = field(default=(), repr=False)
    blocks: tuple[MeasuredBlock, ...] = field(default=(), repr=False)
    attentions: tuple[MeasuredAttention, ...] = field(default=(), repr=False)
    updates: tuple[MeasuredUpdate, ...] = field(default=(), repr=False)

    def calibrated(self, path: str | Path) -> "Machine":
        """This machine with the numbers of a calibration file in place of its own.

        Of rates by dtype those that the file has are replaced. Levels of the network that end within a node
        are the nearest ones, and what lies between nodes stays as it was.

        Raises:
            UserError: where the file cannot be read, or has a key that is no field, or no value for one.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"calibration {path} cannot be read: {error}") from None
        if not isinstance(values, dict):
            raise UserError(f"calibration {path} is no JSON object: use a file that fourfold bench wrote")
        names = [found.name for found in fields(self)]
        if wrong := [key for key in values if key not in names]:
            raise UserError(*(f"calibration {path}: no field '{key}'.{nearest(key, names)}" for key in wrong))
        if wrong := [key for key, value in values.items() if not _is_value(key, value, getattr(self, key))]:
            raise UserError(
                *(f"calibration {path}: {key} is not as fourfold bench writes it" for key in wrong)
            )
        found = _read(values)
        if not found.get("levels"):  # of one rank: it has seen no network
            found.pop("levels", None)
        for name, value in found.items():
            if isinstance(value, Mapping):
                found[name] = {**getattr(self, name), **value}
        if (levels := found.get("levels")) and levels[-1].ranks:
            found["levels"] = (*levels, *(level for level in self.levels if not level.ranks))
        return replace(self, **{"source": f"calibrated by {path}", **found})

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Machine":
        """What `to_json` returned; of one rank there may be no levels."""
        return cls(**_read({"levels": [], **values}))

    def to_json(self) -> dict[str, Any]:
        """All fields, as `calibrated` reads them."""
        return {
            found.name: [vars(row) for row in value]
            if isinstance(value := getattr(self, found.name), tuple) and found.name in _ROWS
            else value
            for found in fields(self)
        }

    def product_seconds(
        self, m: int, n: int, k: int, dtype: str, *, itemsize: int = 2, count: int = 1
    ) -> float:
        """The time of a product of an (m, k) and a (k, n) matrix on one rank, or of ``count`` at once.

        The longer of its arithmetic and its traffic with memory. Arithmetic counts whole waves of tiles, and
        products with a short inner dimension are less efficient: k / (k + 256), the part of a tile's time
        that is not start and end.
        """
        if measured := self._measured_product(m, n, k, dtype):
            return count * measured
        rows, columns = self.tile
        waves = count * -(-m // rows) * -(-n // columns) / self.processors
        full = waves / ceil(waves)
        flops = 2 * count * m * n * k * (k + 256) / k
        if (n % ALIGNED or k % ALIGNED) and itemsize < 4:
            flops *= MISALIGNED
        arithmetic = flops / (self.peak_flops[dtype] * self.product_efficiency[dtype] * full)
        traffic = count * (m * k + k * n + m * n) * itemsize / self.memory_bytes_per_second
        return max(arithmetic * self.ranks_per_device, traffic)

    def attention_seconds(self, flops: float, sequence: int, dtype: str, *, backward: bool = False) -> float:
        """The time of fused attention that computes so many FLOPs, of rows of so many tokens."""
        efficiency = self.attention_backward_efficiency if backward else self.attention_efficiency
        efficiency *= sequence / (sequence + 512)
        return flops * self.ranks_per_device / (self.peak_flops[dtype] * efficiency)

    def memory_seconds(self, nbytes: float) -> float:
        """The time of element-wise work that reads and writes so many bytes."""
        return nbytes / self.memory_bytes_per_second

    def collective_seconds(self, event: Event, ranks: int, *, stride: int = 1) -> float:
        """The time of a collective over ``ranks`` ranks that stand ``stride`` apart.

        Through several levels a message goes in parts at the same time, so the slowest level decides;
        the ranks of a group that are near one another share what their links carry to the next level. A
        round of a ring goes over all links at once, and takes the latency of the farthest.
        """
        if ranks == 1:
            return 0.0
        near = min(ranks, max(1, self.levels[0].ranks // stride)) if len(self.levels) > 1 else ranks
        is_message = event.op in ("send", "recv")  # between two neighbours: the farthest pair decides
        if self.collectives and (measured := self._measured_collective(event, ranks, near)) is not None:
            return measured
        longest, latency, inside = 0.0, 0.0, 1
        for level in self.levels:
            reached = ranks if level.ranks == 0 else min(ranks, max(1, level.ranks // stride))
            parts = -(-reached // inside)
            shared = 1 if is_message else inside
            if parts > 1:
                speed = level.bytes_per_second * shared
                found = formula_seconds(event, parts, bytes_per_second=speed, latency_seconds=0.0)
                longest, latency = max(longest, found), level.latency_seconds
            inside = max(inside, reached)
        return longest + rounds(event.op, ranks) * latency + self.launch_seconds

    def _measured_collective(self, event: Event, ranks: int, near: int) -> float | None:
        table = self._collective_table.get((event.op, ranks, near))
        return None if table is None else interpolated(table, max(event.bytes, 1))

    @cached_property
    def block_table(self) -> BlockTable:
        """What was measured of whole blocks, to look up."""
        return BlockTable(self.blocks, self.attentions, self.updates)

    @cached_property
    def _collective_table(self) -> dict[tuple[str, int, int], list[tuple[float, float]]]:
        found: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
        for row in self.collectives:
            found.setdefault((row.op, row.ranks, row.near), []).append((max(row.bytes, 1), row.seconds))
        return {key: sorted(rows) for key, rows in found.items()}

    def _measured_product(self, m: int, n: int, k: int, dtype: str) -> float | None:
        """By FLOPs, from the products of that dtype: exact where a shape was measured."""
        shapes, by_flops = self._product_table
        if (m, n, k, dtype) in shapes:
            return shapes[m, n, k, dtype]
        return interpolated(by_flops[dtype], 2.0 * m * n * k) if dtype in by_flops else None

    @cached_property
    def _product_table(
        self,
    ) -> tuple[dict[tuple[int, int, int, str], float], dict[str, list[tuple[float, float]]]]:
        shapes = {(row.m, row.n, row.k, row.dtype): row.seconds for row in self.products}
        by_flops: dict[str, list[tuple[float, float]]] = {}
        for row in self.products:
            by_flops.setdefault(row.dtype, []).append((2.0 * row.m * row.n * row.k, row.seconds))
        return shapes, {dtype: sorted(rows) for dtype, rows in by_flops.items()}


_ROWS: dict[str, Any] = {
    "levels": Level,
    "products": MeasuredProduct,
    "collectives": MeasuredCollective,
    "blocks": MeasuredBlock,
    "attentions": MeasuredAttention,
    "updates": MeasuredUpdate,
}


def _is_value(name: str, value: object, own: object) -> bool:
    """Whether a value from JSON may stand in place of a machine's own."""
    if kind := _ROWS.get(name):
        return isinstance(value, list) and all(isinstance(row, dict) and _is_row(kind, row) for row in value)
    if isinstance(own, Mapping):
        return isinstance(value, dict) and all(_is_number(number) and number > 0 for number in value.values())
    if name == "tile":
        return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))
    return isinstance(value, str) if isinstance(own, str) else _is_number(value)


def _is_row(kind: type[Any], row: Mapping[str, object]) -> bool:
    of_kind = {found.name: found for found in fields(kind)}
    if row.keys() - of_kind.keys() or any(
        found.default is MISSING and name not in row for name, found in of_kind.items()
    ):
        return False
    return all(
        _is_number(value) if of_kind[name].type in (int, float) else isinstance(value, str | list)
        for name, value in row.items()
    )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < inf


def _read(values: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(values)
    for name, kind in _ROWS.items():
        if name in found:
            found[name] = tuple(kind(**row) for row in found[name])
    if "tile" in found:
        found["tile"] = tuple(found["tile"])
    return found
