"""Low-rank adapters (LoRA, arXiv 2106.09685): what is the same on every backend.

Beside the weight W [out, in] of a linear layer stand A [r, in] and B [out, r]; the layer computes with W + s
B A, s = alpha / r or, rank stabilised (arXiv 2312.03732), alpha / sqrt(r). W is never written. Layers and
factors have PEFT's names, whatever a backend fuses.
"""

# A PeftDirectory has keys() and is no mapping: "in" would not ask for its names.
# ruff: noqa: SIM118

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from converters.adapters.megatron_adapter import PEFT_PREFIX
from converters.adapters.peft_directory import WEIGHTS_FILE, PeftDirectory
from converters.checkpoint.source import ADAPTER_CONFIG
from megarl.config.adapters import adapters_of, expanded, is_named
from megarl.config.backend import scores
from megarl.config.policy import PolicyConfig
from megarl.errors import ConfigError, Violation
from megarl.models.engine.scoring import SCORE
from megarl.models.engine.stacked_adapters import Stack, StackedFactors, listed

KEY = "policy.peft"
ADAPTER_DIRECTORY = "adapter"
SAVED_SCORE = f"{PEFT_PREFIX}{SCORE}"
"""PEFT's name of a score layer that is trained with adapters (``modules_to_save``)."""
_BASE = ".base_layer.weight"


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """Settings of ``policy.peft``.

    Attributes:
        rank: of every adapter.
        alpha: of the configuration.
        rank_stabilized: ``scaling`` is alpha / sqrt(rank).
        dropout: share of values that training drops.
        drops_input: of the adapter's input; else of its output.
        init: how A begins.
        targets, excluded: patterns of layers that have an adapter, and of those that have none.
        parameters: patterns of stacks of experts that have one.
        start: PEFT directory that training goes on from.
        base: the model of the adapters, as the configuration names it.
        scores: the model has a score layer, which is trained whole and stored with the adapters.
    """

    rank: int
    alpha: float
    rank_stabilized: bool
    dropout: float
    drops_input: bool
    init: str
    targets: tuple[str, ...]
    excluded: tuple[str, ...]
    parameters: tuple[str, ...]
    start: Path | None
    base: str
    scores: bool = False

    @classmethod
    def of(cls, policy: PolicyConfig) -> AdapterSettings | None:
        """The settings of a filled-in policy section; None where all weights are trained."""
        section = adapters_of(policy)
        if section is None:
            return None
        start = section["adapter_path"]
        return cls(
            rank=section["dim"],
            alpha=section["alpha"],
            rank_stabilized=section["use_rslora"],
            dropout=section["dropout"],
            drops_input=section["dropout_position"] == "pre",
            init=section["lora_A_init_method"],
            targets=expanded(section["target_modules"]),
            excluded=expanded(section["exclude_modules"]),
            parameters=tuple(section["target_parameters"]),
            start=None if start is None else Path(start).expanduser(),
            base=str(policy["model_name"]),
            scores=scores(policy),
        )

    @property
    def scaling(self) -> float:
        """Return the factor s on the product B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def chosen_stacks(self, stacks: Sequence[Stack]) -> list[Stack]:
        """Return the stacks of experts that have an adapter.

        Raises:
            ConfigError: a pattern names none.
        """
        known = (
            ", ".join(dict.fromkeys(".".join(stack.name.split(".")[-2:]) for stack in stacks))
            or "it has none"
        )
        for pattern in self.parameters:
            if not any(is_named(stack.name, (pattern,)) for stack in stacks):
                bound, fix = (
                    f"{pattern!r} names no stack of experts of the model",
                    f"write names of stacks ({known}), or an empty list",
                )
                raise ConfigError([Violation(f"{KEY}.target_parameters", list(self.parameters), bound, fix)])
        return [stack for stack in stacks if is_named(stack.name, self.parameters)]

    def chosen(
        self,
        layers: Collection[str],
        others: Collection[str],
        named: Collection[str] = (),
        stacks: Sequence[Stack] = (),
    ) -> list[str]:
        """Return the layers that have an adapter.

        Args:
            layers: names of all that may have one.
            others: names of the matrices that cannot: routers.
            named: names of the layers that have one where a pattern names them alone: of experts, embedding,
                output layer.
            stacks: of ``chosen_stacks``.

        Raises:
            ConfigError: a pattern names nothing, or what cannot have an adapter; or nothing is left.
        """
        # Without a pattern all linear layers, but never what has
        # to be named: experts, embedding, output layer.
        targets, possible = self.targets or ("*",), [*layers, *(named if self.targets else ())]
        allowed = [name for name in possible if not is_named(name, self.excluded)]
        found = [name for name in allowed if is_named(name, targets)]
        faults = []
        for pattern in self.targets:
            stranger = next(
                (name for name in others if is_named(name, (pattern,)) and not is_named(name, self.excluded)),
                None,
            )
            if stranger is not None:
                bound, fix = (
                    f"{pattern!r} names {stranger}, which can have no adapter in this version",
                    "add it to exclude_modules",
                )
                faults.append(Violation(f"{KEY}.target_modules", list(self.targets), bound, fix))
            elif not any(is_named(name, (pattern,)) for name in possible):
                bound, fix = (
                    f"{pattern!r} names no linear layer of the model",
                    f"write a name such as {next(iter(layers), 'q_proj')}",
                )
                faults.append(Violation(f"{KEY}.target_modules", list(self.targets), bound, fix))
        if not found and not stacks and not faults:
            bound = "no layer has an adapter, so that nothing would be trained"
            faults.append(
                Violation(f"{KEY}.exclude_modules", list(self.excluded), bound, "exclude fewer layers")
            )
        if faults:
            raise ConfigError(faults)
        return found

    def as_peft(
        self,
        adapted: Collection[str],
        matrices: Iterable[str],
        stacks: Collection[str] = (),
        other_stacks: Collection[str] = (),
    ) -> dict[str, Any]:
        """Return the ``adapter_config.json`` of adapters of some of a model's matrices, and of its stacks
        of experts."""
        rest = [name for name in matrices if name not in adapted]
        ends = {name.rpartition(".")[2] for name in adapted}
        ends -= {name.rpartition(".")[2] for name in rest}
        # By the last part of a name where all such layers have an adapter: PEFT reads it as a suffix.
        targets = ends | {name for name in adapted if name.rpartition(".")[2] not in ends}
        return {
            "peft_type": "LORA",
            "task_type": "SEQ_CLS" if self.scores else "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "use_rslora": self.rank_stabilized,
            "lora_dropout": self.dropout,
            "target_modules": sorted(targets),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "modules_to_save": [SCORE.removesuffix(".weight")] if self.scores else None,
            "use_dora": False,
            **({"target_parameters": listed(stacks, other_stacks)} if stacks else {}),
        }


class AdapterSwitch:
    """Says whether the layers of a model compute with their adapters."""

    def __init__(self) -> None:
        self.is_on = True

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the model is its base."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before


class FirstFactors:
    """The values that adapters begin with, whole; the same on all ranks, in every layout and on every
    backend.

    Args:
        settings: of the adapters.
        modules: names of all layers of the model that have one.
        seed: of the random matrices A.
        stacks: of experts that have one.

    Raises:
        ConfigError: the PEFT directory to go on from has another rank, scale or other layers.
        ConversionError: it is damaged, or no plain LoRA.
    """

    def __init__(
        self, settings: AdapterSettings, modules: Collection[str], seed: int, stacks: Sequence[Stack] = ()
    ) -> None:
        self._settings, self._seed = settings, seed
        self._stacked = StackedFactors(stacks, settings.rank)
        self._recent: dict[str, torch.Tensor] = {}
        self._source = None if settings.start is None else PeftDirectory(settings.start)
        if self._source is not None:
            self._require_same(self._source, modules)

    def read(self, module: str, letter: str, width: int) -> torch.Tensor:
        """Return the factor ``letter`` of a layer in float32 on the CPU: A [r, width] or B [width, r]. Of a
        new adapter B is zero, of an embedding's A, and B normal."""
        shape = (self._settings.rank, width) if letter == "A" else (width, self._settings.rank)
        if self._source is not None:
            stored = self._read(self._source, module, letter).float()
            if tuple(stored.shape) != shape:
                raise self._refusal(
                    f"{module} has a factor {letter} of shape {list(stored.shape)}, the model asks for "
                    f"{list(shape)}"
                )
            return stored
        # One factor is zero, so that training begins with the base; PEFT's choice for an embedding is A.
        if letter == ("A" if is_embedding(module) else "B"):
            return torch.zeros(shape)
        # By the layer's name: neither the order of layers nor the ranks that hold them change the numbers.
        digest = hashlib.sha256(f"{self._seed}:{module}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        if letter == "B":
            return torch.randn(shape, generator=generator)
        if self._settings.init == "kaiming":
            # kaiming_uniform_ with a = sqrt(5), PEFT's choice: its bound is 1 / sqrt(inputs).
            return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(width)
        deviation = (
            math.sqrt(2 / (width + self._settings.rank))
            if self._settings.init == "xavier"
            else 1 / self._settings.rank
        )
        return torch.randn(shape, generator=generator) * deviation

    def score(self) -> torch.Tensor | None:
        """Return the score layer [1, h] of the adapter to go on from; None where there is none to go on
        from."""
        return self._source.read(SAVED_SCORE) if self._source is not None and self._settings.scores else None

    def base_of(self, module: str) -> torch.Tensor | None:
        """Return the weight of the base that the adapter to go on from has with it, as PEFT keeps those of
        embedding and output layer."""
        name = f"{PEFT_PREFIX}{module}{_BASE}"
        return self._source.read(name) if self._source is not None and name in self._source.keys() else None

    def _read(self, source: PeftDirectory, module: str, letter: str) -> torch.Tensor:
        if module not in self._stacked:
            return source.read(factor_name(module, letter))
        stored, (rows, columns) = self._stacked.taken(module, letter)
        name = factor_name(stored, letter)
        if name not in self._recent:
            # an expert at a time asks for its part of each of the four factors of a layer
            self._recent = dict(list(self._recent.items())[-3:]) | {name: source.read(name)}
        return self._recent[name][rows, columns]

    def forget(self) -> None:
        """Let go of what was read, once all factors have their values."""
        self._recent = {}

    def _require_same(self, source: PeftDirectory, modules: Collection[str]) -> None:
        wanted = {
            factor_name(module, letter)
            for module in (*modules, *self._stacked.modules.values())
            for letter in "AB"
        }
        wanted |= {SAVED_SCORE} if self._settings.scores else set()
        # PEFT stores the base of an adapted embedding or output layer too, which base_of compares.
        stored = {name for name in source.keys() if not name.endswith(_BASE)}
        if stored != wanted:
            more, fewer = sorted(stored - wanted), sorted(wanted - stored)
            raise self._refusal(
                f"it holds other layers: {more[:2]} are only there, {fewer[:2]} only in {KEY} ({len(more)}, "
                f"{len(fewer)})"
            )
        for module in (*modules, *self._stacked.modules):
            if source.config.rank_of(module) != self._settings.rank:
                raise self._refusal(
                    f"{module} has rank {source.config.rank_of(module)} there, and {KEY}.dim is "
                    f"{self._settings.rank}"
                )
            if not math.isclose(source.config.scaling_of(module), self._settings.scaling):
                raise self._refusal(
                    f"{module} has scale {source.config.scaling_of(module):g} there, and here "
                    f"{self._settings.scaling:g}"
                )

    def _refusal(self, bound: str) -> ConfigError:
        fix = "let dim, alpha, use_rslora and target_modules say what its adapter_config.json does"
        return ConfigError([Violation(f"{KEY}.adapter_path", str(self._settings.start), bound, fix)])


def factor_name(module: str, letter: str) -> str:
    """Return what PEFT calls a factor in its files."""
    if is_embedding(module):
        return f"{PEFT_PREFIX}{module}.lora_embedding_{letter}"
    return f"{PEFT_PREFIX}{module}.lora_{letter}.weight"


def is_embedding(module: str) -> bool:
    """Return whether a layer is the embedding of tokens, by its name."""
    return module.endswith("embed_tokens")


def refuse_tied(is_tied: bool, settings: AdapterSettings) -> None:
    """Refuse an adapter of embedding or output layer where they are one matrix."""
    for pattern in settings.targets if is_tied else ():
        for name in ("lm_head", "model.embed_tokens"):
            if is_named(name, (pattern,)) and not is_named(name, settings.excluded):
                bound = (
                    f"{pattern!r} names {name}, and embedding and output layer are one matrix "
                    "(tie_word_embeddings)"
                )
                fix = "add it to exclude_modules: with an adapter of one of them the two would differ"
                raise ConfigError([Violation(f"{KEY}.target_modules", list(settings.targets), bound, fix)])


def refuse_dropped_outputs(
    chosen: Collection[str], vocabulary: Iterable[str], settings: AdapterSettings
) -> None:
    """Refuse to drop logits, which are not there at one time; nor does PEFT."""
    if (
        settings.dropout
        and not settings.drops_input
        and any(name in chosen for name in vocabulary if not is_embedding(name))
    ):
        bound = "the output layer has an adapter, whose output, the logits, cannot be dropped"
        raise ConfigError([Violation(f"{KEY}.dropout_position", "post", bound, "write pre")])


def refuse_other_base(module: str, settings: AdapterSettings) -> None:
    """Refuse to go on from an adapter that brings another embedding or output layer than the model has. A
    collective over the world.

    Args:
        module: the one of this rank that is another; empty for none.
        settings: of the adapters.
    """
    everywhere = [""] * dist.get_world_size()
    # All ranks raise alike: a rank with the right rows would go on into the next collective.
    dist.all_gather_object(everywhere, module)
    modules = [found for found in everywhere if found]
    if modules:
        bound = f"it was trained beside another {modules[0]} than the model has, and brings that with it"
        fix = f"name its own base as policy.model_name, or start without {KEY}.adapter_path"
        raise ConfigError([Violation(f"{KEY}.adapter_path", str(settings.start), bound, fix)])


def drop(values: torch.Tensor, share: float, module: nn.Module) -> torch.Tensor:
    """Return values with a share of them dropped while the module trains."""
    return nn.functional.dropout(values, share) if share and module.training else values


@torch.no_grad()
def merged(weight: torch.Tensor, up: torch.Tensor, down: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return W + s B A of a shard, added up in float32 and rounded once to the dtype of W, which is left as
    it is.

    Args:
        weight: [m, n].
        up: [m, R], the rows of B.
        down: [R, n], the columns of A.
        scaling: s.
    """
    return torch.addmm(weight.float(), up.float(), down.float(), alpha=scaling).to(weight.dtype)


def write_peft(directory: Path, peft: Mapping[str, Any], factors: Mapping[str, torch.Tensor]) -> None:
    """Write a directory that ``peft.PeftModel.from_pretrained`` reads.

    Args:
        directory: made here.
        peft: of ``AdapterSettings.as_peft``.
        factors: by PEFT's names, on the CPU.
    """
    directory.mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in factors.items()},
        directory / WEIGHTS_FILE,
        metadata={"format": "pt"},
    )
    (directory / ADAPTER_CONFIG).write_text(json.dumps(peft, indent=2) + "\n", encoding="utf-8")
