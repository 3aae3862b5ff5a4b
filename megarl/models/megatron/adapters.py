"""Low-rank adapters beside Megatron-Core's parallel linear layers, under tensor, sequence, pipeline, context
and data parallelism.

A layer that Megatron fuses (query, key and value; gate and up) has one pair of factors for each matrix in it,
as in PEFT. The factor that faces the cut side of the layer is cut with it, and the other one is whole on
every tensor-parallel rank:

    column-parallel   h = s A x, whole on every rank;   B cut by rows       gradient of A: of what all ranks
    make of h row-parallel      h = s sum over ranks of A x;      A cut by columns    gradient of B: of the
    rank's output

Under sequence parallelism a rank finds the gradient of the whole factor for its run of the sequence alone.
Such a factor says so (``sequence_parallel``), and Megatron-Core adds these up over the ranks as it does those
of norms; having no ``tensor_model_parallel`` mark, it counts once in the gradient's norm. Data parallelism,
the optimizer and checkpoints see the factors alone, because nothing else asks for gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn

from converters.adapters.megatron_adapter import linears
from converters.foreign.settings import RUN_CONFIG_FILE
from converters.mapping.layouts import ShardLayout, shard_layout
from converters.mapping.rule import Rule
from converters.mapping.rules import hf_tensors, rule_for
from converters.model_config.architecture import Architecture
from megarl.config.adapters import CUT_KINDS
from megarl.errors import ConfigError, Violation
from megarl.models.engine.adapters import (
    KEY,
    AdapterSettings,
    AdapterSwitch,
    FirstFactors,
    drop,
    factor_name,
    merged,
)
from megarl.models.engine.groups import ParallelGroups
from megarl.models.megatron.hf_state import ADAPTER, global_names
from megarl.models.megatron.parallel import ExpertGroups

logger = logging.getLogger(__name__)
# Names that PEFT (0.21) changes into those of stacks of experts in some mixtures, wherever they stand.
_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")
# What Megatron-Bridge's CanonicalLoRA calls the adapters of a fused layer, whose checkpoints the converters
# read.
_STORED = {
    "q_proj": "adapter_q.",
    "k_proj": "adapter_k.",
    "v_proj": "adapter_v.",
    "gate_proj": "adapter_gate.",
    "up_proj": "adapter_up.",
}


class Adapter(nn.Module):
    """The adapters of the matrices in one parallel linear layer.

    Its parameters are ``lora_A_q_proj`` [r, in] and ``lora_B_q_proj`` [rows of q_proj, r], and so on: of this
    tensor-parallel rank.

    Args:
        linear: the layer.
        rule: of its weight.
        layout: of this rank's shard of the weight.
        parts: numbers of those of the rule's parts that have an adapter.
        settings: of all adapters.
        switch: of all adapters.
    """

    def __init__(
        self,
        linear: Any,
        rule: Rule,
        layout: ShardLayout,
        parts: Sequence[int],
        settings: AdapterSettings,
        switch: AdapterSwitch,
    ) -> None:
        super().__init__()
        self._settings, self.switch = settings, switch
        self.is_row = isinstance(linear, RowParallelLinear)
        self.sequence_parallel, self._group = linear.sequence_parallel, linear.tp_group
        self.modules_adapted = [rule.parts[part].name.removesuffix(".weight") for part in parts]
        self._names = [module.rpartition(".")[2] for module in self.modules_adapted]
        self._is_fused = len(rule.parts) > 1
        spans = {part: [span for span in layout.spans if span.part == part] for part in parts}
        self._starts = {part: min(span.start for span in spans[part]) for part in parts}
        rows = {
            part: sum(span.length for span in spans[part]) if layout.axis == 0 else layout.shape[0]
            for part in parts
        }
        for part, name in zip(parts, self._names, strict=True):
            for letter, shape in (
                ("A", (settings.rank, layout.shape[1])),
                ("B", (rows[part], settings.rank)),
            ):
                self.register_parameter(f"lora_{letter}_{name}", self._new(linear.weight, letter, shape))
        order = _order_of(layout, parts, rows) if layout.axis == 0 else None
        self.register_buffer(
            "_order", None if order is None else order.to(linear.weight.device), persistent=False
        )

    def _new(self, weight: torch.Tensor, letter: str, shape: tuple[int, int]) -> nn.Parameter:
        parameter = nn.Parameter(weight.new_zeros(shape))
        is_cut = (letter == "A") == self.is_row
        set_tensor_model_parallel_attributes(parameter, is_parallel=is_cut, dim=int(letter == "A"), stride=1)
        setattr(parameter, "sequence_parallel", self.sequence_parallel and not is_cut)  # noqa: B010 - no attribute of a parameter to mypy
        return parameter

    @torch.no_grad()
    def fill(self, first: FirstFactors, rule: Rule) -> None:
        """Give the factors the values that they begin with."""
        by_name = {part.name.removesuffix(".weight"): part for part in rule.parts}
        group, starts = self._group, list(self._starts.values())
        for module, name, start in zip(self.modules_adapted, self._names, starts, strict=True):
            for letter, width in (("A", by_name[module].shape[1]), ("B", by_name[module].shape[0])):
                own = self.get_parameter(f"lora_{letter}_{name}")
                whole = first.read(module, letter, width)
                if letter == "A" and self.is_row:
                    whole = whole.chunk(group.size(), dim=1)[group.rank()]
                elif letter == "B" and not self.is_row:
                    whole = whole[start : start + own.shape[0]]
                own.copy_(whole)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[s, B, in] to what is added to the layer's output [s, B, out], both as they lie on the ranks around
        the layer."""
        share, scaling = self._settings.dropout, self._settings.scaling
        if self._settings.drops_input:
            inputs = drop(inputs, share, self)
        hidden = F.linear(inputs, self.down()) * scaling
        if self.is_row and self.sequence_parallel:
            hidden = reduce_scatter_to_sequence_parallel_region(hidden, group=self._group)
        elif self.is_row:
            hidden = reduce_from_tensor_model_parallel_region(hidden, group=self._group)
        elif self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=self._group
            )
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self._group)
        output = F.linear(hidden, self.up())
        return output if self._settings.drops_input else drop(output, share, self)

    def down(self) -> torch.Tensor:
        """Return the matrices A of all parts, [R, in]."""
        return torch.cat([self.get_parameter(f"lora_A_{name}") for name in self._names])

    def up(self) -> torch.Tensor:
        """Return the matrices B [out, R], each beside its own part of R, with rows as the layer has them."""
        ups = [self.get_parameter(f"lora_B_{name}") for name in self._names]
        if not self._is_fused:
            return ups[0]
        # behind the rows of all parts one of zeros, for the rows of parts without an adapter
        rows = F.pad(torch.block_diag(*ups), (0, 0, 0, 1))
        return rows.index_select(0, self.get_buffer("_order"))

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of the layer's weight with the adapters in it."""
        return merged(weight.detach(), self.up(), self.down(), self._settings.scaling)

    def factors(self) -> Iterator[tuple[str, torch.Tensor, int | None]]:
        """Yield PEFT's name of each factor, this rank's part of it, and the dimension that it is cut along;
        None for a whole one."""
        for module, name in zip(self.modules_adapted, self._names, strict=True):
            for letter in "AB":
                cut = (letter == "A") == self.is_row
                yield (
                    factor_name(module, letter),
                    self.get_parameter(f"lora_{letter}_{name}").detach(),
                    int(letter == "A") if cut else None,
                )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """As Megatron-Core's modules; keys in the checkpoint are those of Megatron-Bridge's CanonicalLoRA."""
        state: dict[str, Any] = {}
        for name in self._names:
            for letter, side in (("A", "linear_in"), ("B", "linear_out")):
                stored = f"{_STORED.get(name, '') if self._is_fused else ''}{side}.weight"
                axis = {stored: int(letter == "A")} if (letter == "A") == self.is_row else {}
                own = f"lora_{letter}_{name}"
                sharded = make_sharded_tensors_for_checkpoint(
                    {stored: self.get_parameter(own)},
                    prefix,
                    axis,
                    sharded_offsets,
                    tp_group=self._group,
                    dp_cp_group=metadata["dp_cp_group"],
                )
                state[f"{prefix}{own}"] = sharded[f"{prefix}{stored}"]
        return state


def _order_of(layout: ShardLayout, parts: Sequence[int], rows: Mapping[int, int]) -> torch.Tensor:
    """Return where each row of a shard stands among the rows of ``parts``, one part behind the other; behind
    them all for a row of another part."""
    total, firsts, position = sum(rows.values()), {}, 0
    for part in parts:
        start = min(span.start for span in layout.spans if span.part == part)
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
    """A parallel linear layer with an adapter; in a checkpoint it has the adapter alone."""

    adapter: Adapter

    def forward(
        self, input_: torch.Tensor, *arguments: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(input_, *arguments, **options)  # type: ignore[misc]
        if self.adapter.switch.is_on:
            output = output + self.adapter(input_)
        return output, bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        return self.adapter.sharded_state_dict(f"{prefix}{ADAPTER}.", sharded_offsets, metadata)


class AdaptedColumnLinear(_Adapted, ColumnParallelLinear):
    """Megatron-Core's column-parallel layer with an adapter."""


class AdaptedRowLinear(_Adapted, RowParallelLinear):
    """Megatron-Core's row-parallel layer with an adapter."""


class Adapters:
    """All adapters of a model, of which this rank has those of its pipeline stage.

    Args:
        settings: of the configuration.
        architecture: the model.
        groups, experts: the process groups.
        seed: of the matrices A.

    Raises:
        ConfigError: no layer, or what cannot be adapted, is chosen; or the adapter to go on from is another
            one.
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
        rules = [rule for rule in linears(architecture) if rule.kind in CUT_KINDS]
        layers = [part.name.removesuffix(".weight") for rule in rules for part in rule.parts]
        matrices = [tensor.name for tensor in hf_tensors(architecture) if len(tensor.shape) == 2]
        others = sorted({name.removesuffix(".weight") for name in matrices} - set(layers))
        self.adapted = settings.chosen(layers, others)
        self._matrices = [*layers, *others]
        self._first = FirstFactors(settings, self.adapted, seed)
        self._by_weight: dict[str, Adapter] = {}

    def put_beside(self, chunks: Sequence[LanguageModule]) -> None:
        """Give layers their adapters, and let nothing else be trained. A collective over the world.

        Raises:
            ConfigError: a model chunk would have nothing to train.
        """
        chosen, idle = set(self.adapted), False
        for chunk in chunks:
            chunk.requires_grad_(False)
            found = 0
            for local, name in global_names(chunk, self._experts).items():
                if not name.endswith(".weight"):
                    continue
                rule = rule_for(name, self._architecture)
                parts = [
                    number
                    for number, part in enumerate(rule.parts)
                    if part.name.removesuffix(".weight") in chosen
                ]
                if parts:
                    adapter = self._beside(chunk.get_submodule(local.removesuffix(".weight")), rule, parts)
                    self._by_weight[rule.megatron_name] = adapter
                    found += 1
            idle = idle or not found
            if chunk.pre_process:
                chunk.embedding.register_forward_hook(_begin_gradients)
        self._refuse_idle(idle)

    def _beside(self, linear: Any, rule: Rule, parts: Sequence[int]) -> Adapter:
        layout = shard_layout(
            rule, self._architecture.head_dim, self._groups.tensor_rank, self._groups.tensor_size, 0
        )
        adapter = Adapter(linear, rule, layout, parts, self.settings, self.switch)
        adapter.fill(self._first, rule)
        # the class and not a wrapper: names, types and attributes of the layer stay what Megatron-Core
        # expects
        linear.__class__ = AdaptedRowLinear if isinstance(linear, RowParallelLinear) else AdaptedColumnLinear
        linear.add_module(ADAPTER, adapter)
        return adapter

    def _refuse_idle(self, idle: bool) -> None:
        everywhere = [False] * dist.get_world_size()
        dist.all_gather_object(everywhere, idle)
        if any(everywhere):
            bound = (
                f"a pipeline stage, or a chunk of one, has no adapter (rank {everywhere.index(True)}), "
                "so that nothing of it is trained"
            )
            fix = "choose layers of every stage, or fewer stages"
            raise ConfigError([Violation(f"{KEY}.target_modules", list(self.settings.targets), bound, fix)])

    def exported(self, held: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return this rank's shards as refits and exports send them: a layer's with the adapter in it, made
        when it is asked for.

        Args:
            held: the shards as they are, by the names of the rules.
        """
        return _Exported(held, self._by_weight if self.switch.is_on else {})

    def as_peft(self) -> dict[str, Any]:
        """Return PEFT's config of the adapters."""
        return self.settings.as_peft(self.adapted, self._matrices)

    def gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        """PEFT's names and whole factors, those of one pipeline stage after the other. A collective over the
        world."""
        if (
            self._architecture.mixture is not None
            and dist.get_rank() == 0
            and any(name.endswith(_OF_EXPERTS) for name in self.adapted)
        ):
            logger.warning(
                "PEFT may take the adapters of MLPs beside experts for those of experts: load the merged "
                "model instead"
            )
        own = [factor for adapter in self._by_weight.values() for factor in adapter.factors()]
        listing = [(name, tuple(tensor.shape), cut) for name, tensor, cut in own]
        groups = self._groups
        stages: list[Any] = [listing]
        if groups.pipeline_size > 1:
            stages = [None] * groups.pipeline_size
            dist.all_gather_object(stages, listing, group=groups.pipeline)
        like = next(iter(own))[1]
        held = {name: tensor for name, tensor, _ in own}
        for stage, names in enumerate(stages):
            for name, shape, cut in names:
                sizes = [size * (groups.tensor_size if axis == cut else 1) for axis, size in enumerate(shape)]
                whole = like.new_empty(sizes)
                if stage == groups.pipeline_rank:
                    whole = _joined(held[name], cut, groups)
                if groups.pipeline_size > 1:
                    dist.broadcast(
                        whole, src=dist.get_global_rank(groups.pipeline, stage), group=groups.pipeline
                    )
                yield name, whole

    def write_run_config(self, directory: Path) -> None:
        """Say the scale in the form of Megatron-Bridge, for ``megarl convert adapter``."""
        peft = {
            "_target_": "megatron.bridge.peft.canonical_lora.CanonicalLoRA",
            "dim": self.settings.rank,
            "alpha": self.settings.scaling * self.settings.rank,
            "dropout": self.settings.dropout,
        }
        said = {"model": {"hf_model_id": self.settings.base, "tensor_model_parallel_size": 1}, "peft": peft}
        (directory / RUN_CONFIG_FILE).write_text(yaml.safe_dump(said), encoding="utf-8")


class _Exported(Mapping[str, torch.Tensor]):
    """Shards by name, some of them with adapters in them."""

    def __init__(self, held: Mapping[str, torch.Tensor], adapters: Mapping[str, Adapter]) -> None:
        self._held, self._adapters = held, adapters

    def __getitem__(self, name: str) -> torch.Tensor:
        adapter = self._adapters.get(name)
        return self._held[name] if adapter is None else adapter.merged(self._held[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def _joined(part: torch.Tensor, cut: int | None, groups: ParallelGroups) -> torch.Tensor:
    """Return a whole factor from the parts of the tensor-parallel ranks."""
    if cut is None or groups.tensor_size == 1:
        return part.contiguous()
    parts = [torch.empty_like(part) for _ in range(groups.tensor_size)]
    dist.all_gather(parts, part.contiguous(), group=groups.tensor)
    return torch.cat(parts, dim=cut)


def _begin_gradients(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Let gradients reach the first layer: those of a layer that is recomputed are asked for by its input
    alone, and that of the first one comes from an embedding that is not trained."""
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output
