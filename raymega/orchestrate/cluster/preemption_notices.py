"""Polls the preemption notices of AWS and Google for this machine over HTTP.

Kubernetes sends a SIGTERM instead, which ``cluster/node_agent.py`` handles; it also acts on the notices.
"""

from __future__ import annotations

import json
import logging
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPException
from typing import Literal

from raymega.errors import ConfigError

log = logging.getLogger(__name__)

Provider = Literal["aws", "gcp", "none"]
ADDRESSES = {"aws": "http://169.254.169.254", "gcp": "http://metadata.google.internal"}
TIMEOUT_S = 2.0
TOKEN_LIFE_S = 21600
GCP_NOTICE_S = 30.0
"""Time from Google's notice, which has no deadline, to the machine's end, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """Notice that this machine will be taken away in ``seconds``."""

    seconds: float
    reason: str


Ask = Callable[[], Notice | None]
"""Function that polls for a notice; it returns None when there is none, or no answer."""


def asker(provider: Provider, *, address: str = "") -> Ask:
    """Return the function that polls ``provider``; ``address`` replaces its usual metadata address."""
    if provider == "aws":
        return AwsNotices(address or ADDRESSES["aws"])
    if provider == "gcp":
        return lambda: _ask_gcp(address or ADDRESSES["gcp"])
    return lambda: None


def choose_provider(name: str) -> Provider:
    """Return ``name``, or for ``auto`` the provider whose metadata service answers on this machine.

    Raises:
        ConfigError: The name is unknown.
    """
    known: dict[str, Provider] = {"aws": "aws", "gcp": "gcp", "none": "none"}
    if name in known:
        return known[name]
    if name != "auto":
        raise ConfigError(
            fact=f"--provider {name!r}",
            rule="it must be auto, aws, gcp or none",
            remedy="on Kubernetes give none: there the notice is a SIGTERM",
        )
    # auto: the first metadata service that answers
    if AwsNotices(ADDRESSES["aws"]).is_there():
        return "aws"
    status, _ = _call(f"{ADDRESSES['gcp']}/computeMetadata/v1/", {"Metadata-Flavor": "Google"})
    return "gcp" if status == 200 else "none"


class AwsNotices:
    """Spot notices of the EC2 instance metadata service, version 2, whose requests need a session token."""

    def __init__(self, address: str) -> None:
        self._address, self._token = address.rstrip("/"), ""

    def is_there(self) -> bool:
        """Return whether the service answers with a token."""
        return bool(self._renewed())

    def __call__(self) -> Notice | None:
        """Poll for a notice, see Ask; the service answers 404 as long as there is none."""
        path = f"{self._address}/latest/meta-data/spot/instance-action"
        status, text = _call(path, {"X-aws-ec2-metadata-token": self._token or self._renewed()})
        if status == 401:  # the token has expired
            status, text = _call(path, {"X-aws-ec2-metadata-token": self._renewed()})
        if status != 200:
            return None
        # the answer is JSON with "action", such as terminate, and "time" in UTC
        try:
            action = json.loads(text)
            at = datetime.fromisoformat(action["time"].replace("Z", "+00:00"))
            seconds = max(0.0, (at - datetime.now(UTC)).total_seconds())
            return Notice(seconds=seconds, reason=f"AWS will {action['action']} this spot instance")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("what %s answers is no notice (%r): %.80s", path, error, text)
            return None

    def _renewed(self) -> str:
        life = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_LIFE_S)}
        status, text = _call(f"{self._address}/latest/api/token", life, method="PUT")
        self._token = text if status == 200 else ""
        return self._token


def _ask_gcp(address: str) -> Notice | None:
    path = f"{address.rstrip('/')}/computeMetadata/v1/instance/preempted"
    status, text = _call(path, {"Metadata-Flavor": "Google"})
    if status != 200 or text.strip().upper() != "TRUE":
        return None
    return Notice(seconds=GCP_NOTICE_S, reason="Google preempts this instance")


def _call(url: str, headers: dict[str, str], *, method: str = "GET") -> tuple[int, str]:
    """Return HTTP status and text; status 0 when there is no answer."""
    request = urllib.request.Request(url, headers=headers, method=method)
    # no proxy: link-local addresses are reachable from this machine only
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            return int(answer.status), answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, ""
    # an answer that breaks off or is no HTTP, and a token that is none, are no notice either
    except (OSError, HTTPException, ValueError):
        return 0, ""
