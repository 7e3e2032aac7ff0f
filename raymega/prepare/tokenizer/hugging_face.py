"""Writes a tokenizer's files so that AutoTokenizer, lm-eval and vLLM give the ids of the dataset.

It owns two edits of tokenizer.json: special tokens are marked, and the begin of a text is that of the
documents. The settings beside it are written by `raymega.data.tokenizer_files`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

PROCESSORS_WITH_TOKENS = ("TemplateProcessing", "BertProcessing", "RobertaProcessing")


def mark_special(tokenizer_json: str, tokens: Mapping[str, int]) -> str:
    """Return the JSON in which ``tokens``, given with their ids, are special tokens.

    A JSON in which they are already is returned as it is.
    """
    definition = json.loads(tokenizer_json)
    added = list(definition.get("added_tokens") or [])
    special = {token["content"] for token in added if token["special"]}
    missing = {token: index for token, index in tokens.items() if token not in special}
    if not missing:
        return tokenizer_json
    # An entry becomes special, or a token of the vocabulary gets one.
    listed = {token["content"]: token for token in added}
    for token, index in missing.items():
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        listed[token] = {
            "id": index,
            "content": token,
            **flags,
            **listed.get(token, {}),
            "special": True,
        }
    definition["added_tokens"] = sorted(listed.values(), key=lambda token: token["id"])
    return _dump(definition)


def loadable(tokenizer_json: str, *, bos: str) -> str:
    """Return the JSON that puts ``bos`` before a text, or nothing if it is empty.

    A JSON that does so already is returned as it is.
    """
    tokenizer = Tokenizer.from_str(tokenizer_json)
    bos_ids = [tokenizer.get_vocab(with_added_tokens=True)[bos]] if bos else []
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    if tokenizer.encode("a", add_special_tokens=True).ids == [*bos_ids, *plain]:
        return tokenizer_json
    # Processors that add tokens are replaced, others (offsets of bytes) stay.
    definition = json.loads(tokenizer_json)
    present = definition.get("post_processor") or {}
    steps = present.get("processors", [present] if present else [])
    steps = [step for step in steps if step["type"] not in PROCESSORS_WITH_TOKENS]
    if bos:
        steps.append(_template(bos, bos_ids))
    whole = {"type": "Sequence", "processors": steps} if len(steps) > 1 else None
    definition["post_processor"] = whole or (steps[0] if steps else None)
    return _dump(definition)


def _template(bos: str, bos_ids: list[int]) -> dict[str, Any]:
    def begin(kind: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": bos, "type_id": kind}}

    def text(name: str, kind: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": kind}}

    return {
        "type": "TemplateProcessing",
        "single": [begin(0), text("A", 0)],
        "pair": [begin(0), text("A", 0), begin(1), text("B", 1)],
        "special_tokens": {bos: {"id": bos, "ids": bos_ids, "tokens": [bos]}},
    }


def _dump(definition: dict[str, Any]) -> str:
    return json.dumps(definition, indent=2, ensure_ascii=False)
