"""Communicators: every group of the grid, built by one factory with one timeout.

`plan/grid.py` decides which ranks form a group, `plan/group_usage.py` which groups a job needs, and
`parallel/comm/collectives.py` sends over one. `parallel/comm/world.py` opens and ends the world they are in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from raymega.errors import CommunicationError, Fault, InternalError
from raymega.parallel.comm.world import finish_world, meeting_fault
from raymega.parallel.workarounds.torch_private import (
    device_types,
    process_group_of,
    world_handle,
)
from raymega.plan.cp_layout import inner_ranks
from raymega.plan.grid import Grid
from raymega.plan.group_usage import unused_groups
from raymega.plan.run_plan import RunPlan
from raymega.plan.zero_levels import data_parallel_shard_size

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

LAYERS, SUMS = "layers", "sums"
"""Purposes of groups: operations that layers wait for, and those of gradients and weights beside them."""
NO_HANDLE: GroupName = ""  # type: ignore[assignment]
"""Handle of a group that the job does not use."""

MOST_IN_WORLD = 1024
"""Number of ranks up to which the world's few numbers are summed in one communicator of all ranks.

A larger one takes long to start (NCCL connects each rank through one root), and a sum in it as many turns as
there are ranks. A sum along the axes instead costs a few more small operations a step."""

P2P_CTAS = 8
"""Most multiprocessors that a pipeline transfer occupies on a GPU.

A receive holds them until its message comes. NCCL would take up to 32 of an H100's 132 for a peer on NVLink; 8
are estimated to move more than one network card does (50 GB/s), and a transfer takes less time than a task."""


@dataclass(slots=True)
class WaitTimer:
    """Seconds that this rank's host has waited for other ranks, over all operations of all its groups."""

    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A communicator as one of its ranks sees it.

    Attributes:
        name: Name for messages, such as ``tp``.
        ranks: Global ranks, ascending, which is torch's order too.
        index: Place of this rank in ``ranks``; peers are named by their place as well.
        timeout_s: Longest wait of one operation, in seconds.
        handle: torch's name for the group; None when it has one rank and nothing is ever sent, empty when
            the job does not use it, or its sums go along ``axes``.
        axes: Groups along which an all-reduce goes, one after the other, instead of a communicator of all
            ranks; empty where there is one.
        devices: Types of device whose tensors the communicator sends; looked up once, as each message is checked.
        waited: Timer to which each wait adds its seconds; all groups of a rank share one.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    timeout_s: float
    handle: GroupName | None
    axes: tuple[Group, ...] = ()
    devices: frozenset[str] = frozenset()
    waited: WaitTimer = field(default_factory=WaitTimer, compare=False, repr=False)
    size: int = field(init=False, compare=False, repr=False)
    """Number of ranks."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.ranks))

    def resolve(self) -> dist.ProcessGroup:
        """Return torch's group, looked up at each use so that this value does not keep it alive.

        gloo closes a connection only with the last reference to its group. So an abort reaches the peers
        at once, whatever still holds this value.

        Raises:
            CommunicationError: The world was closed or aborted.
        """
        assert self.handle is not None, f"group {self.name} has one rank and no torch group"
        if not self.handle:
            raise InternalError(
                Fault(
                    fact=f"group {self.name} has no communicator",
                    rule="a job sends only over the groups that it uses",
                    remedy="correct unused_groups in raymega/plan/group_usage.py",
                )
            )
        try:
            return process_group_of(self.handle)
        except RuntimeError as error:
            raise CommunicationError(
                Fault(
                    fact=f"group {self.name} is gone",
                    rule="an operation needs the world that the group was built in",
                    remedy="open a world and build its groups again",
                )
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """All groups that one rank belongs to.

    Attributes:
        world: All ranks.
        tp: Ranks that cut the layers.
        cp: Ranks that cut the sequence.
        cp_inner: Neighbours on cp that exchange heads (Ulysses).
        cp_outer: Ranks of cp that have the same place in each such neighbourhood.
        dp: Ranks that read different samples.
        replicas: The dp x cp ranks. They hold the same parameters and see different tokens, so that
            gradients are summed, and state is sharded, over them.
        pp_forward: Ranks of the pipeline, for activations.
        pp_backward: The same ranks, for gradients: on its own communicator, so that neither direction
            waits behind the other.
        micro: The tp x cp ranks, which share a micro-batch's tokens.
        etp: Ranks that cut each expert.
        ep: Ranks that share the experts out.
        edp: Ranks that hold the same part of the same experts, over which its gradients are summed.
        embedding: First and last stage; one rank elsewhere.
        sharers: Neighbours among the replicas that shard one copy of the state; all of them unless
            sharding is hybrid.
        copies: Ranks that own the same part of the other copies; one rank unless sharding is hybrid.
        expert_sharers: The same as ``sharers``, within edp.
        expert_copies: The same as ``copies``, within edp.
        nested: Neighbourhoods of 2, 4, ... replicas that this rank is in, of which dynamic context
            parallelism takes one for each micro-batch; empty without it.
    """

    world: Group
    tp: Group
    cp: Group
    cp_inner: Group
    cp_outer: Group
    dp: Group
    replicas: Group
    pp_forward: Group
    pp_backward: Group
    micro: Group
    etp: Group
    ep: Group
    edp: Group
    embedding: Group
    sharers: Group
    copies: Group
    expert_sharers: Group
    expert_copies: Group
    nested: tuple[Group, ...] = ()


def alone(rank: int) -> Group:
    """Return a group of one rank, for an axis of degree 1."""
    return Group(name="alone", ranks=(rank,), index=0, timeout_s=0.0, handle=None)


def groups_of_plan(
    plan: RunPlan, rank: int, *, timeout_s: float, most_in_world: int = MOST_IN_WORLD
) -> Groups:
    """Build the groups of ``rank`` that the plan's job uses, see :func:`build_groups`."""
    parallel = plan.job.parallel
    return build_groups(
        plan.grid,
        rank,
        timeout_s=timeout_s,
        hierarchical_cp_size=inner_ranks(parallel),
        is_nested=parallel.dynamic_cp,
        sharers=data_parallel_shard_size(parallel),
        unused=unused_groups(plan),
        most_in_world=most_in_world,
    )


def build_groups(  # noqa: PLR0913  # groups_of_plan is the one caller that gives all of them
    grid: Grid,
    rank: int,
    *,
    timeout_s: float,
    hierarchical_cp_size: int = 1,
    is_nested: bool = False,
    sharers: int = 0,
    unused: Collection[str] = (),
    most_in_world: int = MOST_IN_WORLD,
) -> Groups:
    """Build the groups of ``rank``, after :func:`open_world` (a world of one needs none).

    A rank creates only the groups that it belongs to, together with their members. torch names a group
    by its ranks and by how many groups the process has created before. So the members must have created
    equally many. ``embedding`` comes last, because middle stages do not have it.

    Args:
        grid: The grid of all ranks.
        rank: Global rank of this process.
        timeout_s: Longest wait of any operation, and for the members, in seconds.
        hierarchical_cp_size: Number of neighbours on cp that exchange heads; a divisor of the cp degree.
        is_nested: Build the neighbourhoods of dynamic context parallelism; dp * cp is a power of two.
        sharers: Number of replicas that shard one copy of the state; a divisor of dp * cp, 0 is all.
        unused: Names of groups that get no communicator, see `raymega.plan.group_usage`.
        most_in_world: Number of ranks up to which the world is a communicator.

    Raises:
        CommunicationError: A member did not arrive within ``timeout_s``.
    """
    is_whole = grid.world_size <= most_in_world
    make = _GroupMaker(grid.world_size, rank, timeout_s, unused if is_whole else {*unused, "world"})
    world = make("world", range(grid.world_size))
    # layers wait for these; the first whose ranks are all ranks takes the world's communicator
    tp, cp = (make(axis, grid.group(axis, rank), LAYERS) for axis in ("tp", "cp"))
    first, step = cp.index // hierarchical_cp_size * hierarchical_cp_size, hierarchical_cp_size
    inner = make("cp_inner", cp.ranks[first : first + step], LAYERS)
    outer = make("cp_outer", cp.ranks[cp.index % step :: step], LAYERS)
    micro = make("micro", grid.group(("tp", "cp"), rank), LAYERS)
    etp = make("etp", grid.expert_group("etp", rank), LAYERS)
    # Its own: tokens on their way to experts must not wait behind sums of gradients.
    ep = make("ep", grid.expert_group("ep", rank), "ep")
    # sums of gradients and gathers of weights overlap with the layers
    replicas = make("replicas", grid.group(("cp", "dp"), rank), SUMS)
    edp = make("edp", grid.expert_group("edp", rank), SUMS)
    sizes = [1 << n for n in range(1, replicas.size.bit_length())] if is_nested else []
    nested = [replicas.ranks[replicas.index // size * size :][:size] for size in sizes]
    groups = Groups(
        world=world,
        tp=tp,
        cp=cp,
        cp_inner=inner,
        cp_outer=outer,
        dp=make("dp", grid.group("dp", rank), SUMS),
        replicas=replicas,
        nested=tuple(make(f"cp{len(ranks)}", ranks, LAYERS) for ranks in nested),
        pp_forward=make("pp_forward", grid.group("pp", rank), "pp_forward"),
        pp_backward=make("pp_backward", grid.group("pp", rank), "pp_backward"),
        micro=micro,
        etp=etp,
        ep=ep,
        edp=edp,
        sharers=make("sharers", _sharers(replicas, sharers), SUMS),
        copies=make("copies", _copies(replicas, sharers), SUMS),
        expert_sharers=make("expert_sharers", _sharers(edp, sharers), SUMS),
        expert_copies=make("expert_copies", _copies(edp, sharers), SUMS),
        embedding=make("embedding", _embedding_ranks(grid, rank), SUMS),
    )
    if not is_whole:
        groups = replace(groups, world=replace(world, axes=_axes(groups)))
    if groups.world.size > 1:
        _wait_for_all(groups.world, rank, timeout_s)
        finish_world()
    return groups


def _axes(groups: Groups) -> tuple[Group, ...]:
    """Return the groups of one rank whose product is the world."""
    # hybrid sharding has no communicator of all replicas
    is_hybrid = groups.replicas.handle == NO_HANDLE
    replicas = (groups.sharers, groups.copies) if is_hybrid else (groups.replicas,)
    axes = (groups.tp, *replicas, groups.pp_forward)
    return tuple(axis for axis in axes if axis.size > 1)


class _GroupMaker:
    """Maker of one rank's groups: those of equal ranks and one purpose share a communicator.

    Operations on one communicator run one after the other, so groups whose operations overlap have different
    purposes. Every rank decides alike, as all have groups of the same shapes.
    """

    def __init__(
        self, world_size: int, rank: int, timeout_s: float, unused: Collection[str]
    ) -> None:
        self._rank, self._timeout_s, self._unused = rank, timeout_s, unused
        self._waited = WaitTimer()
        self._everyone = tuple(range(world_size))
        self._made: dict[tuple[str, tuple[int, ...]], GroupName] = {}
        self._is_world_taken = "world" in unused

    def __call__(self, name: str, ranks: Iterable[int], purpose: str = "world") -> Group:
        members = tuple(sorted(ranks))
        handle = self._handle(name, members, purpose) if len(members) > 1 else None
        return Group(
            name=name,
            ranks=members,
            index=members.index(self._rank),
            timeout_s=self._timeout_s,
            handle=handle,
            devices=device_types(handle) if handle else frozenset(),
            waited=self._waited,
        )

    def _handle(self, name: str, ranks: tuple[int, ...], purpose: str) -> GroupName:
        if name in self._unused:
            return NO_HANDLE
        if (purpose, ranks) not in self._made:
            self._made[purpose, ranks] = self._new_handle(name, ranks, purpose)
        return self._made[purpose, ranks]

    def _new_handle(self, name: str, ranks: tuple[int, ...], purpose: str) -> GroupName:
        # The world's own sums come when the step's are over, so one purpose may share its communicator.
        takes_world = ranks == self._everyone and purpose in (LAYERS, SUMS)
        if takes_world and not self._is_world_taken:
            self._is_world_taken = True
            return self._made["world", ranks]
        return _new_handle(name, ranks, rank=self._rank, timeout_s=self._timeout_s)


def _new_handle(name: str, ranks: tuple[int, ...], *, rank: int, timeout_s: float) -> GroupName:
    if name == "world":
        return world_handle()
    timeout = timedelta(seconds=timeout_s)
    try:
        group = dist.new_group(
            list(ranks),
            timeout=timeout,
            use_local_synchronization=True,
            group_desc=name,
            pg_options=_options(name, timeout),
        )
    except RuntimeError as error:
        what = f"group {name} of ranks {', '.join(map(str, ranks))}"
        raise CommunicationError(meeting_fault(what, rank, timeout_s, error)) from error
    return group.group_name


def _options(name: str, timeout: timedelta) -> object:
    """Return NCCL's options of a pipeline group; None for the defaults."""
    if name not in ("pp_forward", "pp_backward") or dist.get_backend() != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.max_ctas = P2P_CTAS
    return options


def _wait_for_all(world: Group, rank: int, timeout_s: float) -> None:
    """All-reduce once over the world, so that no rank leaves while others still connect to it."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    try:
        for group in world.axes or (world,):
            dist.all_reduce(torch.zeros(1, device=device), group=group.resolve())
    except RuntimeError as error:
        raise CommunicationError(meeting_fault("all groups", rank, timeout_s, error)) from error


def _embedding_ranks(grid: Grid, rank: int) -> tuple[int, ...]:
    here = grid.coords(rank)
    last = grid.pp - 1
    if last == 0 or here.pp not in (0, last):
        return (rank,)
    return (grid.rank(replace(here, pp=0)), grid.rank(replace(here, pp=last)))


def _sharers(whole: Group, number: int) -> tuple[int, ...]:
    """Return the ``number`` neighbours, this rank among them, that shard one copy of the state."""
    size = _group_size(whole, number)
    return whole.ranks[whole.index // size * size :][:size]


def _copies(whole: Group, number: int) -> tuple[int, ...]:
    """Return the ranks that own the same part of their copy of the state as this rank."""
    return whole.ranks[whole.index % _group_size(whole, number) :: _group_size(whole, number)]


# A number that does not divide the group means one copy over all of it; validation reports it.
def _group_size(whole: Group, number: int) -> int:
    return number if number and whole.size % number == 0 else whole.size
