"""Communicators: open the world, build every group of the grid with one timeout, and close them.

`plan/grid.py` decides which ranks form a group; `parallel/comm/collectives.py` sends over one.
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
        handle: torch's name for the group; None when it has one rank and nothing is ever sent.
        waited: Timer to which each wait adds its seconds; all groups of a rank share one.
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
        """Return torch's group, looked up at each use so that this value does not keep it alive.

        gloo closes a connection only with the last reference to its group. So an abort reaches the peers
        at once, whatever still holds this value.

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
    """All groups that one rank belongs to.

    Attributes:
        world: All ranks.
        tp: Ranks that cut the layers.
        cp: Ranks that cut the sequence.
        hierarchical_cp_size: Neighbours on cp that exchange heads (Ulysses).
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
    """Serve a TCPStore on a free port; return its ``host:port`` and the store, which must be kept."""
    with without_name_servers():
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return f"{host}:{store.port}", store


def file_store(path: Path, world_size: int) -> Store:
    """Return a store in a file, for ranks of one machine."""
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
    """Initialise torch.distributed with the other ranks: NCCL for a GPU, gloo for a CPU.

    Args:
        rank: Global rank of this process.
        world_size: Number of ranks to wait for.
        rendezvous: ``host:port`` of the store.
        store: The store itself where this process already has it, else None.
        timeout_s: Longest wait for the other ranks, and of any later operation, in seconds.
        device: Device of the tensors that will be sent; a GPU must be the current one.

    Raises:
        CommunicationError: The store or a rank did not answer in time.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        # rendezvous store
        if store is None:
            host, _, port = rendezvous.rpartition(":")
            with without_name_servers():
                store = TCPStore(host, int(port), is_master=False, timeout=timeout)
        store.set_timeout(timeout)
        # world: sockets that appear from here until built() belong to it
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
    """Return a group of one rank, for an axis of degree 1."""
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

    Raises:
        CommunicationError: A member did not arrive within ``timeout_s``.
    """
    waited = WaitTimer()

    def make(name: str, ranks: tuple[int, ...]) -> Group:
        group = _make_group(name, tuple(sorted(ranks)), rank=rank, timeout_s=timeout_s)
        return replace(group, waited=waited)

    tp, cp, dp = (make(axis, grid.group(axis, rank)) for axis in ("tp", "cp", "dp"))

    def make_again(name: str, ranks: tuple[int, ...], *likes: Group) -> Group:
        """Return a group of ``likes`` with the same ranks, else a new one; all members decide alike."""
        like = next((like for like in likes if set(like.ranks) == set(ranks)), None)
        return make(name, ranks) if like is None else replace(like, name=name)

    replicas = make_again("replicas", tuple(sorted(grid.group(("cp", "dp"), rank))), dp)
    place = replicas.index
    sizes = [1 << n for n in range(1, replicas.size.bit_length())] if is_nested else []
    # cp: neighbours exchange heads, the others exchange keys and values
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
    """Destroy every group once all work is done; do nothing without a world."""
    if dist.is_initialized():
        dist.destroy_process_group()


def abort_world() -> None:
    """Fail the operations that this process and its peers wait in; any thread may call it.

    Afterwards the groups are gone, and a new world may be opened on a new store. A rank that is still
    in the rendezvous fails with its timeout.
    """
    if not dist.is_initialized():
        return
    is_gloo = dist.get_backend() == "gloo"
    groups = abort_groups()
    # Destroying a gloo group blocks until its pending operation has ended, so a thread does it.
    while groups:
        threading.Thread(target=[groups.pop()].clear, daemon=True).start()
    if is_gloo:  # it aborts collectives, but not point-to-point transfers
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
    """All-reduce once over the world, so that no rank leaves while others still connect to it."""
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
    """Return the ``number`` neighbours, this rank among them, that shard one copy of the state."""
    size = _group_size(whole, number)
    return whole.ranks[whole.index // size * size :][:size]


def _copies(whole: Group, number: int) -> tuple[int, ...]:
    """Return the ranks that own the same part of their copy of the state as this rank."""
    return whole.ranks[whole.index % _group_size(whole, number) :: _group_size(whole, number)]


# A number that does not divide the group means one copy over all of it; validation reports it.
def _group_size(whole: Group, number: int) -> int:
    return number if number and whole.size % number == 0 else whole.size


def _meeting_fault(what: str, rank: int, timeout_s: float, error: RuntimeError) -> Fault:
    return Fault(
        fact=f"rank {rank} could not open {what}: {str(error).strip().splitlines()[0]}",
        rule=f"its ranks must meet within elastic.collective_timeout_s={timeout_s:g} s",
        remedy="look at the ranks that failed before, or raise elastic.collective_timeout_s",
    )
