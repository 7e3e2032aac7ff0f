"""Divides a recipe into stages, between which documents are compared with those of other groups.

It owns the stages and the digests on which what is kept of them depends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from raymega.curate.recipe import StepSpec

COMPARING = ("exact", "near", "lines")
"""Steps that compare the documents of all groups; the others look at one document."""
# Part of every digest: raise it when a step gives other results.
VERSION = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Part of a recipe that one pass over the documents does.

    Attributes:
        number: Number of the stage.
        comparison: Step that compared the documents of the stage before, whose finds are removed first; None at first.
        steps: Steps that look at one document.
        next_comparison: Step for which rows are written at the end; None for the last stage.
        digest: Digest of all steps so far and, behind a comparison, of the corpus.
        whole_digest: The same with the corpus in every stage.
    """

    number: int
    comparison: StepSpec | None
    steps: tuple[StepSpec, ...]
    next_comparison: StepSpec | None
    digest: str
    whole_digest: str

    @property
    def folder(self) -> str:
        """Folder below ``_state/`` of what the stage makes of single groups."""
        return f"stages/{self.number}-{self.digest}"

    @property
    def whole_folder(self) -> str:
        """Folder below ``_state/`` of what is made of all groups, which another file changes."""
        return f"stages/{self.number}-{self.whole_digest}"


def plan_stages(
    specs: Sequence[StepSpec], *, assets: Mapping[str, str], corpus: str, reading: str
) -> list[Stage]:
    """Return the stages of a recipe.

    Args:
        specs: Steps, in order.
        assets: Digest of the user's files of each step that has some.
        corpus: Digest of the names, sizes and times of all files.
        reading: Options of the reading, such as the key of the text.
    """
    stages, steps, text = list[Stage](), list[StepSpec](), f"{VERSION}\n{reading}\n"
    comparison: StepSpec | None = None
    for spec in [*(spec for spec in specs if spec.name != "extract"), None]:
        is_end = spec is None or spec.name in COMPARING
        if spec is not None:
            text += describe(spec, assets) + "\n"
        if not is_end:
            assert spec is not None, "the end is a stage's end"
            steps.append(spec)
            continue
        # The first stage of a group does not depend on the other groups.
        stages.append(
            Stage(
                number=len(stages), comparison=comparison, steps=tuple(steps), next_comparison=spec,
                digest=_digest(text + (corpus if stages else "")), whole_digest=_digest(text + corpus),
            )
        )  # fmt: skip
        comparison, steps = spec, []
    return stages


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()


def describe(spec: StepSpec, assets: Mapping[str, str]) -> str:
    """Return the text of a step on which its results depend: options, and the content of its files."""
    options = spec.options.model_dump_json(exclude={"model", "tasks", "lists"})
    return f"{spec.name} {options} {assets.get(spec.name, '')}"
