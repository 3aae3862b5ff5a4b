"""Decoding, the same for every backend: the same seeds draw the same tokens from the same logits.

Prompts of a batch are padded on the left, so that their answers begin together; what a row computes does not depend on its padding. A few
passes over prompts of like lengths fill the cache. Rows with one prompt share its pass. Rows that have ended leave the batch.

Legend: b rows of a batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
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

PASS_POSITIONS = 512
"""One pass more over the prompts is worth so many positions of padding that it saves: it launches all operations, and reads all weights,
once more."""


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

Join: TypeAlias = Callable[[Sequence[Any], int], Forward]
"""Makes one ``Forward`` of several of the same model, with all their rows in order and a cache for so many positions. Each has read its
prompts, no two of the same length, and nothing behind them; the cache of shorter prompts is padded on the left."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """Decoder: what decoding needs of a backend.

    Attributes:
        start: begins a batch.
        groups: who decodes the same rows together.
        device: where the model wants its tokens.
        longest: most tokens of prompt and answer together.
        rows_at_once: most rows of a batch; None for all.
        join: puts batches together after their prompts; None where caches are of a kind that cannot be joined: one pass reads all prompts.
    """

    start: Start
    groups: ParallelGroups
    device: torch.device
    longest: int
    rows_at_once: int | None = None
    join: Join | None = None


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
    ids, lengths = data["input_ids"].cpu(), data["input_lengths"].cpu().long()
    longest_answer, rows_at_once = config["max_new_tokens"], decoder.rows_at_once or max(len(lengths), 1)
    seeds = _seeds(data, len(lengths), decoder.groups)
    stop_strings = stop_strings_of_rows(config.get("stop_strings"), data.get("stop_strings"), len(lengths))
    prompts = [row[:length] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)]
    answers = _Answers.empty(len(lengths), longest_answer)
    for rows in lengths.argsort(stable=True).split(rows_at_once):
        names = rows.tolist()
        stop = StopRules(config.get("stop_token_ids") or [], [stop_strings[row] for row in names], tokenizer)
        uniforms = None if greedy else uniform_numbers([seeds[row] for row in names], longest_answer)
        batch = _Decoding(decoder, names, [prompts[row] for row in names], uniforms, longest_answer)
        batch.run(settings, stop)
        answers.put(rows, batch.answers)
    return _assembled(ids, lengths, answers, int(config["pad_token_id"]))


@dataclass(frozen=True, slots=True)
class _Answers:
    """Answers of some rows: tokens [b, n] int64 and their log-probabilities float32, of each row as many as ``counts`` [b] int64 says, and
    whether a stop ended it, ``stopped`` [b] bool."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    counts: torch.Tensor
    stopped: torch.Tensor

    @classmethod
    def empty(cls, rows: int, longest: int) -> _Answers:
        integers = torch.zeros(rows, longest, dtype=torch.int64)
        return cls(integers, torch.zeros(rows, longest), torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.bool))

    def put(self, rows: torch.Tensor, other: _Answers) -> None:
        """Write the answers of ``other`` into these rows."""
        self.tokens[rows], self.logprobs[rows] = other.tokens, other.logprobs
        self.counts[rows], self.stopped[rows] = other.counts, other.stopped


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
        uniforms: torch.Tensor | None,
        max_new_tokens: int,
    ) -> None:
        self.decoder = decoder
        self.names = names
        self.prompts = prompts
        self.uniforms = uniforms
        self.allowed = torch.tensor([min(max_new_tokens, decoder.longest - len(prompt)) for prompt in prompts])
        self.answers = _Answers.empty(len(prompts), max_new_tokens)
        self.open = self.allowed > 0

    def run(self, settings: SamplingSettings, stop: StopRules) -> None:
        """Fill ``answers``."""
        rows = self.open.nonzero().flatten()
        if not len(rows):
            return
        forward, logits = self._prefill(rows.tolist())
        lengths = self._on_device([len(self.prompts[row]) for row in rows.tolist()])
        done = 0
        while True:
            newest = self._write(rows, done, logits, settings, stop)
            done += 1
            staying = self.open[rows].nonzero().flatten()
            if not len(staying):
                return
            if len(staying) <= (1 - LEAVING_SHARE) * len(rows):
                chosen = staying.to(self.decoder.device)
                forward.keep(chosen)
                rows, newest, lengths = rows[staying], newest[chosen], lengths[chosen]
            lengths = lengths + 1
            logits = forward(newest[:, None], lengths)

    def _prefill(self, rows: list[int]) -> tuple[Forward, torch.Tensor | None]:
        """Read each different prompt once; return the cache and the logits [rows, V] after them. ``rows`` begin with the shortest."""
        places: dict[tuple[int, ...], int] = {}
        prompt_of = [places.setdefault(tuple(self.prompts[row]), len(places)) for row in rows]
        prompts = list(places)
        positions = len(prompts[-1]) + int(self.allowed[rows].max())
        ends = [len(prompts)]
        if self.decoder.join is not None:
            ends = ends_of_passes([len(prompt) for prompt in prompts])
        if len(ends) == 1 or self.decoder.join is None:
            forward, logits = self._read(prompts, positions)
        else:
            parts = [prompts[start:end] for start, end in zip([0, *ends], ends, strict=False)]
            read = [self._read(part, len(part[-1])) for part in parts]
            forward = self.decoder.join([of_part for of_part, _ in read], positions)
            given = [of_part for _, of_part in read if of_part is not None]
            logits = torch.cat(given) if given else None
        if prompt_of != list(range(len(places))):
            chosen = self._on_device(prompt_of)
            forward.keep(chosen)
            logits = None if logits is None else logits[chosen]
        return forward, logits

    def _read(self, prompts: Sequence[Sequence[int]], positions: int) -> tuple[Forward, torch.Tensor | None]:
        """One pass over prompts, the longest last: a cache for ``positions``, and the logits after the prompts."""
        tokens = torch.zeros(len(prompts), len(prompts[-1]), dtype=torch.int64)
        for place, prompt in enumerate(prompts):
            tokens[place, tokens.shape[1] - len(prompt) :] = torch.tensor(prompt, dtype=torch.int64)
        forward = self.decoder.start(len(prompts), positions)
        return forward, forward(tokens.to(self.decoder.device), self._on_device([len(prompt) for prompt in prompts]))

    def _write(
        self, rows: torch.Tensor, done: int, logits: torch.Tensor | None, settings: SamplingSettings, stop: StopRules
    ) -> torch.Tensor:
        """Choose the next tokens [rows], on the device, and keep those of the rows that are open, which have ``done`` tokens each.

        The last pipeline stage chooses, all stages learn.
        """
        chosen = torch.zeros(2, len(rows), dtype=torch.float64, device=self.decoder.device)
        if logits is not None:
            uniforms = torch.empty(0, dtype=torch.float64) if self.uniforms is None else self.uniforms[rows, done]
            chosen[0], chosen[1] = choose_tokens(logits, uniforms, settings)
        chosen = self.decoder.groups.from_last_stage(chosen)
        is_open = self.open[rows]
        writing = rows[is_open]
        tokens, values = chosen.cpu()[:, is_open].unbind(0)
        self._refuse_nan(writing, done, values)
        answers = self.answers
        answers.tokens[writing, done], answers.logprobs[writing, done], answers.counts[writing] = tokens.long(), values.float(), done + 1
        finished = torch.tensor(stop.finished(writing.tolist(), tokens.long(), answers.tokens[writing, : done + 1]))
        answers.stopped[writing] = finished
        self.open[writing] = ~finished & (done + 1 < self.allowed[writing])
        return chosen[0].long()

    def _on_device(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(self.decoder.device)

    def _refuse_nan(self, rows: torch.Tensor, done: int, values: torch.Tensor) -> None:
        """NaN anywhere in a row of logits, or infinity, makes all of its log-probabilities NaN, also the chosen token's."""
        wrong = rows[~values.isfinite()].tolist()
        if wrong:
            raise GenerationError(
                f"row {self.names[wrong[0]]}: the logits of answer token {done} (position {len(self.prompts[wrong[0]]) + done}) are not "
                f"finite ({len(wrong)} of {len(rows)} rows at this position), so no token can be drawn. Fix: see whether the weights are "
                "finite, or use float32 or bfloat16 instead of float16"
            )


def ends_of_passes(lengths: Sequence[int]) -> list[int]:
    """Return which prompts to read together, so that positions, padding among them, and passes cost least.

    Args:
        lengths: of the prompts, the shortest first.

    Returns:
        The prompt that each pass ends before; the last one is their number. Prompts of one length are in one pass.
    """
    distinct, counts = np.unique(np.asarray(lengths, dtype=np.int64), return_counts=True)
    before = np.concatenate([[0], counts.cumsum()])
    # cost[i] of the shortest before[i] prompts, by dynamic programming over where their last pass begins
    cost, begins = np.zeros(len(before), dtype=np.int64), np.zeros(len(before), dtype=np.int64)
    for border, longest in enumerate(distinct, start=1):
        costs = cost[:border] + (before[border] - before[:border]) * longest + PASS_POSITIONS
        begins[border] = costs.argmin()
        cost[border] = costs[begins[border]]
    ends, border = [], len(distinct)
    while border:
        ends.append(int(before[border]))
        border = int(begins[border])
    return ends[::-1]


def _assembled(ids: torch.Tensor, lengths: torch.Tensor, answers: _Answers, pad: int) -> BatchedDataDict[Any]:
    """The NeMo-RL policy API's output tensors, of prompts [B, S] of ``lengths`` [B]."""
    totals = lengths + answers.counts
    width = int(totals.max()) if len(totals) else 0
    found = torch.full((len(totals), width), pad, dtype=torch.int64)
    values = torch.zeros(found.shape, dtype=torch.float32)
    places, prompts = torch.arange(width), ids[:, :width]
    in_prompt = places[: prompts.shape[1]] < lengths[:, None]
    found[:, : prompts.shape[1]][in_prompt] = prompts[in_prompt]
    in_answer = (places >= lengths[:, None]) & (places < totals[:, None])
    given = torch.arange(answers.tokens.shape[1]) < answers.counts[:, None]
    found[in_answer], values[in_answer] = answers.tokens[given], answers.logprobs[given]
    return BatchedDataDict(
        {
            "output_ids": found,
            "logprobs": values,
            "generation_lengths": answers.counts,
            "unpadded_sequence_lengths": totals,
            "truncated": ~answers.stopped,
        }
    )
