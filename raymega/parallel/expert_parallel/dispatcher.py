"""Dispatch: brings tokens to the ranks that hold their experts, and what these made of them back.

Two ways with equal results. all_to_all sends each row to the one rank that needs it, in uneven
parts; all_gather brings all tokens to all ranks, which suits few ranks and many choices a token.
Both hand out transfers that are under way, so that work which needs no other rank is done meanwhile,
in backward too. Expert tensor parallel ranks each hold a part of F of the same experts: they see one
another's rows, and their outputs are terms of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from raymega.parallel.comm.collectives import all_gather
from raymega.parallel.comm.process_groups import Group, alone
from raymega.parallel.comm.trace import CommLog
from raymega.parallel.expert_parallel.overlap import PassInterleaver
from raymega.parallel.expert_parallel.permutation import (
    Permutation,
    count_choices,
    permute,
    permute_evenly,
    reorder_rows,
    select_rows,
    unpermute,
)
from raymega.parallel.expert_parallel.transfers import (
    AsyncTransfer,
    RowCounts,
    TransferStream,
    gather_parts,
    start_row_exchange,
    start_row_gather,
    start_row_sum,
    sum_parts,
    wait_for,
)
from raymega.parallel.tensor_parallel.mappings import gather_positions
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.plan.grid import ExpertPlace


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertGroups:
    """The ranks that a layer of experts works with.

    Attributes:
        ep: Each holds other experts.
        etp: Each holds a part of F of the same experts.
        micro: The tp x cp ranks that share the tokens of a micro-batch.
        sp: How the residual stream lies on the tensor-parallel ranks.
        is_gathered: Tokens are dispatched by all_gather instead of all_to_all.
        log: Sees what the ranks send each other.
        interleaver: Where two passes take turns, who works while one waits for rows; None where one runs.
    """

    ep: Group
    etp: Group
    micro: Group
    sp: SequenceParallel
    is_gathered: bool = False
    log: CommLog = field(default_factory=CommLog, compare=False, repr=False)
    interleaver: PassInterleaver | None = field(default=None, compare=False, repr=False)

    @property
    def to_experts(self) -> TransferStream:
        """By which rows travel over ep."""
        return TransferStream(group=self.ep, name="ep", log=self.log, interleaver=self.interleaver)

    @property
    def to_parts(self) -> TransferStream:
        """By which they travel over etp."""
        return TransferStream(
            group=self.etp, name="etp", log=self.log, interleaver=self.interleaver
        )

    @property
    def place(self) -> ExpertPlace:
        """Which part of every expert tensor this rank holds."""
        return ExpertPlace(
            ep=self.ep.size, ep_rank=self.ep.index, etp=self.etp.size, etp_rank=self.etp.index
        )


def no_expert_groups(sp: SequenceParallel) -> ExpertGroups:
    """Those of a rank that holds all experts whole, and of each sequence all that tp does not cut."""
    nobody = alone(sp.tp.ranks[sp.tp.index])
    return ExpertGroups(ep=nobody, etp=nobody, micro=sp.tp, sp=sp)


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """What the tokens of this rank chose.

    Attributes:
        experts: [T, k] int64, all different in a row; E where a choice was dropped.
        weights: [T, k], by which the experts' outputs are added.
        num_experts: E.
        capacity: Rows that each expert computes for one rank's tokens, filled up with zeros; 0 for
            as many as there are.
        is_dropping: Some choices may be E.
    """

    experts: Tensor
    weights: Tensor
    num_experts: int
    capacity: int = 0
    is_dropping: bool = False


class TokenDispatch(Protocol):
    """One layer's tokens on their way; the verbs are called once each, in this order."""

    def arrive(self) -> tuple[Tensor, Tensor]:
        """Wait. Rows of this rank's experts [R, D] in their order, and how many each has [E/ep]."""

    def start_back(self, rows: Tensor) -> None:
        """Begin to send back what the experts made of the rows: [R, D], of etp ranks a term."""

    def result(self) -> Tensor:
        """Wait. The weighted sum of each token's experts: [T, D]."""


def dispatch_tokens(x: Tensor, routing: Routing, groups: ExpertGroups) -> TokenDispatch:
    """Begin to dispatch ``x`` [T, D]; all ranks of ep and etp have equally many tokens."""
    if groups.is_gathered:
        return _GatheredTrip(x, routing, groups)
    return _ExchangedTrip(x, routing, groups)


@dataclass
class _ExchangedTrip:
    """all_to_all over ep, then gathered over etp; back the mirror image.

    The host reads the counts of all ranks once, when the rows to send are already being made.
    """

    x: Tensor
    routing: Routing
    groups: ExpertGroups
    parts: RowCounts = field(init=False)
    arrangement: Permutation = field(init=False)
    transfer: AsyncTransfer = field(init=False)
    table: Tensor = field(init=False)
    order: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        routing, experts = self.routing, self.routing.experts
        if routing.capacity:
            self.arrangement = permute_evenly(
                experts, routing.num_experts, capacity=routing.capacity
            )
            self.table = _even_table(routing, self.groups, experts.device)
            self.parts = _even_parts(routing, self.groups)
            rows = select_rows(self.x, self.arrangement)
        else:
            counts = count_choices(experts, routing.num_experts)
            self.table = _count_table(counts, self.groups)
            rows = self._make_rows(counts)
        self.transfer = start_row_exchange(rows, self.groups.to_experts, self.parts)

    def _make_rows(self, counts: Tensor) -> Tensor:
        """Rows first, then the host's look at the counts, which says how many there are."""
        routing, experts = self.routing, self.routing.experts
        is_alone = self.groups.ep.size == 1 and self.groups.etp.size == 1
        if not routing.is_dropping:
            self.arrangement = permute(experts, counts, num_rows=experts.numel())
            rows = select_rows(self.x, self.arrangement)
            self.parts = _whole(experts.numel()) if is_alone else _read_parts(self, counts)
            return rows
        self.parts = _read_parts(self, counts)
        self.arrangement = permute(experts, counts, num_rows=sum(self.parts.sent))
        return select_rows(self.x, self.arrangement)

    def arrive(self) -> tuple[Tensor, Tensor]:
        groups, parts = self.groups, self.parts
        rows = gather_parts(wait_for(self.transfer), groups.to_parts, parts.of_etp)
        counts = self.table[0] if self.table.shape[0] == 1 else self.table.sum(0)
        if self.table.shape[0] > 1 and self.table.shape[1] > 1:
            self.order = _by_expert(self.table, num_rows=rows.shape[0])
            rows = reorder_rows(rows, *self.order)
        return rows, counts

    def start_back(self, rows: Tensor) -> None:
        groups, parts = self.groups, self.parts
        if self.order is not None:
            order, back = self.order
            rows = reorder_rows(rows, back, order)
        own = sum_parts(rows, groups.to_parts, parts.of_etp)
        self.transfer = start_row_exchange(own, groups.to_experts, parts.reversed)

    def result(self) -> Tensor:
        return unpermute(wait_for(self.transfer), self.routing.weights, self.arrangement)


@dataclass
class _GatheredTrip:
    """All tokens of ep and etp come together; back a sum over ep and etp of each token's terms."""

    x: Tensor
    routing: Routing
    groups: ExpertGroups
    weights: Tensor = field(init=False)
    arrangement: Permutation = field(init=False)
    transfer: AsyncTransfer = field(init=False)

    def __post_init__(self) -> None:
        groups, routing = self.groups, self.routing
        experts = all_gather(all_gather(routing.experts, groups.etp), groups.ep)
        weights = gather_positions(routing.weights, groups.etp)
        self.weights = gather_positions(weights, groups.ep)
        x = wait_for(start_row_gather(self.x, groups.to_parts))
        self.transfer = start_row_gather(x, groups.to_experts)
        self.arrangement = self._arrange(experts)

    def _arrange(self, experts: Tensor) -> Permutation:
        """Of all ranks' choices those of this rank's experts; the host looks how many they are."""
        groups, routing = self.groups, self.routing
        num_held = routing.num_experts // groups.ep.size
        held = experts - groups.ep.index * num_held
        held = torch.where((held >= 0) & (held < num_held), held, num_held)
        if routing.capacity:
            capacity = routing.capacity * groups.ep.size * groups.etp.size
            return permute_evenly(held, num_held, capacity=capacity)
        is_all = groups.ep.size == 1 and not routing.is_dropping
        num_rows = held.numel() if is_all else int((held < num_held).sum())
        return permute(held, count_choices(held, num_held), num_rows=num_rows)

    def arrive(self) -> tuple[Tensor, Tensor]:
        return select_rows(wait_for(self.transfer), self.arrangement), self.arrangement.counts

    def start_back(self, rows: Tensor) -> None:
        terms = unpermute(rows, self.weights, self.arrangement)
        self.transfer = start_row_sum(terms, self.groups.to_experts)

    def result(self) -> Tensor:
        return wait_for(start_row_sum(wait_for(self.transfer), self.groups.to_parts))


def _count_table(counts: Tensor, groups: ExpertGroups) -> Tensor:
    """Rows that each rank has for each of this rank's experts: [etp * ep, E/ep], etp outermost."""
    if groups.ep.size == 1 and groups.etp.size == 1:
        return counts[None]
    everywhere = all_gather(counts, groups.ep).view(groups.ep.size, groups.ep.size, -1)
    own = everywhere[:, groups.ep.index].contiguous()
    return all_gather(own, groups.etp)


def _read_parts(dispatch: _ExchangedTrip, counts: Tensor) -> RowCounts:
    """The one wait of the host for the device."""
    groups = dispatch.groups
    sent = counts.view(groups.ep.size, -1).sum(1)
    received = dispatch.table.view(groups.etp.size, groups.ep.size, -1).sum(2)
    numbers = torch.cat((sent, received.flatten())).tolist()
    own = numbers[groups.ep.size :][groups.etp.index * groups.ep.size :][: groups.ep.size]
    of_etp = [
        sum(numbers[groups.ep.size :][place * groups.ep.size :][: groups.ep.size])
        for place in range(groups.etp.size)
    ]
    return RowCounts(sent=numbers[: groups.ep.size], received=own, of_etp=of_etp)


def _whole(num_rows: int) -> RowCounts:
    return RowCounts(sent=[num_rows], received=[num_rows], of_etp=[num_rows])


def _even_parts(routing: Routing, groups: ExpertGroups) -> RowCounts:
    part = routing.num_experts // groups.ep.size * routing.capacity
    even = [part] * groups.ep.size
    return RowCounts(sent=even, received=even, of_etp=[sum(even)] * groups.etp.size)


def _even_table(routing: Routing, groups: ExpertGroups, device: torch.device) -> Tensor:
    num_sources = groups.ep.size * groups.etp.size
    shape = num_sources, routing.num_experts // groups.ep.size
    return torch.full(shape, routing.capacity, dtype=torch.int64, device=device)


def _by_expert(table: Tensor, *, num_rows: int) -> tuple[Tensor, Tensor]:
    """From rows by source and expert to rows by expert and source: order, inverse."""
    num_sources, num_experts = table.shape
    experts = torch.arange(num_experts, device=table.device).repeat(num_sources)
    of_rows = experts.repeat_interleave(table.flatten(), output_size=num_rows)
    order = of_rows.argsort(stable=True)
    back = torch.empty_like(order)
    return order, back.scatter_(0, order, torch.arange(num_rows, device=order.device))
