"""The sections of the job file that say where work is done, and in which order."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from raymega.config.fields import NonNegative, Positive, Section

ZERO_STAGES = ("none", "optimizer", "gradients", "parameters")
"""Values of ``parallel.sharding`` by ZeRO's stage, 0 to 3."""


def _zero_stage_name(value: object) -> object:
    """Replace a stage by its name; leave all else to be judged as it is."""
    if type(value) is int and 0 <= value < len(ZERO_STAGES):
        return ZERO_STAGES[value]
    return value


class ParallelSection(Section):
    """Degrees of the five axes. The world has tp * cp * dp * pp workers."""

    layout: Literal["given", "auto"] = Field(
        default="given",
        description="auto, or `parallel: auto` for short: the planner chooses degrees, schedule, chunks, "
        "micro-batch, recompute and sharding for cluster.num_workers on cluster.accelerator. What the job "
        "sets of them stays as it is.",
    )
    tp: Positive = Field(default=1, description="Tensor parallel: heads, FFN and vocabulary cut.")
    pp: Positive = Field(default=1, description="Pipeline parallel: layers cut into stages.")
    dp: Positive = Field(default=1, description="Data parallel: sequences shared out.")
    cp: Positive = Field(
        default=1,
        description="Context parallel: the tokens of a sequence shared out; 2 * cp divides data.seq_len.",
    )
    cp_method: Literal["ring", "all_gather", "all_to_all", "hybrid"] = Field(
        default="ring",
        description="How attention reaches across cp. ring: keys and values go round behind the work. "
        "all_gather: they are collected, which takes memory for the whole sequence. all_to_all: ranks "
        "exchange heads. hybrid: hierarchical_cp_size neighbours exchange heads, and a ring joins such groups.",
    )
    hierarchical_cp_size: Positive = Field(
        default=2, description="hybrid only: neighbours that exchange heads; divides cp."
    )
    dynamic_cp: bool = Field(
        default=False,
        description="Packed documents only: dp * cp ranks share out each step's documents anew, each "
        "pack of them on as few ranks (1, 2, 4, ...) as memory and an even share of the work allow. "
        "A rank holds at most data.seq_len / cp tokens of a micro-batch.",
    )
    ep: Positive = Field(
        default=1,
        description="Expert parallel: the experts of each block shared out over the same ranks, those "
        "of a pipeline stage. Divides model.moe.num_experts; etp * ep divides tp * cp * dp.",
    )
    etp: Positive = Field(
        default=1,
        description="Expert tensor parallel: the features of each expert cut. Divides their width.",
    )
    moe_token_dispatcher_type: Literal["all_to_all", "all_gather"] = Field(
        default="all_to_all",
        description="How tokens reach experts on other ranks. all_to_all: each token is sent to the "
        "ranks of its experts. all_gather: every rank collects all tokens and takes its own, which "
        "pays where most ranks need most tokens.",
    )
    overlap_moe_expert_parallel_comm: bool = Field(
        default=False,
        description="While tokens of one micro-batch travel to experts or back, the rank works on another: "
        "a forward and a backward take turns. With schedule.name=dualpipe_v, or 1f1b on parallel.pp=1, which "
        "then holds the activations of two micro-batches.",
    )
    order: str = Field(
        default="tp-cp-ep-dp-pp",
        description="Axes from the fastest varying rank digit to the slowest.",
    )
    stages: str = Field(
        default="even",
        description="Layers of each stage. even; auto: by cost, so that the stage with head and loss "
        "is not the slowest; or a text such as `Ett|tt|(t|)*2L`: E embedding, t layer, L head and loss, "
        "`|` the next of the pp * chunks stages. Stages may be empty, ranks not.",
    )
    first_stage_layers: NonNegative | Literal["even"] = Field(
        default="even", description="stages=even: layers of the first stage, set by hand."
    )
    last_stage_layers: NonNegative | Literal["even"] = Field(
        default="even", description="stages=even: layers of the last stage, set by hand."
    )
    is_embedding_a_layer: bool = Field(
        default=False, description="stages=even: the embedding counts as a layer of its stage."
    )
    is_loss_a_layer: bool = Field(
        default=False, description="stages=even: head and loss count as a layer of their stage."
    )
    sharding: Annotated[
        Literal["none", "optimizer", "gradients", "parameters"],
        BeforeValidator(_zero_stage_name),
        WithJsonSchema({"enum": [*ZERO_STAGES, 0, 1, 2, 3]}),
    ] = Field(
        default="none",
        description="What the dp * cp ranks with the same parameters share out. optimizer: masters and "
        "moments, for one reduce-scatter and one all-gather a step. gradients: their sums too, for a "
        "reduce-scatter a micro-batch. parameters: weights too, gathered for each forward and each "
        "backward. Each saves memory and sends more. ZeRO's stages 0 to 3 are the same in this order.",
    )
    data_parallel_shard_degree: Positive | Literal["all"] = Field(
        default="all",
        description="Hybrid sharding: so many neighbouring ranks, such as a node's, share one copy out, "
        "and gradients are summed over the copies once a step; divides dp * cp.",
    )
    sequence_parallel: bool = Field(
        default=False,
        description="Between tensor-parallel layers each tp rank holds S/tp positions only: norms "
        "and dropout are cut too. Saves activations; needs tp to divide data.seq_len.",
    )
    is_tp_across_nodes_allowed: bool = Field(
        default=False,
        description="Let a tensor-parallel group span nodes. Slow on all but NVLink domains.",
    )


class ScheduleSection(Section):
    """How a step's micro-batches pass through the pipeline."""

    name: Literal[
        "1f1b", "gpipe", "interleaved", "zb_h1", "zb_h2", "zb_v", "zb_auto", "dualpipe_v"
    ] = Field(
        default="1f1b",
        description="Order of forward and backward work; pp=1 uses it too. 1f1b with several chunks "
        "is interleaved. zb_*: weight gradients are put off to where a rank would idle. zb_v and "
        "dualpipe_v need 2 chunks, zb_h1, zb_h2 and zb_auto 1.",
    )
    chunks: Positive = Field(
        default=1,
        description="v, stages per rank. More of them shrink the bubble of 1f1b, for as many times "
        "the messages.",
    )
    microbatch_group_size_per_vp_stage: Positive | Literal["pp"] = Field(
        default="pp",
        description="Interleaved 1f1b: micro-batches that pass a chunk before the next chunk's turn; "
        "at least parallel.pp.",
    )
    max_in_flight_microbatches: Positive | Literal["pp"] = Field(
        default="pp",
        description="zb_auto: most micro-batches whose activations a rank may hold while it searches "
        "for the shortest order. pp is what 1f1b holds, 2 * pp is enough to fill the bubble.",
    )
    wgrad_activation_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0,
        description="zb_auto: how much of its activations a micro-batch keeps between the two parts of "
        "its backward; what is let go of makes room. 1 is safe; with fused attention it is near 1.",
    )
    micro_batch_size: Positive = Field(
        default=1, description="Sequences in one forward on one data-parallel rank."
    )
