"""Profiles of selected steps: workers are called to begin and to end recording."""

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
"""Directory of the traces, below the run's directory."""


class StepProfiler:
    """Opens and closes the capture range of the CUDA profiler, which Nsight Systems waits for, and torch's
    profiler on some ranks.

    Args:
        policy: its workers record.
        section: a checked ``profiler`` section with its defaults.
        directory: directory of torch's traces.
    """

    def __init__(self, policy: Policy, section: ProfilerConfig, directory: Path) -> None:
        # range(0) is empty, so that nothing is recorded if no steps are given.
        self._steps = range(*(section["steps"] or (0,)))
        self._policy, self._directory = policy, directory
        self._ranks: Sequence[int] = section["torch_ranks"]
        self._begun: int | None = None

    def begin(self, step: int) -> None:
        """Start recording if this is the first step of the range, or the first that remains after a
        resume."""
        if self._begun is not None or step not in self._steps:
            return
        self._policy.start_gpu_profiling()
        if self._ranks:
            self._policy.start_torch_profiling(self._ranks)
        self._begun = step

    def end(self, step: int) -> None:
        """Stop recording, if this was the last step of the range."""
        if step + 1 not in self._steps:
            self.close(step)

    def close(self, step: int) -> None:
        """Stop recording after ``step``, if recording is in progress."""
        if self._begun is None:
            return
        first, self._begun = self._begun, None
        self._policy.stop_gpu_profiling()
        if self._ranks:
            paths = self._policy.stop_torch_profiling(self._directory / f"steps_{first}_to_{step}")
            logger.info("profiles for chrome://tracing or ui.perfetto.dev: %s", ", ".join(paths))


def tell_worker_groups(section: ProfilerConfig) -> None:
    """Let this process's worker groups know which of them run under Nsight Systems."""
    if section["nsys_workers"] is not None:
        steps = ":".join(map(str, section["steps"] or ()))
        env.set_variables(
            {"MEGARL_NSYS_WORKER_PATTERNS": section["nsys_workers"], "MEGARL_NSYS_PROFILE_STEP_RANGE": steps}
        )
