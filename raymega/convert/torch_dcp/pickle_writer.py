"""Writes the few pickles that torch.distributed.checkpoint reads, byte by byte and without torch.

Values are None, booleans, whole numbers, texts, tuples, lists, dicts and the kinds below.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Name:
    """Something of a module, such as a class."""

    module: str
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What ``function`` returns for ``arguments``."""

    function: Name
    arguments: tuple[object, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """An object of ``kind`` with ``state``, made without its initialiser."""

    kind: Name
    state: object


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A dict by its items, whose keys may be objects."""

    items: tuple[tuple[object, object], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outside:
    """Something that the reader gets from elsewhere by ``key``."""

    key: tuple[object, ...]


def to_pickle(value: object) -> bytes:
    """The pickle of ``value``, protocol 2."""
    return b"\x80\x02" + _code(value) + b"."


def _code(value: object) -> bytes:
    match value:
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            return _integer(value)
        case str():
            text = value.encode()
            return b"X" + len(text).to_bytes(4, "little") + text
        case tuple():
            return b"(" + _all(value) + b"t"
        case list():
            return b"](" + _all(value) + b"e"
        case dict():
            return _code(Table(items=tuple(value.items())))
        case _:
            return _object(value)


def _object(value: object) -> bytes:
    match value:
        case Name():
            return f"c{value.module}\n{value.name}\n".encode()
        case Call():
            return _code(value.function) + _code(value.arguments) + b"R"
        case Instance():
            return _code(value.kind) + b")\x81" + _code(value.state) + b"b"
        case Table():
            return b"}(" + _all(part for item in value.items for part in item) + b"u"
        case Outside():
            return _code(value.key) + b"Q"
    raise TypeError(f"{type(value).__name__} has no code")


def _all(values: Iterable[object]) -> bytes:
    return b"".join(map(_code, values))


def _integer(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)
