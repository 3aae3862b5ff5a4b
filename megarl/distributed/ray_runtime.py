"""Start of a private local Ray, or connection to a running one, and the part of the driver's environment that
its workers get.

A local Ray listens on the loopback interface only, without dashboard and without usage reports, and every
connection needs a random token. The interface can be chosen only through a constant of Ray that otherwise
depends on the operating system, see ``_loopback_only``. Signals to the driver's group do not reach its
processes, and other users cannot enter its directory (``ray_processes``).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import ipaddress
import logging
import math
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import ray

from megarl import env
from megarl.distributed import ray_calls
from megarl.distributed.node_choice import local_slots
from megarl.distributed.ray_processes import LocalRay
from megarl.distributed.ray_watch import SILENT_SECONDS, StartWatch, leave_late, watched_join
from megarl.errors import ClusterError, DeadlineError, MegarlError
from megarl.redaction import is_secret, learn, redacted_text
from megarl.time_limit import OutOfTimeError, time_limit

logger = logging.getLogger(__name__)

INIT_SECONDS = 120.0
"""Maximum seconds for each of the two attempts of ``ray.init``; Ray itself gives up on most failures after 30
to 60 s."""
# An alarm that is set to 0 s never goes off.
_SHORTEST_TRY_S = 0.05
SHUTDOWN_SECONDS = 10.0
"""Maximum seconds for ``ray.shutdown`` before the processes that it waits for are killed."""
# ``ray.shutdown`` may take this long after the kill. It has returned after 5 s once its processes were gone.
_STUCK_SECONDS = 15.0
# An attempt may exceed its limit by this time before this process ends: single waits of Ray in C++, of up to
# 30 s, do not notice the alarm.
_OVERTIME_SECONDS = 40.0
TOLD_AFTER_SECONDS = 20.0
"""Seconds after which a start in progress is logged, and between later messages."""

_FORWARDED_PREFIXES = (
    "CUBLAS_",
    "CUDA_",
    "CUDNN_",
    "GLOO_",
    "HF_",
    "KMP_",
    "LD_LIBRARY_PATH",
    "MEGARL_",
    "MKL_",
    "NCCL_",
    "NVTE_",
    "OMP_",
    "OPENBLAS_",
    "PYTHON",
    "PYTORCH_",
    "TOKENIZERS_",
    "TORCH",
    "TRANSFORMERS_",
    "TRITON_",
    "UCX_",
    "VLLM_",
)
# Ray assigns devices to workers itself, and the driver's own choice must not override it.
_NEVER_FORWARDED = {
    "CUDA_VISIBLE_DEVICES",
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONSTARTUP",
    "PYTHONBREAKPOINT",
    *env.UNSAFE,
}


def init_ray(
    log_dir: str | None = None,
    *,
    num_cpus: int | None = None,
    log_to_driver: bool = True,
    object_store_bytes: int | None = None,
    timeout_s: float = math.inf,
    silent_s: float = SILENT_SECONDS,
) -> None:
    """Make Ray ready in this process; does nothing if it is ready already.

    Connects to the cluster that ``RAY_ADDRESS`` names; without it starts a local one, which ends with this
    process.

    Args:
        log_dir: where a local Ray gets a private directory for its own files and logs, which is removed with
            it; a path that is too long for Unix sockets is not used, with a warning.
        num_cpus: worker slots of a local Ray, which may exceed its cores; None gives 64 or the number of
            cores, whichever is more.
        log_to_driver: show what workers print in the driver's output.
        object_store_bytes: size of a local Ray's object store in bytes; None lets Ray choose.
        timeout_s: for all attempts together, of which each has at most ``INIT_SECONDS``.
        silent_s: seconds after which a stopped control process ends this process; a killed one does at once
            (``StartWatch``). Ray has no error for either.

    Raises:
        ClusterError: nothing replies at ``RAY_ADDRESS``, or the local Ray does not start.
        DeadlineError: the start hangs, so that another one may well succeed.
    """
    if ray.is_initialized():
        return
    end = time.monotonic() + timeout_s
    # Disable usage statistics, which Ray sends to its developers by default.
    env.set_variables({"RAY_USAGE_STATS_ENABLED": "0"})
    _redact_what_workers_print()
    runtime_env: dict[str, Any] = {"env_vars": forwarded_environment()}
    address = env.text("RAY_ADDRESS")
    with _termination_handler_kept():
        # For Ray, "local" is not an address but a request to start a local Ray.
        if address is not None and address != "local":
            _attach(address, runtime_env, log_to_driver, end, silent_s)
        else:
            _start_local(log_dir, num_cpus, log_to_driver, object_store_bytes, runtime_env, end, silent_s)


class _Local:
    """The local Ray of this process, if it has started one."""

    present: LocalRay | None = None


def shutdown_ray() -> None:
    """End Ray in this process; nothing is left of a local one."""
    _shut_down(_end_local)
    _end_local()


def _shut_down(end_processes: Callable[[], None]) -> None:
    """Call ``ray.shutdown``, which waits indefinitely if one of Ray's processes is stopped.

    Args:
        end_processes: kills those processes; called in another thread if the call has not returned in time.
            If that does not help either, because the Ray belongs to someone else, this process ends with exit
            code 4.
    """
    done = threading.Event()

    def end() -> None:
        if done.wait(SHUTDOWN_SECONDS):
            return
        logger.warning("Ray has not shut down after %g s; its processes are killed", SHUTDOWN_SECONDS)
        end_processes()
        if not done.wait(_STUCK_SECONDS):
            leave_late(
                "ray.shutdown does not return. Fix: check whether Ray's processes run; the files "
                "of the run are complete"
            )

    bound = threading.Thread(target=end, name="bound of ray.shutdown", daemon=True)
    bound.start()
    try:
        ray.shutdown()
    finally:
        done.set()
        bound.join()


def _end_local() -> None:
    local, _Local.present = _Local.present, None
    if local is not None:
        local.end()


@atexit.register
def _shutdown_at_exit() -> None:
    """Shut down before Ray's own exit handler does: all processes must have left the directory when it is
    removed."""
    if _Local.present is not None:
        shutdown_ray()


@contextlib.contextmanager
def _termination_handler_kept() -> Iterator[None]:
    """Keep the driver's handler of SIGTERM, which may want to save first: ``ray.init`` replaces it by one
    that ends the process at once."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # Python sets handlers only in the main thread. Restore only a function: SIG_DFL would end the process
        # like Ray's handler.
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _init_with_one_retry(
    options: Mapping[str, Any], end: float, watched: Callable[[], AbstractContextManager[object]]
) -> None:
    """Call ``ray.init``, and once more if it failed: on a busy machine one of Ray's processes may be too late
    for the others."""
    try:
        _init_in_time(options, end, watched)
    except Exception as error:
        if time.monotonic() >= end:
            raise
        logger.warning("Ray did not start (%s); trying once more, with new processes", error)
        _init_in_time(options, end, watched)


def _init_in_time(
    options: Mapping[str, Any], end: float, watched: Callable[[], AbstractContextManager[object]]
) -> None:
    """Call ``ray.init`` under a deadline, at most until ``end`` in monotonic seconds. A failed attempt leaves
    no process of Ray.

    Args:
        options: of ``ray.init``.
        end: see above.
        watched: returns the watch that notices a lost control process meanwhile.
    """
    seconds = max(min(INIT_SECONDS, end - time.monotonic()), _SHORTEST_TRY_S)
    # An earlier Ray of this process, and programs of the user, are children as well, and must survive a
    # failed attempt.
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    logs = options.get("_temp_dir", "its temporary directory on the head node")
    try:
        # Use a watching thread as well, because the alarm of the time limit is not noticed while Ray waits in
        # C++.
        with (
            _told_of_waiting(logs, seconds),
            ray_calls.bounded(_OVERTIME_SECONDS, leave_late),
            ray_calls.calling("ray.init", seconds),
            watched(),
            time_limit(seconds),
        ):
            ray.init(**options)
    except BaseException as error:
        _shut_down(lambda: _end_processes_of_ray(others))
        _end_processes_of_ray(others)
        if isinstance(error, OutOfTimeError):
            raise DeadlineError(f"ray.init did not return within {seconds:g} s") from None
        raise


@contextlib.contextmanager
def _told_of_waiting(logs: str, seconds: float) -> Iterator[None]:
    """Log from time to time that a start is still in progress, and where Ray's logs are."""
    done, begun = threading.Event(), time.monotonic()

    def tell() -> None:
        while not done.wait(TOLD_AFTER_SECONDS):
            logger.warning(
                "Ray has not started after %.0f s; waiting at most %g s for its processes (gcs_server, "
                "raylet and the raylet's agents). "
                "Their logs: the newest session in %s",
                time.monotonic() - begun,
                seconds,
                logs,
            )

    teller = threading.Thread(target=tell, name="waiting for Ray", daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def _end_processes_of_ray(others: Collection[int]) -> None:
    """End the processes of a failed start, of which Ray itself knows only some.

    Args:
        others: older children of this process, which stay.
    """
    # Find them by their command lines: Ray's processes start new sessions, so that they share no process
    # group.
    left = [
        child
        for child in psutil.Process().children(recursive=True)
        if child.pid not in others and _is_of_ray(child)
    ]
    for child in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(left, timeout=10)


def _is_of_ray(process: psutil.Process) -> bool:
    try:
        words = " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    # Workers rename themselves to ray::NAME, and the paths of servers and agents contain Ray's package.
    return "ray::" in words or "/ray/" in words


def _failure(error: Exception) -> type[MegarlError]:
    """Return the error class of a failed start: a hang, which Ray reports by a plain Exception, or another
    fault."""
    return DeadlineError if isinstance(error, TimeoutError) or "timed out" in str(error) else ClusterError


def _attach(
    address: str, runtime_env: dict[str, Any], log_to_driver: bool, end: float, silent_s: float
) -> None:
    options = {
        "address": address,
        "runtime_env": runtime_env,
        "log_to_driver": log_to_driver,
        "logging_level": logging.WARNING,
    }
    try:
        _init_in_time(options, end, functools.partial(watched_join, address, silent_s))
    except Exception as error:
        raise _failure(error)(
            f"RAY_ADDRESS = {address!r}: no Ray cluster can be joined there ({error}). "
            "Fix: start it (ray start --head), correct RAY_ADDRESS, or unset RAY_ADDRESS to run a local Ray"
        ) from error


def _start_local(
    log_dir: str | None,
    num_cpus: int | None,
    log_to_driver: bool,
    object_store_bytes: int | None,
    runtime_env: dict[str, Any],
    end: float,
    silent_s: float,
) -> None:
    if num_cpus is not None and num_cpus < 1:
        raise ClusterError(
            f"num_cpus = {num_cpus}: a local Ray needs at least 1. Fix: pass the number of ranks"
        )
    _ask_for_a_token()
    slots = num_cpus if num_cpus is not None else local_slots()
    # The directory of a Ray that died in an earlier run of this process remains until that Ray is ended here.
    _end_local()
    _Local.present = local = LocalRay(log_dir)
    # Silence Ray's warning that token authentication is on, which is wanted here.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    options = {
        "address": "local",
        "num_cpus": slots,
        # Disable the dashboard, which accepts jobs, and thus code, from anybody who reaches its port.
        "include_dashboard": False,
        "log_to_driver": log_to_driver,
        "logging_level": logging.WARNING,
        "object_store_memory": object_store_bytes,
        "runtime_env": runtime_env,
        "_temp_dir": str(local.directory),
        # Do not start idle processes, one per core, which workers with their own environment never use.
        "_system_config": {"prestart_worker_first_driver": False},
    }
    try:
        with _loopback_only():
            _init_with_one_retry(options, end, functools.partial(_watched_start, local, silent_s))
    except Exception as error:
        local.keep_files()
        # Ray raises a plain Exception if one of its own processes does not start.
        raise _failure(error)(
            f"a local Ray with {slots} slots did not start ({error}). Fix: see its logs in "
            f"{local.directory}, which you may remove"
        ) from error
    address = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(address).is_loopback:
        logger.warning(
            "the local Ray listens on %s, not on the loopback interface: this Ray version has no "
            "setting for that",
            address,
        )


@contextlib.contextmanager
def _watched_start(local: LocalRay, silent_s: float) -> Iterator[None]:
    with StartWatch(silent_s) as watch, local.own_sessions(watch.see):
        yield


def _ask_for_a_token() -> None:
    """Make a Ray that this process starts refuse clients without its token: otherwise every user of the
    machine could run code in it.

    Ray's own default differs between versions: 2.52 is the first that can ask for a token, and early ones do
    not ask by default.
    """
    if env.text("RAY_AUTH_TOKEN") is None and env.text("RAY_AUTH_TOKEN_PATH") is None:
        env.set_variables(token := {"RAY_AUTH_TOKEN": secrets.token_hex(32)})
        learn(token)
    env.set_variables({"RAY_AUTH_MODE": "token"})
    # Reload the settings: Ray reads its variables only once, possibly when it was imported.
    settings: Any = getattr(importlib.import_module("ray._raylet"), "Config", None)
    if settings is not None:
        settings.initialize("")


def _redact_what_workers_print() -> None:
    """Make Ray hide the secrets that this process knows in the output of workers, engines and its own
    processes.

    Ray looks the function up when it is joined, and when it shows an error (as of 2.60).
    """
    worker: Any = importlib.import_module("ray._private.worker")
    real = getattr(worker, "print_to_stdstream", None)
    # Without this function Ray prints lines unredacted. If it is wrapped already, an earlier start did that.
    if real is None or hasattr(real, "__wrapped__"):
        return

    @functools.wraps(real)
    def printed(data: Mapping[str, Any], *arguments: Any, **options: Any) -> None:
        real({**data, "lines": list(map(redacted_text, data["lines"]))}, *arguments, **options)

    worker.print_to_stdstream = printed


@contextlib.contextmanager
def _loopback_only() -> Iterator[None]:
    """Make a Ray that starts inside the block use 127.0.0.1 as its node address.

    On Linux Ray replaces a loopback ``_node_ip_address`` by the outer address and listens on all interfaces,
    unless it believes that it cannot form clusters. It reads that from the environment when it is imported,
    which may be long before this call.
    """
    constants: Any = importlib.import_module("ray._private.ray_constants")
    before = getattr(constants, "ENABLE_RAY_CLUSTER", None)
    if before is None:
        yield
        return
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def is_single_host() -> bool:
    """Return whether the cluster is on the loopback interface: no node can join it, so waiting for more
    resources is useless."""
    host = ray.get_runtime_context().gcs_address.rpartition(":")[0]
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


def forwarded_environment(source: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the part of ``source`` (default: this process's environment) that workers get, plus a
    ``PYTHONPATH`` with the driver's import path.

    Ray shows these values to everyone who may look at the cluster, so only variables that control computation
    are included, and none whose name looks like a secret. On one host workers inherit everything else anyway.
    """
    variables = env.snapshot() if source is None else source
    chosen = {name: value for name, value in variables.items() if _may_be_forwarded(name)}
    chosen["PYTHONPATH"] = os.pathsep.join(_driver_import_path(variables.get("PYTHONPATH", "")))
    return chosen


def _may_be_forwarded(name: str) -> bool:
    return name.startswith(_FORWARDED_PREFIXES) and name not in _NEVER_FORWARDED and not is_secret(name)


def _driver_import_path(python_path: str) -> list[str]:
    """Return the directories from which the driver imports project code: workers thus find a checkout that is
    not installed."""
    # Put the checkout first, so that workers import the megarl of the driver even if another one is
    # installed.
    checkout = str(Path(__file__).resolve().parents[2])
    interpreter = {str(Path(prefix).resolve()) for prefix in (sys.prefix, sys.base_prefix)}
    candidates = [checkout, *python_path.split(os.pathsep), *sys.path]
    result: list[str] = []
    for entry in candidates:
        if not entry or not os.path.isdir(entry):
            continue
        path = str(Path(entry).resolve())
        # Leave out paths of the interpreter: a worker has its own, which the driver's would shadow on a node
        # with another Python.
        if path not in result and not any(Path(path).is_relative_to(prefix) for prefix in interpreter):
            result.append(path)
    return result
