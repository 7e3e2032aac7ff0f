"""A config.json with numbers that nobody can list is refused before anything lists them."""

import pytest

from raymega.convert.huggingface.config import model_from
from raymega.convert.huggingface.listed_sizes import EXPERTS, LAYERS, PATTERNS
from raymega.errors import ConfigError
from tests.unit.convert.huggingface.test_config import DEEPSEEK_V3, LLAMA31_8B, QWEN3_MOE

ABSURD = 10**18
LLAVA = {
    "model_type": "llava",
    "text_config": LLAMA31_8B,
    "vision_config": {"num_hidden_layers": 2},
}


def _told(config):
    with pytest.raises(ConfigError) as error:
        model_from(config)
    return error.value.faults[0]


@pytest.mark.parametrize("key", [*LAYERS, *EXPERTS, *PATTERNS])
def test_number_of_what_is_listed_is_refused(key):
    fault = _told({**DEEPSEEK_V3, key: ABSURD})
    assert fault.fact == f"config.json has {key}={ABSURD}"
    assert "at most 100,000" in fault.rule and "config.json" in fault.remedy


@pytest.mark.parametrize("section", ["text_config", "vision_config"])
def test_number_in_a_section_is_refused_with_its_place(section):
    inner = {**LLAVA[section], "num_hidden_layers": ABSURD}
    fault = _told({**LLAVA, section: inner})
    assert fault.fact == f"config.json has {section}.num_hidden_layers={ABSURD}"


def test_experts_of_all_layers_are_refused_where_neither_number_is_large():
    fault = _told({**QWEN3_MOE, "num_hidden_layers": 10_000, "num_experts": 1000})
    assert fault.fact == "config.json has 10000 layers of 1000 experts"
    assert model_from({**QWEN3_MOE, "num_hidden_layers": 61, "num_experts": 384}).num_layers == 61
