"""How a training system works, where that decides its speed: facts, not fitted numbers.

raymega's own are the default; runs of other systems that were published state theirs.
"""

from __future__ import annotations

from dataclasses import dataclass


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
        hides_tensor_parallel: Share of tensor-parallel traffic that runs behind products.
        hides_messages: Messages between chunks of an interleaved pipeline run behind work.
        has_dropout: Residual dropout is computed and its masks written.
    """

    has_fused_attention: bool = True
    gradient_bytes: int = 4
    hides_gradients: bool = True
    gathers_tensors: bool = False
    hides_tensor_parallel: float = 0.0
    hides_messages: bool = True
    has_dropout: bool = False


RAYMEGA = Software()
