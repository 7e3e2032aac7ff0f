"""A stranger's walk: from docs/README.md each of twenty tasks is found in two clicks.

The first click is a link in the one row of the index that has the task's words. The page that it opens has the command, the
field or the words that the task needs, or a line with the task's words and a link to a page that has them.
"""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
LINK = re.compile(r"\]\(([^)#\s]+\.md)?(?:#[^)\s]*)?\)")
TASKS = {
    # word of the index: what the reader must find
    "laptop": "make setup",
    "GPU machine": "nvidia-smi",
    "upgrade": "CHANGELOG",
    "first time": "raymega train jobs/verify.yaml",
    "my own text": "raymega data prepare",
    "published tokenizer": "--eod-token",
    "several datasets": "data.sources",
    "that Megatron wrote": "megatron:",
    "conversations": "--format chat",
    "filter a heap of text": "raymega data curate",
    "LoRA adapters": "model.lora",
    "let a checkpoint write": "raymega generate",
    "continue a published model": "raymega convert hf-import",
    "export my model": "raymega convert hf-export",
    "measure a checkpoint": "--task wikitext",
    "which layout": "raymega plan",
    "what a run costs": "--price",
    "make a model fit": "parallel.tp",
    "stop and resume": "Ctrl-C",
    "submit to a Ray cluster": "raymega submit",
    "an exit code": "| 75 |",
    "NaN": "elastic.max_bad_steps",
    "out of memory": "memory.recompute",
    "hangs": "elastic.collective_timeout_s",
    "MLflow or Grafana": "tracking.mlflow_uri",
}


def _rows():
    text = (DOCS / "README.md").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.startswith("|") and "](" in line]


def _linked(text):
    return [(DOCS / name).resolve() for name in LINK.findall(text) if name]


def _has(page, words):
    return page.exists() and words in page.read_text(encoding="utf-8")


def _is_found(task, wanted):
    (row,) = (row for row in _rows() if task.lower() in row.lower())
    first = _linked(row)
    lines = (
        line
        for page in first
        for line in page.read_text(encoding="utf-8").splitlines()
        if task.lower() in line.lower()
    )
    return any(
        _has(page, wanted) for page in [*first, *(p for line in lines for p in _linked(line))]
    )


@pytest.mark.parametrize("task", TASKS)
def test_task_is_found_in_two_clicks(task):
    assert _is_found(task, TASKS[task])


def test_a_page_that_no_line_of_the_task_leads_to_is_not_found():
    # failures.md links to the page on checkpoints, but not where it speaks of an exit code
    wanted = "checkpoint.every"
    failures = (DOCS / "failures.md").read_text(encoding="utf-8")
    assert any(_has(page, wanted) for page in _linked(failures))
    assert not _is_found("an exit code", wanted)


def test_walk_has_twenty_tasks():
    assert len(TASKS) >= 20
