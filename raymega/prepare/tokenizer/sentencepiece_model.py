"""Converts sentencepiece models (BPE and Unigram) to a `tokenizers` JSON.

The model's own normaliser is kept: its table of characters, the spaces that it adds and removes.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from raymega.errors import ConfigError, Fault
from raymega.extras import import_extra

SPACE = "\u2581"
UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def is_sentencepiece(path: Path) -> bool:
    """Return True if the file is a serialised sentencepiece model, by its name and first bytes."""
    # Field 1 of the message, a piece, comes first; JSON and text begin otherwise.
    with path.open("rb") as file:
        return path.suffix == ".model" and file.read(1) == b"\n"


def convert_sentencepiece(path: Path) -> tuple[str, dict[str, Any], Callable[[str], list[int]]]:
    """Return the `tokenizers` JSON of a model, its special tokens by name, and sentencepiece's ids.

    Raises:
        ConfigError: The file is no model, is of another type, or sentencepiece is not installed.
    """
    purpose = f"--tokenizer {path}"
    sentencepiece = import_extra("sentencepiece", extra="hf", purpose=purpose)
    protocol = import_extra("sentencepiece.sentencepiece_model_pb2", extra="hf", purpose=purpose)
    proto = protocol.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
        original = sentencepiece.SentencePieceProcessor(model_file=str(path))
        spec = proto.trainer_spec
        if spec.model_type not in (UNIGRAM, BPE):
            raise ValueError("another type")
    except Exception as error:  # protobuf's DecodeError, sentencepiece's RuntimeError
        raise ConfigError(_no_model(path, str(error))) from error
    named = {
        name: piece
        for name, at, piece in (
            ("bos_token", spec.bos_id, spec.bos_piece),
            ("eos_token", spec.eos_id, spec.eos_piece),
            ("unk_token", spec.unk_id, spec.unk_piece),
            ("pad_token", spec.pad_id, spec.pad_piece),
        )
        if at >= 0
    }
    return json.dumps(_definition(proto), ensure_ascii=False), named, original.encode


def _definition(proto: Any) -> dict[str, Any]:
    rules = proto.normalizer_spec
    is_bpe = proto.trainer_spec.model_type == BPE
    # A control piece never stands for text; a user's piece always does.
    added = [
        {
            "id": index, "content": piece.piece, "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False,
            "special": piece.type in (CONTROL, UNKNOWN),
        }
        for index, piece in enumerate(proto.pieces)
        if piece.type in (CONTROL, UNKNOWN, USER_DEFINED)
    ]  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": _normalizer(rules), "pre_tokenizer": None, "post_processor": None,
        "decoder": _decoder(has_prefix=rules.add_dummy_prefix),
        "model": _bpe(proto) if is_bpe else _unigram(proto),
    }  # fmt: skip


def _normalizer(rules: Any) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    if rules.precompiled_charsmap:
        table = b64encode(rules.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": table})
    if rules.remove_extra_whitespaces:
        # Of the text, not of its lines: ^ and $ would match at those.
        steps.append({"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if rules.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    return {"type": "Sequence", "normalizers": steps}


def _decoder(*, has_prefix: bool) -> dict[str, Any]:
    space = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    steps = [space, {"type": "ByteFallback"}, {"type": "Fuse"}, *([strip] if has_prefix else [])]
    return {"type": "Sequence", "decoders": steps}


def _unigram(proto: Any) -> dict[str, Any]:
    return {
        "type": "Unigram",
        "unk_id": proto.trainer_spec.unk_id,
        "vocab": [[piece.piece, piece.score] for piece in proto.pieces],
        "byte_fallback": proto.trainer_spec.byte_fallback,
    }


def _bpe(proto: Any) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": proto.trainer_spec.unk_piece,
        "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": True,
        "byte_fallback": proto.trainer_spec.byte_fallback, "ignore_merges": False,
        "vocab": {piece.piece: index for index, piece in enumerate(proto.pieces)},
        "merges": _merges({p.piece: (i, p.score) for i, p in enumerate(proto.pieces) if p.type == NORMAL}),
    }  # fmt: skip


def _merges(pieces: Mapping[str, tuple[int, float]]) -> list[tuple[str, str]]:
    """Return all splits of a piece into two pieces, best score of the whole first."""
    found = [
        (-score, index, pieces[left][0], pieces[right][0], left, right)
        for piece, (index, score) in pieces.items()
        for left, right in ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        if left in pieces and right in pieces
    ]
    return [(left, right) for *_, left, right in sorted(found)]


def _no_model(path: Path, why: str) -> Fault:
    return Fault(
        fact=f"--tokenizer {path} is no sentencepiece model that can be read ({why})",
        rule="it is a .model file of type BPE or Unigram",
        remedy="use the model's tokenizer.json",
    )
