"""The FSDP1 backend: the engine's ``Backend`` protocol on a transformers model in
FullyShardedDataParallel."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from converters.checkpoint.source import HuggingFaceSource
from megarl.config.backend import scores
from megarl.config.nested import at
from megarl.errors import ConfigError, Violation
from megarl.models.engine.groups import ParallelGroups
from megarl.models.engine.heads import Head, HeadOutput
from megarl.models.engine.logprobs import VocabularyShard
from megarl.models.engine.microbatches import Shapes
from megarl.models.engine.model_input import ModelInput
from megarl.models.engine.output_layer import answer_requests
from megarl.models.fsdp1.build import Filler, Held, held_by
from megarl.models.fsdp1.sharded import Sharded
from megarl.models.fsdp1.whole import FullModel
from megarl.models.huggingface.backend import HuggingFaceBackend
from megarl.models.huggingface.loading import build_on_meta, recompute_layers
from megarl.models.huggingface.passes import forward_backward
from megarl.models.huggingface.sending_order import in_sending_order

logger = logging.getLogger(__name__)
PRECISIONS = frozenset({"float32", "bfloat16"})
# Optimizers whose step needs full matrices, of which an FSDP1 rank holds only a flat shard.
NOT_ELEMENTWISE = frozenset({"Adafactor", "Muon"})


class FSDP1Backend(HuggingFaceBackend):
    """A model in torch's FullyShardedDataParallel, or without it on a single rank."""

    def _dtype_of(self, precision: str) -> torch.dtype:
        if precision not in PRECISIONS:
            bound = "FSDP1 computes in float32 or bfloat16; it has no loss scaling"
            raise ConfigError(
                [Violation("policy.precision", precision, bound, "write bfloat16, or enable another backend")]
            )
        return super()._dtype_of(precision)

    def _build(self, source: HuggingFaceSource) -> None:
        policy, runtime = self.policy, self.runtime
        model = build_on_meta(self.hf_config, scores=scores(policy), trust_remote_code=self._trusts)
        if policy["activation_checkpointing_enabled"]:
            # Before FSDP wraps the layers, so that parameters are gathered once for both the backward pass
            # and the recomputation.
            recompute_layers(model)
        answer_requests(model.get_output_embeddings())
        fill = Filler(model, source, runtime.device, self._kept_dtype)
        # FSDP1 flattens parameters, so remember which ones are vectors.
        self._dimensions: Mapping[str, int] = {name: len(place.shape) for name, place in fill.held.items()}
        self.vocabulary = VocabularyShard(self.hf_config.get_text_config().vocab_size)
        self.shapes = Shapes(row_multiple=policy["make_sequence_length_divisible_by"])
        self.groups = _data_parallel()
        self._generating: tuple[nn.Module, dict[str, tuple[Held, nn.Parameter]]] | None = None
        self.model: Sharded | FullModel
        if dist.get_world_size() > 1:
            self.model = Sharded(model, fill, self._dtype, runtime, offload=policy["fsdp_offload_enabled"])
        else:
            if policy["fsdp_offload_enabled"]:
                logger.warning(
                    "fsdp_offload_enabled: one rank alone has no FSDP around its model; nothing is offloaded"
                )
            self.model = FullModel(model, fill, self._dtype, runtime)
        self.module, self.offloads, self._store = self.model.module, self.model.offloads, self.model
        self._parameters = dict(self.model.parameters())

    def _refuse_optimizer(self) -> None:
        name = str(at(self.policy, "optimizer.name") or "")
        if self.groups.data_size > 1 and name.rpartition(".")[2] in NOT_ELEMENTWISE:
            bound = "its step needs full matrices, but FSDP1 cuts them into flat pieces"
            raise ConfigError(
                [
                    Violation(
                        "policy.optimizer.name",
                        name,
                        bound,
                        "write torch.optim.AdamW, or enable another backend",
                    )
                ]
            )

    def forward_backward(
        self, inputs: Sequence[ModelInput], head: Head, *, backward: bool
    ) -> list[HeadOutput]:
        self.model.before_pass()
        try:
            return forward_backward(self.model.module, inputs, head, backward=backward)
        finally:
            self.model.after_pass()

    def export_hf(self) -> Iterator[tuple[str, torch.Tensor]]:
        names = in_sending_order(self._dimensions, self.hf_config)
        for name, tensor in self.model.full_tensors(names):
            yield name, tensor.to(self._dtype)

    @property
    def gathered_bytes(self) -> int:
        """Always 0, meaning no bound: a layer is gathered whatever its size."""
        return 0

    @contextlib.contextmanager
    def _generating_model(self) -> Iterator[nn.Module]:
        """Yield a model with the current weights: the model itself on a single rank, else an unsharded
        copy.

        On exit the copy's weights are freed, but its modules are kept, because building them takes long.
        """
        if isinstance(self.model, FullModel):
            self.model.before_pass()
            yield self.model.module
            return
        if self._generating is None:
            model = build_on_meta(self.hf_config, trust_remote_code=self._trusts)
            # On the meta device the model takes no memory between two rollouts.
            self._generating = model, {name: (held, held.get()) for name, held in held_by(model).items()}
        model, places = self._generating
        try:
            for name, tensor in self.export_hf():
                places[name][0].put(nn.Parameter(tensor, requires_grad=False))
            # This moves only buffers; the parameters are already on the device.
            yield model.to(self.runtime.device)
        finally:
            for held, empty in places.values():
                held.put(empty)

    def close(self) -> None:
        """Free the memory of staged checkpoints, and destroy this rank's single-rank group."""
        super().close()
        if dist.is_initialized() and self.groups.data_size > 1:
            dist.destroy_process_group(self.groups.tensor)


def _data_parallel() -> ParallelGroups:
    """Return groups in which every rank is its own data-parallel replica."""
    everyone = dist.group.WORLD
    assert everyone is not None, "torch.distributed is initialised before a backend is built"
    alone: dist.ProcessGroup = everyone
    if dist.get_world_size() > 1:
        # With this option each rank can create its own group; otherwise all ranks would have to take part in
        # creating every group.
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return ParallelGroups(tensor=alone, context=alone, data=everyone, pipeline=alone)
