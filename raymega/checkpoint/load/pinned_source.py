"""Checkpoints of others that a run reads: at its start, or in each restart the base of adapters and a live teacher.

A run that is trained further has a newer one at any time, so a job names the manifest before its ranks start. The
run's own checkpoints keep its URI, and lack the weights that each restart reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from shlex import quote

from raymega.checkpoint.format.keys import ROOT, is_manifest
from raymega.checkpoint.format.manifest import Manifest, find_restore
from raymega.checkpoint.load.fingerprint import BASE, TEACHER, overwritten_faults
from raymega.checkpoint.load.init_from import open_whole, unlike_faults
from raymega.checkpoint.tools.inspection import open_root
from raymega.config.schema import CheckpointSection, ModelSection
from raymega.errors import Fault, RaymegaError
from raymega.storage.store import Store

RULES = {
    BASE: "its checkpoints have the adapters alone, which fit the weights that they were trained on",
    TEACHER: "with another teacher the run would have another loss from here on",
}


def pinned(asked: str, own: Store, *, field: str, is_read: bool = True) -> str:
    """Return the URI of the manifest from which a run reads the weights of ``field``, now and in each restart.

    It is the one that the run began with, where ``asked`` still names it, else the newest that ``asked``
    names: a run that has been trained further has another model. Where nothing can be read it is ``asked``.

    Args:
        asked: The job's value of ``field``.
        own: Store of the run.
        field: BASE, TEACHER or ``checkpoint.init_adapter``.
        is_read: Whether the run reads it; if not, nothing is looked up there.
    """
    began = _at_start(own, field)
    if _is_exact(began) and f"{began}/".startswith(f"{asked.rstrip('/')}/"):
        return began
    if not is_read:
        return asked
    try:
        store, manifest = open_root(asked)
    except RaymegaError:  # reported before anything starts
        return asked
    return f"{store.uri}/{manifest.key}"


def pin_faults(now: str, own: Store, *, field: str) -> Iterator[Fault]:
    """Yield the fault of a run that would resume with other weights of ``field`` than it began with: those of ``now``."""
    manifest = _newest(own)
    began = _at_start(own, field)
    is_same = now == began or _is_copy(now, began)
    if (began == "none" or _is_exact(began)) and not is_same:
        yield Fault(
            fact=f"{field}={now!r}: the run was begun with {began}",
            rule=RULES[field],
            remedy=f"set {field}={began}, or begin another run with --set run.name=NAME",
        )
    elif manifest is not None:
        remedy = f"set {field} to a copy of what the run began with, or begin another run with --set run.name=NAME"
        yield from overwritten_faults(manifest, now, field=field, remedy=remedy)


def teacher_faults(uri: str, model: ModelSection) -> list[Fault]:
    """Return the faults of a teacher's checkpoint: it is there, whole, and of the teacher's model."""
    if uri == "none":
        return []
    found = open_whole(uri)
    if isinstance(found, list):
        faults = found
    else:
        remedy = f"set distillation.teacher_model to the checkpoint's model section, which `raymega checkpoint show {quote(uri)}` prints"
        unlike = unlike_faults(CheckpointSection(init_from=uri), model, found)
        faults = [replace(fault, remedy=remedy) for fault in unlike]
    return [
        replace(fault, fact=f"of the teacher: {fault.fact.replace(BASE, TEACHER)}")
        for fault in faults
    ]


def _is_copy(now: str, began: str) -> bool:
    """Return whether one URI is that of a copy of the other, as far as both can be read.

    A copy has the key of what was copied, and so have all imported models; they were written at other times.
    """
    if not now.endswith(f"/{began[began.rfind(ROOT) :]}"):
        return False
    try:
        return open_root(now).manifest.created == open_root(began).manifest.created
    except RaymegaError:  # the first one has moved, or is out of reach
        return True


def _newest(own: Store) -> Manifest | None:
    """Return the manifest of the newest whole checkpoint in a run's store; None without one."""
    try:
        return find_restore(own).manifest
    except RaymegaError:  # reported by the driver
        return None


def _at_start(own: Store, field: str) -> str:
    """Return the value of ``field`` in the newest whole checkpoint in a run's store; empty without one."""
    manifest = _newest(own)
    section, _, name = field.partition(".")
    told = manifest.job.get(section) if manifest else None
    return str(told.get(name, "none")) if isinstance(told, dict) else ""


def _is_exact(uri: str) -> bool:
    """Return whether a URI names one manifest."""
    return ROOT in uri and is_manifest(uri[uri.rfind(ROOT) :])
