"""Weight transfer inside vLLM's workers: each engine rank receives weights from the policy and keeps its own
shard. It receives full weights, or slices if the policy rank on its device sends exactly what it reads.

Both weight engines use vLLM's layer-wise reload. It repacks a layer once all its weights have arrived, and
keeps weights that arrived earlier until then. So the part of a weight that this rank reads is copied once out
of the transfer buffer. Experts of a layer are loaded together (``expert_stacks``).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from megarl.distributed.device import is_out_of_memory, runtime_on
from megarl.errors import RefitError
from megarl.models.generation.vllm.adapter_binding import AdapterBinding
from megarl.models.generation.vllm.expert_stacks import ExpertStacks
from megarl.weight_sync.broadcast import WeightListener
from megarl.weight_sync.mailbox import CarriedPayload, MailboxHandle, MailboxReader, mailbox_for
from megarl.weight_sync.manifest import Manifest
from megarl.weight_sync.plan import TensorInfo
from megarl.weight_sync.session import WeightReceiver, payload_for
from megarl.weight_sync.slices import PartialWeight, Reads, Slice, Slices
from megarl.weight_sync.transfer_group import TransferGroup

if TYPE_CHECKING:
    from megarl.models.generation.vllm.options import AdapterScale

logger = logging.getLogger(__name__)
_ENDED_EARLY = "the refit ended before all weights had arrived: refit again"


@dataclass
class Connection(WeightTransferInitInfo):
    """Arguments with which the driver connects an engine to the policy.

    Attributes:
        weights: ``[name, shape, dtype]`` of every weight, in sending order.
        address: ``[ip, port, world_size, first rank of this engine]`` of a transfer group; None for shared
            memory.
        adapter: scale of the adapter whose factors are the weights; None if they are the model's weights.
    """

    weights: list[list[Any]]
    address: list[Any] | None = None
    adapter: AdapterScale | None = None


@dataclass
class Transfer(WeightTransferUpdateInfo):
    """One message of a refit. For a broadcast it is empty.

    Attributes:
        handles: with shared memory, IPC handles of one group of weights, by device.
        ticket: with shared memory, id of a refit in which the ranks exchange all weights among themselves.
        given_up: the refit was aborted, and no more weights will arrive.
    """

    handles: dict[str, CarriedPayload] | None = None
    ticket: int | None = None
    given_up: bool = False


class _Reloading(WeightTransferEngine[Connection, Transfer]):
    """Base class of both weight engines: a reload of the model's weights that is either completed or
    aborted."""

    init_info_cls = Connection
    update_info_cls = Transfer
    supports_draft_weight_update = False

    _tensors: Sequence[TensorInfo] = ()
    _reads: Slices | None = None
    _stacks: ExpertStacks | None = None
    _adapter: AdapterBinding | None = None
    _has_said_bound = False

    def learn(self, manifest: Manifest, connection: Connection) -> None:
        """Store the description of the weights that the policy sends. The slices that this rank reads are
        determined later, before the first reload."""
        self._tensors, self._reads, self._stacks = manifest.tensors, None, None
        scale = connection.adapter
        self._adapter = None if scale is None else AdapterBinding(self.model, scale)

    def start_weight_update(self) -> None:
        """Begin a reload, after undoing a previous one that was aborted."""
        if self._adapter is not None:
            self._adapter.clear()
            return
        with _taking_memory(self.model):
            self._abandon()
        if self._stacks is None:
            self._stacks = ExpertStacks(self.model, self._tensors, self._reads_of_weights())
        # Collect the names now: a tied output layer shares the embedding's tensor, but gets its own during a
        # reload.
        present = {name for name, _ in self.model.named_parameters()}
        self._loaded: set[str] = set()
        if self.device.type == "cpu":
            _set_experts_up_anew(self.model)
        try:
            initialize_layerwise_reload(self.model)
        except BaseException as error:
            self._abandon_after(error)
            raise
        # Keep only parameters that exist during the reload. Those that a layer derives from its weights, as
        # in latent attention, get no weight from the policy.
        self._expected = present & {name for name, _ in self.model.named_parameters()}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load weights, as vLLM's own weight engine does. An aborted refit is raised as an error,
        because vLLM has no other way to end a refit early."""
        try:
            if update_info.get("given_up"):
                raise RefitError("the refit was aborted")
            super().update_weights(update_info)
        except BaseException as error:
            self._abandon_after(error)
            raise

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Load weights into vLLM's model, one after another, and experts in stacks. Until a layer is
        complete, only copies of the parts that this rank reads are kept."""
        if self._adapter is not None:
            self._adapter.take(weights)
            return
        assert self._stacks is not None, "a reload was begun"
        stacked = self._stacks.names
        with _taking_memory(self.model):
            experts = {name: self._part_of(name, tensor)[0] for name, tensor in weights if name in stacked}
            self._loaded |= set(self._stacks.take(experts))
            others = ((name, self._kept(name, tensor)) for name, tensor in weights if name not in experts)
            self._loaded |= set(self.model.load_weights(others) or ())

    def _kept(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of the part of a weight that this rank reads, in a form that vLLM's loaders accept
        instead of the full weight. It remains valid after the group of weights is released."""
        part, where, whole = self._part_of(name, tensor)
        return part.clone() if where is None else PartialWeight.of(part.clone(), whole, where)

    def _part_of(self, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, Slice | None, Sequence[int]]:
        """Return the part of a received weight that this rank reads, its slice of the full weight (None for
        all of it), and the shape of the full weight."""
        where = (self._reads or {}).get(name)
        return (tensor if where is None else where.of(tensor)), where, tensor.shape

    def _reads_of_weights(self) -> Slices:
        """Return the slice that this rank reads of each weight. Weights that it reads in full are omitted.

        The slices are determined once, by loading weights without values, which does not change the model.
        This never raises, because vLLM would see the error of one rank only.
        """
        if self._reads is None:
            try:
                # A single rank reads full weights, and every rank reads full factors of adapters.
                whole = self.parallel_config.world_size == 1 or self._adapter is not None
                self._reads = {} if whole else self._look_on(self._tensors)
            except Exception as error:
                model = type(self.model).__name__
                logger.warning(
                    "the slices that vLLM's loaders of %s read are unknown, so weights are sent in full: %s",
                    model,
                    error,
                )
                self._reads = {}
        return self._reads

    def _look_on(self, tensors: Sequence[TensorInfo]) -> dict[str, Slice]:
        """Determine the slices that the model's weight loaders read."""
        self._abandon()
        notes = {info.name: Reads() for info in tensors}
        left = list(tensors)
        try:
            initialize_layerwise_reload(self.model)
            while left:
                given: list[TensorInfo] = []
                try:
                    self.model.load_weights(self._noting(left, given, notes))
                except Exception as error:
                    if not given:
                        raise
                    # The loader needs values, so this weight must be sent in full. So must the previous one,
                    # because the loader may have requested this weight while it handled that one.
                    logger.info(
                        "%s is not read by slices: %s: %s", given[-1].name, type(error).__name__, error
                    )
                    for info in given[-2:]:
                        notes.pop(info.name, None)
                left = left[len(given) :] if given else []
        finally:
            self._abandon()
        slices = {}
        for info in tensors:
            where = notes[info.name].slice_of(info.shape) if info.name in notes else None
            if where is not None:
                slices[info.name] = where
        return slices

    def _noting(
        self, tensors: Sequence[TensorInfo], given: list[TensorInfo], notes: Mapping[str, Reads]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield weights without values, which record the slices that are read of them. Append each to
        ``given``."""
        for info in tensors:
            given.append(info)
            yield info.name, PartialWeight.noting(info.shape, info.dtype, self.device, notes[info.name])

    def finish_weight_update(self) -> None:
        """End a reload.

        Raises:
            RefitError: not all weights have arrived, or some parameters of the model got no weight.
        """
        version = self.version()
        if self._adapter is not None:
            if version is None:
                self._adapter.clear()
                raise RefitError(_ENDED_EARLY)
            return
        # Raise only after the reload has ended, so that the model is ready for the next refit.
        missing = sorted(self._expected - self._loaded)
        try:
            with _taking_memory(self.model):
                finalize_layerwise_reload(self.model, self.model_config)
                _repack_shared_weights(self.model)
        except BaseException as error:
            self._abandon_after(error)
            raise
        if version is None:
            raise RefitError(_ENDED_EARLY)
        if missing:
            raise RefitError(
                f"no weight of the policy fills {missing[0]} and {len(missing) - 1} more of vLLM's "
                "parameters: give both one model"
            )

    def bind_adapter(self) -> None:
        """Use the received factors from now on. Call this after the end of the refit, at which vLLM removes
        all adapters."""
        assert self._adapter is not None, "weights are factors of an adapter"
        with _taking_memory(self.model):
            bound, layers = self._adapter.bind()
        if not self._has_said_bound and self.parallel_config.rank == 0:
            self._has_said_bound = True
            logger.warning(
                "the adapter covers %d of vLLM's %d layers that can have one (%.0f %%)",
                bound,
                layers,
                100 * bound / layers,
            )

    def _abandon(self) -> None:
        """Restore the tensors that the model had before the reload (some may have new values), and release
        the weights that have arrived.

        vLLM's own end of a reload would treat a layer as complete if an error, such as a lack of memory,
        interrupted it in that layer. The layer would keep unpacked weights, which the next reload cannot load
        into and CUDA graphs do not read. Marked as not loaded, the layer gets its previous tensors back.
        """
        if self._adapter is not None:
            self._adapter.clear()
            return
        if self._stacks is not None:
            self._stacks.forget()
        for layer in self.model.modules():
            reload = get_layerwise_info(layer)
            # A reload first sets a layer's `kernel_tensors`. If it was interrupted after that, the other
            # attributes may still be None; fill them in.
            if reload.kernel_tensors is not None:
                reload.load_numel, reload.load_numel_total = 0, reload.load_numel_total or 0
                reload.kernel_non_persistent_buffers = reload.kernel_non_persistent_buffers or set(
                    layer._non_persistent_buffers_set
                )
                reload.loaded_weights.clear()
        finalize_layerwise_reload(self.model, self.model_config)

    def _abandon_after(self, error: BaseException) -> None:
        """Abort a reload after ``error``. If that fails too, add a note to ``error``; the next start aborts
        it again."""
        try:
            self._abandon()
        except Exception as another:
            error.add_note(
                f"The tensors from before could not be put back yet: {type(another).__name__}: {another}"
            )

    def version(self) -> int | None:
        """Return the version of the weights; None unless they are complete."""
        raise NotImplementedError

    @staticmethod
    def manifest(connection: Connection) -> Manifest:
        """Return the manifest of the weights that the policy sends."""
        return Manifest.from_description(
            {name: (tuple(shape), getattr(torch, dtype)) for name, shape, dtype in connection.weights}
        )


@contextlib.contextmanager
def _taking_memory(model: torch.nn.Module) -> Iterator[None]:
    """Convert errors that are caused by a lack of memory to a RefitError with advice.

    Raises:
        RefitError: there was not enough memory.
    """
    try:
        yield
    except Exception as error:
        # If vLLM lacks the memory to pack weights for its CPU kernel, it continues with unpacked weights, and
        # later fails because of their sizes.
        unpacked = _unpacked_layer(model) if "must match the size of tensor" in str(error) else None
        if unpacked is None and not is_out_of_memory(error):
            raise
        what = (
            str(error)
            if unpacked is None
            else f"the weights of {unpacked} could not be packed for vLLM's kernel on a CPU ({error})"
        )
        raise RefitError(
            f"the engine is out of memory: {what}. Fix: leave it more memory for the weights of a refit, "
            "which it collects a layer at a time: less for policy.generation.vllm_cfg.kv_cache_gb or "
            "gpu_memory_utilization, or a larger tensor_parallel_size; then refit again"
        ) from error


def _unpacked_layer(model: torch.nn.Module) -> str | None:
    """Return the name of a layer whose weights a reload left unpacked, although they were packed before; None
    if there is none."""
    for name, layer in model.named_modules():
        reload = get_layerwise_info(layer)
        if reload.can_load() and reload.kernel_tensors is not None:
            before, now = reload.kernel_tensors[0].get("weight"), layer._parameters.get("weight")
            if (
                before is not None
                and now is not None
                and not before.numel()
                and now.numel()
                and not now.is_meta
            ):
                return name
    return None


def _repack_shared_weights(model: torch.nn.Module) -> None:
    """Repack layers that share another layer's weight, such as a tied output layer.

    The reload repacks only layers into which weights are loaded. A layer that shares a weight may have its
    own form of it (on a CPU, a packed copy). That copy would stay outdated, and vLLM would continue to
    generate with it.
    """
    sharing: dict[int, list[torch.nn.Module]] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.numel():
            # Group by address: layers may have different tensor objects that share memory.
            sharing.setdefault(weight.data_ptr(), []).append(module)
    for modules in sharing.values():
        for module in modules if len(modules) > 1 else ():
            method = getattr(module, "quant_method", None)
            if method is not None:
                method.process_weights_after_loading(module)


def _set_experts_up_anew(model: torch.nn.Module) -> None:
    """Make the reload pack a layer's experts in the same way as at the start.

    vLLM packs experts for its CPU kernel when it creates the kernel. If the kernel already exists, it would
    use unpacked weights, with rows and columns in the wrong order.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


class SharedMemoryEngine(_Reloading):
    """Weight engine for engines on the policy's devices, which reads weights from the policy's buffer. In a
    refit that the ranks run among themselves, weights may arrive as slices."""

    _receiver: WeightReceiver | None = None
    _mailbox: MailboxReader | None = None

    def init_transfer_engine(self, init_info: Connection) -> None:
        """Store the manifest, and create the receiver."""
        self.shutdown()
        self._receiver = WeightReceiver(self.manifest(init_info), self.device)
        self.learn(self._receiver.manifest, init_info)

    def slices_read(self) -> tuple[str, dict[str, list[int]]]:
        """Return the id of this rank's device, and the slice that this rank reads of each weight. Weights
        that it reads in full are omitted."""
        return runtime_on(self.device).identity(), {
            name: where.plain() for name, where in self._reads_of_weights().items()
        }

    def take_slices(self, names: list[str]) -> None:
        """Expect the weights ``names`` as slices in later refits that the ranks run among themselves."""
        assert self._receiver is not None and self._reads is not None, "it was asked for them before"
        shapes = {info.name: info.shape for info in self._tensors}
        # A weight may be in ``names`` because of other ranks, although this rank reads it in full.
        self._receiver.take_slices(
            {name: self._reads.get(name) or Slice.all_of(shapes[name]) for name in names}
        )

    def _part_of(self, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, Slice | None, Sequence[int]]:
        came = self._receiver.manifest.slices.get(name) if self._receiver is not None else None
        return super()._part_of(name, tensor) if came is None else (tensor, *came)

    def meet(self, mailboxes: Mapping[str, MailboxHandle], session: int) -> None:
        """Open the mailbox of the policy rank on this device; see ``RolloutEngine.meet``."""
        self._leave()
        mailbox = mailbox_for(mailboxes, runtime_on(self.device).identity(), self.parallel_config.rank)
        self._mailbox = MailboxReader(mailbox, session)

    def refuse(self, ticket: int) -> None:
        """Tell the policy rank that this rank does not take part in a refit, so that it does not wait."""
        if self._mailbox is not None:
            self._mailbox.refuse(ticket)

    def receive_weights(self, update_info: Transfer) -> None:
        """Load all groups of a refit, or the one group whose handles were sent."""
        assert self._receiver is not None, "vLLM initialises an engine before it uses it"
        if update_info.ticket is not None:
            assert self._mailbox is not None, "the driver has engine and policy meet before a refit"
            self._receiver.receive(self._mailbox, update_info.ticket, self.load)
            return
        with self._receiver.group(
            payload_for(update_info.handles or {}, runtime_on(self.device).identity())
        ) as weights:
            self.load(weights)

    def version(self) -> int | None:
        return self._receiver.version if self._receiver is not None else None

    def shutdown(self) -> None:
        self._leave()
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _leave(self) -> None:
        if self._mailbox is not None:
            self._mailbox.close()
            self._mailbox = None


class BroadcastEngine(_Reloading):
    """Weight engine for engines on their own devices, which receives weights over a transfer group."""

    _listener: WeightListener | None = None

    def init_transfer_engine(self, init_info: Connection) -> None:
        """Join the policy's transfer group."""
        assert init_info.address is not None, "the driver gives the address"
        self.shutdown()
        ip, port, world_size, first_rank = init_info.address
        manifest, rank = self.manifest(init_info), first_rank + self.parallel_config.rank
        self.learn(manifest, init_info)
        group = TransferGroup(ip, port, world_size, rank, digest=manifest.digest, device=self.device)
        self._listener = WeightListener(group, manifest)

    def start_weight_update(self) -> None:
        """Begin a reload. If that fails, leave the transfer group, because the policy would otherwise wait
        for this rank."""
        try:
            super().start_weight_update()
        except BaseException:
            self.shutdown()
            raise

    def receive_weights(self, update_info: Transfer) -> None:
        """Load all weights of a refit."""
        assert self._listener is not None, "vLLM initialises an engine before it uses it"
        self._listener.receive(self.load)

    def version(self) -> int | None:
        return self._listener.version if self._listener is not None else None

    def shutdown(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
