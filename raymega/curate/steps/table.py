"""Makes the steps of a recipe that look at one document at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from raymega.curate.recipe import StepSpec
from raymega.curate.steps.decontaminate import DecontaminateStep
from raymega.curate.steps.language import LanguageStep
from raymega.curate.steps.mend import Mend
from raymega.curate.steps.personal import PersonalStep
from raymega.curate.steps.quality import QualityStep
from raymega.curate.steps.quality_model import QualityModelStep
from raymega.curate.steps.sample import SampleStep
from raymega.curate.steps.step import Step
from raymega.curate.steps.urls import UrlsStep

Make = Callable[[Any, bytes], Step]
LOCAL_STEPS: Mapping[str, Make] = {
    "mend": lambda _, __: Mend(),
    "language": lambda options, _: LanguageStep(options),
    "quality": lambda options, _: QualityStep(options),
    "quality_model": QualityModelStep,
    "personal": lambda options, _: PersonalStep(options),
    "decontaminate": DecontaminateStep,
    "urls": lambda _, lines: UrlsStep(lines.decode().splitlines()),
    "sample": lambda options, _: SampleStep(options),
}


def make_step(spec: StepSpec, content: bytes) -> Step:
    """Return a step; ``content`` is what the user's files of it hold, or empty.

    Raises:
        ConfigError: A package is not installed.
    """
    return LOCAL_STEPS[spec.name](spec.options, content)
