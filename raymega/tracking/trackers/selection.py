"""The trackers that a job chooses, and what is wrong with their settings before anything starts."""

from __future__ import annotations

import netrc
from collections.abc import Iterator, Mapping
from os.path import expandvars
from typing import Any
from urllib.parse import urlsplit

from raymega.config.schema import Job
from raymega.errors import Fault
from raymega.plugins import Plugin, Registry, module_faults, registry_of

CONSOLE = "console"
"""Tracker of the command line itself, which has the stream."""
WANDB_HOST = "https://api.wandb.ai"


def chosen_trackers(job: Job) -> list[Plugin]:
    """Return the rows of the job's trackers that have a thread, in the job's order."""
    registry = registry_of(job.plugins.modules)
    rows = [registry.find("tracker", name) for name in job.tracking.trackers if name != CONSOLE]
    return [row for row in rows if row.name != "mlflow" or job.tracking.mlflow_uri != "off"]


def tracker_faults(values: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield what the trackers lack on this machine: packages, a login, an environment variable.

    Args:
        values: Values of the job's valid fields, by dotted path.
    """
    modules: tuple[str, ...] = values.get("plugins.modules", ())
    # A module with faults has them reported by the job's rules.
    registry = Registry() if module_faults(modules) else registry_of(modules)
    trackers = values.get("tracking.trackers", ())
    for name in trackers:
        if name in registry.names("tracker"):
            yield from registry.package_faults("tracker", name, field="tracking.trackers")
    if "wandb" in trackers and values.get("tracking.wandb_mode") == "online":
        yield from _login_faults()
    if "webhook" in trackers and "tracking.webhook_url" in values:
        yield from _variable_faults(values["tracking.webhook_url"])


def _variable_faults(url: str) -> Iterator[Fault]:
    found = expandvars(url)
    if urlsplit(found).scheme not in ("http", "https"):
        is_variable = url.startswith("$")
        yield Fault(
            fact=f"tracking.webhook_url={url!r}"
            + (" is not set in the environment, or is no address" if is_variable else ""),
            rule="it is an address that begins with http:// or https://, or names a variable that holds one",
            remedy=f"run `export {url[1:]}=https://...`"
            if is_variable
            else "write https://HOST/PATH",
        )


def _login_faults() -> Iterator[Fault]:
    """Yield a fault where wandb would ask for a key: neither the environment nor ~/.netrc has one."""
    if expandvars("$WANDB_API_KEY") != "$WANDB_API_KEY":
        return
    base = expandvars("$WANDB_BASE_URL")
    host = urlsplit(base if base.startswith("http") else WANDB_HOST).hostname or ""
    try:
        is_known = netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        is_known = False
    if not is_known:
        yield Fault(
            fact=f"tracking.wandb_mode=online, and this machine has no login of {host}",
            rule="neither WANDB_API_KEY nor ~/.netrc has a key",
            remedy="run `wandb login`, or --set tracking.wandb_mode=offline and `wandb sync` later",
        )
