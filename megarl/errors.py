"""Every error megarl raises on purpose.

A message names the thing, its value, the bound it broke and how to mend it. Errors that the NeMo-RL policy
API promises as ``AssertionError`` or ``ValueError`` inherit from those as well, so that code which catches
them goes on working.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.redaction import HIDDEN, is_secret, shown

WORKER_TRACE = "\n--- traceback of the worker ---"
"""Line of a message behind which the traceback of a worker stands."""


class MegarlError(Exception):
    """Base of all deliberate errors. ``exit_code`` is what the command line returns for it."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule of a configuration.

    Attributes:
        key: dotted path of the key, for example ``policy.megatron_cfg.tensor_model_parallel_size``.
        value: what stands there.
        bound: what would have been accepted.
        fix: what to write instead.
        candidates: values by dotted key, each set of which may mend it, the best first;
            ``megarl.config.proposals`` tries them on the whole configuration, and ``fix`` is for where none
            of them satisfies all rules.
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
    """A configuration cannot be used. Carries every violation found, not only the first."""

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
    """Return a list of violations as text, one a line."""
    return "\n".join(f"  {number}. {violation}" for number, violation in enumerate(violations, 1))


class MachineError(ConfigError):
    """This machine lacks what a configuration needs; nothing was created or started."""

    heading = "error on this machine, where nothing was started"


class DataError(MegarlError, ValueError):
    """A data file or a record in it cannot be used (missing, empty, broken JSON line, missing field)."""

    exit_code = 2


class RecordError(DataError):
    """One record of a data source cannot be used; ``data.on_bad_record`` says whether it may be left out."""


class ModelError(MegarlError, ValueError):
    """A model directory, its config and its weights do not fit together."""

    exit_code = 2


class BatchError(MegarlError, ValueError, AssertionError):
    """A batch has the wrong keys, shapes, dtypes or values. Raised on the driver, before any worker is
    called."""


class PackingError(MegarlError, ValueError):
    """Sequences cannot be packed into the bins asked for."""


class CheckpointError(MegarlError, RuntimeError):
    """A checkpoint is missing, damaged, or does not fit the run that wants to load it."""


class StorageError(CheckpointError):
    """The storage did not give what a file holds, at any of several tries. The file may be whole."""


class UnusableCheckpointError(CheckpointError):
    """A checkpoint that nothing can go on from: damaged, of another run, or one whose loading could run
    code."""

    exit_code = 2


class StateError(MegarlError, RuntimeError):
    """A method was called in a state that does not allow it, for example training while the optimizer is
    offloaded."""


class MicroBatchMemoryError(MegarlError, MemoryError):
    """A micro-batch that does not fit in memory with the model. It has changed no weight."""


class GenerationError(MegarlError, RuntimeError):
    """A model gave logits that no token can be drawn from."""


class RefitError(MegarlError, RuntimeError):
    """Weights could not be handed to the engine that generates, or what arrived is not what was announced. No
    part of them is served."""


class RewardError(MegarlError, RuntimeError):
    """A reward function raised, returned no finite number, or killed its process. The message names the
    record."""


class RewardOutageError(RewardError):
    """A response could not be scored for a reason that no response can cause: a scorer that does not answer,
    a machine that is full.

    A user's reward function may raise it too: the response is then left out of training, whatever
    ``env.on_error`` says but ``raise``.
    """


class MismatchError(MegarlError, RuntimeError):
    """Generation and training disagree about the probabilities of the same tokens more than the run
    allows."""


class NonFiniteError(MegarlError, RuntimeError):
    """A loss, a gradient or a weight is NaN or infinite. No weight was changed by it.

    Attributes:
        skipped: the global batches it is about, as plain values; empty where it is about weights.
    """

    skipped: list[dict[str, Any]]

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.skipped = []


class WorkerError(MegarlError, RuntimeError):
    """A worker failed. The message starts with the worker's coordinates, for example ``[pp1 dp0 cp0 tp1
    host]``."""


class WorkerLostError(WorkerError):
    """The process of a worker, or its whole node, is gone. What the others hold is useless; another start
    goes on from a checkpoint."""

    exit_code = 4


class ClusterError(MegarlError, RuntimeError):
    """The Ray cluster cannot give what was asked for."""


class MissingNodesError(ClusterError):
    """Nodes that a launcher started have not joined the Ray cluster."""

    exit_code = 3


class DeadlineError(MegarlError, TimeoutError):
    """A phase did not finish within its deadline. What the workers hold is useless; another start goes on
    from a checkpoint."""

    exit_code = 4
