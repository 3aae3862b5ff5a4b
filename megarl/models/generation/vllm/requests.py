"""Conversion of a batch of prompts to vLLM's requests, and of its responses to the output columns of
NeMo-RL's policy API."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megarl.config.generation import GenerationConfig
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.parcels import Columns
from megarl.models.generation.sampling import SamplingSettings
from megarl.models.generation.stopping import stop_strings_of_rows


@dataclass(frozen=True, slots=True)
class Request:
    """A request for vLLM.

    Attributes:
        row: index of the prompt in the batch.
        prompt: token ids.
        options: arguments of vLLM's ``SamplingParams``.
    """

    row: int
    prompt: list[int]
    options: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Answer:
    """vLLM's response to one prompt.

    Attributes:
        tokens: token ids of the response.
        logprobs: log-probability of each token; NaN if not requested.
        truncated: the response ended at a length limit.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    truncated: bool


NO_ROOM = Answer((), (), truncated=True)


def requests_of(data: Columns, config: GenerationConfig, longest: int, *, greedy: bool) -> list[Request]:
    """Return a request for each prompt that leaves room for at least one token.

    Without ``sampling_seeds``, or with ``vllm_cfg.fast_sampling``, requests have no seed; see
    ``seed_of_call``.

    Args:
        data: ``input_ids`` [B, S] right-padded, ``input_lengths`` [B], optionally ``stop_strings``,
            ``sampling_seeds`` and ``max_new_tokens`` [B].
        config: the generation configuration.
        longest: maximum number of tokens of prompt and response together.
        greedy: take the most likely token instead of sampling.

    Raises:
        BatchError: a stop string is empty.
    """
    lengths = data["input_lengths"].tolist()
    stops = stop_strings_of_rows(config.get("stop_strings"), data.get("stop_strings"), len(lengths))
    seeded = "sampling_seeds" in data and not _is_fast(config)
    seeds = data["sampling_seeds"].tolist() if seeded else [None] * len(lengths)
    most = (
        data["max_new_tokens"].tolist()
        if "max_new_tokens" in data
        else [config["max_new_tokens"]] * len(lengths)
    )
    settings = SamplingSettings.of(config, greedy=greedy)
    found = []
    for row, (length, stop, seed) in enumerate(zip(lengths, stops, seeds, strict=True)):
        room = min(config["max_new_tokens"], most[row], longest - length)
        if room <= 0:
            continue
        options = {
            **_drawing(settings),
            "max_tokens": room,
            # 0 requests only the sampled token's log-probability. For greedy tokens vLLM ignores the
            # temperature, so the value would be wrong unless the temperature is 1.
            "logprobs": None if greedy and settings.temperature != 1.0 else 0,
            "seed": None if seed is None else seed % 2**63,
            "stop": list(stop) or None,
            "stop_token_ids": list(config.get("stop_token_ids") or []),
            # Only the configured stop tokens end a response, not every token that the model's files declare.
            "ignore_eos": True,
            # Detokenize only if there are stop strings, because it takes time in vLLM's scheduler.
            "detokenize": bool(stop),
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
        }
        found.append(Request(row, data["input_ids"][row, :length].tolist(), options))
    return found


def seed_of_call(data: Columns, config: GenerationConfig) -> int | None:
    """Return the seed for one engine's call with ``vllm_cfg.fast_sampling``: the seed of its first row. None
    if each row has its own seed, or if there are no rows.

    So different engines and steps have different seeds, and a resumed run samples the same tokens.
    """
    if not _is_fast(config) or not len(data.get("sampling_seeds", ())):
        return None
    return int(data["sampling_seeds"][0]) % 2**63


def _is_fast(config: GenerationConfig) -> bool:
    settings = config.get("vllm_cfg")
    return settings is not None and settings["fast_sampling"]


def _drawing(settings: SamplingSettings) -> dict[str, float]:
    """Return the sampling settings as arguments of ``SamplingParams``. For vLLM, temperature 0 means
    greedy."""
    if settings.greedy:
        return {"temperature": 0.0}
    # For vLLM, top_k = 0 keeps all tokens.
    return {"temperature": settings.temperature, "top_k": settings.top_k or 0, "top_p": settings.top_p}


def answer_of(completion: Any) -> Answer:
    """Convert vLLM's ``CompletionOutput`` to an ``Answer``."""
    tokens = list(completion.token_ids)
    if completion.logprobs is None:
        return Answer(tokens, [math.nan] * len(tokens), completion.finish_reason == "length")
    logprobs = [step[token].logprob for token, step in zip(tokens, completion.logprobs, strict=True)]
    return Answer(tokens, logprobs, completion.finish_reason == "length")


def assembled(data: Columns, answers: Mapping[int, Answer], pad_token_id: int) -> BatchedDataDict[Any]:
    """Assemble responses to the output columns of ``generate``. A row without an entry in ``answers`` had no
    room for a response, and gets an empty one."""
    lengths = data["input_lengths"].tolist()
    given = [answers.get(row, NO_ROOM) for row in range(len(lengths))]
    new = torch.tensor([len(answer.tokens) for answer in given], dtype=torch.int64)
    ends = new + torch.tensor(lengths, dtype=torch.int64)
    width = max(ends.tolist(), default=0)
    ids = torch.full((len(lengths), width), pad_token_id, dtype=torch.int64)
    logprobs = torch.zeros(len(lengths), width)
    for row, (length, answer) in enumerate(zip(lengths, given, strict=True)):
        end = length + len(answer.tokens)
        ids[row, :length] = data["input_ids"][row, :length]
        ids[row, length:end] = torch.tensor(answer.tokens, dtype=torch.int64)
        logprobs[row, length:end] = torch.tensor(answer.logprobs)
    return BatchedDataDict(
        {
            "output_ids": ids,
            "logprobs": logprobs,
            "generation_lengths": new,
            "unpadded_sequence_lengths": ends,
            "truncated": torch.tensor([answer.truncated for answer in given]),
        }
    )
