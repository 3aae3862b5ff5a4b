"""Access to a configuration for rules. A rule that reads an absent key, or a value of the wrong type, does
not apply."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from converters.model_config.architecture import ModelFacts
from megarl.config.algorithms import algorithm_class
from megarl.errors import ConfigError, Violation

if TYPE_CHECKING:
    from megarl.config.plugins import AlgorithmSpec


class NotApplicableError(Exception):
    """A rule read a value that does not exist, so it does not apply. ``apply_rules`` catches this error."""


class View:
    """Read access to a configuration by dotted paths, for rules.

    Args:
        config: the configuration as plain containers.
        faulty: dotted paths of values of the wrong type. They count as absent, and so does everything below
            them; a list with such an item counts as absent as a whole.
        facts: sizes of the model; None if unknown.

    Attributes:
        failures: exceptions that rules raised; None lets them propagate instead.
    """

    def __init__(
        self, config: Mapping[str, Any], faulty: Collection[str] = (), facts: ModelFacts | None = None
    ) -> None:
        self._config = config
        self._faulty = frozenset(faulty)
        self._facts = facts
        self.failures: list[Exception] | None = None

    def __getitem__(self, path: str) -> Any:
        """Return the value at a dotted path.

        Raises:
            NotApplicableError: there is none, or it has the wrong type.
        """
        current: Any = self._config
        walked: list[str] = []
        for part in path.split("."):
            walked.append(part)
            if not isinstance(current, Mapping) or part not in current or ".".join(walked) in self._faulty:
                raise NotApplicableError(path)
            current = current[part]
        # A rule that iterates over a list would meet the faulty item.
        if isinstance(current, list) and any(other.startswith(f"{path}.") for other in self._faulty):
            raise NotApplicableError(path)
        return current

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value at a dotted path, or ``default`` if it is absent or has the wrong type."""
        try:
            return self[path]
        except NotApplicableError:
            return default

    def has(self, path: str) -> bool:
        """Return whether there is a value of the right type at a dotted path; it may be None."""
        try:
            self[path]
        except NotApplicableError:
            return False
        return True

    def written(self, path: str) -> bool:
        """Return whether a key is present, whatever the type of its value."""
        current: Any = self._config
        for part in path.split("."):
            if not isinstance(current, Mapping) or part not in current:
                return False
            current = current[part]
        return True

    def has_faults(self, path: str) -> bool:
        """Return whether the value at a dotted path, or a value below it, is known to have the wrong type."""
        return any(faulty == path or faulty.startswith(f"{path}.") for faulty in self._faulty)

    @property
    def facts(self) -> ModelFacts:
        """Sizes of the model.

        Raises:
            NotApplicableError: they are unknown.
        """
        if self._facts is None:
            raise NotApplicableError("the model's sizes are not known")
        return self._facts

    @property
    def algorithm(self) -> type[AlgorithmSpec]:
        """Class of the run's algorithm.

        Raises:
            NotApplicableError: ``algorithm`` is absent or invalid.
        """
        try:
            return algorithm_class(self["algorithm"])
        except ConfigError:
            raise NotApplicableError("algorithm") from None

    @property
    def compares_answers(self) -> bool:
        """True if the records of the run are preference pairs; False also if the algorithm is unknown."""
        try:
            return self.algorithm.PAIRS
        except NotApplicableError:
            return False

    def require(self, condition: bool) -> None:
        """Leave the calling rule unless ``condition`` is true.

        Raises:
            NotApplicableError: it is false.
        """
        if not condition:
            raise NotApplicableError("does not apply")


Rule: TypeAlias = Callable[[View], Iterator[Violation]]


def apply_rules(rules: Iterable[Rule], view: View) -> Iterator[Violation]:
    """Yield the violations of the rules that apply to a view."""
    for rule in rules:
        try:
            # Collect the violations first: a rule that raises NotApplicableError midway must report nothing.
            yield from list(rule(view))
        except NotApplicableError:
            continue
        except Exception as error:
            # The cause may be a value that another rule refuses, such as a size of 0, so ``check`` decides
            # later.
            if view.failures is None:
                raise
            view.failures.append(error)
