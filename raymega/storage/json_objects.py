"""Reads small JSON objects of a store, and says of a damaged one which byte is wrong.

Whether a damaged object can be done without is decided by those who read it.
"""

from __future__ import annotations

import json
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from raymega.errors import StorageError

Value = TypeVar("Value")


class DamagedError(StorageError):
    """Error for an object that is there, but does not hold what was written."""


def parse_object(
    raw: bytes, adapter: TypeAdapter[Value], *, name: str, rule: str, remedy: str
) -> Value:
    """Return the value that ``raw`` holds as JSON.

    Args:
        raw: Bytes of the object.
        adapter: Validator of the value.
        name: Name of the object for the message, its URI or path.
        rule: Purpose of the object, for the message.
        remedy: Line that mends it, or that continues without it, for the message.

    Raises:
        DamagedError: The bytes are no JSON, or JSON of another form.
    """
    where = first_damage(raw)
    if where is None:
        try:
            return adapter.validate_json(raw)
        except ValidationError as error:
            where = damage_at(raw, error)
    raise damaged(name, len(raw), where, rule=rule, remedy=remedy)


def damaged(
    name: str, num_bytes: int, where: tuple[int, str], *, rule: str, remedy: str
) -> DamagedError:
    """Return the error of an object of ``num_bytes`` bytes; ``where`` is a byte and what is wrong there."""
    byte, why = where
    return DamagedError(
        fact=f"{name} is damaged at byte {byte} of {num_bytes} ({why})", rule=rule, remedy=remedy
    )


def first_damage(raw: bytes) -> tuple[int, str] | None:
    """Return the first byte that is no JSON in UTF-8, and why; None when all of it is."""
    if not raw.strip():
        return 0, "it is empty"
    try:
        json.loads(text := raw.decode())
    except UnicodeDecodeError as error:
        return error.start, "it is no UTF-8"
    except json.JSONDecodeError as error:
        return len(text[: error.pos].encode()), error.msg
    except RecursionError:
        return 0, "it is nested too deeply"
    return None


def damage_at(raw: bytes, error: ValidationError) -> tuple[int, str]:
    """Return the byte of a validator's first complaint about ``raw``, and why; later ones often follow."""
    first = error.errors(include_url=False)[0]
    broken = first_damage(raw)
    return broken or (_byte_of(raw, first["loc"]), f"{_path(first['loc'])}: {first['msg']}")


def _byte_of(raw: bytes, path: tuple[int | str, ...]) -> int:
    """Return the first byte of the innermost named field of ``path``; 0 where it is missing."""
    start = 0
    for name in path:
        found = raw.find(json.dumps(name).encode() + b":", start) if isinstance(name, str) else -1
        start = found if found >= 0 else start
    return start


def _path(path: tuple[int | str, ...]) -> str:
    return ".".join(map(str, path)) or "the whole"
