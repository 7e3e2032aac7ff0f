"""Job whose fields are being changed, and the list of the changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raymega.config.schema import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Field whose value differs from the job's; ``why`` may be empty."""

    field: str
    old: object
    new: object
    why: str = ""

    def __str__(self) -> str:
        text = f"{self.field} {self.old} -> {self.new}"
        return f"{text} ({self.why})" if self.why else text


class Draft:
    """Values of a job being shrunk, with the changes that the report lists."""

    def __init__(self, job: Job) -> None:
        self.values: dict[str, dict[str, Any]] = job.model_dump()
        self.original: dict[str, dict[str, Any]] = job.model_dump()
        self._reasons: dict[str, str] = {}

    def set(self, field: str, new: object, why: str = "") -> None:
        section, name = _section_of(self.values, field)
        section[name] = new
        self._reasons[field] = why

    def changes(self) -> tuple[Change, ...]:
        found = []
        for field, why in self._reasons.items():
            section, name = _section_of(self.original, field)
            old, new = section[name], _section_of(self.values, field)[0][name]
            if old != new:
                found.append(Change(field=field, old=old, new=new, why=why))
        return tuple(found)

    def job(self) -> Job:
        return Job.model_validate(self.values)


def _section_of(values: dict[str, Any], field: str) -> tuple[dict[str, Any], str]:
    """Return the section of the dotted path ``field``, and the field's name in it."""
    *sections, name = field.split(".")
    for section in sections:
        values = values[section]
    return values, name
