"""The collector: prompts to samples, by whatever generates and through an environment. Synchronous: the newest weights, all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.advantages import PART
from megarl.distributed.token_batches import TokenRows
from megarl.errors import BatchError, MegarlError
from megarl.observe.timing import Sequences
from megarl.rollout.environment import Environment, EnvironmentReturn, Turn
from megarl.rollout.samples import generate_samples
from megarl.rollout.texts import decode_rows, decode_with_special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.data.datasets import Example
    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.models.generation.interfaces import GenerationInterface, Sampling
    from megarl.observe.timing import PhaseTimer


class RefittedEngine(Protocol):
    """Engines beside the policy, and how they come by its weights."""

    @property
    def generation(self) -> GenerationInterface:
        """The engines."""
        ...

    def bring_up_to_date(self) -> None:
        """Give the engines the policy's weights, where they have others."""
        ...

    def replace_lost_engines(self, error: MegarlError) -> None:
        """Start new engines in place of lost ones, after ``error``; raises where none is lost or that is done no more."""
        ...


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Samples of a batch of prompts.

    Attributes:
        samples: B rows, see ``generate_samples``; with ``reward`` [B] float32, ``masked`` [B] bool (by the environment: ``sample_mask`` 0
            too) and ``weight_version`` [B] int64 (steps of training behind the weights that sampled the row). Where the environment says
            so, ``accuracy`` [B] float32 and, for each part of its rewards, ``reward/NAME`` [B] float32; NaN where there is none.
        records: B records, one a row.
        metrics: figures of the environment.
    """

    samples: BatchedDataDict[Any]
    records: Sequence[Example]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Collector:
    """Collects samples.

    Attributes:
        policy: generates where there are no engines.
        tokenizer: decodes responses.
        environment: rewards them.
        timer: told the phases ``refit``, ``generation``, ``reward`` and, where engines were lost, ``engine_restart``.
        stop_token_ids: tokens that end a response; None for the end-of-sequence token.
        engine: engines beside the policy; None where the policy itself generates.
    """

    policy: GenerationInterface
    tokenizer: PreTrainedTokenizerBase
    environment: Environment
    timer: PhaseTimer
    stop_token_ids: Sequence[int] | None = None
    engine: RefittedEngine | None = None

    def collect(
        self,
        records: Sequence[Example],
        generations: int = 1,
        seeds: Sequence[int] | None = None,
        *,
        weight_version: int | None = None,
        greedy: bool = False,
        sampling: Sampling | None = None,
    ) -> Rollouts:
        """Sample responses to the prompts of some records and have them rewarded.

        Args:
            records: P records.
            generations: G, responses a prompt.
            seeds: P * G seeds, see ``sampling_seeds``; None where the engine may sample as it likes.
            weight_version: finished steps of training; None where nobody trains on the samples: they do not have that column.
            greedy: take the likeliest token always.
            sampling: in place of the configured temperature, top-p and top-k; None for those.

        Raises:
            BatchError: what came back does not fit the prompts, or the environment's answer does not fit the responses.
        """
        if not records:
            raise BatchError("there are no records to collect samples for. Fix: give at least one")
        samples = self._generate([record.prompt_ids for record in records], generations, seeds, greedy, sampling)
        rows = len(records) * generations
        of_rows = [record for record in records for _ in range(generations)]
        with self.timer.phase("reward"):
            result = self.environment.step(_turn(samples, of_rows, self.tokenizer))
        rewards, masked = _checked(result, rows)
        samples["reward"] = rewards
        for name, values in _further_columns(result, rows).items():
            samples[name] = values
        if weight_version is not None:
            samples["weight_version"] = torch.full((rows,), weight_version, dtype=torch.int64)
        samples["masked"] = masked
        samples["sample_mask"] = samples["sample_mask"] * (~samples["masked"]).float()
        return Rollouts(samples, of_rows, result.metrics)

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        generations: int,
        seeds: Sequence[int] | None,
        greedy: bool,
        sampling: Sampling | None,
    ) -> BatchedDataDict[Any]:
        """The responses, see ``generate_samples``. Engines that are lost meanwhile are replaced, and asked again for all of them: what they
        answer depends on weights, prompts and seeds alone."""
        asked = prompts, generations, seeds, greedy, sampling
        if self.engine is None:
            with self.timer.phase("generation"):
                self.policy.prepare_for_generation()
                return self._answers(self.policy, *asked)
        while True:
            try:
                with self.timer.phase("refit"):
                    self.engine.bring_up_to_date()
                with self.timer.phase("generation"):
                    return self._answers(self.engine.generation, *asked)
            except MegarlError as error:
                with self.timer.phase("engine_restart"):
                    self.engine.replace_lost_engines(error)

    def _answers(
        self,
        engine: GenerationInterface,
        prompts: Sequence[Sequence[int]],
        generations: int,
        seeds: Sequence[int] | None,
        greedy: bool,
        sampling: Sampling | None,
    ) -> BatchedDataDict[Any]:
        """What an engine that is ready answers; it gives its devices back afterwards."""
        samples = generate_samples(engine, prompts, self.tokenizer, generations, seeds, greedy, self.stop_token_ids, sampling)
        engine.finish_generation()
        lengths = {name: samples[name].numpy() for name in ("input_lengths", "prompt_lengths")}
        self.timer.passed(Sequences(lengths["input_lengths"], lengths["prompt_lengths"], np.array([len(prompt) for prompt in prompts])))
        return samples


def add_metrics(own: Mapping[str, float], of_environment: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a step or a validation, and those of the environment for its batches, summed.

    Raises:
        BatchError: the environment has a metric under a name of the run's own.
    """
    total: dict[str, float] = {}
    for metrics in of_environment:
        for name, value in metrics.items():
            total[name] = total.get(name, 0) + value
    taken = sorted(own.keys() & total.keys())
    if taken:
        raise BatchError(f"the environment returned the metrics {', '.join(taken)}, which the run has itself. Fix: give them other names")
    return {**own, **total}


class _LateTexts(Sequence[str]):
    """Texts of rows of tokens, decoded when the first of them is asked for."""

    def __init__(self, rows: TokenRows, decode: Callable[[TokenRows], list[str]]) -> None:
        self._rows, self._decode = rows, decode
        self._texts: list[str] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: Any) -> Any:
        if self._texts is None:
            self._texts = self._decode(self._rows)
        return self._texts[row]


def _turn(samples: BatchedDataDict[Any], records: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> Turn:
    ids = TokenRows(*(samples[key].numpy() for key in ("input_ids", "prompt_lengths", "input_lengths")))
    lengths = samples["prompt_lengths"].numpy()
    asked = TokenRows(samples["prompt_ids"].numpy(), np.zeros_like(lengths), lengths)

    def with_special_tokens(rows: TokenRows) -> _LateTexts:
        return _LateTexts(rows, lambda rows: decode_with_special_tokens(tokenizer, rows))

    prompts = _LateTexts(asked, lambda rows: decode_rows(tokenizer, rows))
    full = with_special_tokens(ids), with_special_tokens(asked)
    return Turn(records, samples["response_text"], ids, [None] * len(records), prompts, *full)


def _further_columns(result: EnvironmentReturn, rows: int) -> dict[str, Tensor]:
    """``accuracy`` and ``reward/NAME``, [rows] float32 each, as far as the environment gives them.

    Raises:
        BatchError: they do not fit the responses.
    """
    columns: dict[str, Tensor] = {}
    for name, values in {**({"accuracy": result.accuracies} if len(result.accuracies) else {}), **_part_columns(result)}.items():
        if len(values) != rows:
            raise BatchError(f"the environment returned {len(values)} numbers of {name} for {rows} responses. Fix: return one a response")
        columns[name] = torch.tensor([float("nan") if value is None else float(value) for value in values], dtype=torch.float32)
    return columns


def _part_columns(result: EnvironmentReturn) -> dict[str, Sequence[float | None]]:
    return {f"{PART}{name}": values for name, values in result.parts.items()}


def accuracies_of(samples: BatchedDataDict[Any]) -> Tensor:
    """[B] float32, how right each response is: as the environment says, else the reward; NaN where it is not known."""
    return samples["accuracy"] if "accuracy" in samples else samples["reward"]


def part_metrics(batches: Sequence[BatchedDataDict[Any]]) -> dict[str, float]:
    """The mean of each part of the rewards, ``reward/NAME``, over the samples of all batches that have it and are not masked."""
    found: dict[str, list[Tensor]] = {}
    for samples in batches:
        for name in samples:
            if name.startswith(PART):
                values = samples[name]
                found.setdefault(name, []).append(values[~samples["masked"] & ~values.isnan()])
    means = {name: torch.cat(values).double() for name, values in found.items()}
    return {name: float(values.mean()) for name, values in means.items() if len(values)}


def _checked(result: EnvironmentReturn, rows: int) -> tuple[Tensor, Tensor]:
    """Rewards [rows] float32, 0 where a sample is masked without one, and masks [rows] bool, of an environment's answer.

    Raises:
        BatchError: the answer does not fit the responses.
    """
    if not isinstance(result, EnvironmentReturn):
        raise BatchError(
            f"the environment returned a {type(result).__name__}. Fix: return an EnvironmentReturn (megarl.rollout.environment)"
        )
    sizes = {"rewards": len(result.rewards), "terminated": len(result.terminated), "masked": len(result.masked)}
    wrong = {name: size for name, size in sizes.items() if size != rows}
    if wrong:
        raise BatchError(f"the environment returned {wrong} for {rows} responses. Fix: return one of each a response, in their order")
    if not all(result.terminated):
        raise BatchError("the environment goes on after a response, and the collector takes one turn. Fix: return terminated = True")
    odd = next((value for value in result.masked if not isinstance(value, bool | np.bool_)), None)
    if odd is not None:
        raise BatchError(f"the environment returned masked = {odd!r}. Fix: return True or False")
    masked = torch.tensor([bool(value) for value in result.masked], dtype=torch.bool)
    return _reward_column(result.rewards, result.masked), masked


def _reward_column(rewards: Sequence[Any], masked: Sequence[Any]) -> Tensor:
    """[B] float32."""
    if all(type(value) is float for value in rewards):
        column = np.asarray(rewards)
        if bool((np.abs(column) <= torch.finfo(torch.float32).max).all()):
            return torch.from_numpy(column).float()
    return torch.tensor([_reward(*each) for each in zip(rewards, masked, strict=True)], dtype=torch.float32)


def _reward(value: Any, masked: bool) -> float:
    if value is None and masked:
        return 0.0
    if isinstance(value, Number | np.number | Tensor) and not isinstance(value, complex):
        number = float(cast("float", value))
        if abs(number) <= torch.finfo(torch.float32).max:
            return number
    raise BatchError(
        f"the environment returned the reward {value!r}. Fix: return a finite number, or None and masked = True where there is no reward"
    )
