"""Tasks by name."""

from __future__ import annotations

from collections.abc import Mapping

from raymega.evaluate.tasks.images import images
from raymega.evaluate.tasks.lambada import lambada
from raymega.evaluate.tasks.perplexity import perplexity
from raymega.evaluate.tasks.race import race
from raymega.evaluate.tasks.task import Task
from raymega.evaluate.tasks.wikitext import wikitext

TASKS: Mapping[str, Task] = {
    "wikitext": wikitext,
    "lambada": lambada,
    "race": race,
    "perplexity": perplexity,
    "images": images,
}
"""Function of each task; another one is added by a file and a line here."""
