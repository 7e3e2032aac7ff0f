"""Token dispatch: send tokens to the ranks that hold their experts, and combine the experts' outputs.

Two methods with equal results. all_to_all sends each row only to the rank that needs it, in uneven
parts. all_gather sends all tokens to all ranks, which suits few ranks and many choices a token. Both
return pending transfers, so that other work overlaps with them, in backward too. Each expert tensor
parallel rank (etp) holds a part of F of the same experts. Such ranks share their rows, and their
outputs are terms of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from raymega.parallel.comm.collectives import all_gather
from raymega.parallel.comm.process_groups import Group, alone
from raymega.parallel.comm.trace import CommLog
from raymega.parallel.comm.world import raise_if_aborted
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
    """Groups of ranks that a layer of experts communicates over.

    Attributes:
        ep: Ranks that hold different experts.
        etp: Ranks that hold parts of F of the same experts.
        micro: The tp x cp ranks, which share the tokens of a micro-batch.
        sp: Placement of the residual stream on the tensor-parallel ranks.
        is_gathered: True where tokens are dispatched by all_gather, False for all_to_all.
        log: Log of the step, which tracks the transfers.
        interleaver: Scheduler of two passes that take turns while one waits for rows; None for one pass.
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
        """Stream of transfers over ep."""
        return TransferStream(group=self.ep, name="ep", log=self.log, interleaver=self.interleaver)

    @property
    def to_parts(self) -> TransferStream:
        """Stream of transfers over etp."""
        return TransferStream(
            group=self.etp, name="etp", log=self.log, interleaver=self.interleaver
        )

    @property
    def place(self) -> ExpertPlace:
        """Place of this rank on the experts' axes, which selects its part of expert tensors."""
        return ExpertPlace(
            ep=self.ep.size, ep_rank=self.ep.index, etp=self.etp.size, etp_rank=self.etp.index
        )


def no_expert_groups(sp: SequenceParallel) -> ExpertGroups:
    """Return the groups of a rank that holds all experts whole, without context parallelism."""
    nobody = alone(sp.tp.ranks[sp.tp.index])
    return ExpertGroups(ep=nobody, etp=nobody, micro=sp.tp, sp=sp)


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """The router's choices for the tokens of this rank.

    Attributes:
        experts: Chosen experts [T, k] int64, all different within a token; E where a choice was dropped.
        weights: Weights [T, k] of the experts' outputs in the sum.
        num_experts: Number of experts, E.
        capacity: Rows that each expert computes for one rank's tokens, padded with zeros; 0 for no
            padding.
        is_dropping: True where some choices may be dropped.
    """

    experts: Tensor
    weights: Tensor
    num_experts: int
    capacity: int = 0
    is_dropping: bool = False


class TokenDispatch(Protocol):
    """The dispatch of one layer's tokens; its methods are called once each, in this order."""

    def arrive(self) -> tuple[Tensor, Tensor]:
        """Wait for the rows [R, D] of this rank's experts; return them by expert, and their counts [E/ep]."""

    def start_back(self, rows: Tensor) -> None:
        """Start to send back the experts' outputs [R, D]; with etp each rank gives one term of a sum."""

    def result(self) -> Tensor:
        """Wait for the outputs, and return the weighted sum of each token's experts, [T, D]."""


def dispatch_tokens(x: Tensor, routing: Routing, groups: ExpertGroups) -> TokenDispatch:
    """Start to dispatch ``x`` [T, D]; all ranks of ep and etp must have equally many tokens."""
    if groups.is_gathered:
        return _GatheredTrip(x, routing, groups)
    return _ExchangedTrip(x, routing, groups)


@dataclass
class _ExchangedTrip:
    """Dispatch by all_to_all over ep and all-gather over etp; the way back is reduce-scatter, all_to_all.

    The host reads the counts of all ranks once, after the kernels that make the rows are queued.
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
            # padded: all counts equal the capacity, so the host reads nothing
            self.arrangement = permute_evenly(
                experts, routing.num_experts, capacity=routing.capacity
            )
            self.table = _even_table(routing, self.groups, experts.device)
            self.parts = _even_parts(routing, self.groups)
            rows = select_rows(self.x, self.arrangement)
        else:
            # exact counts
            counts = count_choices(experts, routing.num_experts)
            self.table = _count_table(counts, self.groups)
            rows = self._make_rows(counts)
        self.transfer = start_row_exchange(rows, self.groups.to_experts, self.parts)

    def _make_rows(self, counts: Tensor) -> Tensor:
        """Return the rows to send, [R, D] by expert, and read the counts of all ranks."""
        routing, experts = self.routing, self.routing.experts
        is_alone = self.groups.ep.size == 1 and self.groups.etp.size == 1
        # Without drops the number of rows is known, so they are made before the host reads the counts.
        if not routing.is_dropping:
            self.arrangement = permute(experts, counts, num_rows=experts.numel())
            rows = select_rows(self.x, self.arrangement)
            self.parts = _whole(experts.numel()) if is_alone else _read_parts(self, counts)
            return rows
        # With drops the counts say how many rows there are.
        self.parts = _read_parts(self, counts)
        self.arrangement = permute(experts, counts, num_rows=sum(self.parts.sent))
        return select_rows(self.x, self.arrangement)

    def arrive(self) -> tuple[Tensor, Tensor]:
        groups, parts = self.groups, self.parts
        rows = gather_parts(wait_for(self.transfer), groups.to_parts, parts.of_etp)
        # Rows arrive by source rank, then expert; the grouped GEMM needs them by expert.
        counts = self.table[0] if self.table.shape[0] == 1 else self.table.sum(0)
        if self.table.shape[0] > 1 and self.table.shape[1] > 1:
            self.order = _by_expert(self.table, num_rows=rows.shape[0])
            rows = reorder_rows(rows, *self.order)
        return rows, counts

    def start_back(self, rows: Tensor) -> None:
        groups, parts = self.groups, self.parts
        if self.order is not None:
            # by source again, then the terms of etp are summed, and each row returns to its token's rank
            order, back = self.order
            rows = reorder_rows(rows, back, order)
        own = sum_parts(rows, groups.to_parts, parts.of_etp)
        self.transfer = start_row_exchange(own, groups.to_experts, parts.reversed)

    def result(self) -> Tensor:
        return unpermute(wait_for(self.transfer), self.routing.weights, self.arrangement)


@dataclass
class _GatheredTrip:
    """Dispatch by all-gather of all tokens over etp and ep; the way back is a reduce-scatter over both."""

    x: Tensor
    routing: Routing
    groups: ExpertGroups
    weights: Tensor = field(init=False)
    arrangement: Permutation = field(init=False)
    transfer: AsyncTransfer = field(init=False)

    def __post_init__(self) -> None:
        groups, routing = self.groups, self.routing
        # choices and weights of all tokens, then the tokens; the last gather stays pending
        experts = all_gather(all_gather(routing.experts, groups.etp), groups.ep)
        weights = gather_positions(routing.weights, groups.etp)
        self.weights = gather_positions(weights, groups.ep)
        x = wait_for(start_row_gather(self.x, groups.to_parts))
        self.transfer = start_row_gather(x, groups.to_experts)
        self.arrangement = self._arrange(experts)

    def _arrange(self, experts: Tensor) -> Permutation:
        """Return the permutation of the choices of all ranks that fall on this rank's experts."""
        groups, routing = self.groups, self.routing
        num_held = routing.num_experts // groups.ep.size
        # local expert numbers; num_held marks experts of other ranks and dropped choices
        held = experts - groups.ep.index * num_held
        held = torch.where((held >= 0) & (held < num_held), held, num_held)
        if routing.capacity:
            capacity = routing.capacity * groups.ep.size * groups.etp.size
            return permute_evenly(held, num_held, capacity=capacity)
        # int() makes the host wait for the device
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
    """Return the rows that each rank has for each of this rank's experts: [etp * ep, E/ep], etp first."""
    if groups.ep.size == 1 and groups.etp.size == 1:
        return counts[None]
    everywhere = all_gather(counts, groups.ep).view(groups.ep.size, groups.ep.size, -1)
    own = everywhere[:, groups.ep.index].contiguous()
    return all_gather(own, groups.etp)


def _read_parts(dispatch: _ExchangedTrip, counts: Tensor) -> RowCounts:
    """Return the row counts of all ranks; here the host waits for the device, once a layer."""
    groups = dispatch.groups
    sent = counts.view(groups.ep.size, -1).sum(1)
    received = dispatch.table.view(groups.etp.size, groups.ep.size, -1).sum(2)
    # one copy to the host for all numbers
    numbers = torch.cat((sent, received.flatten())).tolist()
    raise_if_aborted("the row counts of experts")
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
    """Return the order that sorts rows from (source, expert) to (expert, source), and its inverse."""
    num_sources, num_experts = table.shape
    experts = torch.arange(num_experts, device=table.device).repeat(num_sources)
    of_rows = experts.repeat_interleave(table.flatten(), output_size=num_rows)
    order = of_rows.argsort(stable=True)
    back = torch.empty_like(order)
    return order, back.scatter_(0, order, torch.arange(num_rows, device=order.device))
