"""Opens the store of a URI and checks URIs, through one table of schemes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, Protocol

from raymega.config.hub import download, hub_name
from raymega.errors import ConfigError, Fault, StorageError, raise_faults
from raymega.plugins import (
    call_plugin,
    code_of,
    find,
    is_known,
    known_names,
    use_entry_point,
)
from raymega.storage.local import LocalStore, split_file_uri
from raymega.storage.named_store import NamedStore
from raymega.storage.store import Store, folders_below


class Backend(Protocol):
    """Functions of one URI scheme."""

    def open_store(self, uri: str) -> Store:
        """Return the store at a URI without faults; nothing is accessed yet."""

    def uri_faults(self, uri: str, *, field: str) -> list[Fault]:
        """Return the faults of the URI's text; nothing is accessed."""

    def access_faults(self, uri: str, *, field: str, is_for_writing: bool) -> list[Fault]:
        """Probe the store within seconds, leave nothing behind, and return why it cannot be used."""

    def drop_unfinished(
        self, uri: str, *, older_than: timedelta, now: datetime, is_dry: bool
    ) -> list[str]:
        """Remove unfinished uploads of killed writers, and return their keys."""


class Folders:
    """The scheme ``file``, and the base of others whose root is a folder."""

    def open_store(self, uri: str) -> Store:
        """See Backend."""
        return LocalStore(_folder(uri))

    def uri_faults(self, uri: str, *, field: str) -> list[Fault]:
        """See Backend."""
        host = split_file_uri(uri)[0] if "://" in uri else ""
        if host not in ("", "localhost"):
            rule = f"file URIs have no host, but this one names {host!r}"
            remedy = "write file:///path with three slashes"
            return [Fault(fact=f"{field}={uri!r}", rule=rule, remedy=remedy)]
        return []

    def access_faults(self, uri: str, *, field: str, is_for_writing: bool) -> list[Fault]:
        """Write and remove a probe in the nearest folder that exists, and return why that failed."""
        if not is_for_writing:
            return []
        folder = _folder(uri)
        # the folder itself is not created: a check leaves nothing behind
        try:
            existing = next(at for at in (folder, *folder.parents) if at.exists())
            with tempfile.TemporaryDirectory(dir=existing, prefix=".raymega-probe-") as probe:
                LocalStore(Path(probe)).put("probe", [b"probe"], overwrite=False)
        except (OSError, StorageError) as error:
            cause = error.strerror if isinstance(error, OSError) else error.faults[0]
            return [
                Fault(
                    fact=f"{field}={str(folder)!r} cannot be written to: {cause}",
                    rule="the folder, or the nearest one above it that exists, must be writable",
                    remedy="correct its permissions or choose another folder",
                )
            ]
        return []

    def drop_unfinished(self, uri: str, **_: object) -> list[str]:  # noqa: ARG002
        """Return no keys: in a folder each put removes old leftovers itself (``storage/local.py``)."""
        return []


def _s3() -> Backend:
    from raymega.storage import s3  # here, because importing boto3 is slow

    return s3


BACKENDS: Mapping[str, Callable[[], Backend]] = {"file": Folders, "s3": _s3}
"""Backends of the package by scheme; `raymega/plugins.py` registers them beside those of plug-ins."""


def open_store(uri: str) -> Store:
    """Return the store whose root is ``uri``: a path, ``file:///path`` or ``s3://bucket/prefix``.

    Nothing is accessed yet.

    Raises:
        ConfigError: The URI has none of these forms.
    """
    raise_faults(ConfigError, _uri_faults(uri, field="uri"))
    row = find("store", _scheme(uri))
    store = call_plugin(row, lambda: _backend(uri).open_store(uri))
    return NamedStore(store, row) if row.is_outside else store


def load_client(uri: str) -> None:
    """Load the client library of the store at ``uri``, which takes a tenth of a second and more; asks for nothing."""
    if _scheme(uri) == "s3":
        from raymega.storage import s3

        s3.load_client()


def store_faults(uri: str, *, field: str = "checkpoint.uri") -> list[Fault]:
    """Return why ``uri`` cannot be written to; writes a probe object and removes it.

    Args:
        uri: Root of a store; it need not exist yet.
        field: Name of the job file's field, for the message.
    """
    return _access_faults(uri, field, is_for_writing=True)


def reading_faults(uri: str, *, field: str) -> list[Fault]:
    """Return why the store of ``uri`` cannot be read; whether ``uri`` exists is not checked.

    Args:
        uri: Root of a store.
        field: Name of the job file's field, for the message.
    """
    return _access_faults(uri, field, is_for_writing=False)


def folder_faults(uri: str, *, field: str) -> list[Fault]:
    """Return why ``uri`` cannot be a folder on the machine that opens it; accesses nothing."""
    if is_known("store", _scheme(uri)) and _scheme(uri) != "file":
        rule, remedy = "it must be a folder on a machine's own disks", "give a path"
        return [Fault(fact=f"{field}={uri!r}", rule=rule, remedy=remedy)]
    return _uri_faults(uri, field=field)


def apart_faults(uri: str, *, field: str, other: str, other_field: str) -> list[Fault]:
    """Return a fault when two URIs resolve to the same local folder, however they are written.

    Args:
        uri: URI of a folder in which old files are deleted.
        field: Name of its field in the job file, for the message.
        other: URI of a store whose files must be kept.
        other_field: Name of the field of ``other``.
    """
    mine, theirs = local_path(uri), local_path(other)
    if mine is None or theirs is None or mine.resolve() != theirs.resolve():
        return []
    return [
        Fault(
            fact=f"{field}={uri!r} is the folder of {other_field} too",
            rule="old files are removed there, and with them checkpoints that were to be kept",
            remedy=f"set {field} to a folder of its own, or to none",
        )
    ]


def drop_unfinished(
    uri: str, *, older_than: timedelta, now: datetime, is_dry: bool = False
) -> list[str]:
    """Remove the unfinished uploads of killed writers below ``uri``, which are invisible but take space.

    Args:
        uri: Root of a store.
        older_than: Age from which an upload counts as abandoned, such as a day.
        now: Current time, with its time zone.
        is_dry: Whether to list the uploads without removing them.

    Returns:
        Keys of the objects that were being uploaded; none for a folder, where ``put`` itself removes old leftovers.

    Raises:
        ConfigError: The URI is not that of a store.
        StorageError: The store refuses.
    """
    raise_faults(ConfigError, _uri_faults(uri, field="uri"))
    backend = _backend(uri)
    return call_plugin(
        find("store", _scheme(uri)),
        lambda: backend.drop_unfinished(uri, older_than=older_than, now=now, is_dry=is_dry),
    )


def is_anything_at(uri: str) -> bool:
    """Return whether ``uri`` is a folder, even an empty one, or a prefix with an object below it.

    Raises:
        ConfigError: The URI is not that of a store.
        StorageError: The store refuses.
    """
    folder = local_path(uri)
    if folder is not None:
        return folder.exists()
    # a listing of the names alone first: a run has millions of objects
    store = open_store(uri)
    return any(True for _ in folders_below(store, "")) or any(True for _ in store.list(""))


def _access_faults(uri: str, field: str, *, is_for_writing: bool) -> list[Fault]:
    faults = _uri_faults(uri, field=field)
    if faults:
        return faults
    row = find("store", _scheme(uri))
    return call_plugin(
        row,
        lambda: _backend(uri).access_faults(uri, field=field, is_for_writing=is_for_writing),
    )


def _backend(uri: str) -> Backend:
    backend: Backend = code_of("store", _scheme(uri))()
    return backend


def local_path(uri: str) -> Path | None:
    """Return the folder that ``uri`` names on this machine, or None for an object store."""
    return _folder(uri) if _scheme(uri) == "file" else None


def driver_folder(uri: str) -> Path:
    """Return the folder on this machine for the driver's files of the run at ``uri``.

    It is the run's own folder if that is local. For an object store it is a folder below ~/.raymega with
    the whole URI in its path, as two stores may each have a run of the same name.
    """
    places = [part for part in uri.replace(":", "/").split("/") if part.strip(".")]
    return local_path(uri) or Path.home().joinpath(".raymega", "remote", *places)


def _scheme(uri: str) -> str:
    scheme = uri.partition("://")[0].lower() if "://" in uri else "file"
    if "." in scheme and not is_known("store", scheme):
        use_entry_point(scheme.partition(".")[0])
    return scheme


def _other_scheme(scheme: str, rest: str) -> str:
    """Return the way to what an unknown scheme names, or the nearest known scheme."""
    if scheme in ("gs", "gcs"):
        return (
            "Cloud Storage speaks S3: export AWS_ENDPOINT_URL_S3=https://storage.googleapis.com, "
            f"with an HMAC key as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and use s3://{rest}"
        )
    if scheme in ("az", "abfs", "abfss", "wasb", "wasbs", "adl", "hdfs"):
        return f"mount it on every node and use the path, such as /mnt/{rest}"
    if name := hub_name(f"{scheme}://{rest}"):
        kind: Literal["model", "dataset"] = "dataset" if "datasets/" in rest else "model"
        return f"nothing is read from the Hub: `{download(name, kind)[0]}`, and use that folder"
    # cutoff 0: there is always a nearest scheme to suggest
    near = get_close_matches(scheme, BACKENDS, n=1, cutoff=0.0)
    return f"nearest is {near[0]}://{rest}; or use a path"


def _folder(uri: str) -> Path:
    path = split_file_uri(uri)[1] if "://" in uri else Path(uri)
    return path.expanduser().absolute()


def _uri_faults(uri: str, *, field: str) -> list[Fault]:
    scheme = _scheme(uri)
    fact = f"{field}={uri!r}"
    if not uri:
        return [Fault(fact=fact, rule="it must name a folder", remedy="give a path")]
    if not is_known("store", scheme):
        rule = f"scheme {scheme!r} is unknown; known are {', '.join(known_names('store'))} and plain paths"
        return [Fault(fact=fact, rule=rule, remedy=_other_scheme(scheme, uri.partition("://")[2]))]
    return call_plugin(find("store", scheme), lambda: _backend(uri).uri_faults(uri, field=field))
