"""What accelerators can do: makers' figures, keyed by the name that the driver of the device gives."""

from __future__ import annotations

from dataclasses import dataclass

PEAK_16_BIT_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "B200": 2250e12,
}
"""Dense bfloat16 and float16 with float32 sums, by NVIDIA's data sheets. A narrower name comes before
a wider one that it contains; GB200 and GH200, which run at other clocks, are not these."""
_OTHERS = ("GB200", "GH200")
_16_BIT = ("bfloat16", "float16")


NVLINK_BYTES_PER_S = {"A100": 300e9, "H100": 450e9, "H200": 450e9, "B200": 900e9}
"""Of one GPU in one direction, through the node's switch. Cards in PCIe slots have none of it."""
_CARDS = ("PCIe", "PCIE", "NVL", *_OTHERS)


def nvlink_bytes_per_s(device_name: str) -> float | None:
    """What a GPU of that name sends to the others of its node, or None when it is not known."""
    if any(name in device_name for name in _CARDS):
        return None
    return next((v for name, v in NVLINK_BYTES_PER_S.items() if name in device_name), None)


def peak_flops(device_name: str, *, dtype: str) -> float | None:
    """FLOP/s of one device for matrices of ``dtype``, or None when the table does not know.

    Args:
        device_name: Such as ``NVIDIA H100 80GB HBM3``.
        dtype: The job's ``precision.dtype``.
    """
    if dtype not in _16_BIT or any(name in device_name for name in _OTHERS):
        return None
    found = (flops for name, flops in PEAK_16_BIT_FLOPS.items() if name in device_name)
    return next(found, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """What one kind of cluster does in practice, for cost formulas.

    Attributes:
        flops: Peak FLOP/s of 16-bit matrices.
        matrix_share: Share of the peak that large matrix products reach.
        attention_share: Share that fused causal attention reaches, forward and backward together.
        near_bytes_per_s: One GPU to others of its node, one direction.
        far_bytes_per_s: One GPU to another node.
        hop_s: Of a message, however short.
        launch_s: Of a kernel, however small.
        ranks_per_node: GPUs of a node.
    """

    flops: float
    matrix_share: float
    attention_share: float
    near_bytes_per_s: float
    far_bytes_per_s: float
    hop_s: float
    launch_s: float
    ranks_per_node: int


HARDWARE = {
    "h100": Hardware(
        flops=989e12,
        matrix_share=0.6,
        attention_share=0.4,
        near_bytes_per_s=450e9,
        far_bytes_per_s=50e9,
        hop_s=15e-6,
        launch_s=2e-6,
        ranks_per_node=8,
    ),
}
"""DGX H100: one 400 Gb/s adapter a GPU. The shares and times are round figures that published runs
suggest; nothing here was measured."""
