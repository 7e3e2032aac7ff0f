"""Fusing: lets torch.compile make one kernel of what is written as several operations, where asked.

Only pure functions of tensors are given to it: never a collective, a hook or an autograd graph. So
what is kept for backward, what is recomputed and what is put off stay as they are without it.
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

Function = TypeVar("Function", bound=Callable[..., object])


def fused(function: Function, *, is_on: bool) -> Function:
    """``function``, or with ``is_on`` one that computes the same in fewer passes over memory.

    Args:
        function: Of tensors, numbers and booleans, to tensors; as its last act it may overwrite an
            argument of which nobody wants a gradient.
        is_on: Compile it at its first call, for the shapes that it gets; other shapes later on make
            it general.
    """
    return _compiled(function) if is_on else function


def can_fuse(device: torch.device) -> bool:
    """Whether this machine can compile for ``device``; if not, a log line says why, once.

    What is not compiled is computed as written, with the same numbers up to rounding.
    """
    return not _obstacle(device)


@cache
def _compiled(function: Function) -> Function:
    # One process compiles a kernel or two at a time: a pool of compilers a rank costs more than it
    # gains.
    folder = _own_folder()
    compiled = torch.compile(function, options={"compile_threads": 1})

    @wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        try:
            return compiled(*args, **kwargs)
        except Exception:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    return cast(Function, call)


@cache
def _own_folder() -> Path:
    """Where torch keeps what it compiled, from now on: a folder that is raymega's alone.

    A compiler that was killed may leave half a file there, which torch takes for a whole one in every
    process to come. So a failure empties the folder, and the next process compiles anew.
    """
    default = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default)
    if folder.name != "raymega":  # as it is for the child of a process that did this
        folder /= "raymega"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    return folder


@cache
def _obstacle(device: torch.device) -> str:
    """Why nothing can be compiled for ``device``; '' if it can."""
    try:
        _compiled(_probe)(torch.zeros(8, device=device))
    except (RuntimeError, OSError, ImportError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        logger.warning("kernels are not compiled but run one by one: %s", reason)
        return reason
    return ""


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x.exp() + 1.0
