"""Lockstep decoding, the same for every backend: the same seeds draw the same tokens from the same logits.

Rows of a batch go forward together: the cache is first filled up to the shortest prompt, then one position at a time; a row whose prompt is
longer takes its next prompt token instead of a sampled one. All rows of a batch so share one position, which is what static caches want,
and no row ever sees padding. Rows are batched by prompt length to keep the difference small.

Legend: b rows of a batch, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.errors import GenerationError
from megarl.models.engine.groups import ParallelGroups
from megarl.models.generation.sampling import SamplingSettings, choose_tokens, uniform_numbers
from megarl.models.generation.stopping import StopRules, stop_strings_of_rows

SEED_RANGE = 2**62


class Forward(Protocol):
    """A model with the key-value cache of one batch."""

    def __call__(self, tokens: torch.Tensor, first: int) -> torch.Tensor | None:
        """The next positions of all rows.

        Args:
            tokens: [b, n] int64 on the device, at positions ``first`` to ``first + n - 1``; everything before is in the cache.
            first: position of the first of them.

        Returns:
            [b, V] logits over the true vocabulary after the last of them; None on pipeline stages that have none.
        """


Start: TypeAlias = Callable[[int, int], Forward]
"""Makes a ``Forward`` with an empty cache for so many rows and positions."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """Decoder: what decoding needs of a backend.

    Attributes:
        start: begins a batch.
        groups: who decodes the same rows together.
        device: where the model wants its tokens.
        longest: most tokens of prompt and answer together.
        rows_at_once: most rows of a batch; None for all.
    """

    start: Start
    groups: ParallelGroups
    device: torch.device
    longest: int
    rows_at_once: int | None = None


def decode(decoder: Decoder, data: Mapping[str, Any], config: Mapping[str, Any], tokenizer: Any, *, greedy: bool) -> BatchedDataDict[Any]:
    """Continue every prompt.

    Args:
        decoder: the model; it is in evaluation mode.
        data: ``input_ids`` [B, S] right-padded, ``input_lengths`` [B], optionally ``stop_strings`` (one entry a row) and
            ``sampling_seeds`` [B] int64. Without seeds they are drawn from this process's generator.
        config: the generation configuration.
        tokenizer: decodes answers for stop strings.
        greedy: take the most likely token instead of sampling.

    Returns:
        ``output_ids`` [B, longest], right-padded; ``logprobs`` [B, longest] float32, zero on prompts and padding; ``generation_lengths``
        [B]; ``unpadded_sequence_lengths`` [B]; ``truncated`` [B] bool, True where a length limit and not a stop ended the answer.

    Raises:
        BatchError: a stop string is empty.
        GenerationError: on all ranks that share the rows, when a row's logits are NaN; names the row.
    """
    settings = SamplingSettings.of(config, greedy=greedy)
    lengths = data["input_lengths"].tolist()
    if not lengths:
        return _assemble([], [], [], [], int(config["pad_token_id"]))
    rows_at_once = decoder.rows_at_once or len(lengths)
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])
    seeds = _seeds(data, len(lengths), decoder.groups)
    stop_strings = stop_strings_of_rows(config.get("stop_strings"), data.get("stop_strings"), len(lengths))
    prompts = [data["input_ids"][row, :length].tolist() for row, length in enumerate(lengths)]
    answers: list[list[int]] = [[] for _ in lengths]
    logprobs: list[list[float]] = [[] for _ in lengths]
    truncated = [False] * len(lengths)
    for first in range(0, len(order), rows_at_once):
        rows = order[first : first + rows_at_once]
        stop = StopRules(config.get("stop_token_ids") or [], [stop_strings[row] for row in rows], tokenizer)
        uniforms = uniform_numbers([seeds[row] for row in rows], config["max_new_tokens"])
        batch = _Decoding(decoder, rows, [prompts[row] for row in rows], uniforms, config["max_new_tokens"])
        batch.run(settings, stop)
        for index, row in enumerate(rows):
            answers[row], logprobs[row], truncated[row] = batch.answers[index], batch.logprobs[index], not batch.stopped[index]
    return _assemble(prompts, answers, logprobs, truncated, int(config["pad_token_id"]))


def _seeds(data: Mapping[str, Any], rows: int, groups: ParallelGroups) -> list[int]:
    """One seed a row, the same on all ranks of a replica and different between data-parallel ranks."""
    if "sampling_seeds" in data:
        return data["sampling_seeds"].tolist()
    drawn = torch.randint(SEED_RANGE, (rows,))
    box = [drawn + groups.data_rank * 0x9E3779B97F4A7C15 % SEED_RANGE]
    for group in (groups.tensor, groups.context):
        if dist.get_world_size(group) > 1:
            dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    return groups.object_from_last_stage(box[0]).tolist()


class _Decoding:
    """Lockstep decoding of one batch of prompts; ``names`` are their rows in the data, for messages."""

    def __init__(
        self,
        decoder: Decoder,
        names: Sequence[int],
        prompts: Sequence[Sequence[int]],
        uniforms: torch.Tensor,
        max_new_tokens: int,
    ) -> None:
        self.decoder = decoder
        self.names = names
        self.prompts = prompts
        self.uniforms = uniforms
        self.allowed = [min(max_new_tokens, decoder.longest - len(prompt)) for prompt in prompts]
        self.total = max(len(prompt) + allowed for prompt, allowed in zip(prompts, self.allowed, strict=True))
        self.tokens = torch.zeros(len(prompts), self.total, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            self.tokens[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
        self.answers: list[list[int]] = [[] for _ in prompts]
        self.logprobs: list[list[float]] = [[] for _ in prompts]
        self.open = [allowed > 0 for allowed in self.allowed]
        self.stopped = [False for _ in prompts]

    def run(self, settings: SamplingSettings, stop: StopRules) -> None:
        """Fill ``answers``, ``logprobs`` and ``stopped``, row by row."""
        forward = self.decoder.start(len(self.prompts), self.total)
        done, position = 0, min(len(prompt) for prompt in self.prompts)
        while any(self.open) and position < self.total:
            logits = forward(self.tokens[:, done:position].to(self.decoder.device), done)
            writing = [row for row, open_ in enumerate(self.open) if open_ and len(self.prompts[row]) <= position]
            if writing:
                self._write(writing, position, logits, settings, stop)
            done, position = position, position + 1

    def _write(self, rows: list[int], position: int, logits: torch.Tensor | None, settings: SamplingSettings, stop: StopRules) -> None:
        """Choose the tokens at ``position`` for ``rows``; the last pipeline stage chooses, all stages learn."""
        device = self.decoder.device
        chosen = torch.zeros(2, len(rows), dtype=torch.float64, device=device)
        if logits is not None:
            numbers = torch.tensor([float(self.uniforms[row, len(self.answers[row])]) for row in rows], dtype=torch.float64)
            tokens, values = choose_tokens(logits[torch.tensor(rows, device=device)], numbers, settings)
            chosen[0], chosen[1] = tokens.double(), values.double()
        tokens, values = self.decoder.groups.from_last_stage(chosen).cpu().unbind(0)
        self._refuse_nan(rows, position, values)
        newest = tokens.long()
        self.tokens[rows, position] = newest
        for row, token, value in zip(rows, newest.tolist(), values.tolist(), strict=True):
            self.answers[row].append(token)
            self.logprobs[row].append(value)
        for row, finished in zip(rows, stop.finished(rows, newest, [self.answers[row] for row in rows]), strict=True):
            self.stopped[row] = finished
            self.open[row] = not finished and len(self.answers[row]) < self.allowed[row]

    def _refuse_nan(self, rows: list[int], position: int, values: torch.Tensor) -> None:
        """NaN anywhere in a row of logits, or infinity, makes all of its log-probabilities NaN, also the chosen token's."""
        wrong = [row for row, value in zip(rows, values.tolist(), strict=True) if not math.isfinite(value)]
        if wrong:
            raise GenerationError(
                f"row {self.names[wrong[0]]}: the logits of answer token {len(self.answers[wrong[0]])} (position {position}) are not "
                f"finite ({len(wrong)} of {len(rows)} rows at this position), so no token can be drawn. Fix: see whether the weights are "
                "finite, or use float32 or bfloat16 instead of float16"
            )


def _assemble(
    prompts: list[list[int]], answers: list[list[int]], logprobs: list[list[float]], truncated: list[bool], pad: int
) -> BatchedDataDict[Any]:
    """The NeMo-RL policy API's output tensors."""
    totals = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
    ids = torch.full((len(prompts), max(totals, default=0)), pad, dtype=torch.int64)
    values = torch.zeros(ids.shape, dtype=torch.float32)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids[row, : totals[row]] = torch.tensor(prompt + answer, dtype=torch.int64)
        values[row, len(prompt) : totals[row]] = torch.tensor(logprobs[row], dtype=torch.float32)
    return BatchedDataDict(
        {
            "output_ids": ids,
            "logprobs": values,
            "generation_lengths": torch.tensor([len(answer) for answer in answers], dtype=torch.int64),
            "unpadded_sequence_lengths": torch.tensor(totals, dtype=torch.int64),
            "truncated": torch.tensor(truncated, dtype=torch.bool),
        }
    )
