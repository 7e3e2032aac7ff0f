"""Rules of distillation: what a teacher sees of a row is what the model sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from raymega.config.load import parse_job
from raymega.plan.validation.registry import job_faults

DISTILL = Path(__file__).parents[4] / "jobs" / "distill.yaml"
LLAVA = Path(__file__).parents[4] / "jobs" / "llava.yaml"
TEXT = (
    "family: llama, num_layers: 2, hidden_size: 32, num_heads: 8, ffn_hidden_size: 64, vocab_size: 256, "
    "max_positions: 64"
)
TOWER = (
    "kind: clip, image_size: 8, patch_size: 4, num_layers: 2, hidden_size: 16, num_heads: 2, ffn_hidden_size: 32, "
    "image_token_id: 255"
)


def _facts(*overrides: str) -> list[str]:
    parsed = parse_job(LLAVA, ["distillation.loss_type=forward_kl", *overrides])
    assert not parsed.faults
    return [fault.fact for fault in job_faults(parsed.values)]


def _teacher(vision: str) -> str:
    return f"distillation.teacher_model={{{TEXT}{vision}}}"


def test_a_teacher_with_a_tower_of_its_own_sees_the_same_images() -> None:
    assert (
        _facts()
        == _facts("distillation.teacher=stored")
        == _facts(_teacher(f", vision: {{{TOWER}}}"))
        == []
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([_teacher("")], "vision has kind=none, and model.vision clip"),
        (
            [_teacher(f", vision: {{{TOWER}, image_mean: [0.5, 0.5, 0.5]}}")],
            "vision has image_mean=(0.5, 0.5, 0.5), and model.vision (0.48145466, 0.4578275, 0.40821073)",
        ),
        (
            [_teacher(f", vision: {{{TOWER}}}"), "model.vision={}"],
            "vision has kind=clip, and model.vision none",
        ),
    ],
    ids=["text-alone", "other-pixels", "images-for-none"],
)
def test_a_teacher_that_sees_other_images_is_refused(overrides: list[str], words: str) -> None:
    assert any(words in fact for fact in _facts(*overrides))


def test_a_short_teacher_is_not_told_to_place_its_layers() -> None:
    parsed = parse_job(
        DISTILL, ["parallel.pp=2", "parallel.tp=1", "distillation.teacher_model.num_layers=1"]
    )
    (fault,) = job_faults(parsed.values)
    assert fault.fact.startswith("of the teacher, distillation.teacher_model: parallel.pp=2")
    assert fault.remedy == "use parallel.pp of at most 1"
