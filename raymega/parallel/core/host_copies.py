"""Asynchronous copies between a device and host memory.

On a GPU they run on streams of their own, from and to pinned memory; a wait orders the compute stream
behind them. On a CPU, where device and host share one memory, they are plain synchronous copies. They
gain nothing there, but the callers are the same. Only this module tells the two apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Return ``numbers`` on the device, float64, by a copy for which the host does not wait."""
    # torch's pinned memory is used again only after the copy
    host = torch.tensor(numbers, dtype=torch.float64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


class AsyncCopy:
    """A pending copy."""

    def __init__(self, done: torch.cuda.Event | None) -> None:
        self._done = done

    def wait(self) -> None:
        """Order the current stream behind the copy; the host does not wait."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)

    def wait_on_host(self) -> None:
        """Return when the copy is complete, so that host memory may be read."""
        if self._done is not None:
            self._done.synchronize()


class HostMemory:
    """Copies to and from the host for one device, with one stream a direction so that both overlap."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._out = torch.cuda.Stream(device) if self._is_gpu else None
        self._in = torch.cuda.Stream(device) if self._is_gpu else None

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return host memory for ``tensor``, pinned where the device is a GPU."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._is_gpu)

    def start_out(self, tensor: Tensor, host: Tensor) -> AsyncCopy:
        """Start to copy to the host; the tensor may be released at once, but not written before the wait."""
        return self._start(self._out, tensor, host, held=tensor)

    def start_in(self, host: Tensor, tensor: Tensor) -> AsyncCopy:
        """Start to copy to the device; touch neither tensor before the wait."""
        return self._start(self._in, host, tensor, held=tensor)

    def _start(
        self, stream: torch.cuda.Stream | None, source: Tensor, target: Tensor, *, held: Tensor
    ) -> AsyncCopy:
        if stream is None:
            target.copy_(source)
            return AsyncCopy(None)
        # The source may still be computed, and the target still be read, on the compute stream.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(stream)
        held.record_stream(
            stream
        )  # the allocator must not reuse its memory before the copy is done
        return AsyncCopy(done)
