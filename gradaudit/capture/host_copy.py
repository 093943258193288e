"""A copy from a device to the host that nobody waits for but who reads it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class HostCopy:
    """A device tensor on its way to the host.

    Sync: none to make; `numpy` waits for the copy and belongs in the writer thread.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: Any = None
        self.on_host = tensor.device.type == "cpu"
        if self.on_host:
            self._host = tensor
        else:
            pinned = tensor.device.type == "cuda"
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
            self._host.copy_(tensor, non_blocking=pinned)
            if pinned:
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._event.record(torch.cuda.current_stream(tensor.device))

    def numpy(self) -> np.ndarray:
        """The values. Sync: waits for this one copy."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()
