"""What clouds say to a machine that they are about to take back: AWS and Google, asked over HTTP.

Kubernetes sends a signal instead, which is node_agent's. What follows from a notice is so too.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from raymega.errors import ConfigError, Fault

Provider = Literal["aws", "gcp", "none"]
ADDRESSES = {"aws": "http://169.254.169.254", "gcp": "http://metadata.google.internal"}
TIMEOUT_S = 2.0
TOKEN_LIFE_S = 21600
GCP_NOTICE_S = 30.0
"""Google says that a machine goes, and not when: it has half a minute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """This machine will be taken away in ``seconds``."""

    seconds: float
    reason: str


Ask = Callable[[], Notice | None]
"""One question; None when the machine stays, or when nobody answers."""


def asker(provider: Provider, *, address: str = "") -> Ask:
    """What to ask ``provider``; its metadata service is at ``address``, or where it always is."""
    if provider == "aws":
        return AwsNotices(address or ADDRESSES["aws"])
    if provider == "gcp":
        return lambda: _ask_gcp(address or ADDRESSES["gcp"])
    return lambda: None


def choose_provider(name: str) -> Provider:
    """``name`` itself, or for ``auto`` whose metadata service answers here.

    Raises:
        ConfigError: Nobody has that name.
    """
    known: dict[str, Provider] = {"aws": "aws", "gcp": "gcp", "none": "none"}
    if name in known:
        return known[name]
    if name != "auto":
        raise ConfigError(_unknown(name))
    if AwsNotices(ADDRESSES["aws"]).is_there():
        return "aws"
    status, _ = _call(f"{ADDRESSES['gcp']}/computeMetadata/v1/", {"Metadata-Flavor": "Google"})
    return "gcp" if status == 200 else "none"


class AwsNotices:
    """Spot notices by the instance metadata service, version 2: each question bears a token."""

    def __init__(self, address: str) -> None:
        self._address, self._token = address.rstrip("/"), ""

    def is_there(self) -> bool:
        """It gives a token."""
        return bool(self._renewed())

    def __call__(self) -> Notice | None:
        """See Ask. A 404 is the answer of every day: nothing is going to happen."""
        path = f"{self._address}/latest/meta-data/spot/instance-action"
        status, text = _call(path, {"X-aws-ec2-metadata-token": self._token or self._renewed()})
        if status == 401:  # the token has expired
            status, text = _call(path, {"X-aws-ec2-metadata-token": self._renewed()})
        if status != 200:
            return None
        action = json.loads(text)
        at = datetime.fromisoformat(action["time"].replace("Z", "+00:00"))
        seconds = max(0.0, (at - datetime.now(UTC)).total_seconds())
        return Notice(seconds=seconds, reason=f"AWS will {action['action']} this spot instance")

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


def _unknown(name: str) -> Fault:
    return Fault(
        fact=f"--provider {name!r}",
        rule="it must be auto, aws, gcp or none",
        remedy="on Kubernetes give none: there the notice is a SIGTERM",
    )


def _call(url: str, headers: dict[str, str], *, method: str = "GET") -> tuple[int, str]:
    """Status and text; 0 when nobody answers. No proxy: these addresses are the machine's own."""
    request = urllib.request.Request(url, headers=headers, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""
    except OSError:
        return 0, ""
