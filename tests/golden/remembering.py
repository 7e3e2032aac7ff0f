"""Pure functions that are asked the same again and again, answered once: thousands of ranks take long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch


@contextmanager
def remembered(*functions: Callable[..., Any]) -> Iterator[None]:
    """While the body runs, each function computes once for equal arguments, whoever has imported it."""
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "raymega"]
    with ExitStack() as stack:
        for function in functions:
            other = cache(function)
            for module in modules:
                for name in [name for name, value in vars(module).items() if value is function]:
                    stack.enter_context(patch.object(module, name, other))
        yield
