"""Warns of a run at work whose checkpoints another run reads."""

from __future__ import annotations

import logging

from raymega.checkpoint.tools.inspection import open_root
from raymega.errors import RaymegaError
from raymega.orchestrate.core.clock import Clock
from raymega.orchestrate.run_store.lease import driver_of

log = logging.getLogger(__name__)


def warn_of_driver(field: str, uri: str, clock: Clock) -> None:
    """Warn of a checkpoint that the driver of its own run will delete; one that cannot be read is told elsewhere.

    Args:
        field: Name of the job's field.
        uri: URI of the manifest that the field names.
        clock: Clock by which a lease has expired.
    """
    try:
        driver = driver_of(open_root(uri).store, now=clock.timestamp())
    except RaymegaError:
        return
    if driver is not None:
        log.warning(
            "%s=%s is of a run that is trained by %s, which deletes all but its newest checkpoint.keep_last; "
            "ranks that read it later, as after a restart, need a copy: raymega checkpoint copy %s FOLDER",
            field, uri, driver.holder, uri,
        )  # fmt: skip
