"""Turns a failure of the S3 client into one fault that names bucket, key, endpoint and a remedy.

It owns the wording. Messages are composed from the service's error code and the client's error class,
never from a request or an endpoint as given, so they cannot contain credentials.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from botocore import exceptions as boto
from botocore.exceptions import BotoCoreError, ClientError

from raymega.errors import Fault, StorageError
from raymega.storage.store import RefusedError

ABSENT_CODES = frozenset({"NoSuchKey", "404", "NotFound"})
TAKEN_CODES = frozenset({"PreconditionFailed", "412"})
REFUSED_CODES = frozenset({"AccessDenied", "403", "AllAccessDisabled", "NoSuchBucket"})
UNKNOWN_STATUSES = frozenset({400, 405, 411, 501})
"""HTTP statuses by which services refuse an operation that they lack, or its form."""

_CREDENTIALS = (
    "requests are signed with the usual AWS credentials, on every node",
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE where driver and workers "
    "start, or give the nodes a role",
)
_BUCKET = (
    "the bucket must exist; it is not made here",
    "create it, or correct the bucket's name or AWS_ENDPOINT_URL_S3",
)
_ACCESS = (
    "the credentials need s3:ListBucket on the bucket, and s3:GetObject, s3:PutObject, "
    "s3:DeleteObject and s3:AbortMultipartUpload on its objects",
    "widen the policy, or use other credentials",
)
_REGION = (
    "requests go to the bucket's own region",
    "set AWS_DEFAULT_REGION to the bucket's region",
)
_ENDPOINT = (
    "the endpoint must answer over HTTP from the driver and from every node",
    "start or repair it, or correct AWS_ENDPOINT_URL_S3 (AWS_DEFAULT_REGION for AWS itself)",
)
_CLOCK = ("signatures are valid for 15 minutes", "set this machine's clock")
_OTHER = (
    "every request is tried several times before it counts as failed",
    "see the service's own log; if it is overloaded, try again later",
)
_BY_CODE = {
    "NoSuchBucket": _BUCKET,
    "404": _ENDPOINT,  # an S3 service would name what is missing; this is another HTTP server
    "AccessDenied": _ACCESS,
    "403": _ACCESS,
    "AllAccessDisabled": _ACCESS,
    "InvalidAccessKeyId": _CREDENTIALS,
    "SignatureDoesNotMatch": _CREDENTIALS,
    "ExpiredToken": _CREDENTIALS,
    "InvalidToken": _CREDENTIALS,
    "PermanentRedirect": _REGION,
    "301": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "RequestTimeTooSkewed": _CLOCK,
}
_BY_CLASS: tuple[tuple[tuple[type[Exception], ...], tuple[str, str]], ...] = (
    (
        (
            boto.NoCredentialsError,
            boto.PartialCredentialsError,
            boto.CredentialRetrievalError,
            boto.ProfileNotFound,
            boto.TokenRetrievalError,
            boto.SSOError,
        ),
        _CREDENTIALS,
    ),
    ((boto.HTTPClientError, boto.ConnectionError, ValueError), _ENDPOINT),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Location:
    """Bucket and endpoint of requests; the endpoint as the client resolved it, without credentials."""

    bucket: str
    endpoint: str


def code_of(error: ClientError) -> str:
    """Return the service's error code, such as ``NoSuchKey``, or the HTTP status of an empty answer."""
    return str(error.response.get("Error", {}).get("Code", "unknown"))


def status_of(error: ClientError) -> int:
    """Return the HTTP status of the service's answer; 0 where it is not known."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


@contextmanager
def failures(verb: str, key: str, place: S3Location) -> Iterator[None]:
    """Turn the client's exceptions into a StorageError; callers handle missing and taken keys inside it.

    Args:
        verb: Operation that was tried, for the message.
        key: Full name of the object in the bucket; may be empty.
        place: Bucket and endpoint of the request.
    """
    try:
        yield
    except (ClientError, BotoCoreError) as error:
        is_refused = isinstance(error, ClientError) and code_of(error) in REFUSED_CODES
        kind = RefusedError if is_refused else StorageError
        raise kind(fault_of(error, verb, key, place)) from error


def fault_of(error: Exception, verb: str, key: str, place: S3Location) -> Fault:
    """Return the fault that describes ``error``, with a rule and a remedy that fit its code or class."""
    rule, remedy = _rule_of(error)
    name = f"s3://{place.bucket}/{key}"
    return Fault(
        fact=f"could not {verb} {name} at {place.endpoint}: {_cause(error)}",
        rule=rule,
        remedy=remedy,
    )


def _cause(error: Exception) -> str:
    if isinstance(error, ClientError):
        return code_of(error)
    return type(error).__name__


def _rule_of(error: Exception) -> tuple[str, str]:
    if isinstance(error, ClientError):
        return _BY_CODE.get(code_of(error), _OTHER)
    return next((text for kinds, text in _BY_CLASS if isinstance(error, kinds)), _OTHER)
