"""The job file's parallel and schedule sections: how work is divided over ranks, and its order."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from raymega.config.fields import NonNegative, Positive, Section

ZERO_STAGES = ("none", "optimizer", "gradients", "parameters")
"""Values of ``parallel.sharding``; the index is ZeRO's stage, 0 to 3."""


def _zero_stage_name(value: object) -> object:
    """Return the name of a ZeRO stage given as a number, and any other value unchanged."""
    if type(value) is int and 0 <= value < len(ZERO_STAGES):
        return ZERO_STAGES[value]
    return value


class ParallelSection(Section):
    """Degrees of the axes, placement and sharding. The world has tp * cp * dp * pp workers."""

    # Degrees, or their choice by the planner.
    layout: Literal["given", "auto"] = "given"
    """auto, or `parallel: auto` for short: the planner chooses degrees, schedule, chunks,
    micro-batch, recompute and sharding for cluster.num_workers on cluster.accelerator. Those of
    them that the job sets are kept."""
    tp: Positive = 1
    """Tensor parallel: heads, feed-forward features and vocabulary are split."""
    pp: Positive = 1
    """Pipeline parallel: layers are split into stages."""
    dp: Positive = 1
    """Data parallel: sequences are split over ranks."""
    cp: Positive = 1
    """Context parallel: the tokens of a sequence are split; 2 * cp divides data.seq_len."""
    # Context parallelism.
    cp_method: Literal["ring", "all_gather", "all_to_all", "hybrid"] = "ring"
    """Method of attention across cp ranks. ring: keys and values pass from rank to rank during the
    computation. all_gather: they are gathered, which takes memory for the whole sequence.
    all_to_all: ranks exchange heads (Ulysses). hybrid: hierarchical_cp_size neighbours exchange
    heads, and a ring joins such groups."""
    hierarchical_cp_size: Positive = 2
    """hybrid only: number of neighbours that exchange heads; divides cp."""
    dynamic_cp: bool = False
    """Packed documents only: each step's documents are distributed anew over the dp * cp ranks,
    each pack of them on as few ranks (1, 2, 4, ...) as memory and an even share of the work allow.
    A rank holds at most data.seq_len / cp tokens of a micro-batch."""
    # Expert parallelism.
    ep: Positive = 1
    """Expert parallel: the experts of each block are distributed over the ranks of its pipeline
    stage. Divides model.moe.num_experts; etp * ep divides tp * cp * dp."""
    etp: Positive = 1
    """Expert tensor parallel: the features of each expert are split. Divides the width of an
    expert."""
    moe_token_dispatcher_type: Literal["all_to_all", "all_gather"] = "all_to_all"
    """Path of tokens to experts on other ranks. all_to_all: each token is sent to the ranks of its
    experts. all_gather: every rank gathers all tokens and takes those of its experts, which pays
    where most ranks need most tokens."""
    overlap_moe_expert_parallel_comm: bool = False
    """Overlap the exchange of one micro-batch's tokens with work on another: a forward and a
    backward alternate. With schedule.name=dualpipe_v, or 1f1b on parallel.pp=1, which then holds
    those of one more block."""
    # Order of ranks, and the layers of each stage.
    order: str = "tp-cp-ep-dp-pp"
    """Axes from the fastest varying rank digit to the slowest."""
    stages: str = "even"
    """Layers of each stage. even: equal numbers. auto: by cost, so that the stage with head and
    loss is not the slowest. Or a text such as `Ett|tt|(t|)*2L`: E embedding, t layer, L head and
    loss, `|` the next of the pp * chunks stages. Stages may be empty, ranks may not."""
    first_stage_layers: NonNegative | Literal["even"] = "even"
    """stages=even: number of layers of the first stage, set by hand."""
    last_stage_layers: NonNegative | Literal["even"] = "even"
    """stages=even: number of layers of the last stage, set by hand."""
    is_embedding_a_layer: bool = False
    """stages=even: the embedding counts as a layer of its stage."""
    is_loss_a_layer: bool = False
    """stages=even: head and loss count as a layer of their stage."""
    # Sharding of state and activations.
    sharding: Annotated[
        Literal["none", "optimizer", "gradients", "parameters"],
        BeforeValidator(_zero_stage_name),
        WithJsonSchema({"enum": [*ZERO_STAGES, 0, 1, 2, 3]}),
    ] = "none"
    """State that is sharded over the dp * cp ranks with the same parameters. optimizer: masters and
    moments, at one reduce-scatter and one all-gather a step. gradients: gradient sums too, at a
    reduce-scatter a micro-batch. parameters: weights too, gathered for each forward and each
    backward. Each saves memory and sends more. ZeRO's stages 0 to 3 mean the same, in this order."""
    data_parallel_shard_degree: Positive | Literal["all"] = "all"
    """Hybrid sharding: number of neighbouring ranks, such as a node's, that shard one copy of the
    state; gradients are summed over the copies once a step. Divides dp * cp."""
    sequence_parallel: bool = False
    """Between tensor-parallel layers each tp rank holds S/tp positions only, so norms and dropout
    are split too. Saves memory of activations; tp must divide data.seq_len."""
    tp_comm_overlap: bool | Literal["auto"] = "auto"
    """sequence_parallel only: positions are gathered and summed in blocks, beside the products of
    other blocks. auto: on GPUs. The order of sums stays; products of fewer rows may round
    differently."""
    balance_images: bool = False
    """model.vision only: the images of all dp ranks' micro-batches at the same place are shared out evenly over dp, and
    their features come back to the ranks whose tokens they are. Pays where ranks have unequal numbers of images."""
    is_tp_across_nodes_allowed: bool = False
    """Let a tensor-parallel group span nodes. Slow except inside an NVLink domain."""


class ScheduleSection(Section):
    """Order in which a step's micro-batches pass through the pipeline."""

    name: Literal[
        "1f1b", "gpipe", "interleaved", "zb_h1", "zb_h2", "zb_v", "zb_auto", "dualpipe_v"
    ] = "1f1b"
    """Order of forward and backward work, with pp=1 too. 1f1b with several chunks is interleaved.
    zb_*: weight gradients are computed later, when a rank would idle. zb_v and dualpipe_v need 2
    chunks, zb_h1, zb_h2 and zb_auto 1."""
    chunks: Positive = 1
    """v, stages per rank. 1f1b with v chunks has 1/v of the bubble, and v times the messages."""
    # Options of one schedule each.
    microbatch_group_size_per_vp_stage: Positive | Literal["pp"] = "pp"
    """Interleaved 1f1b: number of micro-batches that pass a chunk before the next chunk's turn; at
    least parallel.pp."""
    max_in_flight_microbatches: Positive | Literal["pp"] = "pp"
    """zb_auto: largest number of micro-batches whose activations a rank may hold in the order that
    is searched for. 1f1b holds pp; 2 * pp is enough to fill the bubble."""
    wgrad_activation_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """zb_auto: share of its activations that a micro-batch keeps between the two parts of its
    backward; the rest makes room for others. 1 is safe; with fused attention it is near 1."""
    # Size of a micro-batch.
    micro_batch_size: Positive = 1
    """Sequences in one forward on one data-parallel rank."""
