"""Generation by a transformers model with a transformers cache, drawing the same tokens as every other backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.device import DeviceRuntime
from megarl.models.engine.decoding import Decoder, decode
from megarl.models.engine.graphs import graphs_on
from megarl.models.engine.groups import ParallelGroups
from megarl.models.engine.logprobs import VocabularyShard


class Generating(Protocol):
    """Generating: what generation needs of a backend."""

    policy: Mapping[str, Any]
    groups: ParallelGroups
    vocabulary: VocabularyShard
    runtime: DeviceRuntime


def generate(
    model: torch.nn.Module,
    backend: Generating,
    data: Mapping[str, Any],
    config: Mapping[str, Any],
    tokenizer: Any,
    *,
    greedy: bool,
) -> BatchedDataDict[Any]:
    """Continue every prompt; see ``decode``.

    Data-parallel ranks need not be in step, so the model must need no collective with them: its parameters are whole, or those of this
    tensor-parallel rank. Ranks that share rows have to be in step, and are.

    Args:
        model: a causal language model of transformers; its logits are the columns that ``backend.vocabulary`` says.
        backend: where the model runs and who runs it together.
        data, config, tokenizer, greedy: as for ``decode``.
    """
    decoder = Decoder(
        lambda rows, positions: _CachedForward(model, backend.vocabulary, lambda: DynamicCache(config=model.config)),
        backend.groups,
        backend.runtime.device,
        backend.policy["max_total_sequence_length"],
        backend.policy.get("generation_batch_size"),
        one_pass=not _can_be_joined(DynamicCache(config=model.config)),
        graphs=graphs_on(backend.runtime.device, "the cache of transformers grows with each token"),
    )
    with _evaluating(model), torch.no_grad():
        return decode(decoder, data, config, tokenizer, greedy=greedy)


class _CachedForward:
    """See ``Forward``."""

    def __init__(self, model: torch.nn.Module, vocabulary: VocabularyShard, new_cache: Callable[[], Any]) -> None:
        self.model = model
        self.vocabulary = vocabulary
        self.new_cache = new_cache
        self.read_caches: list[Any] = []
        self.cache: Any = None
        self.is_padded = False

    def read(self, tokens: torch.Tensor, lengths: torch.Tensor, prompt_of: torch.Tensor, end: int) -> torch.Tensor:
        """See ``Forward``."""
        width = tokens.shape[1]
        padded = bool((lengths < width).any())
        self.is_padded = self.is_padded or padded or width < end
        self.read_caches.append(self.new_cache())
        logits = self._forward(tokens, lengths.to(tokens.device), self.read_caches[-1], padded=padded)
        if len(prompt_of) == len(tokens):
            return logits
        self.read_caches[-1].batch_select_indices(prompt_of)
        return logits[prompt_of]

    def step(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """See ``Forward``."""
        return self._forward(tokens[:, None], lengths, self._whole_cache(), padded=self.is_padded)

    def keep(self, rows: torch.Tensor) -> None:
        """See ``Forward``."""
        self._whole_cache().batch_select_indices(rows)

    def _whole_cache(self) -> Any:
        if self.read_caches:
            self.cache = self.read_caches[0] if len(self.read_caches) == 1 else _joined(self.read_caches)
            self.read_caches = []
        return self.cache

    def _forward(self, tokens: torch.Tensor, lengths: torch.Tensor, cache: Any, *, padded: bool) -> torch.Tensor:
        new = tokens.shape[1]
        positions = (lengths[:, None] - new + torch.arange(new, device=tokens.device)).clamp(min=0)
        further = {"row_lengths": lengths} if padded else {}
        output = self.model(input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1, **further)
        return _all_columns(output.logits[:, -1], self.vocabulary)


def _can_be_joined(cache: DynamicCache) -> bool:
    """Whether every layer keeps keys and values of its last positions, and nothing that was computed from all of them."""
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)


def _joined(parts: Sequence[Any]) -> Any:
    """One cache with the rows of several, padded on the left where prompts are shorter than the longest; the first of ``parts``."""
    for layers in zip(*(part.layers for part in parts), strict=True):
        layer = layers[0]
        layer.keys = _stacked([each.keys for each in layers])
        layer.values = _stacked([each.values for each in layers])
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = max(each.cumulative_length for each in layers)
    return parts[0]


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """[sum of b, heads, most positions, d] of tensors [b, heads, positions, d], with zeros before the shorter ones."""
    rows, positions = sum(len(tensor) for tensor in tensors), max(tensor.shape[2] for tensor in tensors)
    whole = tensors[0].new_zeros(rows, tensors[0].shape[1], positions, tensors[0].shape[3])
    for tensor, place in zip(tensors, whole.split([len(tensor) for tensor in tensors]), strict=True):
        place[:, :, positions - tensor.shape[2] :] = tensor
    return whole


def _all_columns(logits: torch.Tensor, vocabulary: VocabularyShard) -> torch.Tensor:
    """[b, V] of the true vocabulary from the columns [b, V / ranks] of each tensor-parallel rank."""
    if vocabulary.group is not None:
        ranks = dist.get_world_size(vocabulary.group)
        columns = logits.t().contiguous()
        whole = torch.empty(ranks * columns.shape[0], columns.shape[1], dtype=columns.dtype, device=columns.device)
        dist.all_gather_into_tensor(whole, columns, group=vocabulary.group)
        logits = whole.t()
    return logits[:, : vocabulary.size]


@contextlib.contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
