"""Count how often the log-probabilities read and write the logits, forward and backward: alone, with
entropies, with further tokens.

Of the PyTorch code, torch's dispatcher shows each operation and the tensors that it reads and writes. Of the
Triton kernels, Triton's interpreter shows each element that they load and store. The unit is a pass: as many
elements as there are logits, whatever their dtype. A few numbers a token, such as its maximum, are far below
one and are counted too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.models.engine import logprobs
from megarl.models.engine.logprobs import VocabularyShard, vocab_parallel_scores
from megarl.patched import patched

TOKENS, VOCABULARY = 6, 8292
BY_KERNELS = {"forward_read": 1, "forward_written": 0, "backward_read": 1, "backward_written": 1}
BY_PYTORCH = {"forward_read": 5, "forward_written": 3, "backward_read": 5, "backward_written": 5}
"""Passes of log-probabilities alone."""
# operations that write a tensor without reading what it held, and those that touch as many elements as their
# index has
OVERWRITING, INDEXED = {"copy_", "fill_", "zero_"}, {"gather", "scatter_add_"}

VARIANTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "entropies": {"with_entropies": True},
    "further tokens": {"further": torch.arange(4 * TOKENS).view(TOKENS, 4)},
}
"""Further arguments of ``vocab_parallel_scores``, by what is scored."""

Counting = Callable[[], AbstractContextManager["Counter[str]"]]
"""Counts elements ``read`` and ``written`` for the time of a block."""


def passes_of_kernels(variant: str) -> dict[str, float]:
    """Passes of the Triton kernels by name, as in ``BY_KERNELS``, where Triton was imported with
    ``TRITON_INTERPRET=1``."""
    from megarl.models.engine import logprob_kernels

    return _passes(logprob_kernels, _by_interpreter, variant)


def passes_of_pytorch(variant: str) -> dict[str, float]:
    """Passes of the PyTorch code by name, as in ``BY_PYTORCH``."""
    return _passes(None, _by_dispatcher, variant)


def _passes(kernels: ModuleType | None, counting: Counting, variant: str) -> dict[str, float]:
    logits = torch.randn(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(1)).requires_grad_()
    found = {}
    with patched((logprobs, "kernels", lambda *_: kernels)):
        scored = logits * 1
        with counting() as count:
            shard = VocabularyShard(VOCABULARY)
            scores = vocab_parallel_scores(
                scored, torch.arange(TOKENS), shard, overwrite=True, **VARIANTS[variant]
            )
            others = [values.sum() for values in (scores.entropies, scores.further) if values is not None]
        found |= {f"forward_{name}": count[name] / logits.numel() for name in ("read", "written")}
        with counting() as count:
            torch.autograd.grad(sum(others, scores.logprobs.sum()), scored)
        found |= {f"backward_{name}": count[name] / logits.numel() for name in ("read", "written")}
    return found


class _Elements(TorchDispatchMode):
    """Elements that operations read and write; views read nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter(read=0, written=0)

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = operation(*arguments, **(options or {}))
        name = operation.overloadpacket.__name__
        tensors = {
            given.name: value for given, value in zip(operation._schema.arguments, arguments, strict=False)
        }
        tensors = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
        written = {
            given.name
            for given in operation._schema.arguments
            if given.alias_info is not None and given.alias_info.is_write
        }
        if name in INDEXED:
            self.count.update(read=arguments[2].numel(), written=arguments[2].numel())
        elif not operation.is_view and not name.startswith(("empty", "new_empty", "detach", "_unsafe_view")):
            held = {
                key: tensor for key, tensor in tensors.items() if not (key in written and name in OVERWRITING)
            }
            results = result if isinstance(result, (tuple, list)) else [result]
            made = [tensor for tensor in results if isinstance(tensor, Tensor)]
            self.count.update(
                read=sum(tensor.numel() for tensor in held.values()),
                written=sum(tensor.numel() for tensor in made),
            )
        return result


@contextmanager
def _by_dispatcher() -> Iterator[Counter[str]]:
    with _Elements() as mode:
        yield mode.count


@contextmanager
def _by_interpreter() -> Iterator[Counter[str]]:
    from triton.runtime.interpreter import InterpreterBuilder

    count: Counter[str] = Counter(read=0, written=0)
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counted_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        count["read"] += int(mask.data.sum())
        return load(self, pointers, mask, *rest)

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        count["written"] += int(mask.data.sum())
        return store(self, pointers, value, mask, *rest)

    with patched(
        (InterpreterBuilder, "create_masked_load", counted_load),
        (InterpreterBuilder, "create_masked_store", counted_store),
    ):
        yield count
