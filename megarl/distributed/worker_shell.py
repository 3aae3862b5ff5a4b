"""The Ray actor around a worker: a generic shell, and the handle with which the driver calls it.

The driver knows the worker class only by name. The shell imports and constructs it in the worker's process,
so the driver never imports the worker's dependencies. This module does not import torch, because thread
counts must be set before torch is loaded.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import inspect
import logging
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorClass, ActorHandle

from megarl import env
from megarl.distributed import ray_calls, rendezvous
from megarl.distributed.leftovers import owned_directory
from megarl.distributed.worker_group_utils import RayOptions
from megarl.distributed.worker_stacks import register_stacks
from megarl.errors import ClusterError, ConfigError
from megarl.redaction import redact_log

logger = logging.getLogger(__name__)
_COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """Host name, Ray's node id and process id of a worker."""

    host: str
    node_id: str
    process_id: int


@dataclass(frozen=True, slots=True)
class ClassRequirements:
    """Requirements of a worker class: the Ray options of its decorator, and the three results of its
    ``configure_worker``."""

    decorator_options: RayOptions = field(default_factory=dict)
    resources: RayOptions = field(default_factory=dict)
    env_vars: dict[str, str] = field(default_factory=dict)
    init_kwargs: Mapping[str, object] = field(default_factory=dict)


def import_worker_class(name: str) -> tuple[type, RayOptions]:
    """Import ``package.module.Class``. Return the class, without a Ray decorator, and the decorator's
    options.

    Raises:
        ConfigError: the name is not dotted, the module does not contain it, or it is not a class.
        ClusterError: the module cannot be imported in this process.
    """
    module_name, _, class_name = name.rpartition(".")
    if not module_name:
        raise ConfigError(f"worker class = {name!r}: must be a full name. Fix: write package.module.Class")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ClusterError(
            f"worker class = {name!r} cannot be imported on {socket.gethostname()}: {error}. "
            "Fix: install what it needs in the workers' environment"
        ) from error
    found: Any = getattr(module, class_name, None)
    # NeMo-RL's worker classes are decorated with ``ray.remote``. A decorated class cannot be instantiated in
    # this process, so use the original class.
    if isinstance(found, ActorClass):
        return found.__ray_metadata__.modified_class, dict(getattr(found, "_default_options", {}))
    if not inspect.isclass(found):
        raise ConfigError(
            f"worker class = {name!r}: module {module_name} has no class {class_name!r}. Fix: correct the "
            "name"
        )
    return found, {}


def own_compile_cache() -> None:
    """Make ``torch.compile`` use a cache directory to which nobody else can write, because it unpickles the
    files there. A value of ``TORCHINDUCTOR_CACHE_DIR`` in the environment is kept.

    The default directory is in the machine's temporary directory and has the user's name. Any user can create
    it first, and then write to it.
    """
    if env.text(_COMPILE_CACHE):
        return
    usual = Path(tempfile.gettempdir()) / f"torchinductor_{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        usual.mkdir(mode=0o700)
    # lstat does not follow a symbolic link, which another user may have created.
    found = usual.lstat()
    if (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.geteuid()
        and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    ):
        env.set_variables({_COMPILE_CACHE: str(usual)})
        return
    other = str(owned_directory(tempfile.gettempdir(), "megarl-compiled-"))
    atexit.register(shutil.rmtree, other, ignore_errors=True)
    logger.warning(
        "%s is not this user's alone: compiled code of torch.compile is kept in %s, and removed "
        "after this run",
        usual,
        other,
    )
    env.set_variables({_COMPILE_CACHE: other})


class WorkerShell:
    """Ray actor class that constructs and calls one worker in its process."""

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        env.set_variables(environment)
        redact_log(env.snapshot())
        # Remove unsafe variables of the node's environment: another user may have started its Ray.
        env.forget_unsafe()
        own_compile_cache()
        self._name = name
        self._worker: Any = None
        register_stacks(name)

    def __repr__(self) -> str:
        return self._name

    def inspect_class(
        self, class_name: str, num_gpus: float, bundle_indices: tuple[int, list[int]] | None
    ) -> tuple[WorkerProcess, ClassRequirements]:
        """Import the worker class. Return this process and the class's requirements."""
        worker_class, options = import_worker_class(class_name)
        process = WorkerProcess(socket.gethostname(), ray.get_runtime_context().get_node_id(), os.getpid())
        configure = getattr(worker_class, "configure_worker", None)
        if configure is None:
            return process, ClassRequirements(decorator_options=options)
        resources, env_vars, init_kwargs = configure(num_gpus=num_gpus, bundle_indices=bundle_indices)
        return process, ClassRequirements(
            options, dict(resources or {}), dict(env_vars or {}), dict(init_kwargs or {})
        )

    def open_rendezvous(self) -> tuple[str, int]:
        """Bind the group's rendezvous port in this process and keep it. Return address and port. Only for
        rank 0."""
        # Bind the port here and keep it. A port that was only found to be free may be in use later.
        address = ray.util.get_node_ip_address()
        return address, rendezvous.open_listener(address)

    def construct(
        self,
        class_name: str,
        endpoint: rendezvous.Endpoint,
        arguments: tuple[Sequence[object], Mapping[str, object]],
        init_kwargs: Mapping[str, object],
    ) -> dict[str, bool]:
        """Construct the worker. Return its methods by name; the value is True for generator methods."""
        env.set_variables({"MASTER_ADDR": endpoint.address, "MASTER_PORT": str(endpoint.port)})
        rendezvous.set_endpoint(endpoint)
        # Arguments from the class's ``configure_worker`` override the caller's.
        worker_class, _ = import_worker_class(class_name)
        positional, keywords = arguments
        self._worker = worker_class(*positional, **{**keywords, **init_kwargs})
        return _methods(worker_class)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the worker."""
        return getattr(self._worker, method)(*args, **kwargs)

    def call_after(self, before: Sequence[str], method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run the methods ``before``, without arguments, and then ``method``. If one raises, the others are
        not run."""
        for name in before:
            getattr(self._worker, name)()
        return self.call(method, *args, **kwargs)

    def stream(self, method: str, /, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Run a generator method of the worker. Ray stores each item as a separate object."""
        yield from getattr(self._worker, method)(*args, **kwargs)


def _methods(worker_class: type) -> dict[str, bool]:
    result: dict[str, bool] = {}
    for name in dir(worker_class):
        attribute = getattr(worker_class, name, None)
        if not (name.startswith("__") and name.endswith("__")) and callable(attribute):
            result[name] = inspect.isgeneratorfunction(attribute)
    return result


class RemoteMethod:
    """A worker's method on the driver, called with ``.remote(...)`` like a method of a Ray actor."""

    __slots__ = ("_actor", "_name", "is_generator")

    def __init__(self, actor: ActorHandle[Any], name: str, is_generator: bool) -> None:
        self._actor = actor
        self._name = name
        self.is_generator = is_generator

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Start the method. Return an ``ObjectRef``, or an ``ObjectRefGenerator`` for a generator method."""
        target: Any = self._actor.stream if self.is_generator else self._actor.call
        return ray_calls.submit(target, self._name, *args, **kwargs)

    def remote_after(self, before: Sequence[str], **kwargs: Any) -> Any:
        """Start the methods ``before``, without arguments, and then this method, in one call. Not for
        generator methods."""
        target: Any = self._actor.call_after
        return ray_calls.submit(target, tuple(before), self._name, **kwargs)


class WorkerHandle:
    """The driver's handle of a worker. ``handle.method.remote(...)`` returns a Ray future, as with a Ray
    actor.

    Ray resolves object references among the direct arguments. ``actor`` is the Ray actor itself, for
    ``ray.kill``.
    """

    __slots__ = ("_class_name", "_methods", "actor", "process")

    def __init__(
        self, actor: ActorHandle[Any], class_name: str, methods: Mapping[str, bool], process: WorkerProcess
    ) -> None:
        self.actor = actor
        self.process = process
        self._class_name = class_name
        self._methods = dict(methods)

    def __getattr__(self, name: str) -> RemoteMethod:
        # Python also calls this for a slot that is not set yet. Reading ``_methods`` would then recurse
        # infinitely.
        if name.startswith("__") or name in WorkerHandle.__slots__:
            raise AttributeError(name)
        if name not in self._methods:
            known = ", ".join(method for method in self._methods if not method.startswith("_"))
            raise AttributeError(f"worker class {self._class_name} has no method {name!r}; it has: {known}")
        return RemoteMethod(self.actor, name, self._methods[name])

    def __reduce__(
        self,
    ) -> tuple[type[WorkerHandle], tuple[ActorHandle[Any], str, dict[str, bool], WorkerProcess]]:
        return WorkerHandle, (self.actor, self._class_name, self._methods, self.process)
