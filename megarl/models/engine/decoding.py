"""Decoding, the same for every backend: the same seeds draw the same tokens from the same logits.

Prompts of a batch are padded on the left, so that one pass fills the cache for all of them and their answers begin together; what a row
computes does not depend on its padding. Rows with one prompt share its pass. Rows that have ended leave the batch.

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


LEAVING_SHARE = 1 / 8
"""Rows leave a batch once so large a share of it has ended: the cache is copied then."""


class Forward(Protocol):
    """A model with the key-value cache of one batch."""

    def __call__(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor | None:
        """The next positions of all rows.

        Args:
            tokens: [b, n] int64 on the device, behind those that are in the cache.
            lengths: [b] int64 on the device, of each row its tokens up to now, the last of these n among them. What it has more in the
                cache is padding, on the left.

        Returns:
            [b, V] logits over the true vocabulary after the last of them; None on pipeline stages that have none.
        """

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these rows of the batch, int64 on the device, in their order; one may come several times."""


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
    """Decoding of one batch of prompts; ``names`` are their rows in the data, for messages."""

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
        self.answers: list[list[int]] = [[] for _ in prompts]
        self.logprobs: list[list[float]] = [[] for _ in prompts]
        self.open = [allowed > 0 for allowed in self.allowed]
        self.stopped = [False for _ in prompts]

    def run(self, settings: SamplingSettings, stop: StopRules) -> None:
        """Fill ``answers``, ``logprobs`` and ``stopped``, row by row."""
        rows = [row for row, is_open in enumerate(self.open) if is_open]
        if not rows:
            return
        forward, logits = self._prefill(rows)
        lengths = self._on_device([len(self.prompts[row]) for row in rows])
        while True:
            newest = self._write(rows, logits, settings, stop)
            staying = [place for place, row in enumerate(rows) if self.open[row]]
            if not staying:
                return
            if len(staying) <= (1 - LEAVING_SHARE) * len(rows):
                chosen = self._on_device(staying)
                forward.keep(chosen)
                rows, newest, lengths = [rows[place] for place in staying], newest[chosen], lengths[chosen]
            lengths = lengths + 1
            logits = forward(newest[:, None], lengths)

    def _prefill(self, rows: list[int]) -> tuple[Forward, torch.Tensor | None]:
        """One pass over each different prompt; the cache and the logits [rows, V] after the prompts."""
        places: dict[tuple[int, ...], int] = {}
        prompt_of = [places.setdefault(tuple(self.prompts[row]), len(places)) for row in rows]
        lengths = [len(prompt) for prompt in places]
        tokens = torch.zeros(len(places), max(lengths), dtype=torch.int64)
        for prompt, place in places.items():
            tokens[place, tokens.shape[1] - len(prompt) :] = torch.tensor(prompt, dtype=torch.int64)
        forward = self.decoder.start(len(places), tokens.shape[1] + max(self.allowed[row] for row in rows))
        logits = forward(tokens.to(self.decoder.device), self._on_device(lengths))
        if prompt_of != list(range(len(places))):
            chosen = self._on_device(prompt_of)
            forward.keep(chosen)
            logits = None if logits is None else logits[chosen]
        return forward, logits

    def _write(self, rows: list[int], logits: torch.Tensor | None, settings: SamplingSettings, stop: StopRules) -> torch.Tensor:
        """Choose the next tokens [rows], on the device, and keep those of the rows that are open.

        The last pipeline stage chooses, all stages learn. Each row that is open has as many tokens as any other.
        """
        device = self.decoder.device
        done = max(len(self.answers[row]) for row in rows)
        chosen = torch.zeros(2, len(rows), dtype=torch.float64, device=device)
        if logits is not None:
            tokens, values = choose_tokens(logits, self.uniforms[rows, done], settings)
            chosen[0], chosen[1] = tokens.double(), values.double()
        chosen = self.decoder.groups.from_last_stage(chosen)
        is_open = [self.open[row] for row in rows]
        writing = [row for row, open_ in zip(rows, is_open, strict=True) if open_]
        tokens, values = chosen.cpu()[:, torch.tensor(is_open)].unbind(0)
        self._refuse_nan(writing, values)
        for row, token, value in zip(writing, tokens.long().tolist(), values.tolist(), strict=True):
            self.answers[row].append(token)
            self.logprobs[row].append(value)
        for row, finished in zip(writing, stop.finished(writing, tokens.long(), [self.answers[row] for row in writing]), strict=True):
            self.stopped[row] = finished
            self.open[row] = not finished and len(self.answers[row]) < self.allowed[row]
        return chosen[0].long()

    def _on_device(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(self.decoder.device)

    def _refuse_nan(self, rows: list[int], values: torch.Tensor) -> None:
        """NaN anywhere in a row of logits, or infinity, makes all of its log-probabilities NaN, also the chosen token's."""
        wrong = [row for row, value in zip(rows, values.tolist(), strict=True) if not math.isfinite(value)]
        if wrong:
            token = len(self.answers[wrong[0]])
            raise GenerationError(
                f"row {self.names[wrong[0]]}: the logits of answer token {token} (position {len(self.prompts[wrong[0]]) + token}) are not "
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
