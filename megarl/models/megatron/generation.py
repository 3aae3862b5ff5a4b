"""Generation with Megatron itself and a key-value cache, in any layout of tensor, pipeline, context and data
parallelism.

Replicas that share experts must run the same collectives, so each of them decodes the rows of all these
replicas and keeps the results of its own rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megarl.checkpoint.collective import gather_objects
from megarl.config.generation import GenerationConfig
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.parcels import Columns
from megarl.models.engine.context import ContextShare
from megarl.models.engine.decoded_rows import DecodedRows
from megarl.models.engine.decoding import Decoder, decode
from megarl.models.engine.graphs import Graphs, graphs_on
from megarl.models.engine.groups import ParallelGroups
from megarl.models.engine.step import evaluation_mode
from megarl.models.megatron.cached_attention import decoding
from megarl.models.megatron.gated_delta import GatedDeltaMixer
from megarl.models.megatron.moe_decoding import fixed_shapes
from megarl.models.megatron.specs import PortableAttention, portable_core
from megarl.patched import patched

if TYPE_CHECKING:
    from megarl.models.megatron.backend import MegatronBackend


@dataclass(frozen=True)
class CoupledGroups(ParallelGroups):
    """Groups of a replica that receives sampled values from the first of the replicas that share experts.

    These replicas all compute the same rows, but in matmuls of different shapes. Rounding differences could
    make two of them sample different tokens, so only the first replica's last pipeline stage decides.
    """

    replicas: dist.ProcessGroup

    def from_last_stage(self, values: torch.Tensor) -> torch.Tensor:
        """Broadcast values from the first replica's last stage, in place; see ``ParallelGroups``."""
        ParallelGroups.from_last_stage(self, values)
        # Broadcast between replicas second: by then every stage of the first replica has its last stage's
        # values.
        dist.broadcast(values, src=dist.get_global_rank(self.replicas, 0), group=self.replicas)
        return values

    def object_from_last_stage(self, value: Any) -> Any:
        """Broadcast an object from the first replica's last stage; see ``ParallelGroups``."""
        box = [ParallelGroups.object_from_last_stage(self, value)]
        dist.broadcast_object_list(box, src=dist.get_global_rank(self.replicas, 0), group=self.replicas)
        return box[0]


def decode_together(
    decode_rows: Callable[[ParallelGroups, Columns], BatchedDataDict[Any]],
    data: Columns,
    groups: ParallelGroups,
    replicas: dist.ProcessGroup,
) -> BatchedDataDict[Any]:
    """Run ``decode_rows`` on the rows of all replicas that share experts, and return the results of this
    replica's rows. Collective over these replicas.

    Args:
        decode_rows: decodes rows with the given groups.
        data: this replica's rows; may be empty.
        groups: this replica's groups.
        replicas: group of the replicas that share experts.
    """
    # Gather rows as objects: their numbers and widths differ between replicas, and prompts are small.
    parts = gather_objects(dict(data), replicas)
    counts = [part["input_ids"].shape[0] for part in parts]
    coupled = CoupledGroups(
        **{field.name: getattr(groups, field.name) for field in dataclasses.fields(groups)}, replicas=replicas
    )
    # If no replica has rows, keep one part for its columns.
    output = decode_rows(coupled, _joined(list(itertools.compress(parts, counts)) or parts[:1]))
    first = sum(counts[: dist.get_rank(replicas)])
    mine = {key: value[first : first + counts[dist.get_rank(replicas)]] for key, value in output.items()}
    # Trim the padding to this replica's longest row; rows of other replicas may be longer.
    width = int(mine["unpadded_sequence_lengths"].max()) if len(mine["unpadded_sequence_lengths"]) else 0
    return BatchedDataDict(
        {key: value[:, :width] if value.ndim > 1 else value for key, value in mine.items()}
    )


def _joined(parts: list[Columns]) -> Columns:
    """Concatenate the rows of several batches, right-padded with zeros to one width."""
    width = max(part["input_ids"].shape[1] for part in parts)

    def join(key: str) -> Any:
        values = [part[key] for part in parts]
        if not isinstance(values[0], torch.Tensor):
            return list(itertools.chain.from_iterable(values))
        return torch.cat(
            [F.pad(value, (0, width - value.shape[1])) if value.ndim > 1 else value for value in values]
        )

    return {key: join(key) for key in parts[0]}


def generate(
    backend: MegatronBackend,
    data: Columns,
    config: GenerationConfig,
    tokenizer: Any,
    *,
    greedy: bool,
) -> BatchedDataDict[Any]:
    """Continue every prompt with sampled (or greedy) tokens; see ``decode``."""
    # Gather parameters now, because the hooks that gather them run only in training passes.
    backend.sync_parameters()
    graphs = graphs_on(backend.runtime.device)

    # Use one cache for all batches of the call, because recorded CUDA graphs contain its addresses.
    decoded = DecodedRows(graphs, backend.runtime.device)

    def decode_rows(groups: ParallelGroups, rows: Columns) -> BatchedDataDict[Any]:
        decoder = Decoder(
            lambda rows, positions: _CachedForward(backend, decoded, graphs, rows, positions),
            groups,
            backend.runtime.device,
            backend.policy["max_total_sequence_length"],
            backend.policy["generation_batch_size"],
            graphs=graphs,
        )
        return decode(decoder, rows, config, tokenizer, greedy=greedy)

    with (
        evaluation_mode(backend),
        _whole_sequences(backend.stages),
        decoding(backend.stages, decoded, portable_core),
        fixed_shapes(backend.stages, backend.groups, backend.experts, decoded),
    ):
        if backend.experts.replicas is None:
            return decode_rows(backend.groups, data)
        return decode_together(decode_rows, data, backend.groups, backend.experts.replicas)


class _CachedForward:
    """Forward pass with a key-value cache through all model chunks of all pipeline stages; see
    ``Forward``."""

    def __init__(
        self, backend: MegatronBackend, decoded: DecodedRows, graphs: Graphs, rows: int, positions: int
    ) -> None:
        self.backend = backend
        self.decoded = decoded
        self.graphs = graphs
        # Megatron requires such a context for cached decoding, although our cache replaces Megatron's.
        self.context = StaticInferenceContext(rows, positions)
        decoded.reserve(positions, rows)

    def read(
        self, tokens: torch.Tensor, lengths: torch.Tensor, prompt_of: torch.Tensor, end: int
    ) -> torch.Tensor | None:
        """Process prompts. Return the logits of each row on the last pipeline stage, None on the others; see
        ``Forward``."""
        self.decoded.read(lengths, tokens.shape[1], prompt_of, end)
        logits = self._through_stages(tokens.shape, lambda chunk, hidden: self._chunk(chunk, tokens, hidden))
        # Rows with the same prompt share its logits; each row samples with its own random numbers.
        return None if logits is None else logits[prompt_of]

    def step(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor | None:
        """Process one token per row. Return the logits on the last pipeline stage, None on the others; see
        ``Forward``."""
        positions = self.decoded.advance()

        def run(chunk: int, hidden: torch.Tensor | None) -> torch.Tensor:
            def forward(lengths: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
                self.decoded.step(lengths, positions)
                return (
                    self._chunk(chunk, given[:, None], None)
                    if hidden is None
                    else self._chunk(chunk, None, given)
                )

            # The graph key includes the number of cached positions read, because a recorded graph always
            # reads that number.
            return self.graphs.run((chunk, positions), forward, lengths, tokens if hidden is None else hidden)

        return self._through_stages((self.decoded.count, 1), run)

    def keep(self, rows: torch.Tensor) -> None:
        """Keep only the given rows in the cache; see ``Forward``."""
        self.decoded.keep(rows)

    def _chunk(self, chunk: int, tokens: torch.Tensor | None, hidden: torch.Tensor | None) -> torch.Tensor:
        """Run one model chunk. Return hidden states [n, b, H] or, from the model's last chunk, logits [b, V]
        of the last position.

        The model's first chunk takes ``tokens`` [b, n]; all others take ``hidden``.
        """
        stage = self.backend.stages[chunk]
        if hidden is not None:
            # Megatron-Core's schedules also use set_input_tensor, because forward has no argument for hidden
            # states.
            stage.set_input_tensor(hidden)
        output: torch.Tensor = stage(
            tokens, None, None, inference_context=self.context, runtime_gather_output=True
        )
        # Drop the padding columns of the vocabulary, which must never be sampled.
        return output[:, -1, : self.backend.vocabulary.size] if self._is_last(chunk) else output

    def _is_last(self, chunk: int) -> bool:
        return self.backend.groups.is_last_stage and chunk == len(self.backend.stages) - 1

    def _through_stages(
        self, shape: Sequence[int], run: Callable[[int, torch.Tensor | None], torch.Tensor]
    ) -> torch.Tensor | None:
        """Run this stage's chunks in their turn. Return the output of the model's last chunk; None on ranks
        that do not have it.

        Args:
            shape: [b, n] of the tokens.
            run: runs one chunk, given its index and its input, hidden states [n, b, H]; the input is None for
                the model's first chunk.
        """
        output = None
        for chunk, stage in enumerate(self.backend.stages):
            is_first = self.backend.groups.is_first_stage and chunk == 0
            output = run(chunk, None if is_first else self._receive(stage.config, shape))
            if not self._is_last(chunk):
                self._send(output)
                output = None
        return output

    def _receive(self, config: Any, shape: Sequence[int]) -> torch.Tensor:
        """Receive hidden states [n, b, hidden] from the previous stage. The first stage receives its later
        chunks' input from the last stage."""
        groups = self.backend.groups
        rows, positions = shape
        hidden = torch.empty(
            positions,
            rows,
            config.hidden_size,
            dtype=config.pipeline_dtype,
            device=self.backend.runtime.device,
        )
        before = (groups.pipeline_rank - 1) % groups.pipeline_size
        # Block here: in a decoding step a stage has nothing else to do.
        dist.recv(hidden, src=dist.get_global_rank(groups.pipeline, before), group=groups.pipeline)
        return hidden

    def _send(self, hidden: torch.Tensor) -> None:
        groups = self.backend.groups
        after = (groups.pipeline_rank + 1) % groups.pipeline_size
        dist.send(
            hidden.contiguous(), dst=dist.get_global_rank(groups.pipeline, after), group=groups.pipeline
        )


@contextlib.contextmanager
def _whole_sequences(stages: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Disable sequence and context parallelism within the context, because a decoding step's single position
    cannot be split over ranks.

    They only change where activations are stored, so the weights stay valid. All context-parallel ranks then
    compute the same values.
    """
    alone = ContextShare()
    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        # Skip equal values: modules share a config, and each of its attributes must be saved and restored
        # only once.
        if hasattr(owner, name) and getattr(owner, name) != value:
            replaced.append((owner, name, value))

    for module in torch.nn.ModuleList(stages).modules():
        replace(module, "sequence_parallel", False)
        replace(module, "reduce_scatter_embeddings", False)
        if isinstance(module, PortableAttention | GatedDeltaMixer):
            replace(module, "context", alone)
        if isinstance(module, RotaryEmbedding):
            # With a group, the embedding would return only the angles of this rank's part of the sequence.
            replace(module, "cp_group", None)
        config = getattr(module, "config", None)
        replace(config, "sequence_parallel", False)
        replace(config, "context_parallel_size", 1)
    with patched(*replaced):
        yield
