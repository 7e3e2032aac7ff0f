"""Copies between a device and host memory, under way while other work is done.

On a GPU they run on a stream of their own from and to pinned memory, and waiting orders the stream that
computes behind them. On a CPU, where device and host are one memory, they are plain copies, made at once:
nothing is gained there, and everything else is the same. This is the one place that knows which it is.
"""

from __future__ import annotations

import torch
from torch import Tensor


class AsyncCopy:
    """A copy that was begun."""

    def __init__(self, done: torch.cuda.Event | None) -> None:
        self._done = done

    def wait(self) -> None:
        """Let what computes from now on find it complete; on a GPU the host does not wait."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)

    def wait_on_host(self) -> None:
        """Return when it is complete: host memory may be read."""
        if self._done is not None:
            self._done.synchronize()


class HostMemory:
    """Where a device's tensors wait. One stream a direction, so that both go at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._out = torch.cuda.Stream(device) if self._is_gpu else None
        self._in = torch.cuda.Stream(device) if self._is_gpu else None

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Memory for a flat tensor's values on the host."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._is_gpu)

    def start_out(self, tensor: Tensor, host: Tensor) -> AsyncCopy:
        """Begin to copy to the host; the tensor may be let go of at once, not be changed before."""
        return self._start(self._out, tensor, host, held=tensor)

    def start_in(self, host: Tensor, tensor: Tensor) -> AsyncCopy:
        """Begin to copy back; neither may be touched before it was waited for."""
        return self._start(self._in, host, tensor, held=tensor)

    def _start(
        self, stream: torch.cuda.Stream | None, source: Tensor, target: Tensor, *, held: Tensor
    ) -> AsyncCopy:
        if stream is None:
            target.copy_(source)
            return AsyncCopy(None)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(stream)
        held.record_stream(stream)  # its memory is not given out again before that
        return AsyncCopy(done)
