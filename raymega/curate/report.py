"""The page of a curation: what each step took, with examples, languages, lengths and speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from raymega.drawing.bars import Bars, draw_bars
from raymega.drawing.page import charts, facts, folded, note, page, table
from raymega.errors import counted, duration

MOST_LANGUAGES = 30
FILLS = {"kept": "#0072b2", "removed": "#d55e00"}


def curation_page(
    counts: Mapping[str, Any], speed: Mapping[str, float], *, inputs: Sequence[str], seconds: float
) -> str:
    """Return the page.

    Args:
        counts: Content of counts.json.
        speed: CPU seconds of each step.
        inputs: Inputs as they were given.
        seconds: Duration of the command that finished the corpus.
    """
    steps: list[dict[str, Any]] = counts["steps"]
    first, last = steps[0], steps[-1]
    share = last["bytes_out"] / max(first["bytes_in"], 1)
    parts = [
        facts(
            {
                "documents read": f"{first['documents_in']:,}",
                "documents kept": f"{last['documents_out']:,}",
                "text read": _size(first["bytes_in"]),
                "text kept": f"{_size(last['bytes_out'])} ({share:.1%})",
                "duration": duration(seconds),
            }
        ),
        note(f"Inputs: {', '.join(inputs)}"),
        "<h2>Steps</h2>",
        charts([_waterfall(steps)]),
        table(
            ("step", "documents", "removed", "changed", "kept", "text kept", "MB / CPU s"),
            [_row(step, speed) for step in steps],
        ),
        note(
            "Speed is text that came to the step by the CPU seconds in it; tasks of one curation add up."
        ),
        "<h2>Languages</h2>",
        _languages(counts["languages"], last["bytes_out"]),
        "<h2>Lengths</h2>",
        _lengths(counts["lengths_read"], counts["lengths"]),
        "<h2>What each step took</h2>",
        *(_examples(step) for step in steps if step["reasons"]),
    ]
    return page("Curation", parts)


def _waterfall(steps: Sequence[Mapping[str, Any]]) -> str:
    rows = {}
    for step in steps:
        removed = step["bytes_in"] - step["bytes_out"]
        rows[step["name"]] = {"kept": step["bytes_out"] / 1e6, "removed": removed / 1e6}
    bars = Bars(title="Text that came to each step", unit="MB", rows=rows, fills=FILLS)
    return draw_bars(bars)


def _row(step: Mapping[str, Any], speed: Mapping[str, float]) -> tuple[object, ...]:
    seconds = speed.get(step["name"], 0.0)
    removed = step["documents_in"] - step["documents_out"]
    return (
        step["name"], step["documents_in"], removed, step["documents_changed"], step["documents_out"],
        _size(step["bytes_out"]), f"{step['bytes_in'] / seconds / 1e6:.1f}" if seconds > 0 else "",
    )  # fmt: skip


def _languages(languages: Mapping[str, Sequence[int]], whole: int) -> str:
    rows = [
        (language or "unknown", documents, _size(size), f"{size / max(whole, 1):.1%}")
        for language, (documents, size) in list(languages.items())[:MOST_LANGUAGES]
    ]
    left = len(languages) - len(rows)
    more = note(counted(left, "other")) if left > 0 else ""
    return table(("language", "documents", "text", "share"), rows) + more


def _lengths(read: Mapping[str, int], kept: Mapping[str, int]) -> str:
    rows = [
        (
            f"{_size(2 ** max(bits - 1, 0))} to {_size(2**bits)}",
            read.get(str(bits), 0),
            kept.get(str(bits), 0),
        )
        for bits in sorted({int(each) for each in (*read, *kept)})
    ]
    return table(("size of a document", "read", "kept"), rows)


def _examples(step: Mapping[str, Any]) -> str:
    reasons = table(("reason", "documents"), list(step["reasons"].items()))
    rows = [(each["reason"], each["source"], each["text"]) for each in step["examples"]]
    shown = table(("reason", "source", "text"), rows)
    title = (
        f"{step['name']}: {counted(sum(step['reasons'].values()), 'document')}, {len(rows)} shown"
    )
    return f"<h3>{escape(step['name'])}</h3>{reasons}{folded(title, shown)}"


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return (
                f"{num_bytes:.0f} {unit}"
                if unit == "B" or num_bytes >= 100
                else f"{num_bytes:.1f} {unit}"
            )
        num_bytes /= 1000
    return f"{num_bytes:,.1f} TB"
