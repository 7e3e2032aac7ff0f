"""Tasks refuse encoders, which predict no next token."""

import pytest

from raymega.errors import ConfigError
from raymega.evaluate.plan import EvalOptions, plan_on
from tests.support.jobs import make_test_plan

VALUES = {"seq_len": 16, "dtype": "float64", "device": "cpu"}


def test_an_encoder_has_no_tasks():
    options = "model.family=bert", "model.num_kv_heads=num_heads", "data.masking.mask_token_id=64"
    with pytest.raises(ConfigError, match="bert is an encoder"):
        plan_on(make_test_plan(*options).job.model, EvalOptions(), VALUES)


def test_a_head_without_a_vocabulary_has_no_tasks():
    options = "model.head.kind=regression", "data.packing=best_fit"
    with pytest.raises(ConfigError, match="this head has no vocabulary"):
        plan_on(make_test_plan(*options).job.model, EvalOptions(), VALUES)
