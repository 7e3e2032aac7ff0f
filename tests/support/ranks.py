"""Several ranks for one test: fresh processes from one forkserver that has torch loaded already.

A process costs about 10 ms instead of the seconds that importing torch takes. Every call gets new
processes and a new gloo world, so a rank that dies or hangs harms its own test only.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
import torch.distributed as dist

from raymega.parallel.comm import process_groups, world
from raymega.parallel.comm.collectives import is_communication_error
from raymega.plan.grid import Coords, Grid

PRELOADED = [
    "torch",
    "torch.distributed",
    "torch._dynamo",  # 1.5 s of a CPU, which torch.utils.checkpoint loads when it is first used
    "numpy",
    "pytest",
    "hypothesis",
    "safetensors.torch",
    "raymega.train.entry",
    # what most tests' modules import: 30 to 90 ms a rank
    "tests.support.training",
    "tests.support.references.plain_training",
    "raymega.convert.huggingface.importer",
    "raymega.convert.huggingface.exporter",
    "raymega.generate.run",
    "tests.unit.model.parts",
]
HEAVY = frozenset({"transformers", "ray"})
"""Packages that take a CPU up to 2 s to load, each rank anew."""
TIMEOUT_S = 200.0
"""A guard against ranks that hang, on hosts that are several times slower than usual."""
GRACE_S = 30.0
"""Seconds that the other ranks have after one has failed, to report what they saw."""
ENDLESS_S = 10_000.0
"""A timeout of collectives that no test lives to see."""


class RankFailureError(Exception):
    """Ranks raised, died or took too long; the text says which and shows the first cause once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnv:
    """Environment of a rank in :func:`run_grid`."""

    rank: int
    grid: Grid
    coords: Coords
    groups: process_groups.Groups
    device: torch.device


@dataclass(kw_only=True, slots=True)
class _Rank:
    index: int
    process: ForkServerProcess
    pipe: Connection
    result: Any = None
    failure: str = ""
    is_secondary: bool = False
    is_done: bool = False


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = TIMEOUT_S,
    collective_timeout_s: float = 0,
) -> list:
    """``fn(rank, world_size, *args)`` on every rank of a gloo world; the results by rank.

    ``fn`` must be a top-level function. Collectives time out before ``timeout`` seconds do, unless
    they are given a timeout of their own.
    """
    limit_s = collective_timeout_s or _collective_timeout_s(timeout)
    # A file, not a TCPStore: that looks every peer's address up in the DNS, which may take seconds.
    with tempfile.TemporaryDirectory() as folder:
        work = pickle.dumps((_in_world, (world_size, f"{folder}/store", limit_s, fn, args)))
        return _run([_start(rank, work) for rank in range(world_size)], timeout)


def run_grid(
    fn: Callable[..., Any],
    grid: Grid,
    *args: Any,
    timeout: float = TIMEOUT_S,
    collective_timeout_s: float = 0,
    hierarchical_cp_size: int = 1,
    is_nested: bool = False,
    sharers: int = 0,
    unused: Collection[str] = (),
    most_in_world: int = process_groups.MOST_IN_WORLD,
) -> list:
    """``fn(env, *args)`` on every rank of ``grid``, its groups built; the results by rank."""
    limit_s = collective_timeout_s or _collective_timeout_s(timeout)
    shape = grid, hierarchical_cp_size, is_nested, sharers, unused, limit_s, most_in_world
    return run_ranks(
        _in_grid, grid.world_size, fn, shape, args, timeout=timeout, collective_timeout_s=limit_s
    )


def run_alone(fn: Callable[..., Any], *args: Any, timeout: float = TIMEOUT_S) -> Any:
    """``fn(*args)`` in one fresh process with no world; for tests that change global state."""
    return _run([_start(0, pickle.dumps((_without_world, (fn, args))))], timeout)[0]


def refuse_heavy(work: tuple, loaded: Collection[str]) -> None:
    """Raise an ImportError where the modules of a rank's functions have ``loaded`` a package of HEAVY."""
    if found := HEAVY.intersection(loaded):
        names = {each.__module__ for each in _functions(work)}
        raise ImportError(
            f"{', '.join(sorted(names))}: each rank loads {', '.join(sorted(found))} with it;"
            " import it in the functions that use it"
        )


def _functions(work: tuple) -> Iterator[Callable[..., Any]]:
    # of a grid they lie in the arguments of this module's own
    for each in work:
        if type(each) is tuple:
            yield from _functions(each)
        elif callable(each) and each.__module__ != __name__:
            yield each


def _in_world(
    rank: int, world_size: int, store: str, limit_s: float, fn: Callable[..., Any], args: tuple
) -> Any:
    # as a training worker enters its world
    world.open_world(
        rank=rank,
        world_size=world_size,
        rendezvous="",
        store=dist.FileStore(store, world_size),
        timeout_s=limit_s,
        device=torch.device("cpu"),
    )
    dist.barrier()
    result = fn(rank, world_size, *args)
    world.close_world()
    return result


def _without_world(_rank: int, fn: Callable[..., Any], args: tuple) -> Any:
    return fn(*args)


def _in_grid(
    rank: int,
    _world_size: int,
    fn: Callable[..., Any],
    shape: tuple[Grid, int, bool, int, Collection[str], float],
    args: tuple,
) -> Any:
    grid, hierarchical_cp_size, is_nested, sharers, unused, limit_s, most_in_world = shape
    env = RankEnv(
        rank=rank,
        grid=grid,
        coords=grid.coords(rank),
        groups=process_groups.build_groups(
            grid,
            rank,
            timeout_s=limit_s,
            hierarchical_cp_size=hierarchical_cp_size,
            is_nested=is_nested,
            sharers=sharers,
            unused=unused,
            most_in_world=most_in_world,
        ),
        device=torch.device("cpu"),
    )
    return fn(env, *args)


def _collective_timeout_s(timeout: float) -> float:
    return timeout * 0.75


@functools.cache
def _forkserver() -> multiprocessing.context.ForkServerContext:
    """The session's one forkserver; it starts with the first process and ends with pytest."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _run(ranks: list[_Rank], timeout: float) -> list:
    # no process outlives the call, whatever ends it
    try:
        _collect(ranks, timeout)
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()
            rank.pipe.close()
    _raise_failures(ranks)
    return [rank.result for rank in ranks]


def _start(index: int, work: bytes) -> _Rank:
    context = _forkserver()
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(index, work, theirs), daemon=True)
    process.start()
    theirs.close()
    return _Rank(index=index, process=process, pipe=mine)


def _main(index: int, work: bytes, pipe: Connection) -> None:
    """Body of a rank's process: do the work and send one outcome back."""
    # what is loaded stays: no collection of garbage copies the pages that it shares with other ranks
    gc.freeze()
    threading.Thread(target=_die_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    try:
        # unpickled here, so that a function that does not load is this rank's failure
        fn, args = pickle.loads(work)
        refuse_heavy(args, sys.modules)
        outcome = (True, fn(index, *args), False)
    # also SystemExit: the test wants the traceback, not the exit code
    except BaseException as error:
        outcome = (False, traceback.format_exc(), is_communication_error(error))
    # one message, so that the parent sees a result or the end of the pipe
    # Not pipe.send: its pickler would share tensors with a process that is about to end.
    pipe.send_bytes(pickle.dumps(outcome))
    os._exit(0)


def _die_with_parent() -> None:
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _collect(ranks: list[_Rank], timeout: float) -> None:
    """Wait for every outcome, until ``timeout`` or for a while after the first failure."""
    deadline = time.monotonic() + timeout
    while waiting := {rank.pipe: rank for rank in ranks if not rank.is_done}:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            _receive(waiting[pipe])
        # after a failure the others get a moment to say what they saw
        if any(rank.failure for rank in ranks):
            deadline = min(deadline, time.monotonic() + GRACE_S)
    is_secondary = any(rank.failure for rank in ranks)
    for rank in waiting.values():
        rank.failure = (
            "did not end after that" if is_secondary else f"no result after {timeout:g} s"
        )
        rank.is_secondary = is_secondary


def _receive(rank: _Rank) -> None:
    rank.is_done = True
    try:
        is_good, value, rank.is_secondary = pickle.loads(rank.pipe.recv_bytes())
    except EOFError:
        rank.process.join()
        rank.failure = _describe_exit(rank.process.exitcode)
        return
    if is_good:
        rank.result = value
    else:
        rank.failure = value


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"the process died of {signal.Signals(-code).name}"
    return f"the process ended with exit code {code} and no result"


def _raise_failures(ranks: list[_Rank]) -> None:
    failed = [rank for rank in ranks if rank.failure]
    if not failed:
        return
    # ranks that lost a peer are not the cause
    causes = [rank for rank in failed if not rank.is_secondary] or failed
    lines = [f"rank {causes[0].index} of {len(ranks)}: {causes[0].failure}"]
    for rank in failed:
        if rank is not causes[0]:
            lines.append(f"rank {rank.index}: {rank.failure.strip().splitlines()[-1]}")
    raise RankFailureError("\n".join(lines))
