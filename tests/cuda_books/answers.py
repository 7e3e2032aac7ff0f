"""Answers of a real device and of the other ranks, put in by hand: numbers read back are zeros here.

Each function puts its answers in for the whole process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import raymega.parallel.expert_parallel.dispatcher as dispatcher
from raymega.parallel.core import rng
from raymega.plan.run_plan import RunPlan
from raymega.train import forward_backward, nan_locator
from raymega.train import step as train_step


class OthersStore(dist.Store):
    """A rendezvous store in which the other ranks have put what they owe: the ids of communicators."""

    alive: ClassVar[list[OthersStore]] = []
    """All of them: torch keeps the store, but not the Python object that answers for it."""

    def __init__(self) -> None:
        super().__init__()
        self.alive.append(self)
        self._values: dict[str, bytes] = {}

    def clone(self) -> OthersStore:
        """Return the store for another thread."""
        return self

    def set(self, key: str, value: bytes | str) -> None:
        """Keep a value."""
        self._values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        """Return a value, or NCCL's id of 128 bytes."""
        return self._values.get(key, bytes(128))

    def add(self, key: str, amount: int) -> int:
        """Count, as the store of a world does."""
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def wait(self, *_: Any) -> None:
        """Return at once."""

    def check(self, _keys: list[str]) -> bool:
        """Return True: everything is there."""
        return True


def put_in(plan: RunPlan) -> None:
    """Answer for a job of ``plan``, whose process runs no other."""
    put_in_other_ranks()
    answer_no()
    put_in_totals(float(plan.batch.global_batch_size * plan.job.data.seq_len))
    put_in_even_routing(plan.grid.ep)
    put_in_initial_values()
    put_in_finite_state()
    use_flash_attention()


def use_flash_attention() -> None:
    """Leave flash attention as the only kernel of whole rows."""
    # cuDNN plans its kernels on the device, and the memory-efficient ones ask it for limits: both need a real one
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)


def answer_no() -> None:
    """Take the device's answer to a question for no, after it has been read: it holds what was there before."""
    # the read itself stays: it is a host synchronisation, which is counted
    read = torch.Tensor.__bool__

    def is_true(tensor: torch.Tensor) -> bool:
        return read(tensor) and not tensor.is_cuda

    torch.Tensor.__bool__ = is_true


def put_in_other_ranks() -> None:
    """Let the other ranks have met already."""
    c10d._store_based_barrier = lambda *_, **__: None


def put_in_totals(tokens: float) -> None:
    """Give a step a loss, a norm and tokens, and an evaluation a loss and tokens."""
    read = train_step._totals_of

    def totals_of(*args: Any) -> Any:
        read_back = read(*args)
        return replace(read_back, divisor=tokens, tokens=tokens, loss_sum=tokens, norm_sq=1.0)

    train_step._totals_of = totals_of
    # an evaluation's sums: 1 each, which makes a finite loss
    read_sums = forward_backward.sum_over_world

    def sums(*args: Any) -> tuple[float, ...]:
        return tuple(1.0 for _ in read_sums(*args))

    forward_backward.sum_over_world = sums


def put_in_even_routing(ep: int) -> None:
    """Give each expert-parallel rank equally many rows, whichever the dispatcher."""
    # the number of a rank's rows is read from the device, and is an argument of the permutation
    read, permute = dispatcher._read_parts, dispatcher.permute

    def read_parts(dispatch: Any, counts: torch.Tensor) -> Any:
        read(dispatch, counts)
        groups, rows = dispatch.groups, dispatch.routing.experts.numel()
        even = [rows // groups.ep.size] * groups.ep.size
        return dispatcher.RowCounts(sent=even, received=even, of_etp=[rows] * groups.etp.size)

    def permute_rows(choices: Any, counts: Any, *, num_rows: int) -> Any:
        return permute(choices, counts, num_rows=num_rows or choices.numel() // ep)

    dispatcher._read_parts, dispatcher.permute = read_parts, permute_rows


def put_in_initial_values() -> None:
    """Draw no initial values: each million of them takes a hundred launches, and nothing is counted of them."""

    def normal(
        _key: int, box: Any, _shape: Any, dtype: torch.dtype, *, device: Any
    ) -> torch.Tensor:
        return torch.empty(box.shape, dtype=dtype, device=device)

    rng.normal = normal


def put_in_finite_state() -> None:
    """Find all state finite where a save looks at it."""
    read, read_all = nan_locator._is_finite, nan_locator._are_finite
    nan_locator._is_finite = lambda tensor: read(tensor) or True
    nan_locator._are_finite = lambda tensors: read_all(tensors) or True
