"""From a URI to its store: the one table of schemes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from urllib.parse import unquote, urlsplit

from raymega.errors import Fault, StorageError, raise_faults
from raymega.storage.local import LocalStore
from raymega.storage.store import Store


def _open_file(uri: str) -> Store:
    return LocalStore(_folder(uri))


SCHEMES: dict[str, Callable[[str], Store]] = {"file": _open_file}
PLANNED_SCHEMES = ("s3",)


def open_store(uri: str) -> Store:
    """The store whose root is ``uri``: a path or ``file:///path``. Touches nothing yet.

    Raises:
        StorageError: The URI's scheme is not one that is built.
    """
    raise_faults(StorageError, _uri_faults(uri, field="uri"))
    return SCHEMES[_scheme(uri)](uri)


def store_faults(uri: str, *, field: str = "checkpoint.uri") -> list[Fault]:
    """What keeps ``uri`` from being written to; writes a probe and leaves nothing behind.

    Args:
        uri: Root of a store; it need not exist yet.
        field: What the user calls it, for the message.
    """
    return _uri_faults(uri, field=field) or _folder_faults(_folder(uri), field=field)


def _scheme(uri: str) -> str:
    return uri.partition("://")[0].lower() if "://" in uri else "file"


def _folder(uri: str) -> Path:
    path = unquote(urlsplit(uri).path) if "://" in uri else uri
    return Path(path).expanduser().absolute()


def _uri_faults(uri: str, *, field: str) -> list[Fault]:
    scheme = _scheme(uri)
    fact = f"{field}={uri!r}"
    if not uri:
        return [Fault(fact=fact, rule="it must name a folder", remedy="give a path")]
    if scheme in PLANNED_SCHEMES:
        rule = f"{scheme}:// stores are not built yet"
        return [Fault(fact=fact, rule=rule, remedy="use a path or file:///path")]
    if scheme not in SCHEMES:
        near = get_close_matches(scheme, (*SCHEMES, *PLANNED_SCHEMES), n=1, cutoff=0.0)
        rule = f"scheme {scheme!r} is unknown; known are {', '.join(SCHEMES)} and plain paths"
        note = " (not built yet)" if near[0] in PLANNED_SCHEMES else ""
        remedy = f"nearest is {near[0]}://{note}; or use a path"
        return [Fault(fact=fact, rule=rule, remedy=remedy)]
    if "://" in uri and urlsplit(uri).netloc not in ("", "localhost"):
        rule = f"file URIs have no host, but this one names {urlsplit(uri).netloc!r}"
        return [Fault(fact=fact, rule=rule, remedy="write file:///path with three slashes")]
    return []


def _folder_faults(folder: Path, *, field: str) -> list[Fault]:
    """Write and remove a probe in the nearest folder that exists."""
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
