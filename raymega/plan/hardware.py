"""What accelerators can do: makers' figures, keyed by the name that the driver of the device gives."""

from __future__ import annotations

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
