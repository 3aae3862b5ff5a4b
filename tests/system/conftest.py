"""One local Ray for all system tests of a session: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from megarl.distributed.ray_runtime import init_ray

LOCAL_SLOTS = 24


@pytest.fixture(scope="session")
def local_ray() -> Iterator[int]:
    """Number of worker slots of the session's Ray."""
    init_ray(num_cpus=LOCAL_SLOTS, log_to_driver=False)
    yield LOCAL_SLOTS
    ray.shutdown()
