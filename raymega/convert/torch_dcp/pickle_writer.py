"""Writes the pickles that torch.distributed.checkpoint reads, opcode by opcode and without torch.

Values are None, bool, int, str, tuple, list, dict and instances of the classes below.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Name:
    """Reference to a class or function of a module."""

    module: str
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Result of calling ``function`` with ``arguments`` in the reader."""

    function: Name
    arguments: tuple[object, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """An object of class ``kind`` with ``state``, created without a call of ``__init__``."""

    kind: Name
    state: object


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A dict given by its items, so that keys may be instances of these classes."""

    items: tuple[tuple[object, object], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outside:
    """Persistent id: an object that the reader supplies for ``key``, such as a storage."""

    key: tuple[object, ...]


def to_pickle(value: object) -> bytes:
    """Return the pickle of ``value`` in protocol 2."""
    # PROTO 2, the value, STOP.
    return b"\x80\x02" + _code(value) + b"."


def _code(value: object) -> bytes:
    match value:
        case None:
            return b"N"  # NONE
        case bool():
            return b"\x88" if value else b"\x89"  # NEWTRUE, NEWFALSE
        case int():
            return _integer(value)
        case str():
            text = value.encode()
            return b"X" + len(text).to_bytes(4, "little") + text  # BINUNICODE
        case tuple():
            return b"(" + _all(value) + b"t"  # MARK, TUPLE
        case list():
            return b"](" + _all(value) + b"e"  # EMPTY_LIST, MARK, APPENDS
        case dict():
            return _code(Table(items=tuple(value.items())))
        case _:
            return _object(value)


def _object(value: object) -> bytes:
    match value:
        case Name():
            return f"c{value.module}\n{value.name}\n".encode()  # GLOBAL
        case Call():
            return _code(value.function) + _code(value.arguments) + b"R"  # REDUCE
        case Instance():
            # EMPTY_TUPLE, NEWOBJ; BUILD sets the state.
            return _code(value.kind) + b")\x81" + _code(value.state) + b"b"
        case Table():
            # EMPTY_DICT, MARK; SETITEMS.
            return b"}(" + _all(part for item in value.items for part in item) + b"u"
        case Outside():
            return _code(value.key) + b"Q"  # BINPERSID
    raise TypeError(f"{type(value).__name__} has no code")


def _all(values: Iterable[object]) -> bytes:
    return b"".join(map(_code, values))


def _integer(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        return b"J" + value.to_bytes(4, "little", signed=True)  # BININT
    return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)  # LONG1 of 8 bytes
