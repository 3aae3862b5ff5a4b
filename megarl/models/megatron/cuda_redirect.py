"""Runs Megatron-Core, which is written for CUDA, in a process without CUDA.

All redirections are in this module, in three layers:

* *Stand-ins*, installed by ``install`` and removed by ``restore``: ``torch.cuda.current_device`` returns the
  CPU device, streams and events do nothing, and CUDA random-number functions use the CPU generator. They cost
  nothing in a forward pass. ``Tensor.record_stream`` is among them, because it checks the type of its
  argument before any function mode is called.
* ``CudaLiterals``, a ``TorchFunctionMode`` that rewrites ``device="cuda"``, ``.cuda()``, ``pin_memory`` and
  the result of ``Tensor.type()``. It costs one to three microseconds per torch call. So ``cuda_literals`` is
  entered only where Megatron-Core uses such literals (building, optimizer step, schedule bookkeeping,
  checkpoints), and ``plain_torch`` disables it inside the model's forward and backward pass. Modes are
  thread-local: a helper thread has to enter the mode itself.
* ``without_compiler``, around the import of Megatron-Core, which passes small functions to ``torch.compile``
  (fused activations, a router's token count). On a CPU they stay uncompiled: torch's compiler takes seconds
  to load in every worker, then runs a C++ compiler, and there is little to fuse.

In a process that computes on CUDA every function here is a no-op. megarl's runtime selects the device: with
``MEGARL_DEVICE=cpu`` a process on a machine with GPUs is redirected too, and Megatron-Core sees no CUDA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megarl.distributed.device import runtime, will_use_cuda
from megarl.patched import patched

CPU = torch.device("cpu")
_TENSOR_TYPES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}


def needed() -> bool:
    """Return True in a process that computes on a CPU."""
    return not runtime().is_cuda


def _uncompiled(model: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """Replacement for ``torch.compile``, as a decorator with or without options, that returns the function
    itself."""
    return _uncompiled if model is None else model


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Make ``torch.compile`` return functions unchanged within the context. No-op in a process with CUDA.

    Megatron-Core binds ``torch.compile`` at its first import. If that happens in this context, none of its
    functions is ever compiled.
    """
    # will_use_cuda does not initialise CUDA: this runs at import, before the process has chosen its device.
    if will_use_cuda():
        yield
        return
    with patched((torch, "compile", _uncompiled)):
        yield


class _InertEvent:
    """A CUDA event that does nothing: on a CPU all work is complete when the event is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any, **kwargs: Any) -> None: ...

    def wait(self, *args: Any, **kwargs: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _InertEvent) -> float:
        return 0.0


class _InertStream:
    """A CUDA stream that does nothing: work on a CPU is already in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = CPU

    def wait_stream(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_event(self, *args: Any, **kwargs: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, *args: Any, **kwargs: Any) -> _InertEvent:
        return _InertEvent()

    def __enter__(self) -> _InertStream:
        return self

    def __exit__(self, *args: Any) -> None: ...


_STREAM = _InertStream()


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.random.default_generator.manual_seed(seed)


def _rotary_angles_of_context_rank(pos_emb: torch.Tensor, seq_dim: int, cp_group: Any) -> torch.Tensor:
    """Return chunks r and 2c - 1 - r of 2c chunks of the rotary angles, for rank r of c. Megatron's own
    function uses page-locked memory for this, in the forward pass."""
    size, rank = cp_group.size(), cp_group.rank()
    chunks = pos_emb.chunk(2 * size, dim=seq_dim)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=seq_dim)


def _splits_as_they_are(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return the numbers of tokens to exchange with each rank, as numpy if requested. The collectives need
    numpy, but Megatron's own function converts only tensors that it moves from CUDA."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _uneven_collectives(mappings: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield replacements for all-gathers and reduce-scatters of unequal lengths, which gloo lacks."""
    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_uneven(
        input_: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        longest = max(output_split_sizes)
        # gloo gathers only equal lengths: pad to the longest, then trim.
        padded = input_.new_zeros(longest, *input_.shape[1:])
        padded[: input_.shape[0]] = input_
        whole = input_.new_empty(group.size(), longest, *input_.shape[1:])
        if longest:  # false for experts that receive no token
            torch.distributed.all_gather_into_tensor(whole.flatten(0, 1), padded, group=group)
        parts = zip(whole, output_split_sizes, strict=True)
        return torch.cat([part[:length] for part, length in parts])

    def reduce_scatter_uneven(
        input_: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(input_, group, input_split_sizes, use_global_buffer)
        # All-reduce and slice, although this sends more bytes, because gloo has no reduce-scatter of unequal
        # lengths.
        total = input_.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=group)
        # Clone the slice, so that it does not keep the whole sum in memory.
        return total.split(list(input_split_sizes))[group.rank()].clone()

    yield mappings, "_gather_along_first_dim", gather_uneven
    yield mappings, "_reduce_scatter_along_first_dim", reduce_scatter_uneven


def _collectives_of_one(buffers: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield replacements that skip gradient reduce-scatters and parameter gathers in groups of one rank. NCCL
    does nothing there, but gloo copies every tensor to itself."""

    def unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
        def run(output: torch.Tensor, input_: torch.Tensor, **options: Any) -> Any:
            # Compare pointers too: a gather into other memory must copy even with one rank.
            if options["group"].size() > 1 or output.data_ptr() != input_.data_ptr():
                return collective(output, input_, **options)
            return None

        return run

    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        yield buffers, name, unless_alone(getattr(buffers, name))


def _plain_backward(backward: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``backward`` in ``plain_torch``, because autograd functions need no literals rewritten."""

    def run(output: torch.Tensor, grad_output: torch.Tensor | None) -> None:
        with plain_torch():
            backward(output, grad_output)

    return run


_CUDA_STAND_INS: dict[str, Any] = {
    # With MEGARL_DEVICE=cpu on a machine with GPUs, torch would report CUDA.
    "is_available": lambda: False,
    "device_count": lambda: 0,
    "current_device": lambda: CPU,
    "current_stream": lambda *args, **kwargs: _STREAM,
    "default_stream": lambda *args, **kwargs: _STREAM,
    "stream": lambda stream=None: contextlib.nullcontext(),
    "Stream": _InertStream,
    "Event": _InertEvent,
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "manual_seed": _manual_seed,
}


def _stand_ins() -> Iterator[tuple[Any, str, Any]]:
    """Yield (owner, attribute, replacement) for everything that ``install`` changes."""
    for name, replacement in _CUDA_STAND_INS.items():
        yield torch.cuda, name, replacement
    yield torch.Tensor, "record_stream", _nothing
    # Import inside the function, because this module is imported before Megatron-Core.
    from megatron.core.tensor_parallel import random as megatron_random

    yield megatron_random, "_get_cuda_rng_state", _get_rng_state
    yield megatron_random, "_set_cuda_rng_state", _set_rng_state
    from megatron.core.models.common.embeddings import rotary_pos_embedding, yarn_rotary_pos_embedding

    for embedding in (rotary_pos_embedding, yarn_rotary_pos_embedding):
        yield embedding, "get_pos_emb_on_this_cp_rank", _rotary_angles_of_context_rank
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # an undefined name without Transformer Engine in 0.16.1
        yield moe_utils, "te_general_gemm", None
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import token_dispatcher

    yield token_dispatcher, "maybe_move_tensor_to_cpu", _splits_as_they_are
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.pipeline_parallel import schedules

    yield from _collectives_of_one(param_and_grad_buffer)
    yield schedules, "custom_backward", _plain_backward(schedules.custom_backward)
    yield from _uneven_collectives(mappings)


_installed = contextlib.ExitStack()
_depth = 0


def install() -> None:
    """Install the stand-ins; each call needs its own ``restore``. No-op in a process with CUDA."""
    global _depth
    if not needed():
        return
    # Calls nest when tests and megarl parity build several backends in one process.
    _depth += 1
    if _depth == 1:
        _installed.enter_context(patched(*_stand_ins()))


def restore() -> None:
    """Undo one ``install``; the last one restores all originals."""
    global _depth
    if _depth == 0:
        return
    _depth -= 1
    if _depth == 0:
        _installed.close()


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    return isinstance(device, torch.device) and device.type == "cuda"


class CudaLiterals(TorchFunctionMode):
    """A function mode that makes Megatron-Core's CUDA literals mean the CPU; see the module's docstring."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron-Core's optimizers group parameters by this name, and raise unless it is a CUDA type.
            return _TENSOR_TYPES.get(args[0].dtype) or func(*args)
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **kwargs)


def cuda_literals() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which CUDA literals mean the CPU; no-op in a process with CUDA."""
    return CudaLiterals() if needed() else contextlib.nullcontext()


def plain_torch() -> contextlib.AbstractContextManager[Any]:
    """Return a context within ``cuda_literals`` in which torch calls are not intercepted, for forward and
    backward passes."""
    return torch._C.DisableTorchFunction() if needed() else contextlib.nullcontext()
