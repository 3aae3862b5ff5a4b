"""Generation by Megatron itself, with a static key-value cache, in any layout of tensor, pipeline and data parallelism.

Rows of a batch go forward in lockstep: the cache is first filled up to the shortest prompt, then one position at a time; a row whose
prompt is longer takes its next prompt token instead of a sampled one. All rows of a batch so share one position, which is what Megatron's
static cache wants, and no row ever sees padding. Rows are batched by prompt length to keep the difference small.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext

from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.models.engine.groups import ParallelGroups
from megarl.models.engine.step import evaluation_mode
from megarl.models.generation.sampling import SamplingSettings, choose_tokens, uniform_numbers
from megarl.models.generation.stopping import StopRules, stop_strings_of_rows

if TYPE_CHECKING:
    from megarl.models.megatron.backend import MegatronBackend

SEED_RANGE = 2**62


def generate(
    backend: MegatronBackend, data: Mapping[str, Any], config: Mapping[str, Any], tokenizer: Any, *, greedy: bool
) -> BatchedDataDict[Any]:
    """Continue every prompt.

    Args:
        backend: the model.
        data: ``input_ids`` [B, S] right-padded, ``input_lengths`` [B], optionally ``stop_strings`` (one entry a row) and
        ``sampling_seeds`` [B] int64.
            Without seeds they are drawn from this process's generator.
        config: the generation configuration.
        tokenizer: decodes answers for stop strings.
        greedy: take the most likely token instead of sampling.

    Returns:
        ``output_ids`` [B, longest], right-padded; ``logprobs`` [B, longest] float32, zero on prompts and padding; ``generation_lengths``
        [B];
        ``unpadded_sequence_lengths`` [B]; ``truncated`` [B] bool, True where a length limit and not a stop ended the answer.
    """
    settings = SamplingSettings(greedy, float(config["temperature"]), config.get("top_k"), float(config.get("top_p") or 1.0))
    lengths = data["input_lengths"].tolist()
    backend.sync_parameters()
    if not lengths:
        return _assemble([], [], [], [], int(config["pad_token_id"]))
    rows_at_once = backend.policy.get("generation_batch_size") or len(lengths)
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])
    seeds = _seeds(data, len(lengths), backend.groups)
    stop_strings = stop_strings_of_rows(config.get("stop_strings"), data.get("stop_strings"), len(lengths))
    limit = backend.policy["max_total_sequence_length"]
    answers: list[list[int]] = [[] for _ in lengths]
    logprobs: list[list[float]] = [[] for _ in lengths]
    truncated = [False] * len(lengths)
    with evaluation_mode(backend), _without_sequence_parallel(backend.stage):
        for first in range(0, len(order), rows_at_once):
            rows = order[first : first + rows_at_once]
            stop = StopRules(config.get("stop_token_ids") or [], [stop_strings[row] for row in rows], tokenizer)
            decoding = _Decoding(
                backend,
                [data["input_ids"][row, : lengths[row]].tolist() for row in rows],
                uniform_numbers([seeds[row] for row in rows], config["max_new_tokens"]),
                config["max_new_tokens"],
                limit,
            )
            decoding.run(settings, stop)
            for index, row in enumerate(rows):
                answers[row], logprobs[row], truncated[row] = decoding.answers[index], decoding.logprobs[index], not decoding.stopped[index]
    prompts = [data["input_ids"][row, :length].tolist() for row, length in enumerate(lengths)]
    return _assemble(prompts, answers, logprobs, truncated, int(config["pad_token_id"]))


def _seeds(data: Mapping[str, Any], rows: int, groups: ParallelGroups) -> list[int]:
    """One seed a row, the same on all ranks of a replica and different between data-parallel ranks."""
    if "sampling_seeds" in data:
        return data["sampling_seeds"].tolist()
    drawn = torch.randint(SEED_RANGE, (rows,))
    box = [drawn + groups.data_rank * 0x9E3779B97F4A7C15 % SEED_RANGE]
    if groups.tensor_size > 1:
        dist.broadcast_object_list(box, src=dist.get_global_rank(groups.tensor, 0), group=groups.tensor)
    return groups.object_from_last_stage(box[0]).tolist()


class _Decoding:
    """Lockstep decoding of one batch of prompts: b rows, at most T positions."""

    def __init__(
        self, backend: MegatronBackend, prompts: Sequence[Sequence[int]], uniforms: torch.Tensor, max_new_tokens: int, limit: int
    ) -> None:
        self.backend = backend
        self.prompts = prompts
        self.uniforms = uniforms
        self.allowed = [min(max_new_tokens, limit - len(prompt)) for prompt in prompts]
        self.total = max(len(prompt) + allowed for prompt, allowed in zip(prompts, self.allowed, strict=True))
        self.device = backend.runtime.device
        self.tokens = torch.zeros(len(prompts), self.total, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            self.tokens[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
        self.answers: list[list[int]] = [[] for _ in prompts]
        self.logprobs: list[list[float]] = [[] for _ in prompts]
        self.open = [allowed > 0 for allowed in self.allowed]
        self.stopped = [False for _ in prompts]

    def run(self, settings: SamplingSettings, stop: StopRules) -> None:
        """Fill ``answers``, ``logprobs`` and ``stopped``, row by row."""
        context = StaticInferenceContext(len(self.prompts), self.total)
        done, position = 0, min(len(prompt) for prompt in self.prompts)
        while any(self.open) and position < self.total:
            logits = self._forward(context, done, position)
            context.sequence_len_offset = position
            context.enable_decode_mode()
            writing = [row for row, open_ in enumerate(self.open) if open_ and len(self.prompts[row]) <= position]
            if writing:
                self._write(writing, position, logits, settings, stop)
            done, position = position, position + 1

    def _write(self, rows: list[int], position: int, logits: torch.Tensor | None, settings: SamplingSettings, stop: StopRules) -> None:
        """Choose the tokens at ``position`` for ``rows``; the last pipeline stage chooses, all stages learn."""
        chosen = torch.zeros(2, len(rows), dtype=torch.float64, device=self.device)
        if logits is not None:
            numbers = torch.tensor([float(self.uniforms[row, len(self.answers[row])]) for row in rows], dtype=torch.float64)
            tokens, values = choose_tokens(logits[torch.tensor(rows, device=self.device)], numbers, settings)
            chosen[0], chosen[1] = tokens.double(), values.double()
        tokens, values = self.backend.groups.from_last_stage(chosen).cpu().unbind(0)
        newest = tokens.long()
        self.tokens[rows, position] = newest
        for row, token, value in zip(rows, newest.tolist(), values.tolist(), strict=True):
            self.answers[row].append(token)
            self.logprobs[row].append(value)
        for row, finished in zip(rows, stop.finished(rows, newest, [self.answers[row] for row in rows]), strict=True):
            self.stopped[row] = finished
            self.open[row] = not finished and len(self.answers[row]) < self.allowed[row]

    def _forward(self, context: StaticInferenceContext, first: int, last: int) -> torch.Tensor | None:
        """Positions ``first`` to ``last`` (exclusive) through all pipeline stages; [b, V] logits of the last of them on the last stage."""
        groups, stage = self.backend.groups, self.backend.stage
        tokens = self.tokens[:, first:last].to(self.device)
        if not groups.is_first_stage:
            hidden = torch.empty(
                last - first, len(self.prompts), stage.config.hidden_size, dtype=stage.config.pipeline_dtype, device=self.device
            )
            dist.recv(hidden, src=dist.get_global_rank(groups.pipeline, groups.pipeline_rank - 1), group=groups.pipeline)
            stage.set_input_tensor(hidden)
        output = stage(tokens, None, None, inference_context=context, runtime_gather_output=True)
        if not groups.is_last_stage:
            dist.send(output.contiguous(), dst=dist.get_global_rank(groups.pipeline, groups.pipeline_rank + 1), group=groups.pipeline)
            return None
        return output[:, -1, : self.backend.vocabulary.size]


@contextlib.contextmanager
def _without_sequence_parallel(stage: torch.nn.Module) -> Iterator[None]:
    """Decoding takes one position at a time, which cannot be split over ranks: run it with plain tensor parallelism.

    Sequence parallelism changes only where activations are, not what is computed, so the same weights serve.
    """
    switched: list[tuple[Any, str]] = []
    for module in stage.modules():
        for owner, name in (
            (module, "sequence_parallel"),
            (module, "reduce_scatter_embeddings"),
            (getattr(module, "config", None), "sequence_parallel"),
        ):
            if getattr(owner, name, False) is True:
                setattr(owner, name, False)
                switched.append((owner, name))
    try:
        yield
    finally:
        for owner, name in switched:
            setattr(owner, name, True)


def _assemble(
    prompts: list[list[int]], answers: list[list[int]], logprobs: list[list[float]], truncated: list[bool], pad: int
) -> BatchedDataDict[Any]:
    """The contract's output tensors."""
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
