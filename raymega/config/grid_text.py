"""Reads the text of ``--grid``, degrees of the parallel axes, and writes texts of ``--set`` to paste."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from raymega.errors import ConfigError, Fault

AXES = ("tp", "cp", "pp", "dp", "ep", "etp")
"""Axes that have a degree in the section ``parallel``."""
OPTIONS = ("sequence_parallel", "cp_method")
"""Other fields of that section that a grid may name: how ranks of an axis cut a sequence."""
_DEGREE = re.compile(r"\s*-?\d+\s*")
_PAIR = re.compile(r"([a-z]+)\s*=?\s*(\d+)")


def grid_overrides(text: str) -> list[str]:
    """Return a text such as ``tp=2,pp=2`` as overrides of a job; empty is no override.

    Fields of OPTIONS may follow: ``cp=2,cp_method=all_to_all``.

    Raises:
        ConfigError: The text is not of this form, or names an axis that no grid has.
    """
    pairs = [pair.strip() for pair in text.split(",") if pair.strip()]
    cut = [pair.partition("=") for pair in pairs]
    # Whether a degree is large enough is checked with the other fields of the job.
    is_whole = [
        equals and (axis.strip() in OPTIONS or (axis.strip() in AXES and _DEGREE.fullmatch(value)))
        for axis, equals, value in cut
    ]
    is_unique = len({axis.strip() for axis, _, _ in cut}) == len(cut)
    if all(is_whole) and is_unique:
        return [f"parallel.{axis.strip()}={value.strip()}" for axis, _, value in cut]
    found = {axis: degree for axis, degree in _PAIR.findall(text.lower()) if axis in AXES}
    meant = [f"{axis}={degree}" for axis, degree in found.items()]
    if not meant and text.strip().isdigit():
        meant = [f"dp={text.strip()}"]
    raise ConfigError(
        Fault(
            fact=f"--grid {text}",
            rule="it must be pairs axis=degree with commas between them, each axis once; axes are "
            f"{', '.join(AXES)}; {' and '.join(OPTIONS)} may follow",
            remedy=f"write --grid {','.join(meant or ['tp=2', 'pp=2'])}",
        )
    )


def set_options(overrides: Iterable[str]) -> str:
    """Return overrides as options of a command line, quoted for a shell: a placement of layers has pipes."""
    return " ".join(f"--set {shlex.quote(text)}" for text in overrides)


def degrees_of(text: str) -> dict[str, int]:
    """Return the degrees of tp, cp, pp and dp in a text such as ``tp=2,pp=2``; 1 where it has none above 0.

    Raises:
        ConfigError: The text is not of this form, or names an axis that no grid has.
    """
    given = dict(text.split("=", 1) for text in grid_overrides(text))
    return {
        axis: max(1, int(given.get(f"parallel.{axis}", 1))) for axis in ("tp", "cp", "pp", "dp")
    }
