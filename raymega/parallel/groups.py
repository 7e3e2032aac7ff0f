"""Communicators: opens the world, builds every group of the grid with one timeout, closes them.

Who belongs to a group is plan.grid's; what is sent over one is parallel.comm's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from raymega.errors import CommunicationError, Fault
from raymega.plan.grid import Grid


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """One communicator as one of its ranks sees it.

    Attributes:
        name: For messages, such as ``tp``.
        ranks: Global ranks, ascending, which is torch's order too.
        index: Own place in ``ranks``; peers are named by their place as well.
        timeout_s: Longest wait of one operation.
        handle: torch's group; None when the group has one rank and nothing is ever sent.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    timeout_s: float
    handle: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Every group that one rank belongs to.

    The two pipeline groups have equal ranks: activations travel on one, gradients on the other, so
    that neither waits behind the other. ``model`` is tp x pp, all ranks of one replica.
    ``embedding`` joins first and last stage; elsewhere it has one rank.
    """

    world: Group
    tp: Group
    dp: Group
    pp_forward: Group
    pp_backward: Group
    model: Group
    embedding: Group


def host_store(host: str) -> tuple[str, Store]:
    """Serve a store on a fresh port; return its ``host:port`` and the store, which must be kept."""
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return f"{host}:{store.port}", store


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
            store = TCPStore(host, int(port), is_master=False, timeout=timeout)
        store.set_timeout(timeout)
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


def build_groups(grid: Grid, rank: int, *, timeout_s: float) -> Groups:
    """Make the groups of ``rank``, after :func:`open_world` (a world of one needs none).

    A rank makes only groups that it belongs to, and waits only for their members. torch names a
    group by its ranks and by how many groups the process has made before, so members must have
    made equally many: ``embedding``, which middle stages lack, has to come last.

    Raises:
        CommunicationError: A member did not come in time.
    """

    def make(name: str, ranks: tuple[int, ...]) -> Group:
        return _make_group(name, tuple(sorted(ranks)), rank=rank, timeout_s=timeout_s)

    return Groups(
        world=make("world", tuple(range(grid.world_size))),
        tp=make("tp", grid.group("tp", rank)),
        dp=make("dp", grid.group("dp", rank)),
        pp_forward=make("pp_forward", grid.group("pp", rank)),
        pp_backward=make("pp_backward", grid.group("pp", rank)),
        model=make("model", grid.group(("tp", "pp"), rank)),
        embedding=make("embedding", _embedding_ranks(grid, rank)),
    )


def close_world() -> None:
    """Take down every group in good order; does nothing when there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()


def abort_world() -> None:
    """Fail every operation that this process is stuck in; called from another thread.

    The groups are gone afterwards; a new world may be opened on a new store.
    """
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()


def _make_group(name: str, ranks: tuple[int, ...], *, rank: int, timeout_s: float) -> Group:
    index = ranks.index(rank)
    if len(ranks) == 1:
        return Group(name=name, ranks=ranks, index=index, timeout_s=timeout_s, handle=None)
    if name == "world":
        handle = dist.group.WORLD
    else:
        handle = _new_handle(name, ranks, rank=rank, timeout_s=timeout_s)
    return Group(name=name, ranks=ranks, index=index, timeout_s=timeout_s, handle=handle)


def _new_handle(
    name: str, ranks: tuple[int, ...], *, rank: int, timeout_s: float
) -> dist.ProcessGroup:
    try:
        handle: dist.ProcessGroup = dist.new_group(
            list(ranks),
            timeout=timedelta(seconds=timeout_s),
            use_local_synchronization=True,
            group_desc=name,
        )
    except RuntimeError as error:
        what = f"group {name} of ranks {', '.join(map(str, ranks))}"
        raise CommunicationError(_meeting_fault(what, rank, timeout_s, error)) from error
    return handle


def _embedding_ranks(grid: Grid, rank: int) -> tuple[int, ...]:
    here = grid.coords(rank)
    last = grid.pp - 1
    if last == 0 or here.pp not in (0, last):
        return (rank,)
    return (grid.rank(replace(here, pp=0)), grid.rank(replace(here, pp=last)))


def _meeting_fault(what: str, rank: int, timeout_s: float, error: RuntimeError) -> Fault:
    return Fault(
        fact=f"rank {rank} could not open {what}: {str(error).strip().splitlines()[0]}",
        rule=f"its ranks must meet within elastic.collective_timeout_s={timeout_s:g} s",
        remedy="look at the ranks that failed before, or raise elastic.collective_timeout_s",
    )
