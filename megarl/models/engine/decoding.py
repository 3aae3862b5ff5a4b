"""Decoding, which all backends share: the same seeds sample the same tokens from the same logits.

Prompts of a batch are padded on the left, so that all responses begin at the same position. A row's results
do not depend on its padding. A few passes over prompts of similar lengths fill the cache. Rows with the same
prompt share its pass. Rows that have ended leave the batch.

A step, and the choice of tokens after it, are functions of fixed shapes, which
``megarl.models.engine.graphs`` can record. Once per step the host waits for the device, to see the tokens.
The host's own data is in numpy, whose operations on a few rows are faster than torch's.

Legend: b rows of a batch, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from megarl.config.generation import GenerationConfig
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.errors import GenerationError
from megarl.models.engine.graphs import Graphs
from megarl.models.engine.groups import ParallelGroups
from megarl.models.generation.sampling import SamplingSettings, choose_tokens, uniform_numbers
from megarl.models.generation.stopping import StopRules, stop_strings_of_rows

SEED_RANGE = 2**62

LEAVING_SHARE = 1 / 8
"""Share of a batch's rows that must have ended before they leave the batch, which copies the cache."""

ROWS_RATIO = 4
"""Once rows have left a batch whose steps are recorded, its number of rows is a power of this, because each
size needs a recording of its own."""

PASS_POSITIONS = 512
"""Cost of one more pass over the prompts, in positions of padding: the pass launches all operations, and
reads all weights, once more."""


class Forward(Protocol):
    """A model with the key-value cache of one batch. One or more passes first read the prompts; steps
    follow."""

    def read(
        self, tokens: torch.Tensor, lengths: torch.Tensor, prompt_of: torch.Tensor, end: int
    ) -> torch.Tensor | None:
        """Read the prompts of the next rows of the batch.

        Args:
            tokens: [p, n] int64 on the device, padded on the left.
            lengths: [p] int64 on the CPU, of the prompts.
            prompt_of: [r] int64 on the device, the index of the prompt that each of the next r rows has.
            end: length of the batch's longest prompt, where the responses of all rows begin.

        Returns:
            [r, V] logits over the true vocabulary after the prompts; None on pipeline stages that have none.
        """

    def step(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor | None:
        """Read one more token of all rows.

        Args:
            tokens: [b] int64 on the device.
            lengths: [b] int64 on the device, the tokens of each row, including the new one. The row's other
                positions in the cache are padding on the left.

        Returns:
            [b, V] logits after the token, as in ``read``; they are valid until the next step.
        """

    def keep(self, rows: torch.Tensor) -> None:
        """Keep only the given rows of the batch, int64 on the device, in their order."""


Start: TypeAlias = Callable[[int, int], Forward]
"""Builds a ``Forward`` with an empty cache for a number of rows and a number of positions; the previous
``Forward`` is not needed any more."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """A backend's model, as decoding uses it.

    Attributes:
        start: begins a batch.
        groups: groups of the ranks that decode the same rows together.
        device: device on which the model expects its tokens.
        longest: maximum tokens of prompt and response together.
        rows_at_once: maximum rows of a batch; None for all rows.
        one_pass: a batch reads all its prompts in one pass, because the cache entries of several passes could
            not be concatenated.
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
    decoder: Decoder, data: Mapping[str, Any], config: GenerationConfig, tokenizer: Any, *, greedy: bool
) -> BatchedDataDict[Any]:
    """Generate a response to every prompt.

    Args:
        decoder: the model, in evaluation mode.
        data: ``input_ids`` [B, S] right-padded, ``input_lengths`` [B], optionally ``stop_strings`` (one entry
            per row), ``max_new_tokens`` [B] int64 and ``sampling_seeds`` [B] int64. Without
            ``sampling_seeds``, the seeds come from this process's random-number generator.
        config: the generation configuration.
        tokenizer: decodes responses for stop strings.
        greedy: take the most likely token instead of sampling.

    Returns:
        ``output_ids`` [B, longest], right-padded; ``logprobs`` [B, longest] float32, zero on prompts and
        padding; ``generation_lengths`` [B]; ``unpadded_sequence_lengths`` [B]; ``truncated`` [B] bool, True
        where a length limit and not a stop ended the response.

    Raises:
        BatchError: a stop string is empty.
        GenerationError: a row's logits are not finite; names the row, and is raised on all ranks that share
            the rows.
    """
    settings = SamplingSettings.of(config, greedy=greedy)
    ids, lengths = data["input_ids"].cpu(), data["input_lengths"].cpu().long()
    longest_answer, rows_at_once = config["max_new_tokens"], decoder.rows_at_once or max(len(lengths), 1)
    # Choose seeds before any batch is formed, so that the division of rows into batches changes no token.
    seeds = _seeds(data, len(lengths), decoder.groups)
    stop_strings = stop_strings_of_rows(config.get("stop_strings"), data.get("stop_strings"), len(lengths))
    prompts = [row[:length] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)]
    allowed = (decoder.longest - lengths).clamp(0, longest_answer).numpy()
    if "max_new_tokens" in data:
        allowed = np.minimum(allowed, data["max_new_tokens"].numpy())
    answered = lengths.numpy()[allowed > 0]
    # All responses of a batch begin where its longest prompt ends, so that a row may need more positions than
    # decoder.longest.
    positions = int(answered.max(initial=0) + allowed.max(initial=0))
    if decoder.rows_at_once is not None and positions > decoder.longest:
        # Reduce the rows, so that the cache is no larger than that of `rows_at_once` rows of the greatest
        # length.
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
            # Take all numbers of a response at once from the row's own seed, so that they depend on neither
            # batch nor layout.
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
    """Rows and positions of the largest batch. All batches have a cache of this size, so that they can reuse
    its memory."""

    rows: int
    positions: int


@dataclass(frozen=True, slots=True)
class _Answers:
    """Responses of some rows: ``tokens`` [b, n] int64 and their ``logprobs`` float32, of which the first
    ``counts`` [b] int64 of each row are set; ``stopped`` [b] bool is True where a stop ended the response."""

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
        """Write the responses of ``other`` into the given rows."""
        self.tokens[rows], self.logprobs[rows] = other.tokens, other.logprobs
        self.counts[rows], self.stopped[rows] = other.counts, other.stopped


def _seeds(data: Mapping[str, Any], rows: int, groups: ParallelGroups) -> list[int]:
    """Return one seed per row, equal on all ranks of a replica and different between data-parallel ranks."""
    if "sampling_seeds" in data:
        return data["sampling_seeds"].tolist()
    # Use the CPU's generator: it is saved in checkpoints, and gives the same numbers for every device.
    drawn = torch.randint(SEED_RANGE, (rows,))
    box = [drawn + groups.data_rank * 0x9E3779B97F4A7C15 % SEED_RANGE]
    # The ranks of a replica may have advanced their random generators differently, so the first rank's seeds
    # are broadcast to all.
    for group in (groups.tensor, groups.context):
        if dist.get_world_size(group) > 1:
            dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    return groups.object_from_last_stage(box[0]).tolist()


class _Decoding:
    """Decoding of one batch of prompts, the shortest first.

    Args:
        decoder: the model.
        names: row numbers of the prompts in the data, for messages.
        prompts: token ids.
        allowed: [b] maximum tokens of each response.
        uniforms: [b, n] float64 on the device, the random numbers of each row; None takes the most likely
            tokens.
        settings: how tokens are chosen.
        longest_answer: number of tokens per row for which ``answers`` has room.
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
        """Fill ``answers``."""
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
            # Keep the tokens on the device, so that the next step need not wait for the host's work on them.
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
        """Return the indices of the batch's rows that stay, in their order: all rows, or the open ones. Where
        graphs want few sizes, some ended rows stay too. Empty if no row is open."""
        rows, staying = len(is_open), int(is_open.sum())
        # A graph is recorded for one number of rows, so that it pays to have few sizes and to decode some
        # ended rows in vain.
        if self.decoder.graphs.few_sizes:
            size = 1
            while size < staying:
                size *= ROWS_RATIO
        else:
            size = staying if staying <= (1 - LEAVING_SHARE) * rows else rows
        if size >= rows and staying:
            return np.arange(rows)
        # A stable sort keeps the open rows in their order, followed by the others.
        kept: np.ndarray = np.sort(np.argsort(~is_open, kind="stable")[: size if staying else 0])
        return kept

    def _prefill(self, forward: Forward, rows: list[int]) -> torch.Tensor | None:
        """Read each distinct prompt once; return the logits [rows, V] after the prompts. ``rows`` is sorted
        by prompt length, the shortest first."""
        places: dict[tuple[int, ...], int] = {}
        # Read a prompt once for all its responses, the usual case in GRPO.
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
        """Run one pass over prompts, of which the last is the longest."""
        tokens = torch.zeros(len(prompts), len(prompts[-1]), dtype=torch.int64)
        for place, prompt in enumerate(prompts):
            tokens[place, tokens.shape[1] - len(prompt) :] = torch.tensor(prompt, dtype=torch.int64)
        lengths = torch.tensor(list(map(len, prompts)))
        return forward.read(tokens.to(self.decoder.device), lengths, self._on_device(prompt_of), end)

    def _choose(self, rows: int, logits: torch.Tensor | None, uniforms: torch.Tensor | None) -> torch.Tensor:
        """Return the next tokens and their log-probabilities, [2, rows] float64 on the device. The last
        pipeline stage chooses them, and all stages receive them."""
        if logits is None:
            # float64 holds token ids exactly, so that one broadcast carries tokens and log-probabilities.
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
        """Store the chosen tokens [2, rows] of the rows that are open, each of which has ``done`` tokens so
        far, and mark the rows that end."""
        is_open = self.open[rows]
        writing = rows[is_open]
        tokens, values = chosen[0, is_open].astype(np.int64), chosen[1, is_open]
        # All ranks raise together, because all have the same broadcast numbers.
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
        """Raise if a chosen token's log-probability is not finite. NaN or infinity anywhere in a row's logits
        makes all of the row's log-probabilities NaN, including the chosen token's."""
        wrong = rows[~np.isfinite(values)].tolist()
        if wrong:
            raise GenerationError(
                f"row {self.names[wrong[0]]}: the logits of response token {done} (position "
                f"{len(self.prompts[wrong[0]]) + done}) are not finite ({len(wrong)} of "
                f"{len(rows)} rows at this position), so no token can be sampled. Fix: check "
                "whether the weights are finite, or use float32 or bfloat16 instead of float16"
            )


def ends_of_passes(lengths: Sequence[int]) -> list[int]:
    """Return the division of prompts into passes that costs least, counting positions, padding included, and
    passes.

    Args:
        lengths: of the prompts, the shortest first.

    Returns:
        The index of the prompt before which each pass ends; the last index is the number of prompts. Prompts
        of the same length are in the same pass.
    """
    distinct, counts = np.unique(np.asarray(lengths, dtype=np.int64), return_counts=True)
    before = np.concatenate([[0], counts.cumsum()])
    # cost[i] is the cost of the shortest before[i] prompts, found by dynamic programming over where their
    # last pass begins.
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
    """Return the NeMo-RL policy API's output tensors from prompts [B, S] of ``lengths`` [B] and their
    responses."""
    tokens, logprobs, counts, stopped = map(
        torch.from_numpy, (answers.tokens, answers.logprobs, answers.counts, answers.stopped)
    )
    totals = lengths + counts
    width = int(totals.max()) if len(totals) else 0
    found = torch.full((len(totals), width), pad, dtype=torch.int64)
    values = torch.zeros(found.shape, dtype=torch.float32)
    places, prompts = torch.arange(width), ids[:, :width]
    # Use masks, not a loop over rows: torch copies all prompts, and all responses, in one operation each.
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
