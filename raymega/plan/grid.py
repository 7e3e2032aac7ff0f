"""Convert ranks to coordinates of the five-axis grid and back; no other module does.

The module owns orders, coordinates and member lists of groups. It creates no communicator and knows
no node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeVar

from raymega.config.schema import ParallelSection

AXES = ("tp", "cp", "ep", "dp", "pp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Coords:
    """Coordinates of one rank on the dense grid."""

    tp: int
    cp: int
    dp: int
    pp: int

    def on(self, axis: str) -> int:
        """Return the coordinate on ``axis``."""
        return int(getattr(self, axis))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertCoords:
    """Coordinates of one rank on the experts' grid."""

    etp: int
    ep: int
    edp: int
    pp: int

    def on(self, axis: str) -> int:
        """Return the coordinate on ``axis``."""
        return int(getattr(self, axis))


AnyCoords = TypeVar("AnyCoords", Coords, ExpertCoords)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertPlace:
    """Part of every expert tensor that a rank holds: degrees of the axes that cut, and coordinates."""

    ep: int = 1
    ep_rank: int = 0
    etp: int = 1
    etp_rank: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Degrees of the axes and their order, fastest axis first.

    The dense world is tp * cp * dp * pp. The expert axes factorise the same ranks again as etp * ep
    * edp * pp with equal pipeline groups (parallel folding, Liu et al. 2025, arXiv:2504.14960). The
    ranks of a pipeline stage, numbered in dense order, are cut by etp first. Then they are cut by
    ep and edp, in the order in which ``order`` has ep and dp. With ep = etp = 1 all ranks of a
    stage hold the same experts.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    order: str = "tp-cp-ep-dp-pp"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same parameters: cp ranks do as dp ranks do."""
        return self.cp * self.dp

    @property
    def stage_size(self) -> int:
        """Number of ranks at one pipeline coordinate, which the expert axes factorise."""
        return self.tp * self.cp * self.dp

    @property
    def edp(self) -> int:
        """Number of ranks that hold the same part of the same experts."""
        return self.stage_size // (self.etp * self.ep)

    @property
    def dense_axes(self) -> tuple[str, ...]:
        """Axes of the dense view, fastest first."""
        return tuple(axis for axis in self.order.split("-") if axis != "ep")

    def degrees(self) -> dict[str, int]:
        """Return the degree of each axis, as records show a grid."""
        return {axis: self.degree(axis) for axis in ("tp", "pp", "dp", "cp", "ep", "etp")}

    def degree(self, axis: str) -> int:
        """Return the size of ``axis``."""
        return int(getattr(self, axis))

    def coords(self, rank: int) -> Coords:
        """Return the coordinates of ``rank``.

        Raises:
            IndexError: ``rank`` is not in [0, world_size).
        """
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is outside the world of {self.world_size} ranks")
        return Coords(**self._digits(rank, self.dense_axes))

    def rank(self, coords: Coords) -> int:
        """Return the rank at ``coords``; the inverse of :meth:`coords`."""
        return self._number(coords, self.dense_axes)

    def group(self, axes: str | Sequence[str], rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` only on ``axes``, the first axis fastest."""
        return tuple(map(self.rank, self._along(axes, self.coords(rank))))

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Axes of the expert view within a pipeline stage, fastest first."""
        order = self.order.split("-")
        return (
            ("etp", "ep", "edp") if order.index("ep") < order.index("dp") else ("etp", "edp", "ep")
        )

    def expert_coords(self, rank: int) -> ExpertCoords:
        """Return the coordinates of ``rank`` on the experts' grid."""
        here = self.coords(rank)
        # The expert axes number the ranks of one pipeline stage again.
        place = self._number(here, self._stage_axes)
        return ExpertCoords(pp=here.pp, **self._digits(place, self.expert_axes))

    def expert_rank(self, coords: ExpertCoords) -> int:
        """Return the rank at ``coords``; the inverse of :meth:`expert_coords`."""
        place = self._number(coords, self.expert_axes)
        return self.rank(Coords(pp=coords.pp, **self._digits(place, self._stage_axes)))

    def expert_place(self, rank: int) -> ExpertPlace:
        """Return the part of expert tensors that ``rank`` holds."""
        here = self.expert_coords(rank)
        return ExpertPlace(ep=self.ep, ep_rank=here.ep, etp=self.etp, etp_rank=here.etp)

    def expert_group(self, axes: str | Sequence[str], rank: int) -> tuple[int, ...]:
        """Return the group of ``rank`` on the experts' grid; ``axes`` are of etp, ep and edp."""
        return tuple(map(self.expert_rank, self._along(axes, self.expert_coords(rank))))

    @property
    def _stage_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.dense_axes if axis != "pp")

    def _digits(self, number: int, axes: Sequence[str]) -> dict[str, int]:
        """Return the coordinate on each of ``axes``, fastest first, of the place with this number."""
        digits: dict[str, int] = {}
        for axis in axes:
            number, digits[axis] = divmod(number, self.degree(axis))
        return digits

    def _number(self, coords: Coords | ExpertCoords, axes: Sequence[str]) -> int:
        """Return the number of a place on ``axes``; the inverse of :meth:`_digits`."""
        # mixed radix, fastest axis first
        number, stride = 0, 1
        for axis in axes:
            number += coords.on(axis) * stride
            stride *= self.degree(axis)
        return number

    def _along(self, axes: str | Sequence[str], here: AnyCoords) -> Iterator[AnyCoords]:
        """Yield every place that differs from ``here`` on ``axes`` alone, the first axis fastest."""
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        for digits in product(*(range(self.degree(axis)) for axis in reversed(axes))):
            yield replace(here, **dict(zip(reversed(axes), digits, strict=True)))

    def groups(self, axes: str | Sequence[str]) -> Iterator[tuple[int, ...]]:
        """Yield every group of :meth:`group`, each once, by lowest first member."""
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        # the member with coordinate 0 on every axis represents its group
        for rank in range(self.world_size):
            here = self.coords(rank)
            if all(here.on(axis) == 0 for axis in axes):
                yield self.group(axes, rank)

    def describe(self) -> str:
        """Return a short form, such as ``tp2-pp2-dp2``; degrees of 1 are left out."""
        parts = [f"{a}{self.degree(a)}" for a in ("tp", "cp", "pp", "dp", "ep", "etp")]
        # Degrees such as 11 also end with 1, but with two digits.
        return "-".join(p for p in parts if not p.endswith("1") or p[-2:].isdigit()) or "one-rank"

    def describe_rank(self, rank: int) -> str:
        """Return a rank's coordinates on the axes that vary, such as ``cp0 tp1 pp0``."""
        at = self.coords(rank)
        varying = [f"{a}{at.on(a)}" for a in ("dp", "cp", "tp", "pp") if self.degree(a) > 1]
        return " ".join(varying) or f"rank {rank}"

    def by_pipeline(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks with those of a pipeline behind one another, by stage."""

        def place(rank: int) -> tuple[int, int, int, int]:
            at = self.coords(rank)
            return at.dp, at.cp, at.tp, at.pp

        return sorted(ranks, key=place)


def make_grid(parallel: ParallelSection) -> Grid:
    """Return the grid of a job's ``parallel`` section, which must be legal."""
    degrees = {axis: getattr(parallel, axis) for axis in ("tp", "cp", "dp", "pp", "ep", "etp")}
    return Grid(order=parallel.order, **degrees)
