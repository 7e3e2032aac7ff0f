"""Read from a row of published runs which system made the run, and on which hardware.

What the row's columns say counts first, then its words, such as FSDP or compile. Facts of a source
that no column holds stand in the optional column ``facts`` of its table, never here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import yaml
from pydantic import ValidationError

from raymega.config.fields import Positive, Section
from raymega.errors import ConfigError, one_line
from raymega.plan.hardware.catalog import CATALOGUE, Accelerator
from raymega.planner.calibration.known_models import is_gated
from raymega.planner.kernels.system_traits import Remakes, Software

Row = Mapping[str, str]
Format = Literal["16-bit", "8-bit", "4-bit"]
GIGABIT_BYTES = 1e9 / 8
BEFORE_FUSED_ATTENTION = ("v100", "a100")
"""Devices that systems without fused attention were published on."""


class Facts(Section):
    """Facts of a row's system that no column holds, each as the column ``facts`` names it."""

    attention: Literal["unfused", "previous", "newest", "by_format"] = "by_format"
    """Attention that writes its weights, is fused for the previous GPUs, or for these."""
    kernels: Literal["fused", "apart", "by_words"] = "by_words"
    """Norms, rotations and nonlinearities as one kernel each, or one for each operation."""
    gathers: Literal["blocks", "tensors", "by_words"] = "by_words"
    """Unit in which sharded weights are gathered."""
    overlap: Literal["hidden", "exposed", "by_format"] = "by_format"
    """Traffic of gradients and pipeline messages: hidden behind computation, or exposed."""
    update: Literal["waits", "rolled_back"] = "waits"
    """Moment of the update: after the norm of all gradients is known, or before, and rolled back."""
    remakes: Remakes = "nothing"
    """Products that selective recompute runs again."""
    selective: Literal["attention", "elementwise"] = "attention"
    """Parts that selective recompute computes again: attention, or norms and nonlinearities."""
    cp_method: Literal["ring", "all_gather"] = "ring"
    """Method of context parallelism."""
    flops: Literal["causal", "square"] = "causal"
    """Attention that printed FLOP/s count: the causal half, or the whole square."""
    memory: Literal["allocated", "reserved"] = "allocated"
    """Peak that the source prints."""
    micro_batch: Positive | None = None
    """Micro-batch size that the row's table leaves out."""
    micro_batches: Literal["pp"] | None = None
    """Number of micro-batches in a pipeline that states no size: its number of ranks."""
    chunks: Positive | None = None
    """Chunks of a pipeline rank that the row's table leaves out."""
    sharding: Literal["none", "optimizer", "gradients", "parameters"] | None = None
    """Level of sharding that the row's table leaves out."""
    recompute: Literal["none", "full"] | None = None
    """Recompute that the row's table leaves out."""


def facts_of(row: Row) -> Facts:
    """Return the facts in the row's optional column ``facts``, a YAML mapping without braces.

    Raises:
        ConfigError: The cell is no mapping, or holds a fact that does not exist.
    """
    text = row.get("facts") or ""
    try:
        return Facts.model_validate(yaml.safe_load(f"{{{text}}}"))
    except (yaml.YAMLError, ValidationError) as error:
        raise ConfigError(
            fact=f"{row['model']}: facts={text!r} ({one_line(error)})",
            rule=f"it is empty, or NAME: VALUE pairs of {', '.join(Facts.model_fields)}",
            remedy="write, for example, attention: previous, kernels: apart",
        ) from None


def words_of(row: Row) -> str:
    """Return the texts of a row in which a system may be named, in lower case."""
    return " ".join(row.get(name) or "" for name in ("model", "note", "precision")).lower()


def format_of(row: Row) -> Format:
    """Return the format of most products; an empty cell is taken for 16 bits."""
    name = row["precision"].lower()
    if re.search(r"(nv|mx)?fp4|float4", name):
        return "4-bit"
    return "8-bit" if re.search(r"fp8|float8|e4m3|8-bit", name) else "16-bit"


def is_late(row: Row) -> bool:
    """Return whether the system is of the years of fused attention.

    bfloat16 and narrower formats came with it, and so did GPUs after the A100 and the models whose
    layers have gates.
    """
    name = row["precision"].lower()
    is_new = (
        gpu_of(row) not in ("", *BEFORE_FUSED_ATTENTION) or "bf16" in name or "bfloat16" in name
    )
    return is_new or format_of(row) != "16-bit" or is_gated(row)


def is_fully_sharded(row: Row) -> bool:
    """Return whether the row says that parameters are sharded over all replicas."""
    # Notes may write switches out: fsdp=False.
    text = words_of(row)
    if re.search(r"fsdp ?= ?(false|1\b|0\b|no\b)", text):
        return False
    return bool(re.search(r"zero-?3|stage ?3|fsdp|full[_ ]shard|fully[- ]sharded", text))


def software_of(row: Row) -> Software:
    """Return the traits of the row's system.

    float16 without gates is how systems trained before fused attention, and before gradients and
    weights were sent concurrently with computation.
    """
    # What a fact states counts, else the year that the format and the model tell.
    facts, late = facts_of(row), is_late(row)
    # FlashAttention needs an A100 or later.
    has_fused = (
        (late and gpu_of(row) != "v100")
        if facts.attention == "by_format"
        else facts.attention != "unfused"
    )
    overlaps = late if facts.overlap == "by_format" else facts.overlap == "hidden"
    # DeepSpeed's ZeRO-3 gathers the tensors of each layer inside a block when they are used.
    gathers_tensors = facts.gathers == "tensors"
    if facts.gathers == "by_words":
        gathers_tensors = bool(re.search(r"zero-?3|stage ?3", words_of(row)))
    software = Software(
        has_fused_attention=has_fused,
        has_newest_attention=facts.attention != "previous",
        gradient_bytes=4 if late else 2,
        hides_gradients=overlaps,
        hides_messages=overlaps,
        gathers_tensors=gathers_tensors,
        has_dropout=not has_fused,
        fuses_kernels=facts.kernels != "apart",
        waits_for_update=facts.update == "waits",
        # Dispatchers that do so came with experts in 8 bits (DeepEP, 2025).
        sends_once_a_node=format_of(row) != "16-bit",
        remakes=facts.remakes,
    )
    # PyTorch's FSDP runs a model of modules: FlashAttention-2, a kernel for each operation.
    is_of_modules = is_fully_sharded(row) and late and format_of(row) == "16-bit"
    if is_of_modules and facts.kernels == "by_words":
        software = replace(software, fuses_kernels="compile" in words_of(row))
    if is_of_modules and facts.attention == "by_format":
        software = replace(software, has_newest_attention=False)
    return software


def gpu_of(row: Row) -> str:
    """Return the catalogue's name of a row's device; empty for a device that it lacks."""
    name = row["gpu"].lower()
    named = [each for each in CATALOGUE if each in name and each != "cpu"]
    return max(named, key=len, default="")


def device_of(row: Row) -> Accelerator | None:
    """Return the row's device with the memory and the network that its name states.

    ``A100-40GB`` is an A100 with 40 GB, and ``(4x100Gb RoCE)`` a node with four such adapters.
    """
    gpu = gpu_of(row)
    if not gpu:
        return None
    device = CATALOGUE[gpu]
    # An A100 of 40 GB has slower memory as well (NVIDIA A100 data sheet).
    memory = re.search(r"(\d+) ?(?:GB|gb|GiB)\b", row["gpu"])
    if memory and int(memory[1]) < 0.9 * device.memory_bytes / 10**9:
        rate = 1.555e12 if gpu == "a100" else device.memory_bytes_per_s
        device = replace(device, memory_bytes=int(memory[1]) * 2**30, memory_bytes_per_s=rate)
    adapters = re.search(r"(\d+) ?x ?(\d+) ?Gb", row["gpu"])
    if adapters:
        node = int(adapters[1]) * int(adapters[2]) * GIGABIT_BYTES
        device = replace(device, network_bytes_per_s=node / device.devices_per_node)
    return device.with_4_bit_products() if format_of(row) == "4-bit" else device
