"""Define the traits of a training system that decide its speed: facts, not fitted numbers.

The module has raymega's own traits. ``raymega.planner.calibration.published_runs`` sets those of
systems whose runs were published.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Remakes = Literal["nothing", "every_second", "products"]
"""Products of a block, in forward order, that selective recompute runs again: none, every second
one, or all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """Traits of one training system.

    Attributes:
        has_fused_attention: Whether attention never writes its [S, S] weights to memory.
        gradient_bytes: Bytes of one gradient element that is sent between data-parallel ranks.
        hides_gradients: Whether gradient reductions overlap the backward pass, and weight gathers
            of a sharded optimizer the forward pass.
        gathers_tensors: Whether sharded weights are gathered, and their gradients reduced, tensor
            by tensor; otherwise block by block.
        hides_messages: Whether pipeline messages overlap computation; otherwise ranks compute
            nothing while they send.
        has_dropout: Whether residual dropout is computed and its masks are written.
        has_newest_attention: Whether fused attention uses the device's own instructions; otherwise
            those of the previous generation.
        fuses_kernels: Whether norms, rotations and nonlinearities are one kernel each; otherwise
            one kernel for each operation of their formula, with float32 in between.
        makes_steps: Whether rotations and gates run as the fewest possible kernels of torch's own,
            unless the job has ``run.kernels=compile``.
        waits_for_update: Whether no rank updates before all are done, because the norm of all
            gradients scales the update; otherwise each rank continues with its next step
            independently.
        sends_once_a_node: Whether a token travels to a node once for all its experts there, and
            inside the node to each; otherwise once for each expert.
        remakes: Products that selective recompute runs again, in addition to its parts.
    """

    has_fused_attention: bool = True
    gradient_bytes: int = 4
    hides_gradients: bool = True
    gathers_tensors: bool = False
    hides_messages: bool = True
    has_dropout: bool = False
    has_newest_attention: bool = True
    fuses_kernels: bool = True
    makes_steps: bool = False
    waits_for_update: bool = True
    sends_once_a_node: bool = False
    remakes: Remakes = "nothing"


RAYMEGA = Software(has_newest_attention=False, makes_steps=True)
"""Traits of raymega. Its flash attention is torch's FlashAttention-2, which returns the log-sum-exp
that context parallelism merges by."""
