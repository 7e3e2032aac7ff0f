"""Communicators: opens the world, builds every group of the grid with one timeout, closes them.

Who belongs to a group is plan.grid's; what is sent over one is parallel.comm's.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store, TCPStore

from raymega.errors import CommunicationError, Fault
from raymega.glibc import without_name_servers
from raymega.parallel.workarounds.sockets import Connections
from raymega.parallel.workarounds.torch_private import (
    abort_groups,
    count_groups_anew,
    process_group_of,
    world_handle,
)
from raymega.plan.grid import Grid

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName


_connections = Connections()


@dataclass(slots=True)
class WaitTimer:
    """How long this rank's host has waited for others, in all operations of all its groups."""

    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """One communicator as one of its ranks sees it.

    Attributes:
        name: For messages, such as ``tp``.
        ranks: Global ranks, ascending, which is torch's order too.
        index: Own place in ``ranks``; peers are named by their place as well.
        timeout_s: Longest wait of one operation.
        handle: torch's name for it; None when the group has one rank and nothing is ever sent.
        waited: Where waits for its operations add up; groups of one rank share it.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    timeout_s: float
    handle: GroupName | None
    waited: WaitTimer = field(default_factory=WaitTimer, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def resolve(self) -> dist.ProcessGroup:
        """torch's group, looked up at each use so that nobody else keeps it alive.

        gloo closes a connection only with the last reference to its group. So aborting the world
        reaches the peers at once, whatever still holds this value.

        Raises:
            CommunicationError: The world was closed or aborted.
        """
        assert self.handle is not None, f"group {self.name} has one rank and no torch group"
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
    """Every group that one rank belongs to.

    ``replicas`` is dp x cp: ranks that hold the same parameters and see different tokens, so that
    gradients are summed, and state is shared out, over them. ``hierarchical_cp_size`` are neighbours on cp that
    exchange heads, ``cp_outer`` the ranks that have one place in all neighbourhoods. The two pipeline
    groups have equal ranks: activations travel on one, gradients on the other, so that neither waits
    behind the other. ``micro`` is tp x cp, the ranks that share a micro-batch's tokens. ``etp``, ``ep``
    and ``edp`` are the experts' view of the same ranks: those that cut each expert, those that share the
    experts out, and those that hold the same part of the same ones, over which its gradients are summed.
    ``sharers`` are neighbours among the replicas that share out one copy of the state, ``copies`` the
    ranks that own the same part of the other copies: all replicas and none, unless sharding is hybrid;
    ``expert_sharers`` and ``expert_copies`` are the same of edp.
    ``embedding`` joins first and last stage; elsewhere it has one rank. ``nested`` are this rank's
    neighbourhoods of 2, 4, ... among its replicas, of which dynamic context parallelism takes one a
    micro-batch; empty without it.
    """

    world: Group
    tp: Group
    cp: Group
    hierarchical_cp_size: Group
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


def host_store(host: str) -> tuple[str, Store]:
    """Serve a store on a fresh port; return its ``host:port`` and the store, which must be kept."""
    with without_name_servers():
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return f"{host}:{store.port}", store


def file_store(path: Path, world_size: int) -> Store:
    """A store in a file, for ranks of one machine."""
    return FileStore(str(path), world_size)


def open_world(
    *,
    rank: int,
    world_size: int,
    rendezvous: str,
    store: Store | None,
    timeout_s: float,
    device: torch.device,
) -> None:
    """Meet the other ranks: NCCL for a GPU, gloo for a CPU.

    Args:
        rank: Global rank of this process.
        world_size: Ranks to wait for.
        rendezvous: ``host:port`` of the store.
        store: The store itself where this process has it already, else None.
        timeout_s: Longest wait for the others, and of any operation later.
        device: Where tensors live that will be sent; a GPU must be the current one.

    Raises:
        CommunicationError: The store or a rank did not answer in time.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        if store is None:
            host, _, port = rendezvous.rpartition(":")
            with without_name_servers():
                store = TCPStore(host, int(port), is_master=False, timeout=timeout)
        store.set_timeout(timeout)
        _connections.begin()
        count_groups_anew()
        # device_id is left out: it makes torch split every group off the world, in which all
        # ranks must take part, and then a rank could no longer build its own groups alone.
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    except RuntimeError as error:
        raise CommunicationError(_meeting_fault("the world", rank, timeout_s, error)) from error


def alone(rank: int) -> Group:
    """A group of one: an axis that is not there."""
    return Group(name="alone", ranks=(rank,), index=0, timeout_s=0.0, handle=None)


def build_groups(
    grid: Grid,
    rank: int,
    *,
    timeout_s: float,
    hierarchical_cp_size: int = 1,
    is_nested: bool = False,
    sharers: int = 0,
) -> Groups:
    """Make the groups of ``rank``, after :func:`open_world` (a world of one needs none).

    A rank makes only groups that it belongs to, with their members. torch names a group by its
    ranks and by how many groups the process has made before, so members must have made equally
    many: ``embedding``, which middle stages lack, has to come last; of two stages it is theirs.

    Args:
        grid: All ranks.
        rank: This one.
        timeout_s: Longest wait of any operation, and for the members.
        hierarchical_cp_size: How many neighbours on cp exchange heads; a divisor of its degree.
        is_nested: Make the neighbourhoods of dynamic context parallelism; dp * cp is a power of two.
        sharers: How many replicas share out one copy of the state; a divisor of theirs, 0 is all.

    Raises:
        CommunicationError: A member did not come in time.
    """

    waited = WaitTimer()

    def make(name: str, ranks: tuple[int, ...]) -> Group:
        group = _make_group(name, tuple(sorted(ranks)), rank=rank, timeout_s=timeout_s)
        return replace(group, waited=waited)

    tp, cp, dp = (make(axis, grid.group(axis, rank)) for axis in ("tp", "cp", "dp"))

    def make_again(name: str, ranks: tuple[int, ...], *likes: Group) -> Group:
        """A communicator that is there already, where one has these ranks: on all of them, or none."""
        like = next((like for like in likes if set(like.ranks) == set(ranks)), None)
        return make(name, ranks) if like is None else replace(like, name=name)

    replicas = make_again("replicas", tuple(sorted(grid.group(("cp", "dp"), rank))), dp)
    place = replicas.index
    sizes = [1 << n for n in range(1, replicas.size.bit_length())] if is_nested else []
    neighbours = cp.ranks[cp.index // hierarchical_cp_size * hierarchical_cp_size :][
        :hierarchical_cp_size
    ]
    alike = cp.ranks[cp.index % hierarchical_cp_size :: hierarchical_cp_size]
    edp = make_again("edp", grid.expert_group("edp", rank), replicas)
    pp_forward, pp_backward = (
        make(name, grid.group("pp", rank)) for name in ("pp_forward", "pp_backward")
    )
    groups = Groups(
        world=make("world", tuple(range(grid.world_size))),
        tp=tp,
        cp=cp,
        hierarchical_cp_size=make_again("hierarchical_cp_size", neighbours, cp),
        cp_outer=make_again("cp_outer", alike, cp),
        dp=dp,
        replicas=replicas,
        nested=tuple(
            make(f"cp{size}", replicas.ranks[place // size * size :][:size]) for size in sizes
        ),
        pp_forward=pp_forward,
        pp_backward=pp_backward,
        micro=make_again("micro", grid.group(("tp", "cp"), rank), tp, cp),
        etp=make_again("etp", grid.expert_group("etp", rank), tp),
        # Its own: tokens on their way to experts must not wait behind sums of gradients.
        ep=make("ep", grid.expert_group("ep", rank)),
        edp=edp,
        sharers=make_again("sharers", _sharers(replicas, sharers), replicas),
        copies=make_again("copies", _copies(replicas, sharers), replicas),
        expert_sharers=make_again("expert_sharers", _sharers(edp, sharers), edp),
        expert_copies=make_again("expert_copies", _copies(edp, sharers), edp),
        embedding=make_again("embedding", _embedding_ranks(grid, rank), pp_backward),
    )
    if groups.world.size > 1:
        _wait_for_all(rank, timeout_s)
        _connections.built()
    return groups


def close_world() -> None:
    """Take down every group when all work is done; does nothing when there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()


def abort_world() -> None:
    """Fail the operations that this process and its peers wait in; called from any thread.

    Afterwards the groups are gone, and a new world may be opened on a new store. A rank that is still
    meeting the others ends with its timeout.
    """
    if not dist.is_initialized():
        return
    is_gloo = dist.get_backend() == "gloo"
    groups = abort_groups()
    # A gloo group with an operation under way is torn down only after that: not in this thread.
    while groups:
        threading.Thread(target=[groups.pop()].clear, daemon=True).start()
    if is_gloo:  # which gives up collectives, and no transfers
        _connections.cut()


def _make_group(name: str, ranks: tuple[int, ...], *, rank: int, timeout_s: float) -> Group:
    handle = None
    if len(ranks) > 1:
        handle = _new_handle(name, ranks, rank=rank, timeout_s=timeout_s)
    return Group(
        name=name, ranks=ranks, index=ranks.index(rank), timeout_s=timeout_s, handle=handle
    )


def _new_handle(name: str, ranks: tuple[int, ...], *, rank: int, timeout_s: float) -> GroupName:
    if name == "world":
        return world_handle()
    try:
        group = dist.new_group(
            list(ranks),
            timeout=timedelta(seconds=timeout_s),
            use_local_synchronization=True,
            group_desc=name,
        )
    except RuntimeError as error:
        what = f"group {name} of ranks {', '.join(map(str, ranks))}"
        raise CommunicationError(_meeting_fault(what, rank, timeout_s, error)) from error
    return group.group_name


def _wait_for_all(rank: int, timeout_s: float) -> None:
    """Meet once more: a rank that left while others still connect to it would make them fail."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    try:
        dist.all_reduce(torch.zeros(1, device=device))
    except RuntimeError as error:
        raise CommunicationError(_meeting_fault("all groups", rank, timeout_s, error)) from error


def _embedding_ranks(grid: Grid, rank: int) -> tuple[int, ...]:
    here = grid.coords(rank)
    last = grid.pp - 1
    if last == 0 or here.pp not in (0, last):
        return (rank,)
    return (grid.rank(replace(here, pp=0)), grid.rank(replace(here, pp=last)))


def _sharers(whole: Group, number: int) -> tuple[int, ...]:
    """Of a group whose every ``number`` neighbours share one copy out those that are with this rank."""
    size = _group_size(whole, number)
    return whole.ranks[whole.index // size * size :][:size]


def _copies(whole: Group, number: int) -> tuple[int, ...]:
    """Of such a group the ranks that own the same part of their copies."""
    return whole.ranks[whole.index % _group_size(whole, number) :: _group_size(whole, number)]


def _group_size(whole: Group, number: int) -> int:
    return number if number and whole.size % number == 0 else whole.size


def _meeting_fault(what: str, rank: int, timeout_s: float, error: RuntimeError) -> Fault:
    return Fault(
        fact=f"rank {rank} could not open {what}: {str(error).strip().splitlines()[0]}",
        rule=f"its ranks must meet within elastic.collective_timeout_s={timeout_s:g} s",
        remedy="look at the ranks that failed before, or raise elastic.collective_timeout_s",
    )
