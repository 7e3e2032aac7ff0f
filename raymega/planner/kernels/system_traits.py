"""How a training system works, where that decides its speed: facts, not fitted numbers.

raymega's own are stated here; those of systems whose runs were published are published_runs'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Remakes = Literal["nothing", "every_second", "products"]
"""Of the products of a block in the order of its forward: none, the second, fourth and so on, or all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """What a step of a system does.

    Attributes:
        has_fused_attention: Attention never writes its S x S weights to memory.
        gradient_bytes: Of one gradient on its way between data-parallel ranks.
        hides_gradients: Reductions of gradients, and gathers of weights where the optimizer is
            sharded, run behind the backward and the forward pass.
        gathers_tensors: Weights that are sharded are gathered, and their gradients summed, tensor by
            tensor; else block by block.
        hides_messages: Messages of a pipeline run behind work; else ranks do nothing while they send.
        has_dropout: Residual dropout is computed and its masks written.
        has_newest_attention: Fused attention is written for the device's own instructions; else for
            those of the generation before.
        fuses_kernels: Norms, rotations and nonlinearities are one kernel each; else one for every
            operation of their formula, with float32 in between.
        makes_steps: Unless the job says ``run.kernels=compile``, rotations and gates take the fewest of
            torch's own kernels instead.
        waits_for_update: No rank updates before all are done, because the norm of all gradients scales
            the update; else each goes on to its next step by itself.
        remakes: Which products selective recompute makes again, beside its parts.
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
    remakes: Remakes = "nothing"


RAYMEGA = Software(has_newest_attention=False, makes_steps=True)
"""torch's flash attention, which gives the log-sum-exp that context parallelism merges by, is
FlashAttention-2."""
