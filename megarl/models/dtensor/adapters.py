"""Low-rank adapters of linear layers in transformers models, which DTensor and FSDP2 shard together with the
layers.

The factors ``lora_A`` and ``lora_B`` are parameters of the layer itself. Over tensor-parallel ranks, one
factor is sharded like the layer and the other is replicated (``styles``). ``fully_shard`` then shards both
over the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from megarl.models.dtensor.shards import block_of, gather, gather_parts, write_block
from megarl.models.engine.adapters import (
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
from megarl.models.engine.scoring import SCORE
from megarl.models.huggingface.loading import is_tied

FACTORS = ("lora_A", "lora_B")


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter.

    Attributes:
        lora_A, lora_B: the factors [r, in] and [out, r].
        settings, switch: adapter settings and on-off switch of the model.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    settings: AdapterSettings
    switch: AdapterSwitch

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map inputs [..., in] to outputs [..., out]."""
        return self.adapted(inputs, F.linear(inputs, self.weight, self.bias), self.lora_A, self.lora_B)

    def adapted(
        self,
        inputs: torch.Tensor,
        output: torch.Tensor,
        down: torch.Tensor,
        up: torch.Tensor,
        between: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden,
    ) -> torch.Tensor:
        """Return ``output`` plus the adapter's term; ``output`` alone while adapters are off.

        Args:
            inputs: inputs of the layer.
            output: output of the layer without its adapter.
            down, up: this rank's shards of A and B.
            between: converts the output of A to the layout that ``up`` needs.
        """
        if not self.switch.is_on:
            return output
        share, first = self.settings.dropout, self.settings.drops_input
        hidden = between(F.linear(drop(inputs, share, self) if first else inputs, down))
        added = F.linear(hidden, up) * self.settings.scaling
        return output + (added if first else drop(added, share, self))

    def low_rank(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the adapter's two factors for ``Request.output`` of an output layer: the scaled product of A
        and ``rows`` [k, in], and B. None while adapters are off."""
        return self.low_rank_of(rows, self.lora_A, self.lora_B)

    def low_rank_of(
        self, rows: torch.Tensor, down: torch.Tensor, up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the result of ``low_rank`` for this rank's shards of A and B."""
        if not self.switch.is_on:
            return None
        return F.linear(drop(rows, self.settings.dropout, self), down) * self.settings.scaling, up


class AdaptedEmbedding(nn.Embedding):
    """An embedding with an adapter, without dropout, as in PEFT.

    Attributes:
        lora_A, lora_B: A transposed [V, r], and B [h, r].
        settings, switch: adapter settings and on-off switch of the model.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    settings: AdapterSettings
    switch: AdapterSwitch

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map token ids [...] to embeddings [..., h]."""
        rows = super().forward(input)
        return self.adapted(rows, F.embedding(input, self.lora_A), self.lora_B) if self.switch.is_on else rows

    def adapted(self, rows: torch.Tensor, columns: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return embedding rows plus the adapter's term.

        Args:
            rows: embeddings of the tokens.
            columns: columns of A for the same tokens.
            up: the factor B.
        """
        return rows + F.linear(columns * self.settings.scaling, up)


class Adapters:
    """All adapters of a model.

    Args:
        settings: adapter settings from the configuration.
        model: transformers model, not sharded and on the meta device; its base parameters are frozen.
        seed: seed of the initial matrices A.

    Raises:
        ConfigError: no layer is selected, or one that cannot have an adapter; or the run continues from an
            adapter with other settings.
    """

    def __init__(self, settings: AdapterSettings, model: Any, seed: int) -> None:
        self.settings, self.switch = settings, AdapterSwitch()
        output = model.get_output_embeddings()
        refuse_tied(is_tied(model), settings)
        modules = dict(model.named_modules())
        self._score = modules.get(SCORE.removesuffix(".weight"))
        linears: dict[str, nn.Linear] = {}
        vocabulary: dict[str, nn.Embedding | nn.Linear] = {}
        for name, module in modules.items():
            if isinstance(module, nn.Linear) and module is not self._score:
                (vocabulary if module is output else linears)[name] = module
            elif isinstance(module, nn.Embedding) and module is model.get_input_embeddings():
                vocabulary[name] = module
        matrices = {
            name.removesuffix(".weight")
            for name, parameter in model.named_parameters()
            if parameter.ndim == 2
        }
        vocabulary = {} if is_tied(model) else vocabulary
        others = sorted(matrices - set(linears) - set(vocabulary))
        settings.chosen_stacks([])
        self.adapted = settings.chosen(linears, others, list(vocabulary))
        refuse_dropped_outputs(self.adapted, vocabulary, settings)
        self._vocabulary = [name for name in vocabulary if name in self.adapted]
        self._matrices = [*linears, *vocabulary, *others]
        self._first = FirstFactors(settings, self.adapted, seed)
        model.requires_grad_(False)
        if self._score is not None:
            # The score layer is fully trained next to the adapters, like PEFT's modules_to_save.
            self._score.requires_grad_(True)
        for name in self.adapted:
            self._put_beside(linears[name] if name in linears else vocabulary[name])

    def _put_beside(self, layer: nn.Linear | nn.Embedding) -> None:
        rank = self.settings.rank
        if isinstance(layer, nn.Embedding):
            shapes = (layer.num_embeddings, rank), (layer.embedding_dim, rank)
        else:
            shapes = (rank, layer.in_features), (layer.out_features, rank)
        for factor, shape in zip(FACTORS, shapes, strict=True):
            # Register the factors on the layer, so that plans and fully_shard shard them together with the
            # weight.
            layer.register_parameter(factor, nn.Parameter(torch.empty(shape, device="meta")))
        # Change the class instead of wrapping the layer, so that module and parameter names stay the same.
        layer.__class__ = AdaptedEmbedding if isinstance(layer, nn.Embedding) else AdaptedLinear
        adapted = cast(AdaptedLinear, layer)
        adapted.settings, adapted.switch = self.settings, self.switch

    @property
    def rows_of_vocabulary(self) -> list[str]:
        """Names of the factors that have one row per token of the vocabulary."""
        return [f"{name}.{FACTORS[not is_embedding(name)]}" for name in self._vocabulary]

    def fill(self, divided: Mapping[str, DTensor], rows: Mapping[str, int]) -> None:
        """Write the initial values into this rank's shards of the factors. Collective over all ranks.

        Args:
            divided: all sharded parameters by name.
            rows: number of rows of each parameter, without vocabulary padding.

        Raises:
            ConfigError: the adapter to continue from was trained with another embedding or output layer.
        """
        for module in self.adapted:
            for factor in FACTORS:
                parameter = divided[f"{module}.{factor}"]
                is_across = factor == "lora_A" and not is_embedding(module)
                width = parameter.shape[1] if is_across else rows[f"{module}.{factor}"]
                values = self._first.read(module, factor[-1], width)
                write_block(parameter, values.T if factor == "lora_A" and is_embedding(module) else values)
        stored = self._first.score()
        if stored is not None:
            write_block(divided[SCORE], stored.float())
        others = [name for name in self._vocabulary if self._is_other_base(name, divided[f"{name}.weight"])]
        refuse_other_base(next(iter(others), ""), self.settings)

    def _is_other_base(self, module: str, weight: DTensor) -> bool:
        stored = self._first.base_of(module)
        if stored is None:
            return False
        local = weight.to_local()
        own = stored[block_of(weight).slices].to(local)
        return not torch.equal(own, local[: len(own)])

    def is_factor(self, name: str) -> bool:
        """Return whether a parameter is an adapter's factor."""
        return name.rpartition(".")[2] in FACTORS

    def exported(
        self, divided: Mapping[str, DTensor], device: torch.device, bucket_bytes: int
    ) -> Mapping[str, torch.Tensor]:
        """Return this rank's weight shards for refits and exports. Adapters are merged into a shard on
        access.

        Gathers the small factors first: collective over all ranks.
        """
        return _Exported(
            divided,
            self.parts(divided, device, bucket_bytes) if self.switch.is_on else {},
            self.settings.scaling,
        )

    def parts(
        self, divided: Mapping[str, DTensor], device: torch.device, bucket_bytes: int
    ) -> dict[str, torch.Tensor]:
        """Return this tensor-parallel rank's parts of all factors, by name. Collective over all ranks."""
        factors = {name: parameter for name, parameter in divided.items() if self.is_factor(name)}
        return dict(gather_parts(factors, torch.float32, device, bucket_bytes))

    def merged(self, name: str, part: torch.Tensor, factors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a tensor-parallel rank's part of a weight, with its adapter merged if it has one.

        Args:
            name: name of the weight.
            part: this rank's part of the weight.
            factors: result of ``parts``.
        """
        down, up = _factors_of(name, factors)
        return part if down is None or up is None else merged(part, up, down, self.settings.scaling)

    def as_peft(self) -> AdapterConfig:
        """Return PEFT's config of the adapters."""
        return self.settings.as_peft(self.adapted, self._matrices)

    def gathered(
        self, divided: Mapping[str, DTensor], rows: Mapping[str, int], device: torch.device
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield PEFT names and full factors. Collective over the world."""
        for module in self.adapted:
            for factor in FACTORS:
                name = f"{module}.{factor}"
                whole = gather(divided[name], device, rows[name])
                is_across = factor == "lora_A" and is_embedding(module)
                yield factor_name(module, factor[-1]), whole.T if is_across else whole
        if self._score is not None:
            yield SAVED_SCORE, gather(divided[SCORE], device)


class _Exported(Mapping[str, torch.Tensor]):
    """This rank's weight shards by name, with adapters merged on access."""

    def __init__(
        self, divided: Mapping[str, DTensor], factors: Mapping[str, torch.Tensor], scaling: float
    ) -> None:
        self._divided, self._factors, self._scaling = divided, factors, scaling

    def __getitem__(self, name: str) -> torch.Tensor:
        parameter = self._divided[name]
        piece = parameter.to_local().detach()
        down, up = _factors_of(name, self._factors)
        if down is None or up is None:
            return piece
        first, last = block_of(parameter).rows
        # Merge in float32: the stream then rounds only once.
        return merged(piece.to(up.device, torch.float32), up[first:last], down, self._scaling)

    def __iter__(self) -> Iterator[str]:
        return iter(self._divided)

    def __len__(self) -> int:
        return len(self._divided)


def _factors_of(
    name: str, factors: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    module = name.removesuffix(".weight")
    down, up = (factors.get(f"{module}.{factor}") for factor in FACTORS)
    if down is not None and up is not None and is_embedding(module):
        # An embedding's weight is transposed relative to a linear layer's: it has a row per column of A.
        return up.T, down
    return down, up
