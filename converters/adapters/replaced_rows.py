"""Tensors of a PEFT adapter that replace base weights: modules trained in full (``modules_to_save``) and
single token rows (``trainable_token_indices``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from converters.adapters.lora_config import LoraConfig, is_among
from converters.adapters.megatron_adapter import PEFT_PREFIX, MegatronAdapter
from converters.adapters.peft_directory import PeftDirectory
from converters.mapping.rule import HuggingFaceTensor

AdapterSource = PeftDirectory | MegatronAdapter

_TOKENS = ".token_adapter.trainable_tokens_delta"
_HEAD = "lm_head.weight"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Replacement:
    """Rows of the adapter that replace rows of a base tensor.

    Attributes:
        stored: name of the adapter's tensor.
        tokens: row of the base tensor for each row of the adapter's tensor; None if it contains all rows.
    """

    stored: str
    tokens: tuple[int, ...] | None = None

    def put(self, source: AdapterSource, rows: Tensor, start: int) -> None:
        """Overwrite ``rows``, which are the base's rows from index ``start`` on."""
        whole = tuple((0, size) for size in source.shape(self.stored)[1:])
        if self.tokens is None:
            rows.copy_(source.read(self.stored, ((start, start + rows.shape[0]), *whole)))
            return
        for place, token in enumerate(self.tokens):
            # ``rows`` is a range of the tensor's rows, beginning with row ``start``.
            if start <= token < start + rows.shape[0]:
                rows[token - start].copy_(source.read(self.stored, ((place, place + 1), *whole))[0])


class Replacements:
    """Base weights that an adapter replaces, as a whole (``modules_to_save``) or in single rows
    (``trainable_token_indices``).

    Args:
        source: the adapter.
        tensors: name -> tensor of the base model.
        tied: the base model ties its output layer to the embedding.

    Attributes:
        found: Hugging Face tensor name -> replacement.
        names: adapter tensors that were recognised as replacements, valid or not.
        problems: error messages about these tensors.
    """

    def __init__(self, source: AdapterSource, tensors: Mapping[str, HuggingFaceTensor], tied: bool) -> None:
        self._source, self._tensors = source, tensors
        self._embedding = next(name for name in tensors if name.endswith(".embed_tokens.weight"))
        self._config: LoraConfig = source.config
        self.found: dict[str, Replacement] = {}
        self.names: set[str] = set()
        self.problems: list[str] = []
        for stored in sorted(source.keys()):
            name = stored.removeprefix(PEFT_PREFIX)
            if name.endswith(_TOKENS):
                module = name.removesuffix(_TOKENS)
                listed = (
                    tokens
                    for target, tokens in self._config.token_indices.items()
                    if is_among(module, frozenset({target}))
                )
                self._add(stored, f"{module}.weight", next(listed, None))
            elif self._is_of_saved(name, tied) and (name in tensors or (tied and name == _HEAD)):
                self._add(stored, name, None)
        for name in tensors:
            if self._is_saved(name) and name not in self.found:
                self.problems.append(f"missing: {name}, which modules_to_save lists")
        has_tokens = any(name.endswith(_TOKENS) for name in self.names)
        if any(self._config.token_indices.values()) and not has_tokens:
            self.problems.append("missing: the rows that trainable_token_indices lists")
        if tied:
            self.problems += self._tie()

    def _is_saved(self, name: str) -> bool:
        """Return whether modules_to_save lists a tensor's module or an enclosing one. PEFT compares the ends
        of names without regard to dots, so ``norm`` also matches ``input_layernorm``."""
        parts = name.split(".")[:-1]
        saved = tuple(self._config.saved_modules)
        return any(".".join(parts[:end]).endswith(saved) for end in range(1, len(parts) + 1))

    def _is_of_saved(self, name: str, tied: bool) -> bool:
        """Return whether a tensor belongs to a saved module. PEFT saves the output layer of a tied model
        too, although the base checkpoint lacks it; with ensure_weight_tying even if only the embedding is
        listed."""
        return self._is_saved(name) or (tied and name == _HEAD and self._is_saved(self._embedding))

    def _add(self, stored: str, name: str, tokens: tuple[int, ...] | None) -> None:
        self.names.add(stored)
        # A tied model has no output layer of its own.
        base = self._tensors.get(self._embedding if name == _HEAD and name not in self._tensors else name)
        faults = list(self._faults(stored, name, base, tokens))
        self.problems += faults
        if not faults:
            self.found[name] = Replacement(stored, tokens)

    def _faults(
        self, stored: str, name: str, base: HuggingFaceTensor | None, tokens: tuple[int, ...] | None
    ) -> Iterator[str]:
        shape, dtype = self._source.shape(stored), self._source.dtype(stored)
        if base is None:
            yield f"{stored}: the model has no {name}"
            return
        if stored.endswith(_TOKENS) and tokens is None:
            yield f"{stored}: trainable_token_indices does not say which rows of {name} these are"
            return
        expected = base.shape if tokens is None else (len(tokens), *base.shape[1:])
        if shape != expected:
            yield f"shape: {stored} is {list(shape)}, {name} asks for {list(expected)}"
        if dtype not in FLOATS:
            yield f"dtype: {stored} is {dtype}; float32, bfloat16 or float16 is needed"
        if tokens is not None and not all(0 <= token < base.shape[0] for token in tokens):
            yield (
                f"trainable_token_indices of {name}: the largest is {max(tokens)}, but the rows "
                f"are 0 to {base.shape[0] - 1}"
            )

    def _tie(self) -> Iterator[str]:
        """Drop the output layer of a tied model. Yield a problem if it differs from the embedding."""
        # A tied model has no separate output layer that could be changed.
        embedding, head = self.found.get(self._embedding), self.found.pop(_HEAD, None)
        if embedding is not None and embedding.tokens is not None and head is None:
            return  # PEFT uses the trained token rows of a tied embedding for the output layer too.
        if embedding is None and head is None:
            return
        both = embedding is not None and head is not None
        if not both or not torch.equal(self._source.read(embedding.stored), self._source.read(head.stored)):  # type: ignore[union-attr]
            yield (
                "modules_to_save: tie_word_embeddings is true, but the adapter would make "
                "embedding and output layer differ"
            )
