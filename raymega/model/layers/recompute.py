"""Recomputation: backward keeps the input of blocks alone, and runs them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recomputed(run: Callable[[Any], Any], x: Any) -> Any:
    """Return ``run(x)``, which backward calls again.

    Args:
        run: Blocks, as a function of their input.
        x: Residual stream, or a named tuple of several with what blocks share. Its tensors are saved one by one, so that
            hooks of saved tensors, such as those of offload, see them.
    """
    if isinstance(x, Tensor):
        return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)

    def run_parts(*parts: Any) -> Any:
        return run(type(x)(*parts))

    return checkpoint(run_parts, *x, use_reentrant=False, preserve_rng_state=False)
