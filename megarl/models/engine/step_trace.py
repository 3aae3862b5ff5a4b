"""What a rank computes in some steps, recorded by torch's profiler for a browser to show."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megarl.errors import StateError


class StepTrace:
    """A recording that begins at once. There is one in a process at a time.

    Args:
        device: of the rank; on a CUDA device its kernels are recorded too.
    """

    def __init__(self, device: torch.device) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile = profile(activities=activities)
        self._profile.start()

    def stop(self, path: Path) -> str:
        """End it and write it, in the trace format of Chrome, which ``chrome://tracing`` and ui.perfetto.dev open; the path.

        Raises:
            StateError: the file cannot be written.
        """
        self._profile.stop()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise StateError(f"profile {path} cannot be written: {error}. Fix: see to free space and permissions there") from error
        return str(path)
