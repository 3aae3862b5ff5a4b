"""Errors that megarl raises deliberately.

A message names what is wrong, its value, the bound that it violates, and the fix. Errors that NeMo-RL's
policy API documents as ``AssertionError`` or ``ValueError`` inherit from these too, so existing handlers
catch them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.redaction import HIDDEN, is_secret, shown

# Characters of a section in a message.
_LONGEST = 100
WORKER_TRACE = "\n--- traceback of the worker ---"
"""Line that separates an error message from the traceback of the worker in which it was raised."""


class MegarlError(Exception):
    """Base class of all errors that megarl raises deliberately. ``exit_code`` is the exit code of the
    command line."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Violation:
    """One violated rule of a configuration.

    Attributes:
        key: dotted key, for example ``policy.megatron_cfg.tensor_model_parallel_size``.
        value: its configured value.
        bound: the condition that the value does not satisfy.
        fix: advice on what to write instead.
        candidates: possible fixes, best first, each a mapping of dotted keys to new values.
            ``megarl.config.proposals`` tests them on the whole configuration, and replaces ``fix`` by the
            first that satisfies all rules.
    """

    key: str
    value: object
    bound: str
    fix: str
    candidates: tuple[Mapping[str, object], ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        rest = f"{self.bound}. Fix: {self.fix}"
        if is_secret(self.key):
            # Rules quote values in their texts.
            rest = rest.replace(str(self.value), HIDDEN)
        value = shown(self.key, self.value)
        if isinstance(self.value, Mapping | list) and len(value) > _LONGEST:
            # A section with all of its defaults hides what is wrong with it.
            value = f"{value[:_LONGEST]}...{value[-1]}"
        return f"{self.key} = {value}: {rest}"


class ConfigError(MegarlError, ValueError):
    """A configuration cannot be used. ``violations`` has all violations that were found."""

    exit_code = 2
    heading = "configuration error"

    def __init__(self, violations: Sequence[Violation] | str) -> None:
        self.violations: tuple[Violation, ...] = () if isinstance(violations, str) else tuple(violations)
        if isinstance(violations, str):
            text = violations
        else:
            heading = self.heading.replace("error", "errors") if len(self.violations) != 1 else self.heading
            text = f"{len(self.violations)} {heading}:\n{numbered(self.violations)}"
        super().__init__(text)


def numbered(violations: Sequence[Violation]) -> str:
    """Return the violations as a numbered list, one per line."""
    return "\n".join(f"  {number}. {violation}" for number, violation in enumerate(violations, 1))


class MachineError(ConfigError):
    """This machine lacks something that the configuration needs. Nothing was created or started."""

    heading = "error on this machine, where nothing was started"


class DataError(MegarlError, ValueError):
    """A data file or one of its records cannot be used: missing, empty, invalid JSON, or without a required
    field."""

    exit_code = 2


class RecordError(DataError):
    """One record of a data source cannot be used. With ``data.on_bad_record: skip`` it is left out."""


class ModelError(MegarlError, ValueError):
    """A model's directory, its ``config.json`` and its weights contradict each other."""

    exit_code = 2


class BatchError(MegarlError, ValueError, AssertionError):
    """A batch has wrong keys, shapes, dtypes or values. Raised on the driver, before any worker is called."""


class PackingError(MegarlError, ValueError):
    """Sequences cannot be packed into rows of the requested size."""


class CheckpointError(MegarlError, RuntimeError):
    """A checkpoint is missing or damaged, or does not match the run that loads it."""


class StorageError(CheckpointError):
    """A checkpoint file could not be read in several attempts. The file itself may be intact."""


class UnusableCheckpointError(CheckpointError):
    """No run can resume from a checkpoint: it is damaged, belongs to another run, or could execute code when
    loaded."""

    exit_code = 2


class StateError(MegarlError, RuntimeError):
    """A method was called in a state that does not allow it, such as training with an offloaded optimizer."""


class MicroBatchMemoryError(MegarlError, MemoryError):
    """Memory ran out in the forward or backward pass of a micro-batch. No weights were changed."""


class GenerationError(MegarlError, RuntimeError):
    """A model returned logits from which no token can be sampled, such as NaN."""


class RefitError(MegarlError, RuntimeError):
    """A refit failed: weights could not be sent to an engine, or arrived changed. The engine does not use
    them."""


class RewardError(MegarlError, RuntimeError):
    """A reward function raised an error, returned no finite number, or crashed. The message names the
    record."""


class RewardOutageError(RewardError):
    """A response could not be scored for a reason that no response can cause, such as an unresponsive
    scoring service or a full disk.

    Custom reward functions may raise it too. The response is then left out of training, unless
    ``env.on_error`` is ``raise``.
    """


class MismatchError(MegarlError, RuntimeError):
    """Engine and policy give the same tokens log-probabilities that differ by more than the run allows."""


class NonFiniteError(MegarlError, RuntimeError):
    """A loss, gradient or weight is NaN or infinite. No weights were changed by it.

    Attributes:
        skipped: the affected global batches as plain values; empty if the error is about weights.
    """

    skipped: list[dict[str, Any]]

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.skipped = []


class WorkerError(MegarlError, RuntimeError):
    """A worker failed. The message begins with the worker's rank coordinates and host, for example ``[pp1
    dp0 cp0 tp1 host]``."""


class WorkerLostError(WorkerError):
    """The process of a worker, or its node, is gone. The state of all workers is lost, so a restart resumes
    from a checkpoint."""

    exit_code = 4


class ClusterError(MegarlError, RuntimeError):
    """The Ray cluster cannot provide the requested resources."""


class MissingNodesError(ClusterError):
    """Nodes that the launcher started have not joined the Ray cluster."""

    exit_code = 3


class DeadlineError(MegarlError, TimeoutError):
    """A phase exceeded its time limit. The state of all workers is lost, so a restart resumes from a
    checkpoint."""

    exit_code = 4
