"""What system tests share: one local Ray of a session, because starting one takes seconds, and the launches
and material of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from megarl.distributed.ray_runtime import init_ray
from tests.system.whole_runs import Launches, Material, make_material

LOCAL_SLOTS = 24


@pytest.fixture(scope="session")
def local_ray() -> Iterator[int]:
    """Number of worker slots of the session's Ray."""
    init_ray(num_cpus=LOCAL_SLOTS, log_to_driver=False)
    yield LOCAL_SLOTS
    ray.shutdown()


@pytest.fixture(scope="module")
def launches() -> Iterator[Launches]:
    """Starts whole programs, and ends those that a test leaves behind."""
    started = Launches()
    yield started
    started.close()


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    """A tiny model that was taught something, and data for it."""
    return make_material(tmp_path_factory.mktemp("material"))
