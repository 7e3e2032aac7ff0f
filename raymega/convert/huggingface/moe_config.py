"""Translates between config.json's settings of experts and ``model.moe``.

Every architecture has its own names for the same few settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from raymega.config.schema import ModelSection
from raymega.convert.huggingface.architectures import (
    Config,
    alike,
    architecture_of,
    ours,
    theirs,
)
from raymega.errors import Fault

# Settings of config.json to fields of model.moe, by architecture.
_WIDTH = {"moe_intermediate_size": "intermediate_size"}
_MIXTRAL = {"num_local_experts": "num_experts", **alike("router_jitter_noise")}
_GPT_OSS = {"num_local_experts": "num_experts"}
_QWEN = {
    "num_experts": "num_experts",
    **_WIDTH,
    "decoder_sparse_step": "layer_freq",
    **alike("norm_topk_prob"),
}
_DEEPSEEK = {
    "n_routed_experts": "num_experts",
    **_WIDTH,
    **alike("first_k_dense_replace", "routed_scaling_factor"),
}


def expert_values(config: Config) -> dict[str, Any]:
    """Return the ``moe`` entry of the model section; empty for a dense model."""
    read = _READERS.get(config.get("model_type", ""))
    values = read(config) if read else {}
    return {"moe": {"top_k": config["num_experts_per_tok"], **values}} if values else {}


def expert_config(model: ModelSection) -> dict[str, Any]:
    """Return the settings of config.json for ``model.moe``; empty for a dense model."""
    write = _WRITERS.get(architecture_of(model))
    return {"num_experts_per_tok": model.moe.top_k, **write(model)} if write else {}


def expert_faults(config: Config, unlike: Callable[[str, str], Fault]) -> Iterator[Fault]:
    """Return the fault of a pattern of dense blocks that the model section cannot express."""
    # Ours: the first blocks are dense, or every n-th block has experts; not both.
    dense, every = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
    is_front = list(dense) == list(range(len(dense)))
    if dense and not (is_front and every == 1):
        fact = f"mlp_only_layers={list(dense)} with decoder_sparse_step={every}"
        rule = "blocks with experts are all those after the dense ones at the front, or every n-th block"
        yield unlike(fact, rule)


def _qwen_values(config: Config) -> dict[str, Any]:
    config = {"num_experts": config.get("num_local_experts"), **config}
    # Experts in no block at all: transformers then builds the dense architecture.
    num_layers, dense = config["num_hidden_layers"], len(config["mlp_only_layers"])
    has_none = config["num_experts"] == 0 or dense >= num_layers
    if has_none or config["decoder_sparse_step"] > num_layers:
        return {}
    has_shared = config["model_type"] != "qwen3_moe"
    return {
        **ours(_QWEN, config),
        "first_k_dense_replace": dense,
        "shared_expert_intermediate_size": config.get("shared_expert_intermediate_size", 0)
        * has_shared,
        "shared_expert_gate": has_shared,
    }


def _deepseek_values(config: Config) -> dict[str, Any]:
    is_v3 = config["model_type"] != "deepseek_v2"
    if config["first_k_dense_replace"] >= config["num_hidden_layers"]:
        return {}
    # V3 always chooses among groups; V2 only with this method. All groups chosen is no choice.
    is_grouped = is_v3 or config["topk_method"] == "group_limited_greedy"
    groups = config["n_group"] if is_grouped else 1
    if groups > 1 and config["topk_group"] == groups:
        groups = 1
    return {
        **ours(_DEEPSEEK, config),
        "shared_expert_intermediate_size": config["moe_intermediate_size"]
        * config["n_shared_experts"],
        "n_group": groups,
        "topk_group": config["topk_group"] if groups > 1 else 1,
        "group_score": "top2" if is_v3 and groups > 1 else "max",
        "router_score_function": "sigmoid" if is_v3 else "softmax",
        "norm_topk_prob": is_v3 and config["norm_topk_prob"],
        "expert_bias": is_v3,
    }


def _qwen3_config(model: ModelSection) -> dict[str, Any]:
    dense = list(range(model.moe.first_k_dense_replace))
    width = model.expert_width
    return theirs(_QWEN, model.moe) | {"mlp_only_layers": dense, "moe_intermediate_size": width}


def _qwen2_config(model: ModelSection) -> dict[str, Any]:
    return _qwen3_config(model) | theirs(alike("shared_expert_intermediate_size"), model.moe)


def _deepseek_v2_config(model: ModelSection) -> dict[str, Any]:
    method = "group_limited_greedy" if model.moe.n_group > 1 else "greedy"
    return {**_deepseek_v3_config(model), "topk_method": method}


def _deepseek_v3_config(model: ModelSection) -> dict[str, Any]:
    moe = model.moe
    return {
        **theirs({**_DEEPSEEK, **alike("n_group", "topk_group", "norm_topk_prob")}, moe),
        "moe_intermediate_size": model.expert_width,
        "first_k_dense_replace": moe.first_k_dense_replace if moe.num_experts else model.num_layers,
        "n_shared_experts": moe.shared_expert_intermediate_size // model.expert_width,
    }


def _nemotron_values(config: Config) -> dict[str, Any]:
    # the kinds of layers say which blocks have experts
    shared = config["moe_shared_expert_intermediate_size"]
    values = _deepseek_values({**config, "first_k_dense_replace": 0, "num_hidden_layers": 1})
    return {**values, "shared_expert_intermediate_size": shared}


def _nemotron_config(model: ModelSection) -> dict[str, Any]:
    names = alike("n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor")
    return {
        **theirs({"n_routed_experts": "num_experts", **names}, model.moe),
        "moe_intermediate_size": model.expert_width,
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": model.moe.shared_expert_intermediate_size,
    }


def _minimax_values(config: Config) -> dict[str, Any]:
    return {
        **ours(_MIXTRAL, config),
        "router_score_function": "sigmoid",
        "norm_topk_prob": True,
        "expert_bias": True,
    }


def _llama4_values(config: Config) -> dict[str, Any]:
    num_layers, every = config["num_hidden_layers"], config["interleave_moe_layer_step"]
    # a list wins over the interval; llama4.py refuses one that no interval gives
    if config.get("moe_layers") is not None:
        every = 1 + config["moe_layers"][0] if config["moe_layers"] else num_layers + 1
    if every > num_layers:
        return {}
    return {
        "num_experts": config["num_local_experts"],
        "intermediate_size": config["moe_intermediate_size"],
        "shared_expert_intermediate_size": config["moe_intermediate_size"],
        "layer_freq": every,
        "router_score_function": "sigmoid",
        "norm_topk_prob": False,
        "apply_probs_on_input": True,
    }


def _llama4_config(model: ModelSection) -> dict[str, Any]:
    layers = [i for i in range(model.num_layers) if model.holds_experts(i)]
    return {
        "num_local_experts": model.moe.num_experts or 1,
        "moe_intermediate_size": model.expert_width,
        "interleave_moe_layer_step": model.moe.layer_freq,
        "moe_layers": layers,
    }


_READERS: Mapping[str, Callable[[Config], dict[str, Any]]] = {
    "mixtral": partial(ours, _MIXTRAL),
    "qwen2_moe": _qwen_values,
    "qwen3_moe": _qwen_values,
    "qwen3_next": _qwen_values,
    "qwen3_5_moe_text": _qwen_values,
    "deepseek_v2": _deepseek_values,
    "deepseek_v3": _deepseek_values,
    "deepseek_v32": _deepseek_values,
    "glm4_moe": _deepseek_values,
    "minimax_m2": _minimax_values,
    "gpt_oss": partial(ours, _GPT_OSS),
    "llama4_text": _llama4_values,
    "nemotron_h": _nemotron_values,
}
_WRITERS: Mapping[str, Callable[[ModelSection], dict[str, Any]]] = {
    "mixtral": lambda model: theirs(_MIXTRAL, model.moe),
    "qwen2_moe": _qwen2_config,
    "qwen3_moe": _qwen3_config,
    "qwen3_next": _qwen2_config,
    "qwen3_5_moe_text": _qwen2_config,
    "deepseek_v2": _deepseek_v2_config,
    "deepseek_v3": _deepseek_v3_config,
    "deepseek_v32": _deepseek_v3_config,
    "glm4_moe": _deepseek_v3_config,
    "minimax_m2": lambda model: theirs(_MIXTRAL, model.moe),
    "gpt_oss": lambda model: theirs(_GPT_OSS, model.moe),
    "llama4_text": _llama4_config,
    "nemotron_h": _nemotron_config,
}
