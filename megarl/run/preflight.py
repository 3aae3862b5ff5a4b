"""Checks of this machine before a run creates or starts anything: packages, GPUs, directories, limits,
network.

Each check yields its findings instead of raising, so that the user gets one complete list.
"""

from __future__ import annotations

import importlib.util
import math
import os
import resource
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from rich.console import Console

from converters.errors import ConversionError
from megarl import env
from megarl.checkpoint.manifest import read_signing_key
from megarl.checkpoint.storage import tree_bytes
from megarl.config.adapters import adapters_of
from megarl.config.algorithms import replay_key
from megarl.config.asynchrony import LEDGER
from megarl.config.backend import absent_hybrid_model
from megarl.config.data_sources import sources_of
from megarl.config.engines import KEY as GENERATION_BACKEND
from megarl.config.environments import environment_class, environments_of, rewards_of
from megarl.config.memory_run import disk_bytes
from megarl.config.model_facts import facts_of_policy
from megarl.config.models import POLICY, model_roles, model_sections
from megarl.config.nested import at, put
from megarl.config.places import nearest_directory
from megarl.config.plan import size_text
from megarl.config.rules.parallel import generation_shape, training_shape
from megarl.config.rules.view import View
from megarl.config.sections import RunConfig
from megarl.distributed import nvml
from megarl.distributed.node_choice import local_slots
from megarl.errors import ConfigError, MachineError, Violation, numbered
from megarl.import_path import is_import_path
from megarl.redaction import redacted_text
from megarl.rollout.rewards import RewardSpec, get_reward
from megarl.run.start import engine_of

# Timeout in seconds of one network check; proxies may be slow.
_LOOK_S = 10.0

# Free disk space to require even if the size of the model is unknown; a smallest run writes less.
_LEAST_FREE = 64 << 20

# Open files that a process needs. A worker of a small CPU run had 136.
_LEAST_FILES = 256

_THREADS_OF_RAY, _THREADS_OF_RANK = 200, 80
"""Threads to assume for the driver with a local Ray (measured: 185), and for each worker (measured: 79, on
two cores)."""

# Switch -> package that it needs. The packages' names are also the names of megarl's extras.
_PACKAGES = {f"logger.{name}_enabled": name for name in ("wandb", "tensorboard", "mlflow", "trackio")}


_DOCTOR = "megarl doctor says how to install it"
# Entries: key of ``megatron_cfg``, value, package that this value needs, how to install it, value to use
# instead.
_PACKAGES_OF_MEGATRON = (
    ("transformer_engine", True, "transformer-engine", _DOCTOR, "auto"),
    ("moe_permute_fusion", True, "transformer-engine", _DOCTOR, "false"),
    (
        "moe_token_dispatcher_type",
        "flex",
        "deep_ep",
        "install DeepEP (https://github.com/deepseek-ai/DeepEP)",
        "alltoall",
    ),
)


def require_this_machine(config: RunConfig, *, trains: bool = True) -> None:
    """Check that this machine can do the run, before anything is created.

    Args:
        config: checked configuration with its defaults.
        trains: False for an evaluation, which needs less.

    Raises:
        MachineError: lists everything that is missing.
    """
    found = findings(config, trains=trains)
    if found:
        raise MachineError(found)


def findings(config: RunConfig, *, trains: bool = True) -> list[Violation]:
    """Return everything that this machine lacks for a run; arguments as in ``require_this_machine``."""
    return [finding for check in (CHECKS if trains else CHECKS_OF_EVALUATION) for finding in check(config)]


def require_files_of_models(found: Sequence[Violation]) -> None:
    """Raise if a model or tokenizer is among the findings. Reading the data would otherwise retry the
    download for a minute.

    Raises:
        MachineError: a model or tokenizer is not available.
    """
    absent = [finding for finding in found if finding.key.endswith((".model_name", ".tokenizer.name"))]
    if absent:
        raise MachineError(absent)


def print_findings(found: Sequence[Violation], console: Console) -> None:
    """Print, at the end of a dry run, why a real run would be rejected on this machine."""
    if found:
        console.print(
            f"not on this machine ({len(found)}); a run here would be refused:",
            markup=False,
            style="bold yellow",
        )
        console.print(redacted_text(numbered(found)), markup=False, highlight=False)


def missing_engine(config: RunConfig) -> Iterator[Violation]:
    """Yield a violation if the package of the rollout engine, or one that the Megatron settings need, is not
    installed."""
    kind = engine_of(config)
    package = None if kind is None else kind.missing_package()
    if kind is not None and package is not None:
        fix = (
            f"{env.installation(kind.extra)}; or add '~{GENERATION_BACKEND}': then the policy itself "
            "generates"
        )
        yield Violation(
            GENERATION_BACKEND, at(config, GENERATION_BACKEND), f"the package {package} is not installed", fix
        )
    for path in (POLICY, *model_sections(config)):
        for name, value, package, installation, otherwise in _PACKAGES_OF_MEGATRON:
            key = f"{path}.megatron_cfg.{name}"
            if at(config, key) == value and env.installed_version(package) is None:
                fix = f"{installation}; or write {key}={otherwise}"
                yield Violation(key, value, f"the package {package} is not installed", fix)
        key, version = f"{path}.megatron_cfg.model_class", env.installed_version("megatron-core")
        absent = (
            absent_hybrid_model(key, version) if at(config, key) == "hybrid" and version is not None else None
        )
        if absent is not None:
            yield absent


def missing_sinks(config: RunConfig) -> Iterator[Violation]:
    """Yield enabled metric sinks whose package is not installed."""
    for key, package in _PACKAGES.items():
        if at(config, key) and not _can_be_imported(package):
            fix = f"pip install '{env.DISTRIBUTION}[{package}]', or write {key}=false"
            yield Violation(key, True, f"the package {package} is not installed", fix)


def _can_be_imported(package: str) -> bool:
    """Return whether a package can be imported. A plain directory of that name, such as ``wandb/``, does not
    count."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def absent_devices(config: RunConfig) -> Iterator[Violation]:
    """Yield a violation if this machine has too few GPUs or CPU slots for the run. Skipped if ``RAY_ADDRESS``
    names a running cluster, which reports its own resources."""
    if _ray_address() is not None:
        return
    nodes, ranks = training_shape(View(config))
    apart = generation_shape(View(config)) if engine_of(config) is not None else None
    needed = nodes * ranks + (math.prod(apart) if apart is not None else 0)
    from_environment = env.text("MEGARL_DEVICE", "auto")
    wanted, present = {config["cluster"]["device"], from_environment} - {"auto"}, _visible_gpus()
    # Without a GPU, auto means the CPU. ``start.uses_gpus`` refuses it if GPUs are to be expected.
    if "cpu" in wanted or not (wanted or present):
        workers, slots = needed * len(model_roles(config)), local_slots()
        if workers > slots:
            yield Violation(
                "cluster.gpus_per_node",
                ranks,
                f"{workers} workers, and a local Ray starts at most {slots}",
                "use fewer ranks, or a cluster of several nodes",
            )
    elif needed > present:
        machines = f" ({nodes} nodes of {ranks})" if nodes > 1 and apart is None else ""
        lent = "; engines on separate devices need their own GPUs" if apart is not None else ""
        gpus = f"{needed} GPU{'s' * (needed > 1)}"
        bound = f"the run needs {gpus}{machines}, and this machine shows {present}{lent}"
        fix = (
            "start it on a machine that has them, or on a cluster (launch/README.md: sbatch, or "
            "RAY_ADDRESS of a running Ray)"
        )
        if present:
            fix += f"; or write cluster.gpus_per_node={present} where the layout fits"
        elif not nvml.count_devices():
            fix += "; cluster.device=cpu trains on the CPU, which suits tiny models"
        yield Violation("cluster.device", config["cluster"]["device"], bound, fix)


def unusable_rewards(config: RunConfig) -> Iterator[Violation]:
    """Yield custom rewards and environments that cannot be imported or called, and rewards whose sandbox is
    not available."""
    for key, section in environments_of(config.get("env") or {}).items():
        try:
            if is_import_path(section.get("environment", "")):
                environment_class(section["environment"], f"{key}.environment")
                continue
            for reward in rewards_of(section, key).values() if section else ():
                get_reward(RewardSpec.of_section(reward))
        except ConfigError as error:
            yield from error.violations


def missing_data(config: RunConfig) -> Iterator[Violation]:
    """Yield data files that do not exist."""
    for name in ("train", "validation"):
        for key, source in sources_of(config["data"], name):
            path = source.get("path")
            if path is not None and not Path(path).expanduser().exists():
                fix = "give the path of a JSON, parquet, CSV or TSV file, or of a saved data set"
                yield Violation(f"{key}.path", path, "there is no such file", fix)


def missing_ledger(config: RunConfig) -> Iterator[Violation]:
    """Yield a violation if the directory to replay contains no ledger."""
    key = replay_key(config)
    replayed = at(config, key)
    if replayed is not None and not (Path(replayed) / LEDGER).is_dir():
        fix = "give the directory of a run that has trained with schedule=ready_first"
        yield Violation(key, replayed, f"there is no {LEDGER}/ in it", fix)


def missing_adapters(config: RunConfig) -> Iterator[Violation]:
    """Yield ``peft.adapter_path`` values from which no adapter can be read."""
    for path in (POLICY, *model_sections(config)):
        peft = adapters_of(at(config, path))
        start = peft and peft["adapter_path"]
        try:
            if start:
                # Import here, because it imports torch, which a run without adapters does not need yet.
                from converters.adapters.peft_directory import PeftDirectory

                PeftDirectory(Path(start).expanduser())
        except ConversionError as error:
            bound = "; ".join([error.what, *error.details])
            yield Violation(f"{path}.peft.adapter_path", start, bound, error.fix)


def unusable_directories(config: RunConfig) -> Iterator[Violation]:
    """Yield directories of the run that cannot be written, and file systems with too little free space."""
    # Report each unwritable directory once, and each full file system once.
    reported = set[str]()
    on_device: dict[int, list[tuple[str, Path, int]]] = {}
    for key, (place, size) in _places_of_run(config).items():
        fault = fault_of_directory(place)
        if fault is None:
            on_device.setdefault(nearest_directory(place).stat().st_dev, []).append((key, place, size))
        elif fault[0] not in reported:
            reported.add(fault[0])
            yield Violation(key, at(config, key), *fault)
    for together in on_device.values():
        yield from _too_full(config, together)


def fault_of_directory(place: Path) -> tuple[str, str] | None:
    """Return why files cannot be written to a directory, and the fix; None if they can. The directory need
    not exist yet."""
    try:
        nearest = nearest_directory(place)
    except OSError as error:
        bound = f"it cannot be created: {os.strerror(error.errno or 0)}: {error.filename}"
        return bound, "give a directory that can be created"
    if os.access(nearest, os.W_OK | os.X_OK):
        return None
    return f"{nearest} cannot be written by user {os.geteuid()}", "give a directory that you may write to"


def _places_of_run(config: RunConfig) -> dict[str, tuple[Path, int]]:
    """Return key -> (directory, bytes it will contain at the end of the run)."""
    facts, section = facts_of_policy(config[POLICY]), config["checkpointing"]
    # Without checkpoints, only the export remains.
    exported = 0 if facts is None else disk_bytes(put(config, "checkpointing.enabled", False), facts)
    places = {"run_dir": (Path(config["run_dir"]).absolute(), exported)}
    if section["enabled"]:
        kept = 0 if facts is None else disk_bytes(config, facts) - exported
        places["checkpointing.checkpoint_dir"] = (Path(section["checkpoint_dir"]).absolute(), kept)
    return places


def _too_full(config: RunConfig, together: Sequence[tuple[str, Path, int]]) -> Iterator[Violation]:
    key, place, _ = max(together, key=lambda each: each[2])
    measured = nearest_directory(place)
    usage = shutil.disk_usage(measured)
    # Subtract what is there already, because a run that is resumed has written a part of it.
    places = {path for _, path, _ in together}
    roots = [path for _, path, _ in together if places.isdisjoint(path.parents)]
    needed = max(sum(size for _, _, size in together) - sum(map(tree_bytes, roots)), _LEAST_FREE)
    # Some file systems on object storage report a size of 0 bytes.
    if usage.total and usage.free < needed:
        absent = "" if measured == place else ", as it does not exist yet"
        bound = (
            f"{size_text(usage.free)} are free in {measured}{absent}, and the run writes {size_text(needed)} "
            "of checkpoints and exports"
        )
        yield Violation(
            key,
            at(config, key),
            bound,
            f"give {key} another directory"
            + ", or keep fewer checkpoints (checkpointing.keep_top_k)" * config["checkpointing"]["enabled"],
        )


def unreadable_key(config: RunConfig) -> Iterator[Violation]:
    """Yield a violation if the signing key file is missing or invalid."""
    try:
        read_signing_key(config["checkpointing"]["signing_key_file"])
    except ConfigError as error:
        yield from error.violations


def dead_cluster(config: RunConfig) -> Iterator[Violation]:
    """Yield a violation if the Ray cluster at ``RAY_ADDRESS`` does not accept connections."""
    address = _ray_address()
    if address is None or address == "auto":
        return
    # Without a scheme, ``urlsplit`` reads HOST:PORT as a scheme and a path.
    place = urlsplit(address if "://" in address else f"ray://{address}")
    try:
        socket.create_connection((place.hostname or "", place.port or 6379), timeout=_LOOK_S).close()
    except (OSError, ValueError) as error:
        fix = (
            "start it there (ray start --head), correct RAY_ADDRESS, or unset it: then a local Ray is started"
        )
        yield Violation("RAY_ADDRESS", address, f"nothing answers there: {error}", fix)


def low_limits(config: RunConfig) -> Iterator[Violation]:
    """Yield limits on processes and open files that are too low for a local Ray with this run's workers."""
    # Ray raises the soft limit to the hard limit at its start.
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if files != resource.RLIM_INFINITY and files < _LEAST_FILES:
        yield Violation(
            "ulimit -n", files, f"a run opens {_LEAST_FILES} files and more", f"ulimit -n {_LEAST_FILES * 16}"
        )
    nodes, ranks = training_shape(View(config))
    workers = (1 if _ray_address() is not None else nodes) * ranks * len(model_roles(config))
    needed = _THREADS_OF_RAY + workers * _THREADS_OF_RANK
    for name, limit, used in _limits_of_processes():
        if limit - used < needed:
            bound = f"{used} of them are in use, and the run starts some {needed} processes and threads"
            yield Violation(name, limit, bound, f"raise it to {used + needed} or more")


def _limits_of_processes() -> Iterator[tuple[str, int, int]]:
    """Yield (name, limit, current use) of each limit on processes and threads that applies to this
    process."""
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    # This limit does not apply to root.
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
        # For this limit the kernel counts threads rather than processes.
        used = 0
        for process in psutil.process_iter(["uids", "num_threads"]):
            if _is_ours(process):
                used += process.info["num_threads"] or 0
        yield "ulimit -u", soft, used
    # In a container this is its own control group. On a host it is the root group, which has no ``pids.max``.
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "pids.max").read_text().strip()
        if limit != "max":
            yield "pids.max of the control group", int(limit), int((group / "pids.current").read_text())
    except (OSError, ValueError):
        return


def _is_ours(process: psutil.Process) -> bool:
    uids = process.info["uids"]
    return uids is not None and uids.real == os.getuid()


# Every tokenizer file that transformers reads has one of these words in its name.
_TOKENIZER_WORDS = ("token", "vocab", "merges", "spiece", "sentencepiece", "spm", "bpe", "dict.txt")


def unreachable_models(config: RunConfig) -> Iterator[Violation]:
    """Yield models and tokenizers that are neither on this disk nor available from the hub. Sends one request
    each, in parallel."""
    names: dict[str, str] = {}
    for path in (POLICY, *model_sections(config)):
        section = at(config, path)
        for key in ("model_name", "tokenizer.name"):
            name = at(section, key)
            if isinstance(name, str):
                names.setdefault(name, f"{path}.{key}")
    # Start all requests before waiting for the first.
    looks = [_HubLook(key, name) for name, key in names.items() if _is_of_hub(name)]
    end = time.monotonic() + _LOOK_S
    for look in looks:
        look.join(max(end - time.monotonic(), 0.0))
        if look.fault is not None:
            fix = (
                "correct the name, give a directory of a model, or download it where there is a "
                "network (its cache is used)"
            )
            yield Violation(look.key, look.model, look.fault, fix)


def missing_tokenizer(config: RunConfig) -> Iterator[Violation]:
    """Yield a violation if the tokenizer directory has no tokenizer files. Transformers would build an empty
    tokenizer from it."""
    name = config[POLICY]["tokenizer"]["name"]
    directory = Path(name).expanduser()
    if directory.is_dir() and not any(
        word in file.name for file in directory.iterdir() for word in _TOKENIZER_WORDS
    ):
        fix = "copy the tokenizer's files there, or set policy.tokenizer.name to a model that has them"
        yield Violation(f"{POLICY}.tokenizer.name", name, "there is no tokenizer in that directory", fix)


def _is_of_hub(name: str) -> bool:
    """Return whether a name must be requested from the hub: it is not a path, and its config is not in the
    cache."""
    from huggingface_hub import try_to_load_from_cache

    # A hub id is MODEL or OWNER/MODEL.
    if Path(name).expanduser().exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        return False
    try:
        return not isinstance(try_to_load_from_cache(name, "config.json"), str)
    # The name is not a valid hub id; the request reports that.
    except ValueError:
        return True


class _HubLook(threading.Thread):
    """One request for a model to the hub. It runs in a daemon thread, because DNS may block for long."""

    def __init__(self, key: str, model: str) -> None:
        super().__init__(name=f"look for {model}", daemon=True)
        self.key, self.model = key, model
        self.fault: str | None = f"it is not on this disk, and the hub has not answered for {_LOOK_S:g} s"
        self.start()

    def run(self) -> None:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            HFValidationError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
        )

        try:
            # A HEAD request is rejected for the same reasons as a download.
            get_hf_file_metadata(hf_hub_url(self.model, "config.json"), timeout=_LOOK_S)
            self.fault = None
        except GatedRepoError:
            self.fault = (
                "the hub gives it only to those who were granted access: log in (hf auth login, or HF_TOKEN)"
            )
        except (RepositoryNotFoundError, HFValidationError):
            self.fault = (
                "it is no directory on this disk, and the hub has no such model (or not for you: "
                "hf auth login)"
            )
        except EntryNotFoundError:
            self.fault = "the hub has it without a config.json"
        except OfflineModeIsEnabled:
            self.fault = "it is not on this disk, and HF_HUB_OFFLINE forbids asking the hub"
        # Errors of the HTTP library all mean that the hub cannot be reached.
        except Exception as error:
            self.fault = (
                f"it is not on this disk, and the hub cannot be reached ({type(error).__name__}: {error})"
            )


def _ray_address() -> str | None:
    address = env.text("RAY_ADDRESS")
    return None if address == "local" else address


def _visible_gpus() -> int:
    """Return the number of GPUs that a local Ray would find."""
    chosen = env.text("CUDA_VISIBLE_DEVICES")
    present = nvml.count_devices()
    if chosen is None:
        return present
    return min(present, sum(each.strip() not in ("", "-1") for each in chosen.split(",")))


Check = Callable[[RunConfig], Iterator[Violation]]

CHECKS_OF_EVALUATION: tuple[Check, ...] = (
    missing_engine,
    absent_devices,
    dead_cluster,
    low_limits,
    unreachable_models,
    missing_tokenizer,
    unusable_rewards,
    missing_data,
)
CHECKS: tuple[Check, ...] = (
    *CHECKS_OF_EVALUATION,
    missing_ledger,
    missing_adapters,
    missing_sinks,
    unusable_directories,
    unreadable_key,
)
"""All checks, in the order in which their findings are listed."""
