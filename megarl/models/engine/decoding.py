"""Decoding, which all backends share. The same seeds and logits give the same tokens on every backend.

Prompts of a batch are padded on the left, so all responses begin at the same position; padding does not
change a row's result. Prompts are read in a few forward passes, each over prompts of similar lengths, and
rows with equal prompts share one. Rows whose response has ended are removed from the batch.

A decoding step and the sampling after it have fixed shapes, so they can be captured in CUDA graphs
(``megarl.models.engine.graphs``). The host waits for the device once per step, to read the tokens. The host's
own data is in numpy, which is faster than torch for a few rows.

Shapes: b rows of a batch, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from megarl.config.generation import GenerationConfig
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.parcels import Columns
from megarl.errors import GenerationError
from megarl.models.engine.graphs import Graphs
from megarl.models.engine.groups import ParallelGroups
from megarl.models.generation.sampling import SamplingSettings, choose_tokens, uniform_numbers
from megarl.models.generation.stopping import StopRules, stop_strings_of_rows

SEED_RANGE = 2**62

LEAVING_SHARE = 1 / 8
"""Fraction of a batch's rows that must have ended before they are removed. Removing rows copies the KV
cache."""

ROWS_RATIO = 4
"""With graphs, a batch from which rows have been removed has a power of this number of rows, because every
number of rows needs its own graph."""

PASS_POSITIONS = 512
"""Cost of one more forward pass over prompts, as a number of padded positions: a pass launches all kernels
and reads all weights again."""


class Forward(Protocol):
    """A model with the KV cache of one batch. One or more calls of ``read`` are followed by calls of
    ``step``."""

    def read(
        self, tokens: torch.Tensor, lengths: torch.Tensor, prompt_of: torch.Tensor, end: int
    ) -> torch.Tensor | None:
        """Run the model over the prompts of the next rows of the batch.

        Args:
            tokens: [p, n] int64 on the device, the distinct prompts, padded on the left.
            lengths: [p] int64 on the CPU, lengths of the prompts.
            prompt_of: [r] int64 on the device, index of the prompt of each of the next r rows.
            end: length of the batch's longest prompt. All responses begin at this position.

        Returns:
            Logits [r, V] after the prompts, without padding of the vocabulary; None on pipeline stages
            without logits.
        """

    def step(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor | None:
        """Run the model over one more token of each row.

        Args:
            tokens: [b] int64 on the device.
            lengths: [b] int64 on the device, number of tokens of each row, including the new one. All other
                positions of a row in the cache are padding on the left.

        Returns:
            Logits [b, V] as in ``read``, valid until the next step.
        """

    def keep(self, rows: torch.Tensor) -> None:
        """Keep only the rows with the given indices, int64 on the device, in this order."""


Start: TypeAlias = Callable[[int, int], Forward]
"""Function of a number of rows and a number of positions that returns a ``Forward`` with an empty cache of
this size. It may reuse the memory of the previous ``Forward``."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """A backend's model in the form that ``decode`` uses.

    Attributes:
        start: begins a batch.
        groups: process groups of the ranks that decode the same rows together.
        device: device on which the model expects its tokens.
        longest: maximum number of tokens of prompt and response together.
        rows_at_once: maximum number of rows of a batch; None for all rows.
        one_pass: read all prompts of a batch in one forward pass, because the backend cannot concatenate the
            caches of several passes.
        graphs: runs the functions of fixed shapes.
    """

    start: Start
    groups: ParallelGroups
    device: torch.device
    longest: int
    rows_at_once: int | None = None
    one_pass: bool = False
    graphs: Graphs = field(default_factory=Graphs)


def decode(
    decoder: Decoder, data: Columns, config: GenerationConfig, tokenizer: Any, *, greedy: bool
) -> BatchedDataDict[Any]:
    """Generate a response to every prompt.

    Args:
        decoder: the model, in evaluation mode.
        data: ``input_ids`` [B, S] right-padded, ``input_lengths`` [B], optionally ``stop_strings`` (one entry
            per row), ``max_new_tokens`` [B] int64 and ``sampling_seeds`` [B] int64. Without
            ``sampling_seeds``, the seeds come from torch's CPU generator.
        config: the generation configuration.
        tokenizer: decodes responses to find stop strings.
        greedy: take the most likely token instead of sampling.

    Returns:
        ``output_ids`` [B, longest], right-padded; ``logprobs`` [B, longest] float32, zero on prompts and
        padding; ``generation_lengths`` [B]; ``unpadded_sequence_lengths`` [B]; ``truncated`` [B] bool, True
        if a response ended at a length limit rather than at a stop token or string.

    Raises:
        BatchError: a stop string is empty.
        GenerationError: a row's logits are not finite. The message names the row. Raised on all ranks that
            decode the row.
    """
    settings = SamplingSettings.of(config, greedy=greedy)
    ids, lengths = data["input_ids"].cpu(), data["input_lengths"].cpu().long()
    longest_answer, rows_at_once = config["max_new_tokens"], decoder.rows_at_once or max(len(lengths), 1)
    # Choose seeds before batches are formed, so that tokens do not depend on the division into batches.
    seeds = _seeds(data, len(lengths), decoder.groups)
    stop_strings = stop_strings_of_rows(config.get("stop_strings"), data.get("stop_strings"), len(lengths))
    prompts = [row[:length] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)]
    allowed = (decoder.longest - lengths).clamp(0, longest_answer).numpy()
    if "max_new_tokens" in data:
        allowed = np.minimum(allowed, data["max_new_tokens"].numpy())
    answered = lengths.numpy()[allowed > 0]
    # All responses of a batch begin after its longest prompt. So a row with a shorter prompt may need more
    # cache positions than decoder.longest.
    positions = int(answered.max(initial=0) + allowed.max(initial=0))
    if decoder.rows_at_once is not None and positions > decoder.longest:
        # Use fewer rows, so that the cache is not larger than one of `rows_at_once` x `longest` positions.
        rows_at_once = max(rows_at_once * decoder.longest // positions, 1)
    size = _CacheSize(min(rows_at_once, len(answered)), positions)
    answers = _Answers.empty(len(lengths), longest_answer)
    # Sort by length, so that the prompts of a batch have similar lengths and little padding.
    for rows in np.array_split(
        lengths.argsort(stable=True).numpy(), range(rows_at_once, len(prompts), rows_at_once)
    ):
        names = rows.tolist()
        stop = StopRules(config["stop_token_ids"] or [], [stop_strings[row] for row in names], tokenizer)
        uniforms = (
            None
            if greedy
            # Each row's numbers come from its own seed, so they depend neither on the batch nor on the
            # layout.
            else uniform_numbers([seeds[row] for row in names], longest_answer).to(decoder.device)
        )
        batch = _Decoding(
            decoder, names, [prompts[row] for row in names], allowed[rows], uniforms, settings, longest_answer
        )
        batch.run(size, stop)
        answers.put(rows, batch.answers)
    return _assembled(ids, lengths, answers, int(config["pad_token_id"]))


@dataclass(frozen=True, slots=True)
class _CacheSize:
    """Rows and positions of the largest batch. All batches allocate a cache of this size, so that its memory
    can be reused."""

    rows: int
    positions: int


@dataclass(frozen=True, slots=True)
class _Answers:
    """Responses of some rows.

    Attributes:
        tokens, logprobs: [b, n] int64 and float32; the first ``counts`` entries of a row are valid.
        counts: [b] int64, length of each response.
        stopped: [b] bool, True if the response ended at a stop token or string.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    counts: np.ndarray
    stopped: np.ndarray

    @classmethod
    def empty(cls, rows: int, longest: int) -> _Answers:
        return cls(
            np.zeros((rows, longest), np.int64),
            np.zeros((rows, longest), np.float32),
            np.zeros(rows, np.int64),
            np.zeros(rows, np.bool_),
        )

    def put(self, rows: np.ndarray, other: _Answers) -> None:
        """Write all responses of ``other`` into the given rows."""
        self.tokens[rows], self.logprobs[rows] = other.tokens, other.logprobs
        self.counts[rows], self.stopped[rows] = other.counts, other.stopped


def _seeds(data: Columns, rows: int, groups: ParallelGroups) -> list[int]:
    """Return one seed per row. Seeds are equal on all ranks of a data-parallel replica; unless the batch
    brings them, they differ between replicas."""
    if "sampling_seeds" in data:
        return data["sampling_seeds"].tolist()
    # Use the CPU's generator: it is saved in checkpoints, and gives the same numbers for every device.
    drawn = torch.randint(SEED_RANGE, (rows,))
    box = [drawn + groups.data_rank * 0x9E3779B97F4A7C15 % SEED_RANGE]
    # The generators of a replica's ranks may differ, so broadcast the first rank's seeds.
    for group in (groups.tensor, groups.context):
        if dist.get_world_size(group) > 1:
            dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    return groups.object_from_last_stage(box[0]).tolist()


class _Decoding:
    """Decoding of one batch of prompts.

    Args:
        decoder: the model.
        names: row numbers of the prompts in the caller's data, for error messages.
        prompts: token ids, the shortest prompt first.
        allowed: [b], maximum number of tokens of each response.
        uniforms: [b, n] float64 on the device, a uniform random number for each token; None decodes greedily.
        settings: the sampling settings.
        longest_answer: number of tokens per row to allocate in ``answers``.
    """

    def __init__(
        self,
        decoder: Decoder,
        names: Sequence[int],
        prompts: Sequence[Sequence[int]],
        allowed: np.ndarray,
        uniforms: torch.Tensor | None,
        settings: SamplingSettings,
        longest_answer: int,
    ) -> None:
        self.decoder = decoder
        self.names = names
        self.prompts = prompts
        self.allowed = allowed
        self.uniforms = uniforms
        self.settings = settings
        self.answers = _Answers.empty(len(prompts), longest_answer)
        self.open = allowed > 0

    def run(self, size: _CacheSize, stop: StopRules) -> None:
        """Decode until all rows have ended, and fill ``answers``."""
        rows = self.open.nonzero()[0]
        if not len(rows):
            return
        forward = self.decoder.start(size.rows, size.positions)
        logits = self._prefill(forward, rows.tolist())
        lengths = self._on_device([len(self.prompts[row]) for row in rows.tolist()])
        uniforms = (
            self.uniforms
            if self.uniforms is None or len(rows) == len(self.prompts)
            else self.uniforms[self._on_device(rows)]
        )
        done = 0
        while True:
            chosen = self._choose(len(rows), logits, None if uniforms is None else uniforms[:, done])
            # The next step takes the tokens from the device, and so does not wait for a copy from the host.
            newest = chosen[0].long()
            self._write(rows, done, chosen.cpu().numpy(), stop)
            done += 1
            kept = self._kept(self.open[rows])
            if not len(kept):
                return
            if len(kept) < len(rows):
                leaving = self._on_device(kept)
                forward.keep(leaving)
                rows, newest, lengths = rows[kept], newest[leaving], lengths[leaving]
                uniforms = None if uniforms is None else uniforms[leaving]
            lengths = lengths + 1
            logits = forward.step(newest, lengths)

    def _kept(self, is_open: np.ndarray) -> np.ndarray:
        """Return the indices of the rows that stay in the batch, in ascending order; empty if no row is open.

        All rows stay, or only the open ones. With graphs, some ended rows stay too, to keep the number of
        sizes small.
        """
        rows, staying = len(is_open), int(is_open.sum())
        # A graph serves one number of rows. Decoding some ended rows in vain costs less than capturing more
        # graphs.
        if self.decoder.graphs.few_sizes:
            size = 1
            while size < staying:
                size *= ROWS_RATIO
        else:
            size = staying if staying <= (1 - LEAVING_SHARE) * rows else rows
        if size >= rows and staying:
            return np.arange(rows)
        # Keep all open rows, and fill up with ended rows to ``size``. The outer sort restores their order.
        kept: np.ndarray = np.sort(np.argsort(~is_open, kind="stable")[: size if staying else 0])
        return kept

    def _prefill(self, forward: Forward, rows: list[int]) -> torch.Tensor | None:
        """Run the model over each distinct prompt once. Return the logits [rows, V] after the prompts.
        ``rows`` is sorted by prompt length, the shortest first."""
        places: dict[tuple[int, ...], int] = {}
        # Read each prompt once for all its responses: in GRPO, every prompt has several.
        prompt_of = np.array([places.setdefault(tuple(self.prompts[row]), len(places)) for row in rows])
        prompts = list(places)
        ends = [len(prompts)] if self.decoder.one_pass else ends_of_passes(list(map(len, prompts)))
        found = []
        for start, end in itertools.pairwise([0, *ends]):
            # Rows are sorted by length, and prompts of one length are in one pass, so that the rows of a pass
            # are neighbours.
            of_pass = prompt_of[(prompt_of >= start) & (prompt_of < end)] - start
            logits = self._read(forward, prompts[start:end], of_pass, len(prompts[-1]))
            if logits is not None:
                found.append(logits)
        return torch.cat(found) if found else None

    def _read(
        self, forward: Forward, prompts: Sequence[Sequence[int]], prompt_of: np.ndarray, end: int
    ) -> torch.Tensor | None:
        """Run one forward pass over prompts. The last prompt must be the longest."""
        tokens = torch.zeros(len(prompts), len(prompts[-1]), dtype=torch.int64)
        for place, prompt in enumerate(prompts):
            tokens[place, tokens.shape[1] - len(prompt) :] = torch.tensor(prompt, dtype=torch.int64)
        lengths = torch.tensor(list(map(len, prompts)))
        return forward.read(tokens.to(self.decoder.device), lengths, self._on_device(prompt_of), end)

    def _choose(self, rows: int, logits: torch.Tensor | None, uniforms: torch.Tensor | None) -> torch.Tensor:
        """Return the next tokens and their log-probabilities, [2, rows] float64 on the device. The last
        pipeline stage samples them and broadcasts them to all stages."""
        if logits is None:
            # float64 represents token ids exactly, so one broadcast is enough for tokens and
            # log-probabilities.
            chosen = torch.zeros(2, rows, dtype=torch.float64, device=self.decoder.device)
        else:
            given = (logits,) if uniforms is None else (logits, uniforms)
            chosen = self.decoder.graphs.run(("choose", self.settings), self._chosen, *given)
        return self.decoder.groups.from_last_stage(chosen)

    def _chosen(self, logits: torch.Tensor, *uniforms: torch.Tensor) -> torch.Tensor:
        tokens, logprobs = choose_tokens(
            logits, uniforms[0] if uniforms else logits.new_empty(0), self.settings
        )
        return torch.stack([tokens.double(), logprobs.double()])

    def _write(self, rows: np.ndarray, done: int, chosen: np.ndarray, stop: StopRules) -> None:
        """Append the chosen tokens [2, rows] to the open rows, and close the rows that end.

        Args:
            rows: rows of the batch, open or not.
            done: number of tokens that each response has so far.
            chosen: token ids and log-probabilities from ``_choose``.
            stop: decides which rows stop.
        """
        is_open = self.open[rows]
        writing = rows[is_open]
        tokens, values = chosen[0, is_open].astype(np.int64), chosen[1, is_open]
        # All ranks raise together, because all received the same values.
        self._refuse_nan(writing, done, values)
        answers = self.answers
        answers.tokens[writing, done], answers.logprobs[writing, done], answers.counts[writing] = (
            tokens,
            values,
            done + 1,
        )
        finished = stop.finished(writing, tokens, answers.tokens[:, : done + 1])
        answers.stopped[writing] = finished
        self.open[writing] = ~finished & (done + 1 < self.allowed[writing])

    def _on_device(self, numbers: list[int] | np.ndarray) -> torch.Tensor:
        return torch.as_tensor(numbers, dtype=torch.int64).to(self.decoder.device)

    def _refuse_nan(self, rows: np.ndarray, done: int, values: np.ndarray) -> None:
        """Raise GenerationError if a chosen token's log-probability is not finite. A single NaN or infinity
        in a row's logits makes all log-probabilities of the row NaN, so this finds it."""
        wrong = rows[~np.isfinite(values)].tolist()
        if wrong:
            raise GenerationError(
                f"row {self.names[wrong[0]]}: the logits of response token {done} (position "
                f"{len(self.prompts[wrong[0]]) + done}) are not finite ({len(wrong)} of "
                f"{len(rows)} rows at this position), so no token can be sampled. Fix: check "
                "whether the weights are finite, or use float32 or bfloat16 instead of float16"
            )


def ends_of_passes(lengths: Sequence[int]) -> list[int]:
    """Divide prompts into forward passes at the lowest total cost: the number of positions, including
    padding, plus ``PASS_POSITIONS`` per pass.

    Args:
        lengths: prompt lengths in ascending order.

    Returns:
        For each pass, the index after its last prompt; the last entry is the number of prompts. Prompts of
        equal length are in the same pass.
    """
    distinct, counts = np.unique(np.asarray(lengths, dtype=np.int64), return_counts=True)
    before = np.concatenate([[0], counts.cumsum()])
    # Dynamic programming: cost[i] is the lowest cost of the before[i] shortest prompts, and begins[i] is
    # where their last pass begins.
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
    """Assemble prompts [B, S] of ``lengths`` [B] and their responses to the output of ``decode``."""
    tokens, logprobs, counts, stopped = map(
        torch.from_numpy, (answers.tokens, answers.logprobs, answers.counts, answers.stopped)
    )
    totals = lengths + counts
    width = int(totals.max()) if len(totals) else 0
    found = torch.full((len(totals), width), pad, dtype=torch.int64)
    values = torch.zeros(found.shape, dtype=torch.float32)
    places, prompts = torch.arange(width), ids[:, :width]
    # Masks copy all prompts, and all responses, in one operation each; a loop over rows would be slower.
    in_prompt = places[: prompts.shape[1]] < lengths[:, None]
    found[:, : prompts.shape[1]][in_prompt] = prompts[in_prompt]
    in_answer = (places >= lengths[:, None]) & (places < totals[:, None])
    given = torch.arange(tokens.shape[1]) < counts[:, None]
    found[in_answer], values[in_answer] = tokens[given], logprobs[given]
    return BatchedDataDict(
        {
            "output_ids": found,
            "logprobs": values,
            "generation_lengths": counts,
            "unpadded_sequence_lengths": totals,
            "truncated": ~stopped,
        }
    )
