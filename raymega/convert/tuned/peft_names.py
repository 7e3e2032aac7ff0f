"""Names of adapters in PEFT's files, by those of Hugging Face's modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raymega.config.schema import ModelSection
from raymega.convert.huggingface.names import hf_tensors
from raymega.errors import Fault
from raymega.plan.adapters import adapter_names, is_target, magnitude_name

PREFIX = "base_model.model."
CONFIG, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
FACTORS = (".lora_A.weight", ".lora_B.weight")
"""Ends of the names of A and B there."""
MAGNITUDE = ".lora_magnitude_vector"
"""End of the name of DoRA's magnitudes there."""


def linear_modules(model: ModelSection) -> dict[str, str]:
    """Return the linear layers that PEFT can adapt: our name by that of their module."""
    return {
        tensor.name.removesuffix(".weight"): tensor.parts[0].name.removesuffix(".weight")
        for tensor in hf_tensors(model)
        if len(tensor.parts) == 1 and tensor.expert < 0 and tensor.name.endswith(".weight")
    }


def adapter_tensors(theirs: str, ours: str, *, use_dora: bool) -> dict[str, str]:
    """Return the tensors of one adapter, our names by PEFT's.

    Args:
        theirs: Name of the module.
        ours: Our name of the linear layer.
        use_dora: Whether the adapter has magnitudes.
    """
    ends = dict(zip(FACTORS, adapter_names(ours), strict=True))
    if use_dora:
        ends[MAGNITUDE] = magnitude_name(ours)
    return {f"{PREFIX}{theirs}{end}": name for end, name in ends.items()}


def expression_faults(model: ModelSection) -> Iterator[Fault]:
    """Yield the fault of adapters that PEFT's format does not have: of parts of a layer, and of experts."""
    known = set(linear_modules(model).values())
    inside = [t.parts for t in hf_tensors(model)]
    left = [
        part.name
        for parts in inside
        for part in parts
        if is_target(part, model) and part.name.removesuffix(".weight") not in known
    ]
    if left:
        yield Fault(
            fact=f"{left[0]} has an adapter, and PEFT's files have none of routed experts or of parts of a layer",
            rule="an exported adapter is one of whole linear layers of transformers' model",
            remedy="merge it: raymega checkpoint merge URI --out MERGED, then raymega convert hf-export",
        )


def target_modules(adapted: Sequence[str], modules: Sequence[str]) -> list[str]:
    """Return PEFT's target_modules that fit just ``adapted`` of all linear ``modules``: short names where possible."""
    found, wanted = [], set(adapted)
    for short in dict.fromkeys(module.rpartition(".")[2] for module in adapted):
        same = [m for m in modules if m.rpartition(".")[2] == short]
        found += [short] if wanted.issuperset(same) else [m for m in same if m in wanted]
    return found
