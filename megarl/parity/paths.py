"""Selection of the code paths that the workers of a case use: the fast paths of the engine and the backends,
or the plain code that they replace.

Both must reproduce the numbers of the reference. Code that runs only on GPUs is emulated: the variable-length
attention kernel by torch's own attention, sequence by sequence; functions for torch.compile run uncompiled;
Triton kernels run in Triton's interpreter, if Triton is installed. The fast paths further skip masked
positions, use the custom backward pass of rotary embeddings and the fused Adam update. On DTensor, a single
rank computes on full parameters and reduces gradients once.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megarl import env
from megarl.models.engine.worker import EngineWorker
from megarl.parity.case import Case
from megarl.patched import patched


@contextlib.contextmanager
def taken(case: Case) -> Iterator[None]:
    """Select the paths of ``case.paths`` for workers that are built and used inside the ``with`` block."""
    with contextlib.ExitStack() as stack:
        for path in _FAST if case.is_fast else _PLAIN:
            path(stack, case)
        yield


def _replace(module: str, name: str, value: Any) -> Callable[[contextlib.ExitStack, Case], None]:
    return lambda stack, case: stack.enter_context(patched((importlib.import_module(module), name, value)))


KERNELS = ("MEGARL_LOGPROB_KERNEL", "MEGARL_GATED_DELTA_KERNEL")


def _on_megarl_kernel(stack: contextlib.ExitStack, case: Case) -> None:
    """Enable the Triton kernels of log-probabilities and gated delta nets, in Triton's interpreter, if Triton
    is installed."""
    if importlib.util.find_spec("triton") is not None:
        _computing(stack, {**dict.fromkeys(KERNELS, "1"), "TRITON_INTERPRET": "1"})


def _off_megarl_kernel(stack: contextlib.ExitStack, case: Case) -> None:
    _computing(stack, dict.fromkeys(KERNELS, "0"))


def _computing(stack: contextlib.ExitStack, variables: dict[str, str]) -> None:
    stack.enter_context(env.variables(variables))
    chosen = importlib.import_module("megarl.models.engine.kernels").kernels
    # The choice of kernels is cached. Clear the cache now, so that the variables take effect, and again at
    # the end.
    chosen.cache_clear()
    stack.callback(chosen.cache_clear)


def _compiled(stack: contextlib.ExitStack, case: Case) -> None:
    """Use the functions that Megatron would compile and fuse for gates and biases, without compiling them."""
    if case.backend == "megatron":
        stack.enter_context(
            patched((importlib.import_module("megarl.models.megatron.settings"), "compiles", lambda: True))
        )
        # Compiling would take longer than the rest of the case.
        stack.enter_context(torch.compiler.set_stance("force_eager"))


def attention_of_runs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
) -> Tensor:
    """Return attention [T, H, D] like torch's ``varlen_attn``, computed one sequence after another.

    The causal mask aligns the last query of a sequence with its last key.
    """
    mixed = []
    runs = zip(pairwise(query_starts.tolist()), pairwise(key_starts.tolist()), strict=True)
    for (begin, end), (first, last) in runs:
        asked, keys, values = (
            part.transpose(0, 1)[None] for part in (query[begin:end], key[first:last], value[first:last])
        )
        # Position of each key relative to each query; negative for earlier keys.
        behind = (
            torch.arange(last - first)[None]
            - torch.arange(last - first - (end - begin), last - first)[:, None]
        )
        seen = (behind <= 0) & ((behind >= -window_size[0]) if window_size[0] >= 0 else True)
        mixed.append(
            scaled_dot_product_attention(asked, keys, values, attn_mask=seen, scale=scale, enable_gqa=True)[
                0
            ].transpose(0, 1)
        )
    return torch.cat(mixed)


def rotated(tensor: Tensor, by: Any) -> Tensor:
    """Compute ``megarl.models.megatron.rotary.rotate`` with plain torch operations, so that autograd derives
    the backward pass."""
    # Only the first ``width`` elements of a head are rotated.
    width = by.cosines.shape[-1]
    turned, others = tensor.split([width, tensor.shape[-1] - width], dim=-1)
    return torch.cat(
        (turned * by.cosines + turned.roll(width // 2, dims=-1) * by.signed_sines, others), dim=-1
    )


def _in_many_operations(update: Callable[..., None], *arguments: Any, **options: Any) -> None:
    update(*arguments, **{**options, "fused": False})


def _adam_in_many_operations(stack: contextlib.ExitStack, case: Case) -> None:
    if case.backend == "megatron":
        module = importlib.import_module("megarl.models.megatron.adam")
        for name in ("adam", "adamw"):
            stack.enter_context(
                patched((module, name, functools.partial(_in_many_operations, getattr(module, name))))
            )


def _build_plain(stack: contextlib.ExitStack, case: Case) -> None:
    """Patch the worker's constructor so that each new worker turns off its fast paths."""
    original = EngineWorker.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        _plain_worker(self, case)

    stack.enter_context(patched((EngineWorker, "__init__", init)))


def _plain_worker(worker: Any, case: Case) -> None:
    """Turn off the fast paths that a torch backend selects when it is built."""
    backend = worker.backend
    if case.backend == "dtensor":
        backend._stays_whole = backend._reduces_once = False
    if case.backend != "megatron" and backend.optimizer is not None:
        for group in backend.optimizer.param_groups:
            group["fused"] = False


_FAST: tuple[Callable[[contextlib.ExitStack, Case], None], ...] = (
    _on_megarl_kernel,
    _compiled,
    _replace("megarl.models.engine.attention", "serves", lambda query: True),
    _replace("megarl.models.engine.attention", "varlen_kernel", lambda: attention_of_runs),
)
_PLAIN: tuple[Callable[[contextlib.ExitStack, Case], None], ...] = (
    _off_megarl_kernel,
    _replace("megarl.models.megatron.cached_attention", "rotate", rotated),
    _adam_in_many_operations,
    _build_plain,
)
