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
