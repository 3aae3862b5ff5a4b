"""Generation with a transformers model, sampling the same tokens as every other backend.

Keys and values are stored in ``DecodedRows``, whose decoding steps have fixed shapes. A model with other
state than keys and values (such as a recurrent state) uses its own cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from megarl.config.generation import GenerationConfig
from megarl.config.policy import PolicyConfig
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.device import DeviceRuntime
from megarl.models.engine.decoded_rows import DecodedRows
from megarl.models.engine.decoding import Decoder, Forward, decode
from megarl.models.engine.graphs import Graphs, graphs_on
from megarl.models.engine.groups import ParallelGroups
from megarl.models.engine.logprobs import VocabularyShard


class Generating(Protocol):
    """The attributes that generation reads from a backend."""

    policy: PolicyConfig
    groups: ParallelGroups
    vocabulary: VocabularyShard
    runtime: DeviceRuntime


def generate(
    model: torch.nn.Module,
    backend: Generating,
    data: BatchedDataDict[Any],
    config: GenerationConfig,
    tokenizer: Any,
    *,
    greedy: bool,
) -> BatchedDataDict[Any]:
    """Continue every prompt; see ``decode``.

    Tensor-parallel ranks run in lockstep, data-parallel ranks need not. So the model must need no collective
    over data-parallel ranks: its parameters must be full, or this tensor-parallel rank's shards.

    Args:
        model: a causal language model; its logits have the columns of ``backend.vocabulary``.
        backend: supplies the policy configuration, the device and the process groups.
        data, config, tokenizer, greedy: as for ``decode``.
    """
    # Inspect the cache that transformers would create, because it reflects the kinds of the model's layers.
    simple, device = _keeps_positions_alone(DynamicCache(config=model.config)), backend.runtime.device
    graphs = graphs_on(
        device, None if simple else "the model keeps more than keys and values, in a cache of transformers"
    )
    decoded = DecodedRows(graphs, device)

    def start(rows: int, positions: int) -> Forward:
        if not simple:
            return _OwnCacheForward(model, backend.vocabulary)
        decoded.reserve(positions, rows)
        return _CachedForward(model, backend.vocabulary, decoded, graphs)

    decoder = Decoder(
        start,
        backend.groups,
        device,
        backend.policy["max_total_sequence_length"],
        backend.policy["generation_batch_size"],
        one_pass=not simple,
        graphs=graphs,
    )
    with _evaluating(model), torch.no_grad():
        return decode(decoder, data, config, tokenizer, greedy=greedy)


class _CachedForward:
    """``Forward`` with keys and values in ``DecodedRows``."""

    def __init__(
        self, model: torch.nn.Module, vocabulary: VocabularyShard, decoded: DecodedRows, graphs: Graphs
    ) -> None:
        self.model = model
        self.vocabulary = vocabulary
        self.decoded = decoded
        self.graphs = graphs
        self.cache = _RowsCache(decoded)

    def read(
        self, tokens: torch.Tensor, lengths: torch.Tensor, prompt_of: torch.Tensor, end: int
    ) -> torch.Tensor:
        """Process prompts and return the logits after the last token; see ``Forward``."""
        self.decoded.read(lengths, tokens.shape[1], prompt_of, end)
        return self._forward(tokens)[prompt_of]

    def step(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Process one token per row and return the logits after it; see ``Forward``."""
        positions = self.decoded.advance()

        def forward(lengths: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            self.decoded.step(lengths, positions)
            return self._forward(tokens[:, None])

        # The graph key includes the number of cached positions, because a recorded graph always attends to
        # that number.
        return self.graphs.run(positions, forward, lengths, tokens)

    def keep(self, rows: torch.Tensor) -> None:
        """Keep only the given rows in the cache; see ``Forward``."""
        self.decoded.keep(rows)

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = self.decoded.positions.t()
        return _next_logits(
            self.model, self.vocabulary, tokens, positions, self.cache, decoded_rows=self.decoded
        )


class _RowsCache(DynamicCache):  # type: ignore[misc]
    """Presents ``DecodedRows`` to a transformers model as its cache."""

    def __init__(self, decoded: DecodedRows) -> None:
        super().__init__()
        self._decoded = decoded

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *unused: Any,
        **ignored: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's new keys and values and return all of them, as [b, G, n, d]; see ``Cache``."""
        keys, values = self._decoded.store(
            layer_idx, key_states.permute(2, 0, 1, 3), value_states.permute(2, 0, 1, 3)
        )
        return keys.permute(1, 2, 0, 3), values.permute(1, 2, 0, 3)


class _OwnCacheForward:
    """``Forward`` with the model's own cache. All prompts are processed in one pass."""

    def __init__(self, model: torch.nn.Module, vocabulary: VocabularyShard) -> None:
        self.model = model
        self.vocabulary = vocabulary
        self.cache = DynamicCache(config=model.config)
        self.is_padded = False

    def read(
        self, tokens: torch.Tensor, lengths: torch.Tensor, prompt_of: torch.Tensor, end: int
    ) -> torch.Tensor:
        """Process prompts and return the logits after the last token; see ``Forward``."""
        # The lengths are on the host, so this check does not synchronize. Without padding, attention needs no
        # mask.
        self.is_padded = bool((lengths < end).any())
        logits = self._forward(tokens, lengths.to(tokens.device))
        if len(prompt_of) > len(tokens):
            # transformers' caches cannot share a prompt between rows, so copy its entries for each row once.
            self.cache.batch_select_indices(prompt_of)
        return logits[prompt_of]

    def step(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Process one token per row and return the logits after it; see ``Forward``."""
        return self._forward(tokens[:, None], lengths)

    def keep(self, rows: torch.Tensor) -> None:
        """Keep only the given rows in the cache; see ``Forward``."""
        self.cache.batch_select_indices(rows)

    def _forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        new = tokens.shape[1]
        positions = (lengths[:, None] - new + torch.arange(new, device=tokens.device)).clamp(min=0)
        further = {"row_lengths": lengths} if self.is_padded else {}
        return _next_logits(self.model, self.vocabulary, tokens, positions, self.cache, **further)


def _keeps_positions_alone(cache: DynamicCache) -> bool:
    """Return whether every layer caches only keys and values of its last positions, and no state computed
    from all positions."""
    # Compare exact types, because a subclass may keep more.
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)


def _next_logits(
    model: torch.nn.Module,
    vocabulary: VocabularyShard,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    cache: Any,
    **options: Any,
) -> torch.Tensor:
    """Return the logits [b, V] after tokens [b, n] at positions [b, n]."""
    output = model(
        input_ids=tokens,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        # Logits for the last position only: those of all prompt positions would be the largest tensor.
        logits_to_keep=1,
        **options,
    )
    return _all_columns(output.logits[:, -1], vocabulary)


def _all_columns(logits: torch.Tensor, vocabulary: VocabularyShard) -> torch.Tensor:
    """All-gather the logits [b, V] from each tensor-parallel rank's columns [b, V / ranks], and drop
    vocabulary padding."""
    if vocabulary.group is not None:
        ranks = dist.get_world_size(vocabulary.group)
        # Transpose, because the all-gather concatenates along the first dimension.
        columns = logits.t().contiguous()
        whole = torch.empty(
            ranks * columns.shape[0], columns.shape[1], dtype=columns.dtype, device=columns.device
        )
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
