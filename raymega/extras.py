"""Imports optional packages, or says which line installs them.

It owns the refusal of a command whose optional packages are missing; pyproject.toml lists them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from raymega.errors import ConfigError, Fault


def import_extra(module: str, *, extra: str, purpose: str) -> Any:
    """Return the imported module of an optional package; its attributes are not typed.

    Args:
        module: Name of the module.
        extra: Name of raymega's extra that installs it.
        purpose: Subject of the refusal's sentence: what needs the package.

    Raises:
        ConfigError: The package is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        fault = Fault(
            fact=f"{purpose} needs the package {package} ({error})",
            rule=f"it is part of raymega's extra {extra!r}, which is not installed here",
            remedy=f"run `pip install 'raymega[{extra}]'`",
        )
        raise ConfigError(fault) from error
