"""Recipes of `raymega init`: what each kind of training decides, one row a recipe.

A recipe states only fields that differ from a job file's defaults and that neither the model nor the
planner decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raymega.config.schema import ModelSection
from raymega.config.vision.section import VisionSection


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Kind of training that a job file is written for.

    Attributes:
        name: Name on the command line, and of the run unless the file has another.
        summary: Subject of help texts: what the recipe trains.
        needs_model: Whether it starts from the weights of a model that must be named.
        fields: Values by dotted path.
        cpu_steps: Optimizer steps of a run on CPUs, where a job is a trial.
        input: Input of `raymega data prepare`, with its options.
        data_note: Comment above data.loss_on, in place of the field's description; empty for that.
    """

    name: str
    summary: str
    needs_model: bool
    fields: Mapping[str, object]
    cpu_steps: int
    input: str = "my-text/"
    data_note: str = ""


CHATS = "my-chats.jsonl --format chat"
LOSS_NOTE = "auto: of conversations the tokens count that the assistant writes; completion: its last message; all: every token."


RECIPES: Mapping[str, Recipe] = {
    each.name: each
    for each in (
        Recipe(
            name="pretrain",
            summary="a model from random weights, on your text",
            needs_model=False,
            fields={
                "run.steps": 5000, "run.eval_every": 500, "optimizer.lr": 6e-4, "optimizer.lr_warmup_steps": 100,
                "optimizer.weight_decay": 0.1, "checkpoint.every": 250,
            },
            cpu_steps=200,
        ),
        Recipe(
            name="continue",
            summary="a published model or a checkpoint further, on your text",
            needs_model=True,
            fields={
                "run.steps": 1000, "run.eval_every": 100, "optimizer.lr": 2e-5, "optimizer.lr_warmup_steps": 20,
                "optimizer.weight_decay": 0.1, "checkpoint.every": 250,
            },
            cpu_steps=20,
        ),
        Recipe(
            name="sft",
            summary="all weights of a published model or a checkpoint, on your conversations",
            needs_model=True,
            fields={
                "run.steps": 500, "run.eval_every": 50, "data.loss_on": "auto", "data.packing": "best_fit",
                "optimizer.lr": 1e-5, "optimizer.lr_warmup_steps": 20, "optimizer.weight_decay": 0.0,
                "checkpoint.every": 100,
            },
            cpu_steps=20,
            input=CHATS,
            data_note=LOSS_NOTE,
        ),
        Recipe(
            name="lora",
            summary="low-rank adapters of a published model or a checkpoint, on your conversations",
            needs_model=True,
            fields={
                "model.lora": {"r": 16, "lora_alpha": 32.0, "target_modules": ["attention.*", "mlp.*"]},
                "run.steps": 500, "run.eval_every": 50, "data.loss_on": "auto", "data.packing": "best_fit",
                "optimizer.lr": 2e-4, "optimizer.lr_warmup_steps": 20, "optimizer.weight_decay": 0.0,
                "checkpoint.every": 100,
            },
            cpu_steps=20,
            input=CHATS,
            data_note=LOSS_NOTE,
        ),
        Recipe(
            name="qlora",
            summary="low-rank adapters as lora, over frozen weights in 4-bit blocks",
            needs_model=True,
            fields={
                "model.lora": {"r": 16, "lora_alpha": 32.0, "target_modules": ["attention.*", "mlp.*"], "base_dtype": "nf4"},
                "run.steps": 500, "run.eval_every": 50, "data.loss_on": "auto", "data.packing": "best_fit",
                "optimizer.lr": 2e-4, "optimizer.lr_warmup_steps": 20, "optimizer.weight_decay": 0.0,
                "checkpoint.every": 100,
            },
            cpu_steps=20,
            input=CHATS,
            data_note=LOSS_NOTE,
        ),
        Recipe(
            name="dpo",
            summary="low-rank adapters of a model or a checkpoint, on pairs of a chosen and a rejected answer",
            needs_model=True,
            fields={
                "model.lora": {"r": 16, "lora_alpha": 32.0, "target_modules": ["attention.*", "mlp.*"]},
                "run.steps": 500, "run.eval_every": 50, "data.packing": "best_fit", "preference.loss_type": "sigmoid",
                "preference.beta": 0.1, "optimizer.lr": 2e-5, "optimizer.lr_warmup_steps": 20,
                "optimizer.weight_decay": 0.0, "checkpoint.every": 100,
            },
            cpu_steps=20,
            input="my-pairs.jsonl --format preference",
        ),
        Recipe(
            name="distill",
            summary="a model or a checkpoint, on the next-token distribution of a larger one, its teacher",
            needs_model=True,
            fields={
                "run.steps": 1000, "run.eval_every": 100, "distillation.loss_type": "forward_kl",
                "distillation.weight": 0.5, "distillation.temperature": 2.0, "optimizer.lr": 5e-5,
                "optimizer.lr_warmup_steps": 20, "optimizer.weight_decay": 0.1, "checkpoint.every": 250,
            },
            cpu_steps=20,
        ),
        Recipe(
            name="classify",
            summary="a model or a checkpoint with a head for classes, on your labelled texts",
            needs_model=True,
            fields={
                "run.steps": 500, "run.eval_every": 50, "data.packing": "best_fit", "optimizer.lr": 2e-5,
                "optimizer.lr_warmup_steps": 20, "optimizer.weight_decay": 0.01, "checkpoint.every": 100,
            },
            cpu_steps=20,
        ),
        Recipe(
            name="vision",
            summary="a model that reads images among text, published (LLaVA, Qwen2-VL) or from random weights",
            needs_model=False,
            fields={
                "run.steps": 1000, "run.eval_every": 100, "optimizer.lr": 2e-5, "optimizer.lr_warmup_steps": 20,
                "optimizer.weight_decay": 0.0, "checkpoint.every": 250,
            },
            cpu_steps=20,
        ),
    )
}  # fmt: skip
"""Recipes by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Sizes that suit a kind of device.

    Attributes:
        seq_len: Longest sequence, in tokens.
        least_sequences: Least number of sequences of one optimizer step.
        fields: Values by dotted path.
        model: Model of a recipe for which none is named.
        tower: Vision tower of that model, where the recipe has images.
    """

    seq_len: int
    least_sequences: int
    fields: Mapping[str, object]
    model: ModelSection
    tower: VisionSection


SCALES = {
    "cpu": Scale(
        seq_len=128, least_sequences=8,
        fields={"precision.dtype": "float32", "cluster.device": "cpu", "cluster.cpus_per_worker": 0.1},
        model=ModelSection(
            family="llama", num_layers=4, hidden_size=128, num_heads=8, num_kv_heads=4, ffn_hidden_size=352,
            vocab_size=4096, max_positions=128,
        ),
        tower=VisionSection(
            kind="clip", image_size=32, patch_size=8, num_layers=3, hidden_size=64, num_heads=4, ffn_hidden_size=128,
        ),
    ),
    "cuda": Scale(
        seq_len=4096, least_sequences=256,
        fields={"precision.dtype": "bfloat16", "cluster.device": "cuda", "cluster.cpus_per_worker": 4.0},
        model=ModelSection(
            family="llama", num_layers=12, hidden_size=768, num_heads=12, ffn_hidden_size=2048, vocab_size=32768,
            max_positions=2048,
        ),
        tower=VisionSection(
            kind="clip", image_size=224, patch_size=16, num_layers=12, hidden_size=768, num_heads=12,
            ffn_hidden_size=3072,
        ),
    ),
}  # fmt: skip
"""Scales by ``cluster.device``."""
