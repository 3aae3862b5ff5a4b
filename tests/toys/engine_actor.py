"""The toy engine in a process of its own, which may die or stop, and is then started anew.

``TOY_ENGINE_FAULTS`` in the environment names a directory: an empty file ``generate.3`` there has the process
kill itself in the third call of ``generate``, one that says ``stop`` has it stand still; the file goes by
that. ``receive.1`` does the same to the first refit.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.distributed import run_secret
from megarl.errors import DeadlineError, RefitError, WorkerError
from megarl.models.generation.engines import EngineKind
from megarl.models.generation.interfaces import RolloutEngine
from tests.toys.transformers_engine import TransformersConfig, TransformersEngine

FAULTS = "TOY_ENGINE_FAULTS"
CALL_SECONDS = 30.0


class Served:
    """What runs in the actor."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.engine = TransformersEngine(config)

    def expect(self, info: dict[str, Any]) -> None:
        self.engine.prepare_refit_info(info)

    def join(self, ip: str, port: int, world_size: int) -> None:
        self.engine.results(self.engine.init_collective(ip, port, world_size))

    def receive(self, number: int) -> int:
        fail_where_told("receive", number)
        versions = self.engine.results(self.engine.update_weights_from_collective())
        self.engine.loaded(versions)
        return versions[0]

    def generate(self, number: int, data: Any, greedy: bool, sampling: Mapping[str, Any] | None) -> Any:
        fail_where_told("generate", number)
        return self.engine.generate(data, greedy, sampling=sampling)

    def is_alive(self) -> bool:
        return True


def fail_where_told(method: str, number: int) -> None:
    directory = os.environ.get(FAULTS)
    path = Path(directory) / f"{method}.{number}" if directory else None
    if path is not None and path.exists():
        how = path.read_text().strip()
        path.unlink()
        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)


class EngineInActor(RolloutEngine):
    """One engine of one rank in a Ray actor, on a place of a cluster where one is given."""

    def __init__(self, config: Mapping[str, Any], cluster: Any = None) -> None:
        self.config, self.cluster = config, cluster
        self.info: dict[str, Any] | None = None
        self.refits = self.calls = 0
        self._start()

    def _start(self) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.hangs, self._connected, self._version = False, False, None
        options: dict[str, Any] = {
            "num_cpus": 0,
            "runtime_env": {"env_vars": {run_secret.VARIABLE: run_secret.drawn_secret()}},
        }
        if self.cluster is not None:
            [place] = self.cluster.get_placement_groups()
            options |= {
                "num_cpus": 1,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(placement_group=place),
            }
        self.actor: Any = ray.remote(Served).options(**options).remote(self.config)
        if self.info is not None:
            self.results([self.actor.expect.remote(self.info)])

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def ranks(self) -> int:
        return 1

    @property
    def connected(self) -> bool:
        return self._connected

    def disconnect(self) -> None:
        self._connected = False

    def results(self, futures: list[Any]) -> list[Any]:
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        try:
            return ray.get(futures, timeout=CALL_SECONDS)
        except GetTimeoutError as error:
            self.hangs = True
            raise DeadlineError(f"the toy engine did not answer within {CALL_SECONDS:g} s") from error
        except RayError as error:
            raise WorkerError(f"the toy engine failed: {error}") from error

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        self.info, self._version = state_dict_info, None
        self.results([self.actor.expect.remote(state_dict_info)])

    def init_collective(self, ip: str, port: int, world_size: int) -> list[Any]:
        self._connected = True
        return [self.actor.join.remote(ip, port, world_size)]

    def update_weights_from_collective(self) -> list[Any]:
        self._version, self.refits = None, self.refits + 1
        return [self.actor.receive.remote(self.refits)]

    def loaded(self, versions: list[Any]) -> None:
        [self._version] = versions

    def generate(self, data: Any, greedy: bool = False, *, sampling: Mapping[str, Any] | None = None) -> Any:
        if self._version is None:
            raise RefitError("the toy engine has no complete weights: refit it before it generates")
        self.calls += 1
        return self.results([self.actor.generate.remote(self.calls, data, greedy, sampling)])[0]

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def is_alive(self) -> bool:
        try:
            return not self.hangs and bool(self.results([self.actor.is_alive.remote()]))
        except (WorkerError, DeadlineError):
            return False

    def restart(self, policy: Any = None) -> None:
        self.shutdown()
        self._start()

    def shutdown(self) -> bool:
        import ray

        ray.kill(self.actor)
        return True


KIND = EngineKind(
    "transformers in an actor",
    start=lambda cluster, config: EngineInActor(config),
    section=TransformersConfig,
)
PLACED = EngineKind(
    "transformers in an actor on a place of its own",
    start=lambda cluster, config: EngineInActor(config, cluster),
    section=TransformersConfig,
)
