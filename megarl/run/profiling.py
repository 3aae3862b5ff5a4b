"""Profile selected steps with Nsight Systems or torch's profiler."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl import env
from megarl.config.sections import ProfilerConfig

if TYPE_CHECKING:
    from megarl.models.policy.lm_policy import Policy

logger = logging.getLogger(__name__)

DIRECTORY = "profiles"
"""Name of the directory for torch's traces, inside the run directory."""


class StepProfiler:
    """Starts and stops the profilers around the configured steps: the CUDA capture range, which Nsight
    Systems waits for, and torch's profiler on selected ranks.

    Args:
        policy: model whose workers are profiled.
        section: checked ``profiler`` section with its defaults.
        directory: directory for torch's traces.
    """

    def __init__(self, policy: Policy, section: ProfilerConfig, directory: Path) -> None:
        # With no steps configured, ``range(0)`` is empty and nothing is recorded.
        self._steps = range(*(section["steps"] or (0,)))
        self._policy, self._directory = policy, directory
        self._ranks: Sequence[int] = section["torch_ranks"]
        self._begun: int | None = None

    def begin(self, step: int) -> None:
        """Start recording at the first step of the range. After a resume inside the range, start at the first
        step that is left."""
        if self._begun is not None or step not in self._steps:
            return
        self._policy.start_gpu_profiling()
        if self._ranks:
            self._policy.start_torch_profiling(self._ranks)
        self._begun = step

    def end(self, step: int) -> None:
        """Stop recording after the last step of the range."""
        if step + 1 not in self._steps:
            self.close(step)

    def close(self, step: int) -> None:
        """Stop recording if it is in progress.

        Args:
            step: last recorded step; it names the directory of the traces.
        """
        if self._begun is None:
            return
        first, self._begun = self._begun, None
        self._policy.stop_gpu_profiling()
        if self._ranks:
            paths = self._policy.stop_torch_profiling(self._directory / f"steps_{first}_to_{step}")
            logger.info("profiles for chrome://tracing or ui.perfetto.dev: %s", ", ".join(paths))


def tell_worker_groups(section: ProfilerConfig) -> None:
    """Set the environment variables from which worker groups learn which workers run under Nsight Systems."""
    if section["nsys_workers"] is not None:
        steps = ":".join(map(str, section["steps"] or ()))
        env.set_variables(
            {"MEGARL_NSYS_WORKER_PATTERNS": section["nsys_workers"], "MEGARL_NSYS_PROFILE_STEP_RANGE": steps}
        )
