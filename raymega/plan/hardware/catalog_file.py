"""Read an accelerator that the catalogue lacks from a YAML file of its differences from an entry.

The module reads and validates; ``raymega.plan.hardware.catalog`` has the figures of known devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, ValidationError

from raymega.config.fields import Positive, PositiveFloat, Section
from raymega.config.yaml_text import read_yaml
from raymega.errors import ConfigError, Fault, one_line, raise_faults
from raymega.plan.hardware.catalog import CATALOGUE, Accelerator, accelerator

SUFFIXES = (".yaml", ".yml")
Share = Annotated[float, Field(ge=1e-6, le=1)]
Rate = Annotated[float, Field(ge=1, allow_inf_nan=False)]
"""Operations or bytes of a second; below 1 no predicted time is a number."""
Delay = Annotated[float, Field(gt=0, le=1000)]
"""Seconds before something begins."""


class FittedFigures(Section):
    """Constants that a run on the device has shown; others are those of the device that it is like."""

    matmul_share: Share | None = None
    matmul_depth: PositiveFloat | None = None
    matmul_waves: PositiveFloat | None = None
    matmul_8_bit_share: Share | None = None
    matmul_4_bit_share: Share | None = None
    attention_share: Share | None = None
    older_attention_share: Share | None = None
    memory_share: Share | None = None
    launch_s: Delay | None = None
    link_share: Share | None = None
    network_share: Share | None = None
    link_latency_s: Delay | None = None
    network_latency_s: Delay | None = None


class AcceleratorFigures(Section):
    """Content of the file: a name, the device of the catalogue that it is like, and what differs."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")]
    like: str
    peak_16_bit_flops: Rate | None = None
    peak_32_bit_flops: Rate | None = None
    peak_8_bit_flops: Annotated[float, Field(ge=0)] | None = None
    peak_4_bit_flops: Annotated[float, Field(ge=0)] | None = None
    memory_bytes: Positive | None = None
    memory_bytes_per_s: Rate | None = None
    num_cores: Positive | None = None
    shared_cores: Annotated[float, Field(ge=0)] | None = None
    straggler: Annotated[float, Field(ge=1, le=1e6)] | None = None
    link_bytes_per_s: Rate | None = None
    devices_per_node: Positive | None = None
    network_bytes_per_s: Rate | None = None
    host_bytes_per_s: Rate | None = None
    known_error: str | None = None
    measured_formats: tuple[Literal["16-bit", "8-bit", "4-bit", "32-bit"], ...] | None = None
    price_per_hour: Annotated[float, Field(ge=0)] | None = None
    spot_price_per_hour: Annotated[float, Field(ge=0)] | None = None
    interruptions_per_day: Annotated[float, Field(ge=0)] | None = None
    fitted: FittedFigures = FittedFigures()


def find_accelerator(text: str, *, field: str = "--gpu") -> Accelerator:
    """Return the catalogue's entry of that name, or the accelerator in the YAML file ``text``.

    Args:
        text: Name in the catalogue, or path that ends with .yaml or .yml.
        field: Field or option that holds the text, for messages.

    Raises:
        ConfigError: The file is missing, is no YAML, or holds something that no device has.
        PlanError: The catalogue has no such name.
    """
    if not text.endswith(SUFFIXES):
        return accelerator(text, field=field)
    path = Path(text)
    figures = _figures(path, field)
    raise_faults(ConfigError, _name_faults(path, figures))
    base = CATALOGUE[figures.like]
    shares = figures.fitted.model_dump(exclude_none=True)
    if "attention_share" in shares:  # of the kernel that the user has, whichever it is
        shares = {"older_attention_share": 0.0} | shares
    fitted = replace(base.fitted, **shares)
    given = figures.model_dump(exclude_none=True, exclude={"like", "fitted"})
    if "known_error" not in given:  # nothing was measured on a device that is only described
        given.setdefault("measured_formats", ())
    return replace(base, **given, fitted=fitted, driver_name="")


def _figures(path: Path, field: str) -> AcceleratorFigures:
    try:
        raw = read_yaml(path.read_text(encoding="utf-8"))
        return AcceleratorFigures.model_validate(raw)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            fact=f"{field} {path}: {one_line(error)}",
            rule="an accelerator that the catalogue lacks is a YAML file that can be read",
            remedy="write one as docs/planner.md shows",
        ) from error
    except ValidationError as error:
        known = ", ".join(AcceleratorFigures.model_fields)
        raise ConfigError(
            *(
                Fault(
                    fact=f"{path}: {'.'.join(map(str, detail['loc'])) or 'the file'}"
                    + ("" if detail["type"] == "missing" else f"={detail['input']!r}"),
                    rule=detail["msg"][:1].lower() + detail["msg"][1:],
                    remedy=f"a file has name, like, and of {known} what differs",
                )
                for detail in error.errors()
            )
        ) from error


def _name_faults(path: Path, figures: AcceleratorFigures) -> Iterator[Fault]:
    names = ", ".join(CATALOGUE)
    # the device that the file refers to
    if figures.like not in CATALOGUE:
        yield Fault(
            fact=f"{path}: like={figures.like!r}",
            rule=f"what the file leaves out is that of a device of the catalogue: {names}",
            remedy="name the nearest of them",
        )
    # its own name
    if figures.name in CATALOGUE:
        yield Fault(
            fact=f"{path}: name={figures.name!r}",
            rule="the catalogue has a device of that name, with its own expected error",
            remedy=f"take another name, such as {figures.name}-mine",
        )
