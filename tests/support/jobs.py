"""Jobs for tests: the verify job with changes, as a plan."""

from pathlib import Path

from raymega.config.load import parse_job
from raymega.plan.run_plan import RunPlan, make_plan

AXES = ("tp", "cp", "pp", "dp", "ep", "etp")
T5 = (
    "model.family=t5_v1_1", "model.num_kv_heads=num_heads", "model.tie_word_embeddings=false", "data.seq_len=64",
    "model.encoder_decoder={num_encoder_layers: 2, decoder_seq_len: 16}",
    "data.span_corruption={text_seq_len: 52, first_sentinel_id: 255, eos_token_id: 64, decoder_start_token_id: 65}",
)  # fmt: skip
"""Overrides of the verify job that make its model a T5."""
VERIFY = Path(__file__).parents[2] / "jobs" / "verify.yaml"


def make_test_plan(*overrides: str) -> RunPlan:
    """The plan of jobs/verify.yaml with ``overrides`` applied."""
    return make_plan(parse_job(VERIFY, overrides).job())


def layout_overrides(layout: str) -> list[str]:
    """``tp2-pp2-etp2-sp`` as overrides; axes that are not named are 1, sp is sequence parallel."""
    # letters name the axis, digits its degree
    degrees = {
        part.rstrip("0123456789"): part.strip("abcdefghijklmnopqrstuvwxyz")
        for part in layout.split("-")
    }
    return [
        *(f"parallel.{axis}={degrees.get(axis, '1')}" for axis in AXES),
        f"parallel.sequence_parallel={'true' if 'sp' in degrees else 'false'}",
    ]
