"""All goldens as texts by file, in units of work that a test, or the writer, does at once.

A golden is what is printed, byte for byte, but for this:

- the scratch folder is called FOLDER, jobs/verify.yaml JOB, and the home folder HOME;
- of long lines of JSON, breaks are put after commas, which can be taken out again;
- of a plan, ranks that hold the same stand once, beside the sha256 of all that was printed;
- of a mistake of usage, only the exit code is kept: the words are typer's;
- a case with a ``mask`` has stars where versions of pyarrow or pydantic would show;
- a manifest has stars for checksums, losses and norms, and the sha256 of the unmasked bytes beside it.

Last digits of floats depend on Python (3.12 sums more exactly), the C library, torch and the kind of
machine. Where these are those of made_on.json every bit counts; elsewhere floats may differ by
tests.golden.tolerances, and digests by anything.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from tests.golden import pinned, plans, refusals, schedules
from tests.golden.commands import called

MADE_ON, LOSSES = "made_on.json", "losses.json"
REFUSALS = "refusals"
CHECKPOINT = ("manifest.txt", "files.txt", "digests.txt")


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Files that are made together.

    Attributes:
        name: For people.
        files: Their names.
        make: Makes their texts.
    """

    name: str
    files: tuple[str, ...]
    make: Callable[[], dict[str, str]]


def units() -> Iterator[Unit]:
    """All of them; the ones that take long come first, as tests are shared out in order."""
    numbers = (LOSSES, *(f"checkpoint/{name}" for name in CHECKPOINT))
    yield Unit(name="numbers", files=numbers, make=_numbers)
    for job in plans.job_names():
        make = partial(plans.texts_of, job)
        yield Unit(name=f"plan-{job}", files=tuple(plans.files_of(job)), make=make)
    yield Unit(name="plan-published", files=(plans.PUBLISHED,), make=plans.published)
    yield Unit(name="schedules", files=tuple(schedules.file_names()), make=schedules.texts)
    yield Unit(name="made-on", files=(MADE_ON,), make=lambda: {MADE_ON: made_on()})
    yield Unit(name="schema", files=("schema.json",), make=_schema)
    refused = tuple(refusals.file_names())
    yield Unit(name=REFUSALS, files=refused, make=lambda: refusals.refused().texts)


def everything() -> dict[str, str]:
    """Every golden by its name."""
    return {name: text for unit in units() for name, text in unit.make().items()}


def _schema() -> dict[str, str]:
    home = Path.home() / ".raymega"
    return {"schema.json": called("schema").stdout.replace(str(home), f"HOME/{home.name}")}


def made_on() -> str:
    """What decides the last digits of floats here."""
    found = {
        "python": ".".join(map(str, sys.version_info[:2])),
        "libc": " ".join(platform.libc_ver()),
        "torch": version("torch"),
        "machine": platform.machine(),
        "processor": _processor(),
    }
    return json.dumps(found, indent=2) + "\n"


def _processor() -> str:
    """Kind of this processor, by which libraries of linear algebra choose their code."""
    lines = dict(line.split("\t", 1) for line in _cpu_info() if "\t" in line)
    named = (lines.get(name, "").strip(": \t") for name in ("vendor_id", "cpu family", "model"))
    flags = sorted(lines.get("flags", "").strip(": ").split())
    return f"{'/'.join(named)} {hashlib.sha256(' '.join(flags).encode()).hexdigest()[:8]}"


def _cpu_info() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:  # no Linux
        return []


def _numbers() -> dict[str, str]:
    found = pinned.computed()
    checkpoint = {f"checkpoint/{name}": text for name, text in found["checkpoint"].items()}
    curves = {name: [f"{steps}" for steps in curve] for name, curve in found["curves"].items()}
    return {LOSSES: json.dumps(curves, indent=2) + "\n", **checkpoint}
