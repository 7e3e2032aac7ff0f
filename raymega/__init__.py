"""Megatron-style training on Ray.

    import raymega

    job = raymega.load_job("jobs/verify.yaml", ["run.steps=40"])
    raymega.train(job, address="local")
    raymega.open_checkpoint(job.run_uri).read("model/norm.weight")

The functions are those of raymega.api, which is imported when one of them is first used. ``plan``,
``train`` and ``verify`` are also the names of packages here: as attributes they are both.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raymega.api import load_job, open_checkpoint, plan, train, verify

__all__ = ["__version__", "load_job", "open_checkpoint", "plan", "train", "verify"]

_PACKAGES = ("plan", "train", "verify")


class _CallablePackage(ModuleType):
    """Package that can also be called, as the function of the same name in raymega.api."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function of the same name in raymega.api."""
        return _of_api(self.__name__.rpartition(".")[2])(*args, **kwargs)


class _Raymega(ModuleType):
    """Class of this package, which makes its subpackages plan, train and verify callable."""

    # Importing raymega.train sets the attribute, from wherever the import comes.
    def __setattr__(self, name: str, value: object) -> None:
        if name in _PACKAGES and type(value) is ModuleType:
            value.__class__ = _CallablePackage
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Raymega


def _of_api(name: str) -> Any:
    return getattr(import_module("raymega.api"), name)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("raymega")
    # Lazy, so that `import raymega` costs no import of torch, Ray or the planner.
    if name in _PACKAGES:
        return import_module(f"raymega.{name}")
    if name in __all__:
        return _of_api(name)
    raise AttributeError(f"module 'raymega' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
