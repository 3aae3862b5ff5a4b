"""Sample log: selects samples and converts them to the rows of the run's sample files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from megarl.algorithms.advantages import PART
from megarl.config.nested import at
from megarl.config.sections import SamplesConfig
from megarl.distributed.token_rows import TokenRows
from megarl.observe.sample_files import TRAIN, VALIDATION, SampleFiles, shorten
from megarl.rollout.collector import Rollouts
from megarl.rollout.samples import row_mismatch
from megarl.rollout.texts import decode_with_special_tokens, is_harmony
from megarl.rollout.trajectory import TOKEN_VERSIONS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.data.datasets import Example, SourceRange
    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.observe.sinks import MetricSinks
    from megarl.rollout.evaluation import ValidatedSet


@dataclass(frozen=True, slots=True)
class SampleLog:
    """Writes a run's samples to its sample files, one row per response.

    Columns of each row:

    * ``step``, ``set``, ``group`` (index of the prompt in the step), ``generation`` (index of the response
      among those to its prompt), ``record`` (index of the prompt in its data), ``source``, ``env``;
    * ``prompt`` (as the policy saw it, with special tokens), ``answer`` (the response, without them),
      ``reference``;
    * ``reward``, ``rewards`` (unweighted parts by name), ``accuracy``, ``advantage``;
    * ``length`` (response tokens), ``truncated``, ``masked`` (left out of training);
    * ``mismatch``: mean over response tokens of the absolute difference between the engine's and the policy's
      log-probabilities;
    * ``weight_version``: training steps of the oldest weights that sampled any token;
      ``newest_weight_version`` too if weights may be synced during sampling;
    * ``prompt_ids`` and ``answer_ids``, if configured.

    In conversations of several turns, ``answer`` is everything after the prompt, ``length`` counts sampled
    tokens only, and there are two more columns: ``ended`` (``StopReason``) and ``turns``. Each turn has
    ``role`` (assistant or environment) and ``text``; an assistant turn also ``reward``; an environment turn
    that starts a new segment also ``segment``, its number.

    Unknown values are null, such as the reward of a sample that the environment masked. Infinities are the
    texts ``inf`` and ``-inf``. Texts longer than ``max_characters`` are cut in the middle.

    Attributes:
        files: writes the sample files.
        section: ``logger.samples`` of the configuration.
        tokenizer: the policy's tokenizer.
        sinks: also get the samples as a table, if the section asks for it.
    """

    files: SampleFiles
    section: SamplesConfig
    tokenizer: PreTrainedTokenizerBase
    sinks: MetricSinks | None = None

    def train(
        self,
        step: int,
        rollouts: Rollouts,
        advantages: Tensor,
        scored: Mapping[str, Tensor] | None = None,
        sources: Sequence[SourceRange] = (),
    ) -> None:
        """Write the first samples of a training step, if samples of this step are due.

        Args:
            step: number of the step.
            rollouts: B samples; responses to the same prompt are adjacent.
            advantages: [B] float.
            scored: ``prev_logprobs`` of the policy before its update (absent if nobody computed them),
                ``generation_logprobs`` and ``token_mask``, [B, S] each, and ``sample_mask`` [B].
            sources: sources of the training data.
        """
        if step != 1 and step % self.section["period"]:
            return
        number = self._number("num_train_samples", len(rollouts.records))
        known: dict[str, Tensor] = {"advantage": advantages[:number]}
        if scored is not None and "prev_logprobs" in scored:
            mask = scored["token_mask"][:number] * scored["sample_mask"][:number].unsqueeze(1)
            known["mismatch"] = row_mismatch(
                scored["generation_logprobs"][:number], scored["prev_logprobs"][:number], mask
            )
        self._write(TRAIN, step, self._rows(rollouts, number, {"step": step, "set": None}, known, sources))

    def validation(
        self, step: int, validated: Sequence[ValidatedSet], sources: Sequence[SourceRange] = ()
    ) -> None:
        """Write the first samples of each validation set. The column ``set`` is null if there is only one
        set.

        Args:
            step: number of finished training steps.
            validated: the sets with their samples.
            sources: sources of the validation data.
        """
        rows: list[dict[str, Any]] = []
        for each in validated:
            name = each.plan.name if len(validated) > 1 else None
            left, group = (
                self._number("num_validation_samples", sum(len(batch.records) for batch in each.batches)),
                0,
            )
            for batch in each.batches:
                number = min(left, len(batch.records))
                found = self._rows(batch, number, {"step": step, "set": name}, {}, sources, group)
                left, group = left - number, found[-1]["group"] + 1 if found else group
                rows += found
        self._write(VALIDATION, step, rows)

    def _write(self, kind: str, step: int, rows: list[dict[str, Any]]) -> None:
        if not rows:
            return
        then = self.sinks.log_samples if self.sinks is not None and self.section["wandb_table"] else None
        self.files.write(kind, step, rows, then)

    def _number(self, key: str, there: int) -> int:
        wanted: int | None = at(self.section, key)
        return there if wanted is None else min(wanted, there)

    def _response(self, samples: Mapping[str, Any], row: int) -> str:
        """Return a response as text. For Harmony, include the reasoning and tool messages that rewards do not
        read."""
        if not is_harmony(self.tokenizer):
            return str(samples["response_text"][row])
        start, end = int(samples["prompt_lengths"][row]), int(samples["input_lengths"][row])
        return self._decoded(samples["input_ids"][row, start:end])

    def _decoded(self, ids: Tensor) -> str:
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    def _conversation(self, rollouts: Rollouts, row: int, limit: int) -> dict[str, Any]:
        """Return the columns of a conversation of several turns: its texts, in order, and the reason why it
        ended."""
        samples, earlier = rollouts.samples, rollouts.earlier
        turns: list[dict[str, Any]] = []
        segment = 1
        if earlier is not None:
            for number in (earlier["response"] == row).nonzero().squeeze(1).tolist():
                turns += self._turns(earlier, number, segment)
                segment += 1
        turns += self._turns(samples, row, segment)
        answer = "".join(turn["text"] for turn in turns)
        for turn in turns:
            turn["text"] = shorten(turn["text"], limit)
        return {"answer": shorten(answer, limit), "turns": turns, "ended": samples["ended"][row]}

    def _turns(self, samples: Mapping[str, Any], row: int, segment: int) -> list[dict[str, Any]]:
        start, end = int(samples["prompt_lengths"][row]), int(samples["input_lengths"][row])
        opening = int(samples["opening"][row]) if segment > 1 else 0
        ids = samples["input_ids"][row, start - opening : end].numpy()
        sampled = samples["token_mask"][row, start:end].numpy() != 0
        rewards = samples["token_rewards"][row, start:end]
        # An observation without tokens cannot be seen here: the responses before and after it become one turn
        # with the sum of their rewards.
        changes = (np.flatnonzero(sampled[1:] != sampled[:-1]) + 1).tolist()
        pieces = [(first, last) for first, last in pairwise([0, *changes, len(sampled)]) if first < last]
        # Decode all turns in one call, because the overhead of a call exceeds the decoding itself.
        parts = [ids[:opening], *(ids[opening + first : opening + last] for first, last in pieces)]
        opened, *texts = decode_with_special_tokens(self.tokenizer, TokenRows.of_arrays(parts))
        turns: list[dict[str, Any]] = (
            [{"role": "environment", "text": opened, "segment": segment}] if opening else []
        )
        for (first, last), text in zip(pieces, texts, strict=True):
            if not sampled[first]:
                turns.append({"role": "environment", "text": text})
                continue
            [reward] = _numbers(rewards[first:last].sum(dim=0, keepdim=True))
            turns.append({"role": "assistant", "text": text, "reward": reward})
        return turns

    def _rows(
        self,
        rollouts: Rollouts,
        number: int,
        place: Mapping[str, Any],
        known: Mapping[str, Tensor],
        sources: Sequence[SourceRange],
        first_group: int = 0,
    ) -> list[dict[str, Any]]:
        """Return the rows of the first ``number`` samples. They contain plain texts and numbers only, so that
        rows in the writer's queue keep no tensor alive."""
        samples, limit = rollouts.samples, self.section["max_characters"]
        masked = (samples["sample_mask"][:number] == 0).tolist()
        lengths = samples["generation_lengths"].tolist()
        truncated = samples["truncated"].tolist()
        versions = (
            samples["weight_version"].tolist() if "weight_version" in samples else [place["step"]] * number
        )
        newest = samples[TOKEN_VERSIONS][:number].amax(dim=1).tolist() if TOKEN_VERSIONS in samples else None
        # A masked sample holds 0 in these columns, but its reward is unknown.
        figures = {name: _numbers(values) for name, values in known.items()}
        for name in _JUDGED:
            if name in samples:
                values = samples[name][:number].masked_fill(samples["masked"][:number], np.nan)
                figures[name] = _numbers(values)
        parts: dict[str, list[float | str | None]] = {}
        for name in samples:
            if name.startswith(PART):
                parts[name.removeprefix(PART)] = _numbers(samples[name][:number])
        rows: list[dict[str, Any]] = []
        before: Example | None = None
        prompt, group, generation = "", first_group - 1, 0
        for row, record in enumerate(islice(rollouts.records, number)):
            generation += 1
            if record is not before:
                # Compare by identity: a record that occurs twice in a step is two objects.
                before, group, generation = record, group + 1, 0
                prompt = self.tokenizer.decode(list(record.prompt_ids), skip_special_tokens=False)
            rows.append(
                {
                    **place,
                    "group": group,
                    "generation": generation,
                    "record": record.index,
                    "source": _source_of(record, sources),
                    "env": record.env_name,
                    "prompt": shorten(prompt, limit),
                    "answer": shorten(self._response(samples, row), limit),
                    "reference": shorten(record.answer, limit),
                    **{name: figures[name][row] if name in figures else None for name in _FIGURES},
                    "rewards": {name: values[row] for name, values in parts.items()},
                    "length": lengths[row],
                    "truncated": truncated[row],
                    "masked": masked[row],
                    "weight_version": versions[row],
                    **({"newest_weight_version": newest[row]} if newest is not None else {}),
                    **(self._conversation(rollouts, row, limit) if "turns" in samples else {}),
                    **(_token_ids(samples, row) if self.section["token_ids"] else {}),
                }
            )
        return rows


_JUDGED = ("reward", "accuracy")
_FIGURES = (*_JUDGED, "advantage", "mismatch")


def _source_of(record: Example, sources: Sequence[SourceRange]) -> str | None:
    for source in sources:
        if source.start <= record.index < source.end:
            return source.name
    return None


def _token_ids(samples: BatchedDataDict[Any], row: int) -> dict[str, list[int]]:
    ids = samples["input_ids"][row, : int(samples["input_lengths"][row])].tolist()
    begun = int(samples["prompt_lengths"][row])
    return {"prompt_ids": ids[:begun], "answer_ids": ids[begun:]}


def _numbers(values: Tensor) -> list[float | str | None]:
    """Convert float32 values to JSON numbers with the shortest digits that restore them exactly. NaN becomes
    None, an infinity ``inf`` or ``-inf``."""
    numbers: list[float | str | None] = []
    for value in map(float, map(str, values.detach().float().numpy())):
        numbers.append(value if np.isfinite(value) else None if np.isnan(value) else str(value))
    return numbers
