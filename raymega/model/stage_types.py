"""The class of a model's pipeline stages, by what the model reads."""

from __future__ import annotations

from raymega.config.schema import ModelSection
from raymega.model.encoder_decoder import EncoderDecoderStage
from raymega.model.pipeline_stage import StageModule
from raymega.model.vision_stage import VisionStage
from raymega.plan.layers.family_parts import parts_of


def stage_type(model: ModelSection) -> type[StageModule]:
    """Return the class of the model's stages."""
    if model.vision.is_on:
        return VisionStage
    return EncoderDecoderStage if parts_of(model).is_encoder_decoder else StageModule
