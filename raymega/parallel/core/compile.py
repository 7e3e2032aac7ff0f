"""Kernel fusion: torch.compile makes one kernel of several operations, where the job asks for it.

Only pure functions of tensors are compiled: never a collective, a hook or an autograd graph. So
compilation changes neither what is saved for backward, nor recomputation, nor deferred gradients.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import TypeVar, cast

import torch

logger = logging.getLogger(__name__)

# A process compiles a kernel or two at a time, so a pool of compiler processes in each rank does not pay.
# Kernels are not chosen by timing them: tensor-parallel ranks compute the same function of equal numbers,
# and different kernels would give different last bits.
OPTIONS: dict[str, str | int | bool | Callable[..., object]] = {
    "compile_threads": 1, "deterministic": True,
}  # fmt: skip
Function = TypeVar("Function", bound=Callable[..., object])


def fused(function: Function, *, is_on: bool) -> Function:
    """Return ``function``, or with ``is_on`` its compiled form, which makes fewer passes over memory.

    Args:
        function: Function of tensors, numbers and booleans that returns tensors. It may overwrite an
            argument that needs no gradient, as its last operation.
        is_on: Compile at the first call, for the shapes of that call; other shapes later make the
            kernel dynamic.
    """
    return _compiled(function) if is_on else function


def can_fuse(device: torch.device) -> bool:
    """Return whether this machine can compile for ``device``; if not, log the reason once.

    Callers then run the functions uncompiled, with the same numbers up to rounding.
    """
    return not _obstacle(device)


@cache
def _compiled(function: Function) -> Function:
    folder = _own_folder()
    compiled = torch.compile(function, options=OPTIONS)

    @wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        try:
            return compiled(*args, **kwargs)
        # A killed compiler may have left a truncated kernel, on which every later run would fail.
        except Exception:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    return cast(Function, call)


@cache
def _own_folder() -> Path:
    """Set torch's cache of compiled kernels to a folder of raymega's own, and return it.

    A killed compiler may leave a truncated file there, which torch takes for a whole one in every later
    process. So a failure empties the folder, and the next process compiles again.
    """
    default = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default)
    if folder.name != "raymega":  # a child process inherits the variable
        folder /= "raymega"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    return folder


@cache
def _obstacle(device: torch.device) -> str:
    """Return the reason why nothing can be compiled for ``device``; '' if it can."""
    try:
        _compiled(_probe)(torch.zeros(8, device=device))
    except (RuntimeError, OSError, ImportError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        logger.warning("kernels are not compiled but run one by one: %s", reason)
        return reason
    return ""


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x.exp() + 1.0
