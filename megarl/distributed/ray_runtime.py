"""Start of a private local Ray, or connection to a running cluster, and the part of the driver's environment
that workers inherit.

A local Ray listens only on the loopback interface, has no dashboard, sends no usage reports, and requires a
random token for every connection. Ray has no option for the interface; see ``_loopback_only``. Signals to the
driver's process group do not reach Ray's processes, and other users cannot enter its directory
(``ray_processes``).
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
"""Maximum seconds for each of at most two attempts of ``ray.init``. Ray itself detects most failures after 30
to 60 s."""
# Minimum time limit of an attempt, because an alarm that is set to 0 s never goes off.
_SHORTEST_TRY_S = 0.05
SHUTDOWN_SECONDS = 10.0
"""Maximum seconds for ``ray.shutdown``. After that, the processes that it waits for are killed."""
# Maximum seconds for ``ray.shutdown`` after the kill. It was seen to return within 5 s.
_STUCK_SECONDS = 15.0
# Seconds by which an attempt may exceed its limit before this process ends. Ray waits in C++ for up to 30 s
# at a time, and the alarm has no effect until such a wait ends.
_OVERTIME_SECONDS = 40.0
TOLD_AFTER_SECONDS = 20.0
"""Seconds between log messages about a start that is still in progress."""

# Prefixes of environment variables that control computation and its libraries.
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
# Variables that must not be forwarded: Ray assigns devices to workers itself, and PYTHONPATH is set
# explicitly.
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
    """Connect to the Ray cluster at ``RAY_ADDRESS``; without that variable, start a local Ray, which ends
    with this process. No-op if Ray is already initialized.

    Args:
        log_dir: directory in which a local Ray gets a private directory for its files and logs. That
            directory is removed with Ray. If the path is too long for Unix sockets, another directory is
            used, with a warning.
        num_cpus: number of worker slots of a local Ray, which may exceed its cores; None gives 64, or the
            number of cores if that is more.
        log_to_driver: show the output of workers in the driver's output.
        object_store_bytes: size of a local Ray's object store in bytes; None lets Ray choose.
        timeout_s: time limit in seconds for all attempts together; each attempt has at most ``INIT_SECONDS``.
        silent_s: seconds after which this process ends if Ray's control process is stopped. If that is
            killed, this process ends at once (``StartWatch``). Ray raises no error in either case.

    Raises:
        ClusterError: nothing replies at ``RAY_ADDRESS``, or the local Ray does not start.
        DeadlineError: the start hangs; another attempt may succeed.
    """
    if ray.is_initialized():
        return
    end = time.monotonic() + timeout_s
    # By default, Ray sends usage statistics to its developers.
    env.set_variables({"RAY_USAGE_STATS_ENABLED": "0"})
    _redact_what_workers_print()
    runtime_env: dict[str, dict[str, str]] = {"env_vars": forwarded_environment()}
    address = env.text("RAY_ADDRESS")
    with _termination_handler_kept():
        # For Ray, the address "local" is a request to start a local Ray.
        if address is not None and address != "local":
            _attach(address, runtime_env, log_to_driver, end, silent_s)
        else:
            _start_local(log_dir, num_cpus, log_to_driver, object_store_bytes, runtime_env, end, silent_s)


class _Local:
    """The local Ray that this process has started; ``present`` is None if there is none."""

    present: LocalRay | None = None


def shutdown_ray() -> None:
    """Shut down Ray in this process. Of a local Ray, neither processes nor files remain."""
    _shut_down(_end_local)
    _end_local()


def _shut_down(end_processes: Callable[[], None]) -> None:
    """Call ``ray.shutdown``, with a time limit: it waits indefinitely if one of Ray's processes is stopped.

    Args:
        end_processes: kills Ray's processes; called in another thread if ``ray.shutdown`` does not return in
            time. If that does not help, because the cluster belongs to someone else, this process ends with
            exit code 4.
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
    """Shut down a local Ray before Ray's own exit handler does, because all its processes must have ended
    when its directory is removed."""
    if _Local.present is not None:
        shutdown_ray()


@contextlib.contextmanager
def _termination_handler_kept() -> Iterator[None]:
    """Keep the driver's SIGTERM handler, which may have to save first. ``ray.init`` replaces it by one that
    ends the process at once."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # Python can set handlers only in the main thread. Restoring SIG_DFL would be no use, because it ends
        # the process just like Ray's handler.
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _init_with_one_retry(
    options: Mapping[str, Any], end: float, watched: Callable[[], AbstractContextManager[object]]
) -> None:
    """Call ``ray.init``, and retry once. On a busy machine, one of Ray's processes may start too late for the
    others."""
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
    """Call ``ray.init`` with a time limit. A failed attempt leaves no Ray processes behind.

    Args:
        options: arguments of ``ray.init``.
        end: latest end of the attempt, in monotonic seconds.
        watched: returns a context that detects a lost control process.
    """
    seconds = max(min(INIT_SECONDS, end - time.monotonic()), _SHORTEST_TRY_S)
    # Other child processes, such as an earlier Ray of this process or the user's programs, must survive a
    # failed attempt.
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    logs = options.get("_temp_dir", "its temporary directory on the head node")
    try:
        # The alarm of ``time_limit`` has no effect while Ray waits in C++, so a thread watches the call too.
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
    """Log at intervals that the start is still in progress, and where Ray's logs are."""
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
    """Kill the processes of a failed start. Ray itself knows only some of them.

    Args:
        others: ids of child processes that existed before the start, which are not killed.
    """
    # Find them by their command lines. They start new sessions, so they share no process group.
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
    # Workers rename themselves to ray::NAME. The paths of servers and agents contain Ray's package directory.
    return "ray::" in words or "/ray/" in words


def _failure(error: Exception) -> type[MegarlError]:
    """Return the error class for a failed start: DeadlineError for a hang, which Ray reports as a plain
    Exception, otherwise ClusterError."""
    return DeadlineError if isinstance(error, TimeoutError) or "timed out" in str(error) else ClusterError


def _attach(
    address: str, runtime_env: dict[str, dict[str, str]], log_to_driver: bool, end: float, silent_s: float
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
    runtime_env: dict[str, dict[str, str]],
    end: float,
    silent_s: float,
) -> None:
    if num_cpus is not None and num_cpus < 1:
        raise ClusterError(
            f"num_cpus = {num_cpus}: a local Ray needs at least 1. Fix: pass the number of ranks"
        )
    _ask_for_a_token()
    slots = num_cpus if num_cpus is not None else local_slots()
    # Clean up after a Ray that died in an earlier run of this process.
    _end_local()
    _Local.present = local = LocalRay(log_dir)
    # Silence Ray's warning that token authentication is on.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    options = {
        "address": "local",
        "num_cpus": slots,
        # The dashboard would accept jobs, and so code, from anybody who can reach its port.
        "include_dashboard": False,
        "log_to_driver": log_to_driver,
        "logging_level": logging.WARNING,
        "object_store_memory": object_store_bytes,
        "runtime_env": runtime_env,
        "_temp_dir": str(local.directory),
        # Ray would start one idle process per core. Workers with their own environment never use these.
        "_system_config": {"prestart_worker_first_driver": False},
    }
    try:
        with _loopback_only():
            _init_with_one_retry(options, end, functools.partial(_watched_start, local, silent_s))
    except Exception as error:
        local.keep_files()
        # Ray raises a plain Exception if one of its processes does not start.
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
    """Make a Ray cluster that this process starts reject clients without its token. Otherwise every user of
    the machine could run code in it.

    Ray's default differs between versions: tokens exist since 2.52, but early versions do not require them by
    default.
    """
    if env.text("RAY_AUTH_TOKEN") is None and env.text("RAY_AUTH_TOKEN_PATH") is None:
        env.set_variables(token := {"RAY_AUTH_TOKEN": secrets.token_hex(32)})
        learn(token)
    env.set_variables({"RAY_AUTH_MODE": "token"})
    # Reload the settings, because Ray reads its variables only once and may already have done so at import.
    settings: Any = getattr(importlib.import_module("ray._raylet"), "Config", None)
    if settings is not None:
        settings.initialize("")


def _redact_what_workers_print() -> None:
    """Make Ray redact the secrets that this process knows in the output of workers, engines and Ray's own
    processes.

    Ray 2.60 looks up the replaced function when it connects, and when it shows an error.
    """
    worker: Any = importlib.import_module("ray._private.worker")
    real = getattr(worker, "print_to_stdstream", None)
    # A version of Ray without this function prints unredacted lines. If it is wrapped, an earlier call did
    # that.
    if real is None or hasattr(real, "__wrapped__"):
        return

    @functools.wraps(real)
    def printed(data: Mapping[str, Any], *arguments: Any, **options: Any) -> None:
        real({**data, "lines": list(map(redacted_text, data["lines"]))}, *arguments, **options)

    worker.print_to_stdstream = printed


@contextlib.contextmanager
def _loopback_only() -> Iterator[None]:
    """Make a Ray that is started inside the block use 127.0.0.1 as its node address.

    On Linux, Ray replaces a loopback ``_node_ip_address`` by the outer address and listens on all interfaces,
    unless ``ENABLE_RAY_CLUSTER`` is false. Ray reads that setting from the environment when it is imported,
    which may be long before this call; so the constant is set here.
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
    """Return whether the cluster uses the loopback interface. No other node can join it then, so it is
    useless to wait for more resources."""
    host = ray.get_runtime_context().gcs_address.rpartition(":")[0]
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


def forwarded_environment(source: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables that workers get: a subset of ``source`` (default: this process's
    environment), and a ``PYTHONPATH`` with the driver's import path.

    Everyone with access to the cluster can read these values. So the subset contains only variables that
    control computation, and none whose name looks like that of a secret. Workers on the same host inherit all
    other variables anyway.
    """
    variables = env.snapshot() if source is None else source
    chosen = {name: value for name, value in variables.items() if _may_be_forwarded(name)}
    chosen["PYTHONPATH"] = os.pathsep.join(_driver_import_path(variables.get("PYTHONPATH", "")))
    return chosen


def _may_be_forwarded(name: str) -> bool:
    return name.startswith(_FORWARDED_PREFIXES) and name not in _NEVER_FORWARDED and not is_secret(name)


def _driver_import_path(python_path: str) -> list[str]:
    """Return the directories from which the driver imports project code, so that workers find a checkout that
    is not installed."""
    # The checkout comes first, so that workers import the driver's megarl even if another one is installed.
    checkout = str(Path(__file__).resolve().parents[2])
    interpreter = {str(Path(prefix).resolve()) for prefix in (sys.prefix, sys.base_prefix)}
    candidates = [checkout, *python_path.split(os.pathsep), *sys.path]
    result: list[str] = []
    for entry in candidates:
        if not entry or not os.path.isdir(entry):
            continue
        path = str(Path(entry).resolve())
        # Omit the interpreter's paths: on a node with another Python, they would shadow the worker's own.
        if path not in result and not any(Path(path).is_relative_to(prefix) for prefix in interpreter):
            result.append(path)
    return result
