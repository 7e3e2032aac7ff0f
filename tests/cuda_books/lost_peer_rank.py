"""The process of a case of `lost_peer.py`: one step, in which the read of the totals goes wrong."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from raymega.config.load import parse_mapping
from raymega.messages import Requests
from raymega.parallel.comm import world
from raymega.parallel.comm.nccl_warmup import open_communicators
from raymega.parallel.comm.process_groups import groups_of_plan
from raymega.plan.run_plan import make_plan
from raymega.train import forward_backward, step
from raymega.train.build import build_parts
from raymega.train.environment import prepare_process
from raymega.train.state import first_state
from tests.cuda_books.layouts import job_of
from tests.cuda_books.lost_peer import CASES, LAYOUT, WITHIN_S


def outcome(name: str) -> str:
    """Return the error of the step, and what it did to the state and to the world."""
    case, plan = CASES[name], make_plan(parse_mapping(job_of(LAYOUT)).job())
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    device = prepare_process(plan, device="cuda", local_rank=0)
    # open without the other ranks, build
    c10d._store_based_barrier = lambda *_, **__: None
    world.open_world(
        rank=0, world_size=plan.grid.world_size, rendezvous="127.0.0.1:1", store=dist.HashStore(), timeout_s=WITHIN_S,
        device=device,
    )  # fmt: skip
    groups = groups_of_plan(plan, 0, timeout_s=WITHIN_S)
    open_communicators(groups, device)
    parts = build_parts(plan, rank=0, groups=groups, device=device)
    # the totals' all-reduce is the last operation before the read
    reduce = step.all_reduce

    def reduce_and_lose(*args: Any, **kwargs: Any) -> torch.Tensor:
        total = reduce(*args, **kwargs)
        case.happen()
        return total

    step.all_reduce = reduce_and_lose
    if not case.is_checked:
        for module in (step, forward_backward):
            module.raise_if_aborted = lambda _what: None
    before = parts.optimizer.__dict__.copy()
    try:
        step.train_step(parts, first_state(plan.job.precision), Requests(), is_recording=False)
        text = "no error"
    except Exception as error:  # any is the outcome
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    assert parts.optimizer.__dict__ == before
    # The watchdog ends a process two seconds after an error, where it does.
    time.sleep(case.lives_s)
    return text + (" (alive, the world is gone)" if not dist.is_initialized() else " (alive)")


if __name__ == "__main__":
    print(json.dumps(outcome(sys.argv[1])), flush=True)
    os._exit(0)  # the watchdog and the allocator would wait for a device
