"""Table of the parts that the package itself ships; `plugins.py` registers them as it registers those of others."""

from __future__ import annotations

BUILT_IN_PARTS = (
    ("tracker", "jsonl webhook", "raymega.tracking.trackers.makers:open_{}", "", ""),
    ("tracker", "mlflow", "raymega.tracking.trackers.makers:open_{}", "mlflow", ""),
    ("tracker", "tensorboard", "raymega.tracking.trackers.makers:open_{}", "tensorboard", "trackers"),
    ("tracker", "wandb", "raymega.tracking.trackers.makers:open_{}", "wandb", "trackers"),
    ("lr_schedule", "cosine linear inverse_sqrt wsd constant", "raymega.optim.lr_schedule:{}", "", ""),
    ("optimizer", "adamw sgd lion muon", "raymega.plan.memory.optimizer_state:KINDS[{}]", "", ""),
    ("loss", "cross_entropy", "raymega.parallel.tensor_parallel.vocab_logits:{}", "", ""),
    ("activation", "silu gelu gelu_tanh relu relu2 quick_gelu", "raymega.model.layers.mlp:ACTIVATIONS[{}]", "", ""),
    ("norm", "layer_norm rms_norm offset_rms_norm", "raymega.plan.layers.norm_kinds:NORM_KINDS[{}]", "", ""),
    ("family", "gpt2 llama qwen2 qwen3 phi3 granite olmo2 olmo3 gpt_neox gemma2 gemma3 glm4_moe minimax_m2 "
     "gpt_oss llama4 qwen3_next qwen3_5 nemotron_h bert megatron_bert roberta t5 t5_v1_1",
     "raymega.plan.layers.family_parts:FAMILY_PARTS[{}]", "", ""),
    ("hf_family", "mistral smollm3 olmo2 phi3 granite gpt_neox gemma2 gemma3_text olmo3 glm4_moe minimax_m2 gpt_oss llama4_text "
     "qwen3_next qwen3_5_text qwen3_5_moe_text nemotron_h deepseek_v32 openelm bert megatron-bert roberta t5",
     "raymega.convert.huggingface.families.table:HF_FAMILIES[{}]", "", ""),
    ("data_source", "synthetic megatron", "raymega.data.open_split:open_{}", "", ""),
    ("store", "file s3", "raymega.storage.registry:BACKENDS[{}]", "", ""),
)  # fmt: skip
"""Kind, names, place of the code with the name for ``{}``, package that it needs, extra that installs it."""
