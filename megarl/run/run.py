"""Run a configuration from start to end: build the parts, train, restart lost workers, and leave no process
behind."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import yaml

from converters.files.atomic import rename_surely, write_bytes_durably
from converters.files.reading import first_special
from megarl.algorithms.algorithm import ACTOR, Algorithm, Parts, Role
from megarl.algorithms.skipped_batches import DIRECTORY, SkippedBatches
from megarl.algorithms.turns import Turns
from megarl.checkpoint.atomic import remove_tree
from megarl.checkpoint.background import CheckpointMemory
from megarl.checkpoint.lock import LOCK_NAME, RunLock
from megarl.checkpoint.manager import CheckpointManager
from megarl.checkpoint.node_memory import OwnMemory
from megarl.config.algorithms import algorithm_class, generates, own_section, replay_key, step_size
from megarl.config.memory_run import checkpoint_bytes, checkpoint_bytes_beside
from megarl.config.model_facts import facts_of_policy
from megarl.config.nested import at, put
from megarl.config.rules.parallel import generation_shape
from megarl.config.rules.view import View
from megarl.config.sections import CheckpointingConfig, RunConfig
from megarl.config.validate import validate_config
from megarl.data.datasets import Dataset
from megarl.data.sampler import MixtureSampler, ResumableSampler, Sampler
from megarl.distributed.deadlines import keeping_durations
from megarl.distributed.shared_memory import SharedMemoryWatch
from megarl.errors import ConfigError, MegarlError, StateError, Violation
from megarl.import_path import forget_objects
from megarl.observe.console import TrainingConsole
from megarl.observe.launches import FINISHED, recorded_launch, recorded_start
from megarl.observe.metrics_file import FILE_NAME as METRICS_FILE
from megarl.observe.progress import phase
from megarl.observe.sample_files import DIRECTORY as SAMPLES
from megarl.observe.sample_files import SampleFiles
from megarl.observe.sinks import MetricSinks, open_sinks
from megarl.observe.timing import PhaseTimer
from megarl.redaction import redacted
from megarl.run.earlier_launch import (
    CONFIG_FILE,
    keep_template_date,
    kept_configs,
    require_own_checkpoints,
    require_same_recipe,
    with_own_run_resumed,
)
from megarl.run.inputs import Inputs, read_inputs, require_a_step_of_records
from megarl.run.loop import Reporting, Schedule, run_loop, total_steps
from megarl.run.preflight import require_this_machine
from megarl.run.profiling import DIRECTORY as PROFILES
from megarl.run.profiling import StepProfiler, tell_worker_groups
from megarl.run.restarts import Restarts, await_places, most_restarts, patience_for_places
from megarl.run.resume import (
    CheckpointWriter,
    ResumePoint,
    find_resume_point,
    report_changes,
)
from megarl.run.start import (
    check_places,
    checkpoint_memory,
    decided_device,
    start_engines,
    start_models,
    start_policy,
    start_ray,
    watched_memory,
)
from megarl.run.stopping import Attempt, StopRequest, listening_for_stop, this_attempt
from megarl.run.time_left import time_left
from megarl.throughput.step import Devices, StepThroughput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.models.policy.lm_policy import Policy
    from megarl.rollout.sample_log import SampleLog

logger = logging.getLogger(__name__)

PolicyFactory = Callable[..., "Policy"]
"""Builds a role's model like ``start_policy``, and pushes its shutdown onto the stack."""

CHECKPOINTS = "checkpoints"
EXPORT_DIRECTORY = "hf"
NOT_SAVED = 1
_FROZEN_BY_PYTHON = 10_000
"""Upper bound of the objects that Python itself freezes at its start (Python 3.12: some hundred). A run's
imports create some hundred thousand objects, so a larger count means that the caller has frozen them."""
# With Python's default threshold, the collector ran 450 times in a step of 1,024 responses, and took 3 to 11
# ms of the driver's 100 ms.
_OBJECTS_A_COLLECTION = 50_000
"""Number of new container objects that triggers a garbage collection."""


def run(config: RunConfig, make_policy: PolicyFactory | None = None, stop_at: float | None = None) -> int:
    """Train a configuration, or resume the run in its directory, and return the exit code.

    Writes to ``run_dir``: ``config.yaml`` (resolved), ``metrics.jsonl``, ``launches.jsonl``,
    ``checkpoints/step_N`` and, with ``checkpointing.export_hf``, ``hf/step_N``. All workers have ended when
    this returns or raises. A stop request (``megarl.run.stopping``) ends the run after the current step, with
    a checkpoint. Up to ``cluster.max_restarts`` times, lost workers are rebuilt from the newest checkpoint.

    Args:
        config: the configuration as plain containers.
        make_policy: builds the models; None builds real ones on Ray.
        stop_at: time at which this launch must have ended (unix seconds); None: end of the Slurm job, if any.

    Returns:
        0: finished; 75: stopped, can be resumed; 130: Ctrl-C; 1: stopped without checkpoints.

    Raises:
        MegarlError: invalid configuration, data or model (before any worker starts), or a failed worker.
        ConversionError: the model cannot be converted (before any worker starts).
    """
    forget_objects()
    config = validate_config(config)
    run_dir = Path(config["run_dir"]).absolute()
    if make_policy is None:
        with phase("machine checked"):
            require_this_machine(config)
    with ExitStack() as stack:
        # Enter this before the lock, because its cleanup deletes the lock's file and must run after the
        # release.
        stack.enter_context(_left_as_it_was(run_dir))
        # Another launch may be using the directory, so lock it before writing anything.
        lock = _lock(run_dir, "run_dir", stack)
        attempt = this_attempt()
        stack.enter_context(keeping_durations())
        stop = stack.enter_context(listening_for_stop(run_dir, attempt, time_left(stop_at)))
        require_same_recipe(config, run_dir)
        config = with_own_run_resumed(config, run_dir)
        # Set the stored date before reading the inputs, because a template that prints the date would get
        # today's.
        keep_template_date(config, kept_configs(config, run_dir))
        stack.enter_context(recorded_start(run_dir))
        if make_policy is None:
            start_ray(stack, config["deadlines"]["init_s"], config["deadlines"]["least_s"])
        inputs = read_inputs(config, stack)
        manager = _open_checkpoints(config["checkpointing"], lock, run_dir, stack)
        with phase("checkpoints looked for", is_told=False):
            start = find_resume_point(manager, config["checkpointing"]["resume"])
        # Check this before overwriting the earlier launch's file, which must stay if this launch is rejected.
        report_changes(start, config)
        with _written("run_dir", run_dir):
            _write_config(run_dir, config)
        schedule = _schedule(config, len(inputs.train))
        sampler = _sampler(config, inputs.train, start)
        outcome = stack.enter_context(recorded_launch(run_dir, start.step, schedule.total_steps))
        # Nested inside the record of the launch, which then sees the intended exit code.
        stack.enter_context(stop.keeping_exit_code())
        restarts = Restarts(most_restarts(config["cluster"]), stop, outcome)
        # Decide the device once: after the loss of a node, auto could select another one.
        placed = config
        if make_policy is None and restarts.most:
            placed = put(config, "cluster.device", decided_device(config))
        memory = watched_memory() if make_policy is None else SharedMemoryWatch(0)
        with _written("run_dir", run_dir):
            sinks = _open_sinks(config, run_dir, stack)
        launch = _Launch(
            config,
            placed,
            run_dir,
            lock,
            memory,
            inputs,
            schedule,
            attempt,
            restarts,
            sinks,
            make_policy or start_policy,
        )
        while True:
            try:
                return _train(launch, start, sampler, manager)
            except MegarlError as error:
                restarts.require(error)
                lock.require_place()
                await_places(
                    lambda: check_places(placed), patience_for_places(config["deadlines"]["init_s"]), error
                )
                # The constructor removes the unfinished files of the lost workers.
                manager = None if manager is None else CheckpointManager(config["checkpointing"], lock=lock)
                start = _point_of_restart(manager, config["checkpointing"]["resume"])
                restarts.workers_lost(error, start.step)
            # The old sampler has advanced beyond the checkpoint.
            sampler = _sampler(config, inputs.train, start)


@contextlib.contextmanager
def _left_as_it_was(run_dir: Path) -> Iterator[None]:
    """Remove the lock file and the directories that this launch has created, if the launch fails before it
    writes its configuration."""
    made = list(itertools.takewhile(lambda place: not place.exists(), (run_dir, *run_dir.parents)))
    had_lock = (run_dir / LOCK_NAME).exists()
    try:
        yield
    except BaseException:
        if not had_lock and not (run_dir / CONFIG_FILE).exists():
            # Delete the file only while holding the lock, because another launch may take it at this moment.
            with contextlib.suppress(OSError, StateError), RunLock(run_dir) as lock:
                lock.path.unlink()
            # ``rmdir`` fails if the directory contains other files, which must stay.
            with contextlib.suppress(OSError):
                for place in made:
                    place.rmdir()
        raise


@dataclass(frozen=True, slots=True)
class _Launch:
    """Parts of a launch that survive a restart of the workers.

    Attributes:
        config: configuration of the run.
        placed: the same configuration, with ``cluster.device`` resolved.
        run_dir, lock, memory, inputs, schedule, attempt, restarts: see ``run``.
        sinks: kept across restarts, because rows may be waiting for a full disk.
        make_policy: builds the models.
    """

    config: RunConfig
    placed: RunConfig
    run_dir: Path
    lock: RunLock
    memory: SharedMemoryWatch
    inputs: Inputs
    schedule: Schedule
    attempt: Attempt
    restarts: Restarts
    sinks: MetricSinks
    make_policy: PolicyFactory

    def look_around(self) -> None:
        """Check after each step, before anything is written, that the run directory exists and shared memory
        is not full; raise otherwise."""
        self.memory.look()
        self.lock.require_place()


def _train(launch: _Launch, start: ResumePoint, sampler: Sampler, manager: CheckpointManager | None) -> int:
    """Build the workers, train from a starting point, and return the exit code. All workers have ended when
    this returns or raises."""
    config, run_dir, inputs, schedule, restarts = (
        launch.config,
        launch.run_dir,
        launch.inputs,
        launch.schedule,
        launch.restarts,
    )
    with ExitStack() as stack:
        reporting = _open_reporting(launch, start, stack)
        # Workers copy their environment from these variables when they are built.
        tell_worker_groups(config["profiler"])
        models = start_models(launch.placed, inputs.tokenizer, start, stack, launch.make_policy)
        policy, turns = models[ACTOR], Turns(models)
        refit = start_engines(config, policy, stack) if _generates(config, schedule) else None
        if refit is not None:
            refit.restarts, refit.on_restart = restarts.engines, restarts.engines_lost

        reporting = replace(
            reporting,
            memory=lambda: _memory_figures(models),
            throughput=_throughput(config, policy),
            restarts=restarts.figures,
            look_around=launch.look_around,
        )
        with _written("run_dir", run_dir):
            skipped = SkippedBatches(run_dir / DIRECTORY)
            samples = _open_samples(config, run_dir, start, reporting.sinks, inputs.tokenizer, stack)
        read = inputs.tokenizer, inputs.environment, inputs.train, inputs.validation
        parts = Parts(
            launch.placed,
            models,
            refit,
            *read,
            sampler,
            reporting.timer,
            skipped,
            samples,
            turns,
            schedule.total_steps,
        )
        algorithm = cast("type[Algorithm]", algorithm_class(config["algorithm"]))(parts)
        # Registered after models and engines, so closed before them: the algorithm's threads may still call
        # them.
        stack.callback(algorithm.close)
        if start.checkpoint is not None:
            algorithm.load(start.checkpoint)
        memory = None if manager is None else _checkpoint_memory(launch, manager, models, stack)
        writer = _writer(manager, models, turns, config, launch.attempt, samples, memory, algorithm.save)
        if writer is not None:
            # Registered last, so it waits for a background write before the models and their memory are
            # removed.
            stack.push(writer.leave)

        stack.enter_context(_seldom_collected())
        reporting.console.start(start.step)
        restarts.built = True
        stop = restarts.stop
        with stop.deferred():
            profiler = StepProfiler(policy, config["profiler"], run_dir / PROFILES)
            reached = run_loop(algorithm, schedule, reporting, writer, start.step, stop, profiler)
            profiler.close(reached)
        if reached < schedule.total_steps:
            restarts.outcome.text = f"stopped after step {reached}: {stop.reason}"
            return _stopped(reached, stop, reporting.console, writer is not None)
        # A stop request during the last step must not stop the next launch.
        stop.forget_files()
        reporting.console.stop_bar()
        if config["checkpointing"]["export_hf"]:
            # ``max_num_steps`` may have been lowered below the step of the checkpoint that the run resumed
            # from.
            path = run_dir / EXPORT_DIRECTORY / f"step_{max(schedule.total_steps, start.step)}"
            # If models share devices, another model may be loaded after the last step.
            turns.bring(ACTOR)
            _export(policy, path, reporting.console, has_trained=reached > start.step)
        reporting.console.finish()
        restarts.outcome.text = FINISHED
    return 0


@contextlib.contextmanager
def _seldom_collected() -> Iterator[None]:
    """Run the garbage collector rarely inside the block, and exclude the objects that exist already."""
    # A step creates some hundred thousand objects, most of which are freed by reference counting. The default
    # threshold would scan them hundreds of times per step.
    thresholds = gc.get_threshold()
    gc.set_threshold(max(_OBJECTS_A_COLLECTION, thresholds[0]), *thresholds[1:])
    # The objects of torch and transformers stay until the end, and scanning them takes longer than the
    # driver's part of a step. If the caller has frozen objects, leave them frozen.
    freezes = gc.get_freeze_count() < _FROZEN_BY_PYTHON
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if freezes:
            gc.unfreeze()


def _checkpoint_memory(
    launch: _Launch, manager: CheckpointManager, models: Mapping[Role, Policy], stack: ExitStack
) -> CheckpointMemory | None:
    """Return the memory for asynchronous saves; None if ``checkpointing.async_save`` is off."""
    if not launch.config["checkpointing"]["async_save"]:
        return None
    if launch.make_policy is not start_policy:
        # Custom policies do not run on Ray nodes, so there are no other nodes' ranks.
        return OwnMemory(manager.checkpoint_dir)
    return checkpoint_memory(manager.checkpoint_dir, models, stack)


def _point_of_restart(manager: CheckpointManager | None, resume: str) -> ResumePoint:
    """Return the checkpoint from which rebuilt workers continue. With ``resume: never`` only checkpoints of
    this launch exist, so they are resumed too."""
    if manager is not None and resume == "never" and manager.get_latest_checkpoint_path() is None:
        return ResumePoint()
    return find_resume_point(manager, "auto")


def _open_checkpoints(
    section: CheckpointingConfig, lock: RunLock, run_dir: Path, stack: ExitStack
) -> CheckpointManager | None:
    """Return the checkpoint manager, or None if the run writes no checkpoints. Its directory is locked as
    well, because another run may use it."""
    if not section["enabled"]:
        return None
    require_own_checkpoints(section, run_dir)
    directory = Path(section["checkpoint_dir"])
    # If it is ``run_dir``, it is locked already, and a second lock would fail.
    if not (directory.is_dir() and directory.samefile(run_dir)):
        _lock(directory, "checkpointing.checkpoint_dir", stack)
    return CheckpointManager(section, lock=lock)


def _lock(directory: Path, key: str, stack: ExitStack) -> RunLock:
    """Create a directory if it is missing, and lock it for writing.

    Raises:
        ConfigError: it cannot be created or written, or contains a named pipe or similar under the name of a
            file, on which a read would block.
    """
    with _written(key, directory):
        lock = stack.enter_context(RunLock(directory))
        found = first_special(directory)
    if found is not None:
        raise ConfigError(
            [Violation(key, str(directory), f"{found[0].name} in it is {found[1]}, not a file", "remove it")]
        )
    return lock


@contextlib.contextmanager
def _written(key: str, directory: Path) -> Iterator[None]:
    """Convert an OSError of the block to a ConfigError that names the key of the directory."""
    try:
        yield
    except OSError as error:
        # Some of megarl's errors are OSErrors too, and their own messages are better.
        if isinstance(error, MegarlError):
            raise
        why = os.strerror(error.errno) if error.errno else str(error)
        file = "" if error.filename in (None, str(directory)) else f" ({error.filename})"
        bound = f"it cannot be created or written: {why}{file}"
        raise ConfigError(
            [
                Violation(
                    key,
                    str(directory),
                    bound,
                    "give a directory that you may write to, with space on its disk",
                )
            ]
        ) from error


def _memory_figures(models: Mapping[Role, Policy]) -> dict[str, float]:
    """Return the actor's memory metrics, and the process memory of the other models with their role's name as
    a prefix (``critic_memory_gib``)."""
    figures = models[ACTOR].memory_figures()
    for role, model in models.items():
        if role != ACTOR:
            for name, value in model.memory_figures().items():
                if name in _OF_PROCESSES:
                    figures[f"{role.name}_{name}"] = value
    return figures


_OF_PROCESSES = frozenset({"memory_gib", "peak_memory_gib"})


def _writer(
    manager: CheckpointManager | None,
    models: Mapping[Role, Policy],
    turns: Turns,
    config: RunConfig,
    attempt: Attempt,
    samples: SampleLog | None,
    memory: CheckpointMemory | None,
    beside: Callable[[Path], None],
) -> CheckpointWriter | None:
    if manager is None:
        return None
    save_period = config["checkpointing"]["save_period"]
    flush = samples.files.flush if samples is not None else lambda: None
    facts = facts_of_policy(config["policy"])
    estimated = (
        0 if facts is None else checkpoint_bytes(config["policy"], facts) + checkpoint_bytes_beside(config)
    )
    return CheckpointWriter(
        manager,
        models,
        save_period,
        config,
        attempt.checkpoint_committed,
        flush,
        most_failed=config["checkpointing"]["max_failed_saves"],
        estimated_bytes=estimated,
        memory=memory,
        longest_s=config["deadlines"]["save_s"],
        beside=beside,
        turns=turns,
    )


def _stopped(step: int, stop: StopRequest, console: TrainingConsole, has_checkpoints: bool) -> int:
    """Print why the run stops before its last step, and return the exit code."""
    advice = (
        "start it again to resume from there"
        if has_checkpoints
        else "checkpointing.enabled is false: nothing was saved"
    )
    code = stop.exit_code
    console.stopped(f"stopped after step {step} ({stop.reason}); {advice}")
    stop.forget_files()
    return code if has_checkpoints else NOT_SAVED


def _schedule(config: RunConfig, num_records: int) -> Schedule:
    section = own_section(config)
    # A custom algorithm's section may lack these keys.
    return Schedule(
        total_steps(
            section["max_num_steps"], section.get("max_num_epochs"), num_records, step_size(config)[0]
        ),
        section.get("val_period", 0),
        section.get("val_at_start", False),
        section.get("val_at_end", False),
    )


def _sampler(config: RunConfig, train: Dataset, start: ResumePoint) -> Sampler:
    order = config["seed"], config["data"]["shuffle"], train.fingerprint
    weights = [source.weight for source in train.sources if source.weight is not None]
    sampler: Sampler = ResumableSampler(len(train), *order)
    if len(weights) > 1:
        sampler = MixtureSampler([source.end - source.start for source in train.sources], weights, *order)
    if start.sampler_state is not None:
        if not (config["checkpointing"]["accept_changes"] and sampler.differs_in(start.sampler_state)):
            # Do not require a full step of records here: a run that an earlier version started with fewer
            # must be able to continue.
            sampler.load_state(start.sampler_state)
            return sampler
        logger.warning(
            "the data or their order are not those of the checkpoint: the run starts at the first record"
        )
    require_a_step_of_records(train, config)
    return sampler


def _open_sinks(config: RunConfig, run_dir: Path, stack: ExitStack) -> MetricSinks:
    """Open the metric sinks. With ``resume: never``, earlier logs are renamed and kept."""
    if config["checkpointing"]["resume"] == "never":
        _set_aside(run_dir / METRICS_FILE)
        _set_aside(run_dir / SAMPLES)
    return stack.enter_context(open_sinks(config["logger"], run_dir, config))


def _generates(config: RunConfig, schedule: Schedule) -> bool:
    """Return whether the run needs to generate. A run that replays a ledger and never validates does not."""
    validates = schedule.val_period > 0 or schedule.val_at_start or schedule.val_at_end
    return validates or at(config, replay_key(config)) is None


def _open_reporting(launch: _Launch, start: ResumePoint, stack: ExitStack) -> Reporting:
    """Create console, timer and sinks. Rows logged after the checkpoint are removed, since their steps are
    repeated."""
    # Without a checkpoint, remove row 0 as well: the validation before the first step is repeated.
    launch.sinks.truncate_after(start.step if start.step else -1)
    section = algorithm_class(launch.config["algorithm"]).section()
    console = TrainingConsole(
        launch.schedule.total_steps, f"{section.upper()} {Path(launch.config['policy']['model_name']).name}"
    )
    stack.push(console)
    return Reporting(launch.sinks, console, PhaseTimer(on_change=console.working_on))


def _open_samples(
    config: RunConfig,
    run_dir: Path,
    start: ResumePoint,
    sinks: MetricSinks,
    tokenizer: PreTrainedTokenizerBase,
    stack: ExitStack,
) -> SampleLog | None:
    """Open the sample log, and remove samples of steps that will be repeated; None if samples are
    disabled."""
    section = config["logger"]["samples"]
    if not section["enabled"] or not generates(config):
        return None
    from megarl.rollout.sample_log import SampleLog

    files = stack.enter_context(SampleFiles(run_dir / SAMPLES, section["max_files"]))
    files.truncate_after(start.step if start.step else -1)
    return SampleLog(files, section, tokenizer, sinks)


def _throughput(config: RunConfig, policy: Policy) -> StepThroughput:
    """Return the throughput calculator, from the model's size, the number of devices and their peak
    FLOP/s."""
    peaks, own = policy.peak_flops(), generation_shape(View(config))
    training, apart = len(peaks), 0 if own is None else own[0] * own[1]
    devices = Devices(training, apart or training, training + apart, sum(peaks) / training)
    return StepThroughput.of(config["policy"], facts_of_policy(config["policy"]), devices)


def _export(policy: Policy, path: Path, console: TrainingConsole, has_trained: bool) -> None:
    """Export the weights as a Hugging Face model, unless an earlier launch has exported them. Unfinished
    exports of killed launches are removed."""
    for unfinished in path.parent.glob(".*.partial-*"):
        remove_tree(unfinished)
    if has_trained:
        # The path may contain the export of a run that was started over or went back to an earlier
        # checkpoint.
        _set_aside(path)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with phase("Hugging Face model written"):
            policy.export_hf(str(path))
    console.note(f"Hugging Face model: {path}")


def _set_aside(path: Path) -> None:
    """Rename a directory or a non-empty file to ``NAME.before-N``, so that it is not overwritten."""
    if path.is_dir() or (path.is_file() and path.stat().st_size):
        names = (path.with_name(f"{path.stem}.before-{number}{path.suffix}") for number in itertools.count(1))
        rename_surely(path, next(name for name in names if not name.exists()))


def _write_config(run_dir: Path, config: RunConfig) -> None:
    """Write ``config.yaml`` to the run directory. The default checkpoint directory is omitted, so that it
    follows the run directory when that is copied or moved."""
    written = redacted(config)
    if Path(config["checkpointing"]["checkpoint_dir"]).absolute() == run_dir / CHECKPOINTS:
        del written["checkpointing"]["checkpoint_dir"]
    elif Path(config["run_dir"]).is_absolute():
        # Make the path absolute: it is relative to the directory in which the run was started, which an
        # absolute ``run_dir`` does not tell.
        written["checkpointing"]["checkpoint_dir"] = os.path.abspath(
            config["checkpointing"]["checkpoint_dir"]
        )
    path = run_dir / CONFIG_FILE
    temporary = path.with_name(f".{path.name}.tmp")
    write_bytes_durably(
        temporary, yaml.safe_dump(written, sort_keys=False, allow_unicode=True).encode(), private=True
    )
    rename_surely(temporary, path)
