"""What an export refuses, beside settings that config.json cannot say."""

from raymega.convert.huggingface.exporter import _lost_faults
from raymega.convert.huggingface.names import hf_tensors
from tests.unit.convert.folders import make_model

GPT2 = {"architectures": ["GPT2LMHeadModel"]}


def test_weights_that_no_tensor_of_theirs_holds_are_refused():
    further = make_model("gpt2", num_nextn_predict_layers=1)
    (fault,) = _lost_faults(further, hf_tensors(further), GPT2)
    assert "GPT2LMHeadModel has no mtp.0." in str(fault)
    plain = make_model("gpt2")
    assert _lost_faults(plain, hf_tensors(plain), GPT2) == []


def test_routers_counts_are_no_weights():
    moe = {"num_experts": 4, "load_balancing_type": "global", "router_aux_loss_coef": 0.1}
    model = make_model("llama", moe=moe)
    assert _lost_faults(model, hf_tensors(model), {}) == []
