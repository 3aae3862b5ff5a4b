"""Construction of a run's environment: a single one, or several named ones among which each record
selects."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from megarl.config.environments import (
    ENVIRONMENT,
    TOOLS,
    EnvConfig,
    environment_class,
    faults_of_schemas,
    is_nemo_rl,
    named_environments,
)
from megarl.errors import BatchError, ConfigError, RewardError
from megarl.import_path import is_import_path
from megarl.rollout.environment import Environment, EnvironmentReturn, Turn, environment_name
from megarl.rollout.message_env import MessageEnv, MessageEnvironment
from megarl.rollout.single_turn import SingleTurn
from megarl.rollout.tools.environment import ToolEnvironment
from megarl.time_limit import OutOfTimeError, time_limit

if TYPE_CHECKING:
    from megarl.data.datasets import Example
    from megarl.data.messages import ToolDeclaration
    from megarl.data.records import Doubt

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# Time limit for extracting the final answer of one response, in seconds.
_ANSWER_SECONDS = 5.0


class NamedEnvironments:
    """Several environments with names. Each record is stepped by the one that it names (see
    ``environment_name``).

    Args:
        environments: maps names to environments; not empty.

    Attributes:
        environments: maps names to environments.
    """

    def __init__(self, environments: Mapping[str, Environment]) -> None:
        self.environments = dict(environments)

    def step(self, turn: Turn) -> EnvironmentReturn:
        """Step each environment with its own conversations, and merge the results in batch order.

        Metrics with the same name are summed. The reward parts of the environment NAME become ``NAME/PART``,
        and its total rewards become the part ``NAME``.

        Raises:
            RewardError: a record names no existing environment.
            BatchError: an environment does not return one value per response.
        """
        return self._asked(turn, "step")

    @property
    def scores_ahead(self) -> bool:
        """True if any environment can start scoring while other responses are still being sampled."""
        return any(getattr(each, "scores_ahead", False) for each in self.environments.values())

    def score_ahead(self, turn: Turn) -> None:
        """Pass each environment its responses, to start scoring early; see ``SingleTurn.score_ahead``."""
        for name, rows in self._rows_by_name(turn).items():
            if getattr(self.environments[name], "scores_ahead", False):
                cast("Any", self.environments[name]).score_ahead(_of_rows(turn, rows))

    def judges_groups(self, step_rows: int) -> None:
        """Pass ``step_rows`` to all environments, since any of them may own all responses of a step; see
        ``SingleTurn.judges_groups``."""
        for each in self.environments.values():
            tell_of_groups(each, step_rows)

    def _asked(self, turn: Turn, method: str) -> EnvironmentReturn:
        merged = _Merged(len(turn.records))
        for name, rows in self._rows_by_name(turn).items():
            merged.take(name, rows, getattr(self.environments[name], method)(_of_rows(turn, rows)))
        return merged.result()

    def _rows_by_name(self, turn: Turn) -> dict[str, list[int]]:
        rows_of: dict[str, list[int]] = {}
        for row, record in enumerate(turn.records):
            rows_of.setdefault(self._name_of(record), []).append(row)
        return rows_of

    def judge(self, turn: Turn) -> EnvironmentReturn:
        """Have each environment score its complete conversations, and merge the results as in ``step``."""
        return self._asked(turn, "judge")

    def fault_of_reference(self, answer: str, name: str | None = None) -> str | Doubt | None:
        """Return why a record with this reference answer cannot be used, or None.

        Args:
            answer: the reference answer.
            name: name of the record's environment; may be None if there is only one.
        """
        if name is None and len(self.environments) == 1:
            name = next(iter(self.environments))
        if name not in self.environments:
            names = ", ".join(self.environments)
            return (
                f"its record names the environment {name!r}, but the environments are {names}"
                if name
                else f"its record names none of {names}"
            )
        return self.environments[name].fault_of_reference(answer)

    def of(self, record: Example) -> Environment:
        """Return the environment that a record names.

        Raises:
            RewardError: the record names no existing environment.
        """
        return self.environments[self._name_of(record)]

    def close(self) -> None:
        """Close all environments."""
        # The ExitStack closes the remaining environments even if closing one raises.
        with contextlib.ExitStack() as stack:
            for environment in self.environments.values():
                stack.callback(environment.close)

    def _name_of(self, record: Example) -> str:
        name = environment_name(record)
        if name is None and len(self.environments) == 1:
            return next(iter(self.environments))
        if name not in self.environments:
            raise RewardError(
                f"record {record.index} names the environment {name!r}, but the environments are "
                f"{', '.join(self.environments)}. Fix: set env_name of the record, or of its data "
                "source, to one of these"
            )
        return name


class _Merged:
    """Merges the results that several environments return for parts of a batch of ``rows`` conversations."""

    def __init__(self, rows: int) -> None:
        self.rewards: list[float | None] = [None] * rows
        self.terminated, self.masked = [True] * rows, [False] * rows
        self.onwards: dict[str, list[Any]] = {
            name: [None] * rows for name in ("observations", "metadata", "reasons", "stop_strings")
        }
        self.accuracies: list[float | None] = [None] * rows
        self.says_accuracy = False
        self.metrics: dict[str, float] = {}
        self.parts: dict[str, list[float | None]] = {}

    def take(self, name: str, rows: Sequence[int], said: EnvironmentReturn) -> None:
        """Store the result of one environment at the given rows of the batch.

        Raises:
            BatchError: the environment did not return one value per row.
        """
        for what in (said.rewards, said.terminated, said.masked):
            if len(what) != len(rows):
                raise BatchError(
                    f"the environment {name} returned {len(what)} values for {len(rows)} responses. Fix: "
                    "return one each"
                )
        _put(self.rewards, rows, said.rewards)
        _put(self.terminated, rows, said.terminated)
        _put(self.masked, rows, said.masked)
        for column, kept in self.onwards.items():
            given: Sequence[Any] = getattr(said, column)
            _put(kept, rows, given if len(given) else [None] * len(rows))
        self.says_accuracy |= bool(said.accuracies)
        # If an environment reports no accuracy, its reward is the accuracy.
        _put(self.accuracies, rows, said.accuracies or said.rewards)
        parts = {name: said.rewards}
        for part, values in said.parts.items():
            parts[f"{name}/{part}"] = values
        for part, values in parts.items():
            _put(self.parts.setdefault(part, [None] * len(self.rewards)), rows, values)
        for metric, value in said.metrics.items():
            self.metrics[metric] = self.metrics.get(metric, 0) + value

    def result(self) -> EnvironmentReturn:
        """Return the merged result."""
        return EnvironmentReturn(
            self.rewards,
            self.terminated,
            self.masked,
            metrics=self.metrics,
            accuracies=self.accuracies if self.says_accuracy else [],
            parts=self.parts,
            **self.onwards,
        )


def _put(column: list[Any], rows: Sequence[int], values: Sequence[Any]) -> None:
    for row, value in zip(rows, values, strict=True):
        column[row] = value


class _Chosen(Sequence[str]):
    """Lazy view of selected rows of a sequence of texts: a text is decoded only when it is accessed."""

    def __init__(self, texts: Sequence[str], rows: Sequence[int]) -> None:
        self._texts, self._rows = texts, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: Any) -> Any:
        return self._texts[self._rows[place]]


def _of_rows(turn: Turn, rows: Sequence[int]) -> Turn:
    """Select some conversations of a turn."""

    def chosen(column: Sequence[_T]) -> list[_T]:
        return [column[row] for row in rows]

    def texts(column: Sequence[str]) -> Sequence[str]:
        return _Chosen(column, rows) if column else ()

    return replace(
        turn,
        records=chosen(turn.records),
        responses=chosen(turn.responses),
        response_ids=chosen(turn.response_ids),
        metadata=chosen(turn.metadata),
        prompts=texts(turn.prompts),
        full_responses=texts(turn.full_responses),
        full_prompts=texts(turn.full_prompts),
        turns=chosen(turn.turns) if turn.turns else (),
        truncated=chosen(turn.truncated) if turn.truncated else (),
    )


def tell_of_groups(environment: Environment, step_rows: int) -> None:
    """Call the environment's ``judges_groups`` with ``step_rows``, if it has that method."""
    if hasattr(environment, "judges_groups"):
        environment.judges_groups(step_rows)


def environment_of(environment: Environment, record: Example) -> Environment:
    """Return the environment that steps a record: the one that it names, or the only one."""
    return environment.of(record) if isinstance(environment, NamedEnvironments) else environment


def find_faults(environment: Environment, timeout_s: float) -> Callable[..., str | Doubt | None]:
    """Wrap ``fault_of_reference`` of an environment so that errors and endless loops in user code are
    returned as faults.

    The returned function takes the answer and, for named environments, the name of the record's environment.

    Args:
        environment: the environment.
        timeout_s: time limit of each call, in seconds.
    """

    def find(answer: str, name: str | None = None) -> str | Doubt | None:
        try:
            with time_limit(timeout_s):
                if isinstance(environment, NamedEnvironments):
                    return environment.fault_of_reference(answer, name)
                return environment.fault_of_reference(answer)
        except OutOfTimeError:
            return f"fault_of_reference did not return within {timeout_s:g} s"
        # User code may call sys.exit, which raises SystemExit.
        except (Exception, SystemExit) as error:
            return f"fault_of_reference fails on it: {type(error).__name__}: {error}"

    return find


def final_answers(
    environment: Environment, records: Sequence[Example], responses: Sequence[str]
) -> list[str | None] | None:
    """Extract the final answers from B responses, as texts in which equal answers are equal.

    Args:
        environment: extracts the answers with its ``final_answer(response)``, which a user-defined
            environment may also have.
        records: B records.
        responses: B response texts.

    Returns:
        B answers, None for a response without one; or None if an environment of these records cannot extract
        answers.
    """
    finders: list[Any] = []
    for record in records:
        finders.append(getattr(environment_of(environment, record), "final_answer", None))
        if finders[-1] is None:
            return None
    return list(map(_final_answer, finders, responses))


def _final_answer(find: Callable[[str], str | None], response: str) -> str | None:
    try:
        with time_limit(_ANSWER_SECONDS):
            found = find(response)
    # OutOfTimeError does not derive from Exception, so that libraries which catch Exception cannot swallow
    # it.
    except (OutOfTimeError, Exception) as error:
        logger.debug("no final answer was found: %s", error)
        return None
    return None if found is None else str(found)


def tools_told(environment: Environment | None) -> dict[str | None, Sequence[ToolDeclaration]]:
    """Map environment names to the tools that the chat template shows. The key None stands for the only
    environment."""
    met: dict[Any, Any] = dict(environment.environments) if isinstance(environment, NamedEnvironments) else {}
    met[None] = next(iter(met.values())) if len(met) == 1 else environment
    told: dict[str | None, Sequence[ToolDeclaration]] = {}
    for name, each in met.items():
        if tools := getattr(each, "tools", ()):
            told[name] = tools
    return told


def make_environment(section: EnvConfig) -> Environment:
    """Build the environment of an ``env`` section. Several named environments become one
    ``NamedEnvironments``.

    Raises:
        ConfigError: an environment cannot be imported or built.
    """
    named = named_environments(section)
    if not named:
        return _made(section, ENVIRONMENT)
    environments: dict[str, Environment] = {}
    try:
        for name, inner in named.items():
            environments[name] = _made(inner, f"env.{name}.environment")
    except BaseException:
        # Close the environments built so far: they own processes and threads, and nothing else refers to them
        # yet.
        NamedEnvironments(environments).close()
        raise
    return NamedEnvironments(environments)


def _made(section: EnvConfig, key: str) -> Environment:
    name = section["environment"]
    if name == TOOLS:
        return ToolEnvironment(section, key.rpartition(".")[0])
    if not is_import_path(name):
        return SingleTurn(section)
    kind: Any = environment_class(name, key)
    if is_nemo_rl(kind):
        from megarl.rollout.nemo_rl import (
            NemoRLEnvironment,
        )  # This imports torch, which the check of a configuration does not need.

        return NemoRLEnvironment(kind, section)
    if isinstance(kind, type) and issubclass(kind, MessageEnv):
        faults = list(faults_of_schemas(kind.tools, key, name))
        if faults:
            raise ConfigError(faults)
        around = key.rpartition(".")[0]
        if section["reward"] is not None or section["rewards"] is not None:
            logger.warning(
                "%s.reward is not read, since the steps of %s return the rewards. Fix: set it to null",
                around,
                name,
            )
        if kind.tools and section["tool_parser"] is None:
            logger.warning("%s.tool_parser is null: calls of the tools of %s are not parsed", around, name)
        return MessageEnvironment(kind, section, fault_of_reference=kind.fault_of_reference)
    environment: Environment = kind(section)
    return environment
