"""Ring, gathered keys and exchanged heads side by side on the same gloo ranks: time, bytes, memory.

Attention alone, causal, forward and backward, float32; each rank holds equally many tokens at every
degree, so the sequence grows with cp. Peak memory is what a fresh process of the degree and method
needs more than before its first call.

    python -m benchmarks.context_parallel [--quick] [--tokens 512] [--heads 8] [--degrees 2 4 8]
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from raymega.parallel.comm.process_groups import alone
from raymega.parallel.comm.work import Work
from raymega.parallel.context_parallel import attention, transfers
from raymega.parallel.context_parallel.context import (
    Context,
    Rows,
    TokenLayout,
    held_positions,
    make_token_layout,
)
from raymega.plan.grid import Grid
from tests.support.ranks import RankEnv, run_grid

METHODS = ("ring", "all_gather", "all_to_all")
K = 64
STARTS = ("start_shift", "start_all_gather", "start_reduce_scatter_in_place", "start_all_to_all")


class Meter:
    """Bytes that this rank sends to others, seconds that transfers were under way and waited for."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent = self.under_way = self.waited = 0.0

    def count(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call`` with its bytes and seconds counted."""
        # A ring of n sends n - 1 parts of a gather or a reduction; an exchange keeps its own part.
        shares = {
            "start_shift": 1.0,
            "start_all_gather": self.size - 1.0,
            "start_reduce_scatter_in_place": 1 - 1 / self.size,
            "start_all_to_all": 1 - 1 / self.size,
        }

        def counted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            self.sent += tensor.nbytes * shares[name]
            begin = time.perf_counter()
            found = call(tensor, *args, **options)
            if isinstance(found, tuple):
                return found[0], Watched(found[1], begin, self)
            return Watched(found, begin, self)

        return counted


class Watched:
    """A transfer under way, until somebody waited for it."""

    def __init__(self, pending: Work, began: float, meter: Meter) -> None:
        self._pending, self._began, self._meter = pending, began, meter
        # The callback must not hold this object: the operation would keep itself and its tensors.
        self._done = done = list[float]()
        pending.on_done(lambda: done.append(time.perf_counter()))

    def wait(self, timeout_s: float) -> None:
        begin = time.perf_counter()
        self._pending.wait(timeout_s)
        end = time.perf_counter()
        self._meter.waited += end - begin
        self._meter.under_way += min([*self._done, end]) - self._began


def _run(env: RankEnv, method: str, tokens: int, heads: int, rounds: int) -> dict[str, float]:
    groups, nobody = env.groups, alone(env.rank)
    # ring and gathered keys cross the outer group, exchanged heads the inner one
    context = Context(inner=nobody, outer=groups.cp, is_gathered=method == "all_gather")
    if method == "all_to_all":
        context = Context(inner=groups.cp, outer=nobody)
    documents = ((tokens * context.degree,),)
    places = make_token_layout(Rows(held_positions(documents, context), documents), context)
    meter = Meter(context.degree)
    # meter each transfer from outside, so that the measured code has no hooks
    for name in STARTS:
        call = getattr(transfers, name)
        setattr(transfers, name, meter.count(name, call))
    shape = (tokens, 1, heads, K)
    leaves = [torch.randn(shape).requires_grad_() for _ in range(3)]
    grad = torch.randn(shape)
    # four tokens warm up, so that libraries' memory is taken before the peak is read
    small = make_token_layout(Rows(places.positions[:4].t(), ((4 * context.degree,),)), context)
    _step([t[:4].detach().requires_grad_() for t in leaves], grad[:4], small)
    before, seconds = _peak(), []
    for _ in range(rounds):
        # bytes and shares are those of the last round; seconds are all rounds'
        meter.sent = meter.under_way = meter.waited = 0.0
        begin = time.perf_counter()
        _step(leaves, grad, places)
        seconds.append(time.perf_counter() - begin)
    # a transfer is hidden for as long as it was under way without a rank that waited for it
    hidden = 1 - meter.waited / meter.under_way
    return {
        "s": statistics.median(seconds),
        "sent": meter.sent,
        "hidden": hidden,
        "peak": _peak() - before,
    }


def _step(leaves: list[torch.Tensor], grad: torch.Tensor, places: TokenLayout) -> None:
    attention.attend(*leaves, places).backward(grad)
    for leaf in leaves:
        leaf.grad = None


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512, help="a rank's")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--degrees", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a few tokens, one round")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.rounds, options.degrees = 64, 1, [2]
    # Each tensor gets pages of its own: what a heap keeps for later would count as a peak.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    print(f"{options.tokens} tokens a rank, {options.heads} heads of {K}, float32")
    print("cp  method      median step  sent MiB  share hidden  peak growth MiB")
    for cp in options.degrees:
        for method in METHODS:
            # the grid's own split of cp into inner and outer must agree with the method
            inner = cp if method == "all_to_all" else 1
            work = method, options.tokens, options.heads, options.rounds
            found = run_grid(_run, Grid(cp=cp), *work, timeout=600, hierarchical_cp_size=inner)
            worst = {key: max(rank[key] for rank in found) for key in found[0]}
            hidden = statistics.median(rank["hidden"] for rank in found)
            print(
                f"{cp:<3} {method:<11} {worst['s'] * 1e3:8.1f} ms {worst['sent'] / 2**20:9.2f}"
                f" {hidden:12.2f} {worst['peak'] / 2**20:15.1f}"
            )


if __name__ == "__main__":
    main()
