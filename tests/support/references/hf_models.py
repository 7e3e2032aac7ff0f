"""Small random models of transformers, in folders and in float64. The import takes seconds, so it
happens in the functions, and ranks never see it."""

import importlib
from contextlib import contextmanager

import torch

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 259,
    "max_position_embeddings": 40,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
GPT2 = {
    "n_embd": 48, "n_layer": 3, "n_head": 8, "vocab_size": 259, "n_positions": 40,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    **SIZES, "num_key_value_heads": 8, "kv_lora_rank": 20, "q_lora_rank": 12, "qk_rope_head_dim": 4,
    "v_head_dim": 7, "qk_nope_head_dim": 6, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 10,
    "beta_fast": 4.0, "beta_slow": 1.0, "mscale": 0.9, "mscale_all_dim": 0.7,
}  # fmt: skip
EXPERTS = {
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2Moe",
        {**SIZES, **ROUTED, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {**SIZES, **ROUTED, "head_dim": 10, "norm_topk_prob": True, "decoder_sparse_step": 2},
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 2,
        },
    ),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "n_shared_experts": 1, "rope_parameters": YARN}),
}
IN_OTHER_WORDS = {
    "deepseek_v2-all-groups": (
        "DeepseekV2",
        {**LATENT, "topk_method": "group_limited_greedy", "n_shared_experts": 2, "topk_group": 4},
    ),
    "deepseek_v3-all-groups": ("DeepseekV3", {**LATENT, "n_shared_experts": 1, "topk_group": 4}),
    "qwen2_moe-dense": ("Qwen2Moe", {**SIZES, **ROUTED, "mlp_only_layers": [0, 1, 2]}),
    "qwen3_moe-dense": ("Qwen3Moe", {**SIZES, **ROUTED, "head_dim": 10, "decoder_sparse_step": 4}),
}  # fmt: skip
ALIASES = {
    "mistral": ("Mistral", {**SIZES, "sliding_window": None}),
    "kimi_k2": (
        "DeepseekV3",
        {
            **LATENT, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827,
            "rope_parameters": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
}  # fmt: skip
"""Networks under another name; Kimi-K2 has code of its own, that of DeepSeek-V3."""
KIMI_K2 = {"model_type": "kimi_k2", "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
           "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}}  # fmt: skip
"""Settings of its config.json that DeepSeek-V3's lacks."""
KINDS = {
    "gpt2": ("GPT2", GPT2),
    "gpt2-untied": ("GPT2", {**GPT2, "tie_word_embeddings": False, "n_inner": 80}),
    "llama2": ("Llama", {**SIZES, "num_key_value_heads": 8}),
    "llama3": ("Llama", {**SIZES, "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {**SIZES, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 10}),
}
PLAIN_ROPE, LINEAR_ROPE = {"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}
YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, "original_max_position_embeddings": 10,
}  # fmt: skip
WITHOUT_TOKENS = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
WITHOUT_GROUPS = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
GEMMA = {
    **SIZES,
    **WITHOUT_TOKENS,
    "hidden_size": 64,
    "head_dim": 10,
    "query_pre_attn_scalar": 14,
    "sliding_window": 7,
}
FAMILIES = {
    "mistral-window": ("Mistral", {**SIZES, "sliding_window": 7}),
    "smollm3": ("SmolLM3", {**SIZES, **WITHOUT_TOKENS, "num_hidden_layers": 4, "no_rope_layers": [1, 0, 0, 1]}),
    "olmo2": ("Olmo2", {**SIZES, **WITHOUT_TOKENS}),
    "phi3": (
        "Phi3",
        {
            **SIZES, **WITHOUT_TOKENS, "num_attention_heads": 6, "num_key_value_heads": 2, "sliding_window": 11,
            "rope_parameters": {**PLAIN_ROPE, "rope_theta": 500.0, "partial_rotary_factor": 0.75},
        },
    ),
    "granite": (
        "Granite",
        {
            **SIZES, "embedding_multiplier": 2.5, "logits_scaling": 3.0, "residual_multiplier": 0.22,
            "attention_multiplier": 0.31,
        },
    ),
    "gpt_neox": ("GPTNeoX", {**WITHOUT_GROUPS, "num_attention_heads": 6}),
    "gemma2": (
        "Gemma2", {**GEMMA, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5},
    ),
    "gemma3": (
        "Gemma3Text",
        {
            **GEMMA, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {**LINEAR_ROPE, "rope_theta": 700.0},
                "sliding_attention": {**PLAIN_ROPE, "rope_theta": 90.0},
            },
        },
    ),
    "olmo3": (
        "Olmo3",
        {
            **SIZES, **WITHOUT_TOKENS, "num_hidden_layers": 4, "sliding_window": 9,
            "rope_parameters": {
                "full_attention": YARN_ROPE, "sliding_attention": {**PLAIN_ROPE, "rope_theta": 300.0},
            },
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            **SIZES, "head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
            "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "attention_bias": True, "use_qk_norm": True,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {
            **SIZES, **WITHOUT_TOKENS, "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2,
            "rope_parameters": {**PLAIN_ROPE, "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            **SIZES, **WITHOUT_TOKENS, "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2,
            "intermediate_size": 24, "sliding_window": 7, "swiglu_limit": 0.8,
            # with 10 positions the blend would have the same pairs between whole numbers
            "rope_parameters": {**YARN_ROPE, "original_max_position_embeddings": 20, "truncate": False},
        },
    ),
    "llama4": (
        "Llama4Text",
        {
            **SIZES, **WITHOUT_TOKENS, "num_hidden_layers": 4, "head_dim": 12, "intermediate_size": 24,
            "intermediate_size_mlp": 80, "num_local_experts": 4, "interleave_moe_layer_step": 2,
            "attention_chunk_size": 7, "floor_scale": 5, "attn_scale": 0.3,
            "rope_parameters": LLAMA3_ROPE,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            **SIZES, **WITHOUT_TOKENS, **ROUTED, "num_hidden_layers": 4, "head_dim": 12, "num_experts": 4,
            "shared_expert_intermediate_size": 40, "mlp_only_layers": [0], "full_attention_interval": 2,
            "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 6,
            "linear_value_head_dim": 5, "linear_conv_kernel_dim": 4,
            "rope_parameters": {**PLAIN_ROPE, "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3_5": (
        "Qwen3_5Text",
        {
            **SIZES, **WITHOUT_TOKENS, "num_hidden_layers": 4, "head_dim": 12, "linear_num_key_heads": 4,
            "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
            "linear_conv_kernel_dim": 3, "full_attention_interval": 2,
            # with 1e-6 norms of what little a state holds at first multiply roundings
            "rms_norm_eps": 1e-2,
            "rope_parameters": {**PLAIN_ROPE, "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeText",
        {
            **SIZES, **WITHOUT_TOKENS, **ROUTED, "num_hidden_layers": 4, "head_dim": 12, "full_attention_interval": 2,
            "shared_expert_intermediate_size": 40, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
            "linear_key_head_dim": 6, "linear_value_head_dim": 5, "rms_norm_eps": 1e-2,
            "rope_parameters": {**PLAIN_ROPE, "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            **SIZES, **WITHOUT_TOKENS, "head_dim": 12, "ssm_state_size": 6, "mamba_num_heads": 8, "mamba_head_dim": 5,
            "n_groups": 4, "conv_kernel": 3, "chunk_size": 8, "time_step_min": 0.4,
            "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
        },
    ),
    "deepseek_v32": (
        "DeepseekV32",
        {
            **LATENT, "n_shared_experts": 1, "rope_parameters": YARN, "index_n_heads": 3, "index_head_dim": 6,
            "index_topk": 40,
        },
    ),
    "nemotron_h_moe": (
        "NemotronH",
        {
            **SIZES, **WITHOUT_TOKENS, "head_dim": 12, "ssm_state_size": 6, "mamba_num_heads": 8, "mamba_head_dim": 5,
            "n_groups": 4, "conv_kernel": 3, "chunk_size": 8, "time_step_min": 0.4, "n_routed_experts": 8,
            "num_experts_per_tok": 3, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40,
            "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
        },
    ),
}  # fmt: skip
"""Small models by name: a family of convert/huggingface/families each, with all its parts in use."""
HAVE_EXPERTS = (
    "glm4_moe", "minimax_m2", "gpt_oss", "llama4", "qwen3_next", "qwen3_5_moe", "nemotron_h_moe",
    "deepseek_v32",
)  # fmt: skip
FOLDERS = {"Qwen2Moe": "qwen2_moe", "Qwen3Moe": "qwen3_moe", "DeepseekV2": "deepseek_v2",
           "DeepseekV3": "deepseek_v3", "DeepseekV32": "deepseek_v32", "GPTNeoX": "gpt_neox", "Gemma3Text": "gemma3",
           "Glm4Moe": "glm4_moe", "MiniMaxM2": "minimax_m2", "GptOss": "gpt_oss",
           "Llama4Text": "llama4", "Qwen3Next": "qwen3_next", "Qwen3_5Text": "qwen3_5",
           "Qwen3_5MoeText": "qwen3_5_moe", "NemotronH": "nemotron_h"}  # fmt: skip


def make_config(kind, **changes):
    """Return the config of a small model, with ``changes``, and the module that has its classes."""
    family, fields = (KINDS | EXPERTS | IN_OTHER_WORDS | ALIASES | FAMILIES)[kind]
    folder = FOLDERS.get(family, family.lower())
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    return getattr(module, f"{family}Config")(**fields | changes), module


def make_model(kind, *, seed=0, dtype=torch.float64, positions=0, **changes):
    """A model whose every parameter is random: no zero biases or unit norms to hide a mistake."""
    family = (KINDS | EXPERTS | IN_OTHER_WORDS | ALIASES | FAMILIES)[kind][0]
    if positions:
        changes["n_positions" if family == "GPT2" else "max_position_embeddings"] = positions
    config, module = make_config(kind, **changes)
    config._experts_implementation = "eager"
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model = getattr(module, f"{family.removesuffix('Text')}{head}")(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # DeepSeek's score corrections are buffers, and zero in a fresh model
        biases = ((name, values) for name, values in model.named_buffers() if "correction" in name)
        for name, values in (*model.named_parameters(), *biases):
            noise = 0.2 * torch.randn(values.shape, generator=generator, dtype=torch.float64)
            noise = noise.float() if "correction" in name else noise  # loaded in float32 by some
            values.copy_(noise + (1.0 if values.ndim == 1 and "bias" not in name else 0.0))
    return model


def load_model(folder):
    """Load a folder with transformers, in eval mode."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    model.config._experts_implementation = "eager"  # their grouped product has no float64
    return model


class _Torch:
    """torch, whose float32 is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextmanager
def in_float64(model):
    """Run transformers' code without its casts to float32 in norms and RoPE angles, for the body."""
    # every module whose code may call torch.float32, and the helpers of RoPE
    names = {type(part).__module__ for part in model.modules()}
    modules = [importlib.import_module(name) for name in names if name.startswith("transformers")]
    modules.append(importlib.import_module("transformers.modeling_rope_utils"))
    before, plain = [module.__dict__.get("torch") for module in modules], torch.Tensor.float
    torch.Tensor.float = torch.Tensor.double
    for module in modules:
        module.torch = _Torch()
    try:
        ropes = (part for name, part in model.named_modules() if name.endswith("rotary_emb"))
        if rope := next(ropes, None):
            # angles were computed in float32 when the model was made
            for name, angles in type(rope)(model.config.get_text_config()).named_buffers():
                setattr(rope, name, angles)
        yield model
    finally:
        torch.Tensor.float = plain
        for module, torch_before in zip(modules, before, strict=True):
            module.torch = torch_before


def logits(model, tokens):
    """tokens: [B, S] -> [B, S, V], in float64 throughout."""
    with in_float64(model):
        return model(tokens).logits
