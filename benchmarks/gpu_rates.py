"""Rates that plan and roofline assume, measured on the GPU: products, attention, memory, launches."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_parts import GPU, Setting
from raymega.model.layers.fused_ops import rms_norm, swiglu
from raymega.parallel.workarounds.matmul import add_outer

ROWS = (4096, 1024)
"""Rows of a micro-batch, and of a quarter of it, as messages that overlap products cut it."""
PRODUCTS = {
    "7B, qkv": (4096, 12288), "7B, projection": (4096, 4096), "7B, gate and up": (4096, 22016),
    "7B, down": (11008, 4096), "7B tp8, qkv": (4096, 1536), "7B tp8, projection": (512, 4096),
    "7B tp8, gate and up": (4096, 2752), "7B tp8, down": (1376, 4096), "70B tp8, gate and up": (8192, 7168),
    "head": (4096, 32000),
}  # fmt: skip
"""Widths of the input and the output of a layer's products."""
ROUNDS = 7
LAUNCHES = 2000


def measure_rates(setting: Setting) -> dict[str, Any]:
    """Return FLOP/s and bytes/s by kernel and shape, on random values, and seconds of a launch."""
    # zeros would multiply faster
    torch.manual_seed(0)
    return {
        "products": _products(setting),
        "attention": _attention(setting),
        "bytes_per_s": _memory(setting),
        "launch_s": _launch(),
    }


def _products(setting: Setting) -> dict[str, float]:
    """Return the FLOP/s of each product, of its weight's gradient at 7B's widths, and of fp8."""
    shrink, found = 32 if setting.is_small else 1, {}
    for name, (inner, columns) in PRODUCTS.items():
        for rows in ROWS:
            x, w = (
                _random(rows // shrink, inner // shrink),
                _random(columns // shrink, inner // shrink),
            )
            seconds = _seconds(lambda x=x, w=w: x @ w.t())
            found[f"{name}, {rows} rows"] = 2 * x.numel() * w.shape[0] / seconds
        total = torch.zeros(columns // shrink, inner // shrink, device=GPU)
        x, grad = (
            _random(4096 // shrink, inner // shrink),
            _random(4096 // shrink, columns // shrink),
        )
        seconds = _seconds(lambda t=total, g=grad, x=x: add_outer(t, g, x, is_first=False))
        found[f"{name}, weight gradient added in float32"] = (
            2 * x.numel() * total.shape[0] / seconds
        )
    return found


def _attention(setting: Setting) -> dict[str, Any]:
    """Return FLOP/s of causal attention, forward and backward, by torch's kernel."""
    tokens, heads = (256, 4) if setting.is_small else (4096, 32)
    q, k, v = (_random(1, heads, tokens, 128).requires_grad_() for _ in range(3))
    grad = _random(1, heads, tokens, 128)
    # half of q k^T and of the product with v
    flops = 2 * heads * tokens**2 * 128
    kinds = {
        "torch's choice": None,
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }
    found: dict[str, Any] = {}
    for name, kind in kinds.items():
        if setting.is_stand_in and name == "cudnn":
            continue
        try:
            found[name] = _attention_by(kind, (q, k, v), grad, flops)
        except RuntimeError as error:
            found[name] = str(error)[:200]
    return found


def _attention_by(
    kind: SDPBackend | None, qkv: tuple[Tensor, ...], grad: Tensor, flops: int
) -> dict[str, float]:
    def forward() -> Tensor:
        if kind is None:
            return scaled_dot_product_attention(*qkv, is_causal=True)
        with sdpa_kernel(kind):
            return scaled_dot_product_attention(*qkv, is_causal=True)

    forward_s = _seconds(forward)
    y = forward()
    backward_s = _seconds(lambda: torch.autograd.grad(y, qkv, grad, retain_graph=True))
    return {"forward": flops / forward_s, "backward": 2.5 * flops / backward_s}


def _memory(setting: Setting) -> dict[str, float]:
    """Return bytes/s that a copy, fused kernels and transfers to and from the host reach."""
    size = 2**20 if setting.is_small else 2**28
    x, y = _random(size), torch.empty(size, device=GPU, dtype=torch.bfloat16)
    found = {"copy": 4 * size / _seconds(lambda: y.copy_(x))}
    wide, width = x.view(-1, 4096), _random(4096)
    norm_s = _seconds(lambda: rms_norm(wide, width, 1e-5, is_fused=True))
    found["rms norm compiled"] = 4 * size / norm_s
    found["swiglu compiled"] = 3 * size / _seconds(lambda: swiglu(wide, is_fused=True))
    host = torch.empty(size // 4, dtype=torch.bfloat16, pin_memory=True)
    part = x[: size // 4]
    found["to host, pinned"] = size / 2 / _seconds(lambda: host.copy_(part, non_blocking=True))
    found["from host, pinned"] = size / 2 / _seconds(lambda: part.copy_(host, non_blocking=True))
    return found


def _launch() -> dict[str, float]:
    """Return the host's seconds of a small launch, and the device's from one to the next."""
    x = torch.ones(16, device=GPU)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(LAUNCHES):
        x.add_(1.0)
    host_s = (time.perf_counter() - began) / LAUNCHES
    torch.cuda.synchronize()
    return {"host": host_s, "host and device": (time.perf_counter() - began) / LAUNCHES}


def _random(*sizes: int) -> Tensor:
    return torch.randn(*sizes, device=GPU, dtype=torch.bfloat16)


def _seconds(call: Callable[[], object]) -> float:
    """Return the median seconds of a call on the device, of several calls each."""
    for _ in range(2):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(ROUNDS):
        begin.record()
        for _ in range(4):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 4e3)
    # an idle device's clock reads 0 on the stand-in
    return max(median(times), 1e-9)
