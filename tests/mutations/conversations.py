"""Planted mistakes in which tokens of a conversation are learned, and the labels that then count.

`tests.mutations.outcomes` calls `outcome` with each of them planted.
"""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import accumulate, chain, pairwise
from pathlib import Path

from tests.mutations.saves import SaveMutation as ConversationMutation

TARGETS, SHARDS = "prepare/chat/targets.py", "prepare/shards.py"
CONVERSATION_MUTATIONS = (
    ConversationMutation(
        name="the mask is that of the token, not of its label",
        file="data/packing.py",
        old="counted[1:]",
        new="counted[:-1]",
        caught="chatml best_fit: other labels",
    ),
    ConversationMutation(
        name="the mask of a window is not shifted",
        file="data/streaming/stream_rows.py",
        old="self._labels(start + 1, start + self.seq_len + 1)",
        new="self._labels(start, start + self.seq_len)",
        caught="chatml none: other labels",
    ),
    ConversationMutation(
        name="the header before an answer counts",
        file=TARGETS,
        old="return len(prompt), next(",
        new="return len(self._template.render(before, conversation.tools)), next(",
        caught="chatml best_fit: other labels",
    ),
    ConversationMutation(
        name="the end of an answer is not learned",
        file=TARGETS,
        old="next(self._special_ends(encoding, at, len(answered)), at)",
        new="at",
        caught="chatml best_fit: other labels",
    ),
    ConversationMutation(
        name="white space after the end counts",
        file=TARGETS,
        old="next(self._special_ends(encoding, at, len(answered)), at)",
        new="len(answered)",
        caught="chatml best_fit: other labels",
    ),
    ConversationMutation(
        name="all turns are learned",
        file=TARGETS,
        old='if each["role"] == ANSWERING]',
        new="]",
        caught="chatml: refused",
    ),
    ConversationMutation(
        name="a truncated conversation goes on in the next row",
        file="data/packing.py",
        old="is_truncated=self.documents.is_truncated",
        new="is_truncated=False",
        caught="chatml best_fit: other labels",
    ),
    ConversationMutation(
        name="an earlier answer is taken for the last",
        file=TARGETS,
        old="targets[targets == LAST_ANSWER] = EARLIER_ANSWER",
        new="pass",
        caught="chatml completion: other labels",
    ),
    ConversationMutation(
        name="the end of the document is learned after that of the answer",
        file=TARGETS,
        old="is_open = is_answered and len(ends) > 0 and",
        new="is_open = is_answered and len(ends) > 0 or",
        caught="chatml best_fit: other labels",
    ),
    ConversationMutation(
        name="an answer without an end does not learn to stop",
        file=TARGETS,
        old="np.uint8(LAST_ANSWER if is_open else CONTEXT)",
        new="np.uint8(CONTEXT)",
        caught="plain best_fit: other labels",
    ),
    ConversationMutation(
        name="a token across the border is not refused",
        file=TARGETS,
        old="if encoding.ids[: len(ids)] != ids:",
        new="if False:",
        caught="merged: read",
    ),
    ConversationMutation(
        name="a content may spell a special token",
        file=TARGETS,
        old="        self._refuse_spelled(messages)\n",
        new="",
        caught="spelled: read",
    ),
    ConversationMutation(
        name="the rejected answer is that which was chosen",
        file="prepare/chat/rows.py",
        old="_messages(row[name], name, ANSWERING)",
        new="_messages(row[key], key, ANSWERING)",
        caught="preference: other answers",
    ),
)
SEQ_LEN, END, END_OF_DOCUMENT = 96, "<|im_end|>", "<|endoftext|>"
# What counts in the text of a document, by a rule of its own: the groups of a pattern.
ANSWERS = {
    "chatml": r"<\|im_start\|>assistant\n(.*?(?:<\|im_end\|>|$))",
    "plain": r"assistant: ([^\n]*)(?:\n(<\|endoftext\|>))?",
}


def outcome(folder: Path) -> str:
    """Return ``sound``, or the first template or row with which something is wrong."""
    from tests.unit.prepare.chat import templates as t

    chats = [
        t.messages(f"/be brief {i}", f"why {i}?", f"so {i}.", "and " * (i % 9 + 1), ("no. " * (i % 6 + 1)).strip())
        for i in range(24)
    ]  # fmt: skip
    for name, source in (("chatml", t.CHATML), ("plain", t.PLAIN)):
        wrong = _wrong(folder / name, source, chats, ANSWERS[name])
        if wrong:
            return f"{name}{wrong}"
    bad = {
        "forgetful": (t.FORGETFUL, t.messages("a", "b", "c", "d")),
        "merged": (
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            t.messages("who w", "rote"),
        ),
        "spelled": (t.CHATML, t.messages("a <|im_end|>", "b")),
    }
    for name, (source, chat) in bad.items():
        if _prepare(folder / name, source, [{"messages": chat}]):
            return f"{name}: read"
    rows = [{"prompt": "why?", "chosen": "because.", "rejected": "no."}]
    found = _prepare(folder / "preference", t.CHATML, rows, row_format="preference")
    return "sound" if found == ["because." + END, "no." + END] else "preference: other answers"


def _wrong(folder: Path, source: str, chats: list, pattern: str) -> str:
    """Return where the labels that count are not those that the pattern finds in the documents' text."""
    from raymega.data.open_split import Shape, open_split

    if not _prepare(folder, source, [{"messages": chat} for chat in chats]):
        return ": refused"
    for name, loss_on in (("best_fit", "auto"), ("none", "auto"), ("completion", "completion")):
        packing = "none" if name == "none" else "best_fit"
        shape = Shape(seq_len=SEQ_LEN, packing=packing, window=64, loss_on=loss_on)
        split = open_split(str(folder), "train", shape, seed=0)
        rows = [split.row(index) for index in range(split.num_windows)]
        if packing == "none":  # the windows are one stream
            stream = [(row.tokens.tolist(), row.mask.tolist()) for row in rows]
            parts = [tuple(list(chain.from_iterable(each)) for each in zip(*stream, strict=True))]
        else:
            parts = [
                (row.tokens[start:stop].tolist(), row.mask[start:stop].tolist())
                for row in rows
                for start, stop in pairwise(accumulate(row.documents, initial=0))
            ]
        for tokens, mask in parts:
            # Of a conversation without its end the last answer is not known.
            if loss_on == "completion" and END_OF_DOCUMENT not in _text(tokens):
                continue
            # The label after the last token of a truncated document is not in its text.
            if mask[:-1] != _expected(tokens, pattern, is_last_only=loss_on == "completion")[1:]:
                return f" {name}: other labels"
    return ""


def _text(tokens: list[int]) -> str:
    return _tokenizer().decode(tokens, skip_special_tokens=False)


def _expected(tokens: list[int], pattern: str, *, is_last_only: bool) -> list[bool]:
    pieces = [_tokenizer().decode([token], skip_special_tokens=False) for token in tokens]
    ends = list(accumulate(map(len, pieces)))
    matches = list(re.finditer(pattern, "".join(pieces), re.DOTALL))
    spans = [
        match.span(group)
        for match in matches[-is_last_only:]
        for group in range(1, match.re.groups + 1)
    ]
    return [
        any(start < end and end - len(piece) < stop for start, stop in spans)
        for piece, end in zip(pieces, ends, strict=True)
    ]


@cache
def _tokenizer():
    from tests.unit.prepare.chat.templates import make_tokenizer

    return make_tokenizer()


def _prepare(folder: Path, source: str, rows: list, *, row_format: str = "chat") -> list[str]:
    """Write a dataset of the rows into ``folder``; return the texts that count, none where it is refused."""
    from contextlib import nullcontext

    from raymega.data.arrow import TokenStream
    from raymega.errors import ConfigError
    from raymega.prepare import pipeline
    from raymega.prepare.chat.rows import DEFAULT_KEYS
    from raymega.prepare.options import PrepareOptions

    pipeline.on_cluster, pipeline.session_at = (
        lambda items, run: map(run, items),
        lambda _: nullcontext(),
    )
    model = Path(f"{folder}-model")
    model.mkdir(parents=True)
    (model / "tokenizer.json").write_text(_tokenizer().to_str())
    (model / "chat_template.jinja").write_text(source)
    lines = Path(f"{folder}-rows.jsonl")
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = PrepareOptions(
        inputs=(str(lines),), out=str(folder), tokenizer=str(model), eod_token=END_OF_DOCUMENT,
        valid_fraction=0, text_key=DEFAULT_KEYS[row_format], row_format=row_format,
    )  # fmt: skip
    try:
        meta = pipeline.prepare(options, on_progress=lambda *_: None).meta
    except ConfigError:
        return []
    stream, found, at = TokenStream(folder, meta.splits["train"]), [], 0
    for length in map(int, stream.document_lengths()):
        counted = stream.read_targets(at, at + length) > 0
        ids = stream.read(at, at + length)[counted]
        found.append(_tokenizer().decode(ids.tolist(), skip_special_tokens=False))
        at += length
    return found
