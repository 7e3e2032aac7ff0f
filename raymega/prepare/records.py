"""Encodes the report of a finished group, so that a later preparation need not do it again.

It owns the content of a record. Records are stored below ``_state/groups`` by
`raymega.prepare.output` and `raymega.prepare.remote_output`, after the group's other files.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import asdict, dataclass

import numpy as np
from pydantic import TypeAdapter

from raymega.data.format import ShardMeta
from raymega.prepare.documents import BadLine
from raymega.prepare.shards import Counts, GroupDone, SplitPart
from raymega.prepare.tokenizer.encoder import EngineName

STATE_FOLDER = "_state"
RECIPE_FILE = "recipe.json"
RECORDS_FOLDER = "groups"
# There once the fast engine was disproved, so that a later preparation does not ask it again.
DISPROVED_FILE = "gigatoken-disproved"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A split's part as it is stored: ``counts`` are compressed int64."""

    shard: ShardMeta
    num_text_bytes: int
    counts: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Record:
    """A record as it is stored; the fields are those of GroupDone."""

    engine: EngineName
    num_replaced: int
    num_rows: tuple[int, ...]
    bad: tuple[BadLine, ...]
    parts: dict[str, _Part]


_ADAPTER: TypeAdapter[_Record] = TypeAdapter(_Record)


def record_name(key: str) -> str:
    """Return the name of a group's record in ``_state``."""
    return f"{RECORDS_FOLDER}/{key}.json"


def encode_record(done: GroupDone) -> bytes:
    """Return the bytes of a record."""
    parts = {
        name: {
            "shard": asdict(part.shard),
            "num_text_bytes": part.num_text_bytes,
            "counts": base64.b64encode(zlib.compress(part.counts.tobytes())).decode(),
        }
        for name, part in done.parts.items()
    }
    bad = [asdict(line) for line in done.bad]
    # The engine is told at the end; the record is good for every engine.
    record = {"engine": done.engine, "num_replaced": done.num_replaced, "num_rows": done.num_rows}
    return json.dumps(record | {"bad": bad, "parts": parts}, indent=1).encode()


def decode_record(content: bytes, *, index: int) -> GroupDone | None:
    """Return the report in a record, for the group with number ``index``; None if it is damaged."""
    try:
        record = _ADAPTER.validate_json(content, strict=True)
        return GroupDone(
            index=index,
            engine=record.engine,
            num_replaced=record.num_replaced,
            num_rows=record.num_rows,
            bad=record.bad,
            parts={
                name: SplitPart(
                    shard=part.shard,
                    num_text_bytes=part.num_text_bytes,
                    counts=_counts(part.counts),
                )
                for name, part in record.parts.items()
            },
        )
    except (ValueError, zlib.error):
        return None


def _counts(text: str) -> Counts:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.int64)
