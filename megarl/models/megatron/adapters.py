"""Low-rank adapters for Megatron-Core's parallel linear layers, under tensor, sequence, pipeline, context and
data parallelism.

A layer in which Megatron fuses several matrices (query, key and value; gate and up) has one pair of factors
per matrix, as in PEFT. One factor is sharded like the layer; the other is replicated on every tensor-parallel
rank:

    column-parallel   h = s A x, full on every rank    B split by rows      gradient of A: from h of all ranks
    row-parallel      h = s sum over ranks of A x      A split by columns   gradient of B: from its own output

Under sequence parallelism a rank computes the replicated factor's gradient for its own part of the sequence
only. The factor is marked ``sequence_parallel``, so Megatron-Core sums its gradients over the ranks as it
does for norms. It has no ``tensor_model_parallel`` mark, so it counts once in the gradient norm. Data
parallelism, the optimizer and checkpoints see only the factors, because nothing else requires gradients.

An expert that is sharded over ranks gets all tokens on each of them, and the ranks' outputs are summed after
the expert layer. Each rank then has only a part of the replicated factor's gradient. These parts are summed,
and only the first rank counts the result in the norm.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn

from converters.adapters.megatron_adapter import PARTS, linears
from converters.foreign.settings import RUN_CONFIG_FILE
from converters.mapping.layouts import ShardLayout, shard_layout
from converters.mapping.rule import Kind, Rule, is_expert
from converters.mapping.rules import all_rules, hf_tensors, rule_for
from converters.model_config.architecture import Architecture
from megarl.checkpoint.collective import gather_objects
from megarl.config.adapters import CUT_KINDS
from megarl.errors import ConfigError, Violation
from megarl.models.engine.adapters import (
    KEY,
    SAVED_SCORE,
    AdapterConfig,
    AdapterSettings,
    AdapterSwitch,
    FirstFactors,
    drop,
    factor_name,
    is_embedding,
    merged,
    refuse_dropped_outputs,
    refuse_other_base,
    refuse_tied,
)
from megarl.models.engine.groups import ParallelGroups, summed_gradients
from megarl.models.engine.stacked_adapters import Stack, StackedFactors, stacks_of
from megarl.models.megatron.hf_state import ADAPTER, global_names
from megarl.models.megatron.parallel import ExpertGroups
from megarl.models.megatron.vocabulary_adapters import AdaptedEmbedding, EmbeddingAdapter

logger = logging.getLogger(__name__)
# PEFT (0.21) renames these to stacks of experts in some mixture-of-experts models, wherever they occur.
_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Pair:
    """A matrix A and the matrices B that it is multiplied by.

    Attributes:
        module: Hugging Face name of A's layer; in a stack of experts, the name of one expert in it.
        rows: number of rows of B, over all parts.
        parts: for each part of the mapping rule that has an adapter (by index), its rows in B.
    """

    module: str
    rows: int
    parts: Mapping[int, slice]


class Adapter(nn.Module):
    """The adapters of all matrices in one parallel linear layer.

    Its parameters are this tensor-parallel rank's shards, such as ``lora_A_q_proj`` [r, in] and
    ``lora_B_q_proj`` [rows of q_proj, r].

    Args:
        linear: the layer.
        rule: mapping rule of the layer's weight.
        layout: layout of this rank's shard of the weight.
        pairs: the factor pairs; the matrices of an expert in a stack share one A.
        settings: adapter settings of the model.
        switch: on-off switch of all adapters of the model.
    """

    def __init__(
        self,
        linear: Any,
        rule: Rule,
        layout: ShardLayout,
        pairs: Sequence[Pair],
        settings: AdapterSettings,
        switch: AdapterSwitch,
    ) -> None:
        super().__init__()
        self._settings, self.switch = settings, switch
        self.is_row, self._of_expert = isinstance(linear, RowParallelLinear), linear.is_expert
        self.sequence_parallel, self._group = (
            # Experts get their tokens from the dispatcher, so there is no sequence to gather or scatter.
            linear.sequence_parallel and not self._of_expert,
            linear.tp_group,
        )
        self._pairs, self._rule = pairs, rule
        self._names: dict[int, str] = {}
        for pair in pairs:
            for part in pair.parts:
                self._names[part] = rule.parts[part].name.removesuffix(".weight")
        self._starts: dict[int, int] = {}
        rows = {}
        if rule.kind is Kind.VOCAB:
            # Include padding rows of the vocabulary, because a rank may hold only such rows.
            self._starts, rows = {0: linear.tp_group.rank() * layout.shape[0]}, {0: layout.shape[0]}
        else:
            # Keep the first row of each part that this rank holds, by which factors are filled from full
            # ones.
            for part in self._names:
                spans = [span for span in layout.spans if span.part == part]
                self._starts[part] = min(span.start for span in spans)
                rows[part] = sum(span.length for span in spans) if layout.axis == 0 else layout.shape[0]
        for pair in pairs:
            self._register(linear.weight, _parameter("A", pair.module), (settings.rank, layout.shape[1]))
            for part in pair.parts:
                self._register(linear.weight, _parameter("B", self._names[part]), (rows[part], settings.rank))
        order = (
            _order_of(layout, self._starts, rows) if len(rule.parts) > 1 else torch.arange(layout.shape[0])
        )
        # Register no buffer for the identity order: index_select would copy the weights in every pass.
        is_needed = not torch.equal(order, torch.arange(len(order)))
        # Not persistent, because it depends on the layout and a checkpoint must fit any layout.
        self.register_buffer(
            "_order", order.to(linear.weight.device) if is_needed else None, persistent=False
        )

    def _register(self, weight: torch.Tensor, name: str, shape: tuple[int, int]) -> None:
        # Zeros for now; fill() sets values that do not depend on the layout.
        parameter: Any = nn.Parameter(weight.new_zeros(shape))
        is_cut = ("_A_" in name) == self.is_row
        # Megatron-Core counts a parameter in the norm on every rank where it is marked as sharded.
        counts = self._of_expert and self._group.rank() == 0
        set_tensor_model_parallel_attributes(
            parameter, is_parallel=is_cut or counts, dim=int("_A_" in name), stride=1
        )
        parameter.sequence_parallel = self.sequence_parallel and not is_cut
        # Reduce gradients of experts, as in `build`, over the ranks that hold the same experts.
        parameter.allreduce = not self._of_expert
        if self._of_expert and not is_cut and not counts:
            # Mark as shared, so that the norm skips it: otherwise Megatron-Core would decide by this rank's
            # position in the tensor-parallel group of the rest of the model.
            parameter.shared = True
        self.register_parameter(name, parameter)

    @property
    def rank(self) -> int:
        """Total number of rows of all matrices A of the layer, R."""
        return self._settings.rank * len(self._pairs)

    @torch.no_grad()
    def fill(self, first: FirstFactors) -> None:
        """Set the factors to their initial values."""
        group = self._group
        for pair in self._pairs:
            whole = first.read(pair.module, "A", self._rule.parts[0].shape[1])
            if self.is_row:
                whole = whole.chunk(group.size(), dim=1)[group.rank()]
            self.get_parameter(_parameter("A", pair.module)).copy_(whole)
            whole = first.read(pair.module, "B", pair.rows)
            for part, rows in pair.parts.items():
                own = self.get_parameter(_parameter("B", self._names[part]))
                start = 0 if self.is_row else self._starts[part]
                # Padding rows of the vocabulary are beyond the full factor and stay zero.
                values = whole[rows][start : start + own.shape[0]]
                own[: len(values)].copy_(values)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the term that is added to the layer's output [s, B, out], for the layer's input [s, B, in].
        Both are sharded like the layer's own."""
        return self.added(
            inputs, [self], lambda values, weights: _product_of_rows(F.linear, values, weights[0])
        )

    def added(
        self,
        inputs: torch.Tensor,
        adapters: Sequence[Adapter],
        product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return the terms that adapters add to the outputs of their layers.

        Args:
            inputs: inputs of the layers, [..., in].
            adapters: adapters of layers of one shape: this adapter, or those of all experts of this rank.
            product: multiplies values [..., k] by weights [adapters, n, k].
        """
        share, settings = self._settings.dropout, self._settings
        if settings.drops_input:
            inputs = drop(inputs, share, self)
        # Scale here, where a token has only r values instead of the layer's width.
        hidden = product(inputs, self._down_of(adapters)) * settings.scaling
        # An expert skips the reduction: its output is summed over the ranks after the expert layer, and this
        # term with it.
        output = product(hidden if self._of_expert else self._between(hidden), self._up_of(adapters))
        return output if settings.drops_input else drop(output, share, self)

    def inner(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the scaled matmul of the input with A; for a column-parallel layer the result is full on
        every rank."""
        dropped = drop(inputs, self._settings.dropout, self)
        hidden = _product_of_rows(F.linear, dropped, self._down_of([self])[0])
        return self._between(hidden * self._settings.scaling)

    def up(self) -> torch.Tensor:
        """Return this rank's B, [rows of the layer, R]."""
        return self._up_of([self])[0]

    def _between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Convert the output of A to the layout that B needs: reduce, reduce-scatter, all-gather or copy
        it."""
        group = self._group
        if self.is_row and self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(hidden, group=group)
        if self.is_row:
            return reduce_from_tensor_model_parallel_region(hidden, group=group)
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)
        return summed_gradients(hidden, group)

    def _down_of(self, adapters: Sequence[Adapter]) -> torch.Tensor:
        """Return the matrices A of each adapter, [adapters, R, in]."""
        names = [_parameter("A", pair.module) for pair in self._pairs]
        return torch.cat(
            [_stacked(adapters, name, summed_over=None if self.is_row else self._of_ranks) for name in names],
            dim=1,
        )

    def _up_of(self, adapters: Sequence[Adapter]) -> torch.Tensor:
        """Return the matrices B of each adapter, [adapters, out, R], rows in the order of the layer. Each
        pair uses its own columns of R."""
        rank, ups = self._settings.rank, []
        for place, pair in enumerate(self._pairs):
            around = (place * rank, self.rank - (place + 1) * rank)
            for part in pair.parts:
                name = _parameter("B", self._names[part])
                ups.append(
                    # Zero-pad each B to all R columns, so that one matmul serves all matrices of a fused
                    # layer.
                    F.pad(
                        _stacked(adapters, name, summed_over=self._of_ranks if self.is_row else None), around
                    )
                )
        order, rows = self._buffers["_order"], torch.cat(ups, dim=1)
        # The appended zero row stands for rows of matrices without an adapter.
        return rows if order is None else F.pad(rows, (0, 0, 0, 1)).index_select(1, order)

    @property
    def _of_ranks(self) -> Any:
        """Process group over which an expert is sharded; None for other layers, or for a group of one
        rank."""
        return self._group if self._of_expert and self._group.size() > 1 else None

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of the layer's weight with the adapters merged into it."""
        return merged(
            weight.detach(), self._up_of([self])[0], self._down_of([self])[0], self._settings.scaling
        )

    def factors(self) -> Iterator[tuple[str, str, torch.Tensor, int | None]]:
        """Yield each factor as (module name, "A" or "B", this rank's shard, sharded dimension or None if
        replicated)."""
        for pair in self._pairs:
            modules = [("A", pair.module), *(("B", self._names[part]) for part in pair.parts)]
            for letter, module in modules:
                cut = int(letter == "A") if (letter == "A") == self.is_row else None
                yield module, letter, self.get_parameter(_parameter(letter, module)).detach(), cut

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Return the factors as Megatron-Core's modules do, under the checkpoint keys of Megatron-Bridge's
        CanonicalLoRA."""
        state: ShardedStateDict = {}
        for pair in self._pairs:
            alone = next(iter(pair.parts)) if len(pair.parts) == 1 else None
            stored = [("A", pair.module, f"{self._stored(alone)}linear_in.weight")]
            stored += [
                ("B", self._names[part], f"{self._stored(part)}linear_out.weight") for part in pair.parts
            ]
            for letter, module, key in stored:
                axis = {key: int(letter == "A")} if (letter == "A") == self.is_row else {}
                own = _parameter(letter, module)
                sharded = make_sharded_tensors_for_checkpoint(
                    {key: self.get_parameter(own)},
                    prefix,
                    axis,
                    sharded_offsets,
                    tp_group=self._group,
                    dp_cp_group=metadata["dp_cp_group"],
                )
                # Allow it, because layouts pad the vocabulary to different sizes.
                sharded[f"{prefix}{key}"].allow_shape_mismatch = self._rule.kind is Kind.VOCAB
                state[f"{prefix}{own}"] = sharded[f"{prefix}{key}"]
        return state

    def _stored(self, part: int | None) -> str:
        """Return CanonicalLoRA's key prefix for one matrix of a fused layer; empty for the layer as a whole
        or a layer that is not fused."""
        return f"{PARTS[self._rule.kind][part]}." if part is not None and self._rule.kind in PARTS else ""


def _parameter(letter: str, module: str) -> str:
    return f"lora_{letter}_{module.rpartition('.')[2]}"


def _stacked(adapters: Sequence[Adapter], name: str, summed_over: Any) -> torch.Tensor:
    """Stack the adapters' parameters called ``name`` into [adapters, ...]; the gradient is summed over the
    group ``summed_over`` if given."""
    parameters = (
        torch.stack([adapter.get_parameter(name) for adapter in adapters])
        if len(adapters) > 1
        else adapters[0].get_parameter(name)[None]
    )
    return parameters if summed_over is None else summed_gradients(parameters, summed_over)


def _order_of(layout: ShardLayout, starts: Mapping[int, int], rows: Mapping[int, int]) -> torch.Tensor:
    """Return, for each row of a shard, its index among the concatenated rows of ``parts``. Rows of other
    parts get the index after the last."""
    total, firsts, position = sum(rows.values()), {}, 0
    for part, start in starts.items():
        firsts[part], position = position - start, position + rows[part]
    order = torch.full((layout.shape[0],), total)
    position = 0
    for span in layout.spans:
        if span.part in firsts:
            first = firsts[span.part] + span.start
            order[position : position + span.length] = torch.arange(first, first + span.length)
        position += span.length
    return order


class _Adapted:
    """Mixin for a parallel linear layer with an adapter."""

    adapter: Adapter
    tp_group: dist.ProcessGroup

    def forward(
        self, input_: torch.Tensor, *arguments: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(input_, *arguments, **options)  # type: ignore[misc]
        if self.adapter.switch.is_on:
            added = self.adapter(input_)
            if added.shape[-1] < output.shape[-1]:
                # Generation lets the output layer gather its output to the full vocabulary.
                added = gather_from_tensor_model_parallel_region(added, group=self.tp_group)
            output = output + added
        return output, bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> ShardedStateDict:
        # Include the frozen weight, which Megatron-Core expects from an output layer; the checkpoint filters
        # it out.
        own: ShardedStateDict = super().sharded_state_dict(  # type: ignore[misc]
            prefix, sharded_offsets, metadata
        )
        return own | self.adapter.sharded_state_dict(f"{prefix}{ADAPTER}.", sharded_offsets, metadata)


class AdaptedColumnLinear(_Adapted, ColumnParallelLinear):
    """Megatron-Core's column-parallel layer with an adapter."""


class AdaptedRowLinear(_Adapted, RowParallelLinear):
    """Megatron-Core's row-parallel layer with an adapter."""


class Adapters:
    """All adapters of a model. This rank holds those of its pipeline stage.

    Args:
        settings: adapter settings from the configuration.
        architecture: the model.
        groups, experts: the process groups.
        seed: seed of the initial matrices A.

    Raises:
        ConfigError: no layer is selected, or one that cannot have an adapter; or the run continues from an
            adapter with other settings.
    """

    def __init__(
        self,
        settings: AdapterSettings,
        architecture: Architecture,
        groups: ParallelGroups,
        experts: ExpertGroups,
        seed: int,
    ) -> None:
        self.settings, self.switch = settings, AdapterSwitch()
        self._architecture, self._groups, self._experts = architecture, groups, experts
        layers = _modules(linears(architecture, of_experts=False))
        of_experts = _modules(linears(architecture, of_experts=True))
        stacks = stacks_of(architecture)
        chosen = settings.chosen_stacks(stacks)
        self._in_stack: dict[str, Stack] = {}
        for stack in chosen:
            self._in_stack.update(dict.fromkeys(stack.places, stack))
        apart = [module for module in of_experts if module not in self._in_stack]
        matrices = {
            tensor.name.removesuffix(".weight")
            for tensor in hf_tensors(architecture)
            if len(tensor.shape) == 2
        }
        vocabulary = _vocabulary(architecture)
        refuse_tied(architecture.tied_embeddings, settings)
        self._rows = dict.fromkeys(vocabulary, architecture.vocab_size)
        # These matrices, such as routers, can have no adapter, so that a pattern that names one is refused.
        others = sorted(matrices - {*layers, *of_experts, *vocabulary})
        self.adapted = settings.chosen(layers, others, [*apart, *vocabulary], chosen)
        _refuse_some_experts(self.adapted, apart, settings)
        refuse_dropped_outputs(self.adapted, vocabulary, settings)
        self._matrices, self._stacks = [*layers, *apart, *vocabulary, *others], chosen
        self._other_stacks = [stack.name for stack in stacks if stack not in chosen]
        self._first = FirstFactors(settings, self.adapted, seed, chosen)
        self._by_weight: dict[str, Adapter | EmbeddingAdapter] = {}
        self._score: torch.Tensor | None = None

    def put_beside(self, chunks: Sequence[LanguageModule]) -> None:
        """Attach the adapters to their layers and freeze all other parameters. Collective over the world.

        Raises:
            ConfigError: a model chunk would have nothing to train.
        """
        chosen, idle, other = set(self.adapted), False, ""
        for chunk in chunks:
            # Freeze everything first; only the adapters, which are added afterwards, are then trainable.
            chunk.requires_grad_(False)
            _multiply_by_rows(chunk)
            found = 0
            # global_names lists the names before the loop adds those of the adapters.
            for local, name in global_names(chunk, self._experts).items():
                if not name.endswith(".weight"):
                    continue
                rule = rule_for(name, self._architecture)
                pairs = self._pairs_of(rule, chosen)
                if pairs:
                    adapter = self._beside(
                        chunk.get_submodule(local.removesuffix(".weight")), rule, pairs, chunk.vocab_size
                    )
                    self._by_weight[rule.megatron_name] = adapter
                    other = other or self._of_another_base(rule, chunk.get_parameter(local))
                    found += 1
            idle = idle or not found
            if self.settings.scores and chunk.post_process:
                self._score = chunk.output_layer.weight.requires_grad_()
                stored = self._first.score()
                if stored is not None:
                    self._score.data.copy_(stored)
                found += 1
            if chunk.pre_process:
                chunk.embedding.register_forward_hook(_begin_gradients)
        # Free the full factors of an adapter to continue from, which may be large.
        self._first.forget()
        # Raise after the loop: one rank raising alone would leave the others waiting in the next collective.
        self._refuse_anywhere(idle, other)

    def _pairs_of(self, rule: Rule, chosen: Collection[str]) -> list[Pair]:
        pairs: dict[str, Pair] = {}
        for number, part in enumerate(rule.parts):
            module = part.name.removesuffix(".weight")
            stack = self._in_stack.get(module)
            if stack is not None:
                expert, rows = stack.places[module]
                name = stack.of_expert(expert)
                before = pairs[name].parts if name in pairs else {}
                pairs[name] = Pair(name, stack.rows, {**before, number: rows})
            elif module in chosen:
                pairs[module] = Pair(module, part.shape[0], {number: slice(None)})
        return list(pairs.values())

    def _beside(
        self, linear: Any, rule: Rule, pairs: Sequence[Pair], padded_vocab: int
    ) -> Adapter | EmbeddingAdapter:
        adapter: Adapter | EmbeddingAdapter
        # Change the layer's class instead of wrapping it, so that its names, type and attributes stay what
        # Megatron-Core expects.
        if isinstance(linear, VocabParallelEmbedding):
            adapter = EmbeddingAdapter(linear, rule, self.settings, self.switch)
            linear.__class__ = AdaptedEmbedding
        else:
            cut = self._experts if linear.is_expert else self._groups
            layout = shard_layout(
                rule, self._architecture.head_dim, cut.tensor_rank, cut.tensor_size, padded_vocab
            )
            adapter = Adapter(linear, rule, layout, pairs, self.settings, self.switch)
            linear.__class__ = (
                AdaptedRowLinear if isinstance(linear, RowParallelLinear) else AdaptedColumnLinear
            )
        adapter.fill(self._first)
        linear.add_module(ADAPTER, adapter)
        return adapter

    def _of_another_base(self, rule: Rule, weight: torch.Tensor) -> str:
        """Return the module name of an embedding or output layer that differs from the base weights of the
        adapter to continue from; empty if it does not differ."""
        module = rule.parts[0].name.removesuffix(".weight")
        stored = self._first.base_of(module) if rule.kind is Kind.VOCAB else None
        if stored is None:
            return ""
        own = stored[self._groups.tensor_rank * len(weight) :][: len(weight)].to(weight)
        # Compare bitwise: the stored rows are copies of the base weights that the adapter was trained on.
        return "" if torch.equal(own, weight[: len(own)]) else module

    def _refuse_anywhere(self, idle: bool, other: str) -> None:
        refuse_other_base(other, self.settings)
        ranks = [rank for rank, nothing in enumerate(gather_objects(idle)) if nothing]
        if ranks:
            bound = (
                f"a pipeline stage, or a chunk of one, has no adapter (rank {ranks[0]}), so none "
                "of its layers is trained"
            )
            fix = "choose layers of every stage, or fewer stages"
            raise ConfigError([Violation(f"{KEY}.target_modules", list(self.settings.targets), bound, fix)])

    def exported(self, held: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return this rank's shards for refits and exports. Adapters are merged into a shard when it is
        read.

        Args:
            held: the shards without adapters, by the names of the mapping rules.
        """
        return _Exported(held, self._by_weight if self.switch.is_on else {})

    def as_peft(self) -> AdapterConfig:
        """Return PEFT's config of the adapters."""
        return self.settings.as_peft(
            self.adapted, self._matrices, [stack.name for stack in self._stacks], self._other_stacks
        )

    def gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield PEFT names and full factors, one pipeline stage after another. Collective over the world."""
        if (
            self._architecture.mixture is not None
            and dist.get_rank() == 0
            and any(name.endswith(_OF_EXPERTS) for name in self.adapted)
        ):
            logger.warning(
                "PEFT may mistake the adapters of MLPs next to experts for those of experts: load "
                "the merged model instead"
            )
        for module, letter, factor in StackedFactors(self._stacks, self.settings.rank).joined(self._whole()):
            if letter == ("A" if is_embedding(module) else "B"):
                # Drop the padding rows of the vocabulary.
                factor = factor[: self._rows.get(module)]
            yield factor_name(module, letter), factor.T if letter == "A" and is_embedding(module) else factor
        if self.settings.scores:
            yield SAVED_SCORE, self._whole_score()

    def _whole_score(self) -> torch.Tensor:
        """Return the score layer's weight, broadcast from the last pipeline stage."""
        groups, adapter = self._groups, next(iter(self._by_weight.values()))
        if self._score is not None:
            score = self._score.detach().clone()
        else:
            score = next(adapter.parameters()).new_empty(1, self._architecture.hidden_size)
        if groups.pipeline_size > 1:
            dist.broadcast(
                score,
                src=dist.get_global_rank(groups.pipeline, groups.pipeline_size - 1),
                group=groups.pipeline,
            )
        return score

    def _whole(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (module name, letter, full factor); factors of experts come one expert after another."""
        own, listing = [], []
        for name, adapter in self._by_weight.items():
            for module, letter, tensor, cut in adapter.factors():
                own.append(tensor)
                listing.append((is_expert(name), module, letter, tuple(tensor.shape), cut))
        # Gather over expert-parallel ranks and then over stages, so that all know every name and shape before
        # tensors are sent.
        stages = gather_objects(gather_objects(listing, self._experts.model), self._groups.pipeline)
        for stage, listings in enumerate(stages):
            for place, (of_experts, _, letter, shape, cut) in enumerate(listings[0]):
                modules = [each[place][1] for each in (listings if of_experts else listings[:1])]
                group = self._experts.tensor if of_experts else self._groups.tensor
                sizes = [len(modules), *shape]
                if cut is not None:
                    sizes[1 + cut] *= dist.get_world_size(group)
                # Every rank allocates the tensor, because the other stages receive the broadcast below.
                whole = own[0].new_empty(sizes)
                if stage == self._groups.pipeline_rank:
                    part = _joined(own[place], cut, group)
                    whole.copy_(_together(part, self._experts.model) if of_experts else part)
                if self._groups.pipeline_size > 1:
                    dist.broadcast(
                        whole,
                        src=dist.get_global_rank(self._groups.pipeline, stage),
                        group=self._groups.pipeline,
                    )
                for module, factor in zip(modules, whole, strict=True):
                    yield module, letter, factor

    def write_run_config(self, directory: Path) -> None:
        """Write the adapters' rank and alpha in Megatron-Bridge's format, for ``megarl convert adapter``."""
        peft = {
            "_target_": "megatron.bridge.peft.canonical_lora.CanonicalLoRA",
            "dim": self.settings.rank,
            "alpha": self.settings.scaling * self.settings.rank,
            "dropout": self.settings.dropout,
        }
        said = {"model": {"hf_model_id": self.settings.base, "tensor_model_parallel_size": 1}, "peft": peft}
        (directory / RUN_CONFIG_FILE).write_text(yaml.safe_dump(said), encoding="utf-8")


def _vocabulary(architecture: Architecture) -> list[str]:
    """Return the names of the embedding and the output layer; empty if they are tied."""
    if architecture.tied_embeddings:
        return []
    return [
        rule.parts[0].name.removesuffix(".weight")
        for rule in all_rules(architecture)
        if rule.kind is Kind.VOCAB and rule.emits
    ]


def _multiply_by_rows(chunk: nn.Module) -> None:
    """Make a chunk's linear layers flatten their inputs to matrices before the matmul.

    With a frozen weight, Megatron-Core's linear layers pass torch a three-dimensional input. If its first two
    dimensions cannot be viewed as one (the requested rows of an output layer, a transposed batch of one row),
    torch multiplies token by token, and reads the weight once per token, in the backward pass too. A trained
    weight takes another path and is not affected.
    """
    for layer in chunk.modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            layer._forward_impl = partial(_product_of_rows, layer._forward_impl)


def _product_of_rows(
    product: Callable[..., torch.Tensor], input: torch.Tensor, *arguments: Any, **options: Any
) -> torch.Tensor:
    output = product(input.flatten(0, -2), *arguments, **options)
    # Keep the outer dimension flexible (-1): sequence parallelism gathers along the first dimension inside
    # the layer.
    return output.view(-1, *input.shape[1:-1], output.shape[-1])


class _Exported(Mapping[str, torch.Tensor]):
    """Shards by name, in which some have adapters merged on access."""

    def __init__(
        self, held: Mapping[str, torch.Tensor], adapters: Mapping[str, Adapter | EmbeddingAdapter]
    ) -> None:
        self._held, self._adapters = held, adapters

    def __getitem__(self, name: str) -> torch.Tensor:
        # Merge on access, so that only one bucket of merged weights exists at a time.
        adapter = self._adapters.get(name)
        return self._held[name] if adapter is None else adapter.merged(self._held[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def _joined(part: torch.Tensor, cut: int | None, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the full factor, gathered over ``group`` if it is sharded."""
    return part if cut is None else torch.cat(list(_together(part, group)), dim=cut)


def _together(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather the tensors of all ranks of a group, stacked in a new first dimension."""
    whole = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
    # Gather into views of one tensor to avoid another copy.
    dist.all_gather(list(whole), tensor.contiguous(), group=group)
    return whole


def _modules(rules: Iterable[Rule]) -> list[str]:
    """Return the names of the layers that may have an adapter."""
    return [
        part.name.removesuffix(".weight") for rule in rules if rule.kind in CUT_KINDS for part in rule.parts
    ]


def _refuse_some_experts(chosen: Collection[str], experts: Sequence[str], settings: AdapterSettings) -> None:
    """Require adapters on all experts of a layer or on none, because ranks that share experts would otherwise
    train different parameters.

    Raises:
        ConfigError: only some experts of a layer would have an adapter.
    """
    of_layer: dict[str, list[str]] = {}
    for module in experts:
        of_layer.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.*.", module), []).append(module)
    adapted = set(chosen)
    for name, modules in of_layer.items():
        found = [module for module in modules if module in adapted]
        if 0 < len(found) < len(modules):
            bound = f"it gives {found[0]} an adapter, but not all of {name}"
            raise ConfigError(
                [
                    Violation(
                        f"{KEY}.target_modules",
                        list(settings.targets),
                        bound,
                        f"write {name}, for all experts",
                    )
                ]
            )


def _begin_gradients(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Make the embedding's output require a gradient, if gradients are enabled.

    Activation recomputation computes gradients only if a layer's input requires one. The first layer's input
    comes from the frozen embedding, which would not.
    """
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output
