"""All errors that megarl raises on purpose.

A message names the thing, its value, the bound that it broke, and the fix. Errors that the NeMo-RL policy API
promises as ``AssertionError`` or ``ValueError`` also inherit from those, so that code that catches them keeps
working.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.redaction import HIDDEN, is_secret, shown

WORKER_TRACE = "\n--- traceback of the worker ---"
"""Line of a message that precedes a worker's traceback."""


class MegarlError(Exception):
    """Base class of all deliberate errors. ``exit_code`` is the exit code of the command line."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule of a configuration.

    Attributes:
        key: dotted path of the key, for example ``policy.megatron_cfg.tensor_model_parallel_size``.
        value: the configured value.
        bound: what would have been accepted.
        fix: what to write instead.
        candidates: sets of values by dotted key, best first, each of which may fix the violation.
            ``megarl.config.proposals`` tries them on the whole configuration; ``fix`` is used if none of them
            satisfies all rules.
    """

    key: str
    value: object
    bound: str
    fix: str
    candidates: tuple[Mapping[str, object], ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        rest = f"{self.bound}. Fix: {self.fix}"
        if is_secret(self.key):
            rest = rest.replace(str(self.value), HIDDEN)
        return f"{self.key} = {shown(self.key, self.value)}: {rest}"


class ConfigError(MegarlError, ValueError):
    """A configuration cannot be used. The error carries all violations, not only the first."""

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
    """Return a numbered list of violations as text, one per line."""
    return "\n".join(f"  {number}. {violation}" for number, violation in enumerate(violations, 1))


class MachineError(ConfigError):
    """This machine lacks what a configuration needs; nothing was created or started."""

    heading = "error on this machine, where nothing was started"


class DataError(MegarlError, ValueError):
    """A data file or a record in it cannot be used (missing, empty, broken JSON line, missing field)."""

    exit_code = 2


class RecordError(DataError):
    """One record of a data source cannot be used; ``data.on_bad_record`` decides whether it may be
    skipped."""


class ModelError(MegarlError, ValueError):
    """A model directory, its config and its weights do not fit together."""

    exit_code = 2


class BatchError(MegarlError, ValueError, AssertionError):
    """A batch has wrong keys, shapes, dtypes or values. The error is raised on the driver, before any worker
    is called."""


class PackingError(MegarlError, ValueError):
    """Sequences cannot be packed into the requested bins."""


class CheckpointError(MegarlError, RuntimeError):
    """A checkpoint is missing, damaged, or does not fit the run that wants to load it."""


class StorageError(CheckpointError):
    """The storage did not return a file's content in several attempts. The file itself may be undamaged."""


class UnusableCheckpointError(CheckpointError):
    """A checkpoint that no run can resume from: it is damaged, it belongs to another run, or loading it could
    run code."""

    exit_code = 2


class StateError(MegarlError, RuntimeError):
    """A method was called in a state that does not allow it, for example training while the optimizer is
    offloaded."""


class MicroBatchMemoryError(MegarlError, MemoryError):
    """A micro-batch does not fit in memory with the model. No weight was changed."""


class GenerationError(MegarlError, RuntimeError):
    """A model returned logits that no token can be sampled from."""


class RefitError(MegarlError, RuntimeError):
    """Weights could not be handed to the generation engine, or the received weights differ from the announced
    ones. The engine serves none of them."""


class RewardError(MegarlError, RuntimeError):
    """A reward function raised, did not return a finite number, or killed its process. The message names the
    record."""


class RewardOutageError(RewardError):
    """A response could not be scored for a reason that no response can cause, such as an unresponsive scorer
    or a full machine.

    A user's reward function may raise it too. The response is then left out of training, unless
    ``env.on_error`` is ``raise``.
    """


class MismatchError(MegarlError, RuntimeError):
    """The probabilities of the same tokens differ between generation and training by more than the run
    allows."""


class NonFiniteError(MegarlError, RuntimeError):
    """A loss, a gradient or a weight is NaN or infinite. No weight was changed by it.

    Attributes:
        skipped: the affected global batches, as plain values; empty if the error is about weights.
    """

    skipped: list[dict[str, Any]]

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.skipped = []


class WorkerError(MegarlError, RuntimeError):
    """A worker failed. The message starts with the worker's coordinates, for example ``[pp1 dp0 cp0 tp1
    host]``."""


class WorkerLostError(WorkerError):
    """The process of a worker, or its whole node, is gone. The state of the other workers is lost; a restart
    resumes from a checkpoint."""

    exit_code = 4


class ClusterError(MegarlError, RuntimeError):
    """The Ray cluster cannot provide the requested resources."""


class MissingNodesError(ClusterError):
    """Nodes that a launcher started have not joined the Ray cluster."""

    exit_code = 3


class DeadlineError(MegarlError, TimeoutError):
    """A phase did not finish within its deadline. The state of the workers is lost; a restart resumes from a
    checkpoint."""

    exit_code = 4
