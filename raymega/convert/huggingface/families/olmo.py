"""OLMo 2 and 3: norms after attention and feed-forward layer, and norms over all queries and all keys.

OLMo 3 has windows in three of four layers, whose RoPE is never scaled.
"""

from __future__ import annotations

from raymega.convert.huggingface.architectures import LLAMA_DEFAULTS, NO_BIAS, SAME, Architecture
from raymega.convert.huggingface.families.family import HfFamily

_MODULES = {
    "post_attention_layernorm": ("attention_post_norm",),
    "post_feedforward_layernorm": ("mlp_post_norm",),
}
_DEFAULTS = {**LLAMA_DEFAULTS, "rms_norm_eps": 1e-5}
OLMO2 = HfFamily(
    architecture=Architecture("Olmo2ForCausalLM", "olmo2", _DEFAULTS, {**SAME, **NO_BIAS}),
    modules=_MODULES,
)
OLMO3 = HfFamily(
    architecture=Architecture(
        "Olmo3ForCausalLM", "olmo3",
        {**_DEFAULTS, "sliding_window": 4096, "rope_theta": 500000.0}, {**SAME, **NO_BIAS},
    ),
    modules=_MODULES,
    layer_types=lambda _: (*["sliding_attention"] * 3, "full_attention"),
    has_rope_by_type=True,
)  # fmt: skip
