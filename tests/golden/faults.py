"""What is told of job files with mistakes: the cases of cases/jobs.yaml, and every field by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from raymega import api
from raymega.config.fields import Section
from raymega.config.load import parse_job, parse_mapping
from raymega.config.schema import Job
from raymega.errors import RaymegaError
from raymega.plan.validation.registry import RULES
from raymega.plan.validation.rule import Rule
from raymega.plan.validation.unused_fields import PARTNERS, unused_values
from tests.golden.scratch import placed, plain
from tests.support.jobs import VERIFY

CASES = Path(__file__).parent / "cases" / "jobs.yaml"
FIELDS = "fields"
NO_FAULT = "no fault"
Case = Mapping[str, Any]


def groups() -> dict[str, dict[str, Case]]:
    """Cases by group and name."""
    table = yaml.safe_load(CASES.read_text())
    return {
        group: {
            name: case if isinstance(case, dict) else {"set": case} for name, case in cases.items()
        }
        for group, cases in table.items()
    }


def told_of_cases(folder: Path, cases: Mapping[str, Case]) -> str:
    """Every case with its overrides and what is told of it, as `raymega plan` and `train` do."""
    return "\n".join(_told_of_case(folder, name, case) for name, case in cases.items())


def told_of_fields() -> str:
    """What is told when a field is given a mapping, which none of them is; of every field there is."""
    faults = [
        str(fault)
        for section, field in _fields()
        for fault in parse_mapping({section: {field: {"a": 1}}}).faults
        if str(fault).startswith(f"{section}.{field}=")
    ]
    return "\n".join(faults) + "\n"


def idle_rules() -> list[str]:
    """Rows of the tables of rules that refuse no case, by the fields that they read."""
    idle = {rule.reads: rule for rule in RULES}
    unread = set(PARTNERS)
    for case in (case for cases in groups().values() for case in cases.values() if "set" in case):
        values = parse_job(VERIFY, case["set"]).values
        for reads in [reads for reads, rule in idle.items() if _refuses(rule, values)]:
            del idle[reads]
        unread -= unused_values(values).keys()
    return [*map(", ".join, idle), *sorted(unread)]


def _refuses(rule: Rule, values: Mapping[str, Any]) -> bool:
    is_known = all(path in values for path in rule.reads)
    return is_known and bool(rule(*(values[path] for path in rule.reads)))


def _fields() -> Iterator[tuple[str, str]]:
    for section, info in Job.model_fields.items():
        kind = info.annotation
        assert isinstance(kind, type) and issubclass(kind, Section), section
        yield from ((section, field) for field in kind.model_fields)


def _told_of_case(folder: Path, name: str, case: Case) -> str:
    lines = [f"== {name}", *(f"--set {text}" for text in case.get("set", ()))]
    overrides = [placed(text, folder) for text in case.get("set", ())]
    flags = {"is_for_training": "train" in case, "is_in_ray_job": "in_ray" in case}
    try:
        with patch.dict("os.environ", case.get("env", {})):
            api.load_job(_job_file(folder, case), overrides, **flags)
        lines.append(NO_FAULT)
    except RaymegaError as error:
        lines.append(f"exit {error.exit_code}")
        lines += [f"{type(error).__name__}: {fault}" for fault in error.faults]
    return plain("\n".join(lines), folder, mask=case.get("mask", "")) + "\n"


def _job_file(folder: Path, case: Case) -> Path:
    if "path" in case:
        return Path(placed(case["path"], folder))
    if "file" not in case:
        return VERIFY
    path = Path("job.yaml")
    path.write_text(case["file"])
    return path
