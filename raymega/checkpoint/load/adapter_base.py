"""The base of a run with adapters: the checkpoint that it began with, in each restart.

Its own checkpoints have the adapters alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from raymega.checkpoint.format.keys import ROOT, is_manifest
from raymega.checkpoint.format.manifest import find_restore
from raymega.checkpoint.tools.inspection import open_root
from raymega.errors import Fault, RaymegaError
from raymega.storage.store import Store

FIELD = "checkpoint.init_from"


def base_of(asked: str, own: Store) -> str:
    """Return the URI of the manifest from which a run with adapters reads its base, now and in each restart.

    It is the one that the run began with, where ``asked`` still names it, else the newest that ``asked``
    names: a run that has been trained further has another model. Where nothing can be read it is ``asked``.

    Args:
        asked: The job's ``checkpoint.init_from``.
        own: Store of the run.
    """
    began = _base_at_start(own)
    if _is_exact(began) and f"{began}/".startswith(f"{asked.rstrip('/')}/"):
        return began
    try:
        store, manifest = open_root(asked)
    except RaymegaError:  # start_faults tells
        return asked
    return f"{store.uri}/{manifest.key}"


def base_faults(base: str, own: Store) -> Iterator[Fault]:
    """Return the fault of a run that would resume on another ``base`` than its adapters were trained on.

    A copy has the key of what was copied.
    """
    began = _base_at_start(own)
    is_same = base == began or base.endswith(f"/{began[began.rfind(ROOT) :]}")
    if (began == "none" or _is_exact(began)) and not is_same:
        yield Fault(
            fact=f"{FIELD}={base!r}: the run was begun with {began}",
            rule="its checkpoints have the adapters alone, which fit the weights that they were trained on",
            remedy=f"set {FIELD}={began}, or begin another run with --set run.name=NAME",
        )


def _base_at_start(own: Store) -> str:
    """Return ``checkpoint.init_from`` of the newest whole checkpoint in a run's store; empty without one."""
    try:
        manifest = find_restore(own).manifest
    except RaymegaError:  # reported by the driver
        return ""
    told = manifest.job.get("checkpoint") if manifest else None
    return str(told.get("init_from", "none")) if isinstance(told, dict) else ""


def _is_exact(uri: str) -> bool:
    """Return whether a URI names one manifest."""
    return ROOT in uri and is_manifest(uri[uri.rfind(ROOT) :])
