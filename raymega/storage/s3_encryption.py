"""Server-side encryption of what is written: set like the rest of S3, by environment or profile.

It owns the two settings and their refusals. Reading needs neither: the service knows.
"""

from __future__ import annotations

from typing import Any

from botocore.session import Session

from raymega.errors import Fault, StorageError

KIND_VARIABLE, KEY_VARIABLE = "RAYMEGA_S3_ENCRYPTION", "RAYMEGA_S3_KMS_KEY_ID"
KINDS = ("AES256", "aws:kms", "aws:kms:dsse")
SETTINGS = {name.lower(): (name.lower(), name, "", None) for name in (KIND_VARIABLE, KEY_VARIABLE)}
"""For the client's own search: name in a profile, name in the environment, default, conversion."""
WRITES = ("PutObject", "CreateMultipartUpload")


def encryption_of(session: Session) -> dict[str, str]:
    """Request arguments of every write; none when nothing is set.

    Raises:
        StorageError: The settings do not fit together.
    """
    kind, key = (session.get_config_variable(name) for name in SETTINGS)
    if not kind and not key:
        return {}
    if kind not in KINDS or (key and kind == "AES256"):
        raise StorageError(_odd(kind, has_key=bool(key)))
    return {"ServerSideEncryption": kind} | ({"SSEKMSKeyId": key} if key else {})


def encrypt_writes(client: Any, arguments: dict[str, str]) -> None:  # boto3's has no static type
    """From now on every write of ``client`` carries ``arguments``."""

    def add(params: dict[str, Any], **_: object) -> dict[str, Any]:
        return params | arguments

    for operation in WRITES if arguments else ():
        client.meta.events.register(f"provide-client-params.s3.{operation}", add)


def _odd(kind: str, *, has_key: bool) -> Fault:
    key = f" with {KEY_VARIABLE}" if has_key else ""
    return Fault(
        fact=f"{KIND_VARIABLE}={kind!r}{key}",
        rule=f"it is one of {', '.join(KINDS)}, and only the kms ones take a key",
        remedy=f"set {KIND_VARIABLE}=aws:kms for a key of your own, AES256 for the service's",
    )
