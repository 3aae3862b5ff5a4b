"""Low-rank adapters (LoRA, arXiv 2106.09685): the parts that all backends share.

A linear layer with weight W [out, in] gets two factors, A [r, in] and B [out, r], and computes with W + s B
A. The scale s is alpha / r, or alpha / sqrt(r) if rank-stabilized (arXiv 2312.03732). W itself is never
changed. Layers and factors have PEFT's names, no matter which layers a backend fuses.
"""

# A PeftDirectory has keys() but is not a mapping, so `in` does not search its names.
# ruff: noqa: SIM118

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

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
from megarl.weight_sync.plan import WeightIterator

KEY = "policy.peft"
ADAPTER_DIRECTORY = "adapter"
SAVED_SCORE = f"{PEFT_PREFIX}{SCORE}"
"""PEFT's name for the weight of a score layer that is trained in full together with adapters
(``modules_to_save``)."""
_BASE = ".base_layer.weight"
_AS_STORED = "set dim, alpha, use_rslora and target_modules as in its adapter_config.json"


class AdapterConfig(TypedDict):
    """Content of PEFT's ``adapter_config.json``."""

    peft_type: str
    task_type: str
    base_model_name_or_path: str
    r: int
    lora_alpha: float
    use_rslora: bool
    lora_dropout: float
    target_modules: list[str]
    bias: str
    fan_in_fan_out: bool
    inference_mode: bool
    init_lora_weights: bool
    modules_to_save: list[str] | None
    use_dora: bool
    target_parameters: NotRequired[list[str]]


AdapterExport = tuple[AdapterConfig, WeightIterator]


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """Settings of ``policy.peft``.

    Attributes:
        rank: rank of every adapter.
        alpha: alpha as configured.
        rank_stabilized: if True, ``scaling`` is alpha / sqrt(rank), otherwise alpha / rank.
        dropout: dropout probability in training.
        drops_input: apply dropout to the adapter's input; otherwise to its output.
        init: initialization of A: kaiming, xavier or normal.
        targets: patterns of the layers that get an adapter.
        excluded: patterns of the layers that get none.
        parameters: patterns of the expert stacks (several experts' weights in one tensor) that get an
            adapter.
        start: PEFT directory from which training continues; None to start with new adapters.
        base: base model of the adapters, as named in the configuration.
        scores: the model has a score layer, which is trained in full and stored with the adapters.
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
        """Return the settings of a policy section with defaults filled in; None if it has no adapters."""
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
        """The scale s in W + s B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def chosen_stacks(self, stacks: Sequence[Stack]) -> list[Stack]:
        """Return the expert stacks that get an adapter.

        Raises:
            ConfigError: a pattern matches no stack.
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
        """Return the layers that get an adapter.

        Args:
            layers: names of all layers that may get an adapter.
            others: names of the matrices that cannot have an adapter, such as routers.
            named: names of the layers that get an adapter only if a pattern matches them: experts, embedding
                and output layer.
            stacks: result of ``chosen_stacks``.

        Raises:
            ConfigError: a pattern matches nothing, or matches a matrix that cannot have an adapter; or no
                layer gets an adapter.
        """
        # Without patterns, adapt all linear layers except those in ``named``, which require a pattern.
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
    ) -> AdapterConfig:
        """Return the content of ``adapter_config.json``.

        Args:
            adapted: names of the matrices with an adapter.
            matrices: names of all matrices of the model.
            stacks: names of the expert stacks with an adapter.
            other_stacks: names of the expert stacks without one.
        """
        config: AdapterConfig = {
            "peft_type": "LORA",
            "task_type": "SEQ_CLS" if self.scores else "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "use_rslora": self.rank_stabilized,
            "lora_dropout": self.dropout,
            "target_modules": listed(adapted, set(matrices).difference(adapted), 1),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "modules_to_save": [SCORE.removesuffix(".weight")] if self.scores else None,
            "use_dora": False,
        }
        if stacks:
            config["target_parameters"] = listed(stacks, other_stacks, 2)
        return config


class AdapterSwitch:
    """A switch, shared by all layers of a model, that turns their adapters on and off."""

    def __init__(self) -> None:
        self.is_on = True

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Turn the adapters off inside the context, so that the model computes with its base weights
        alone."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before


class FirstFactors:
    """Initial values of all adapters, as full tensors. They do not depend on the rank, the layout or the
    backend.

    Args:
        settings: settings of the adapters.
        modules: names of all layers that have an adapter.
        seed: seed of new random factors.
        stacks: expert stacks that have an adapter.

    Raises:
        ConfigError: the PEFT directory to continue from has another rank, another scale or other layers.
        ConversionError: that directory is damaged, or does not contain a plain LoRA.
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
        """Return one factor of a layer in float32 on the CPU: A [r, width] or B [width, r].

        In a new adapter, B is zero and A is random. In a new adapter of the embedding, A is zero and B is
        normal.
        """
        shape = (self._settings.rank, width) if letter == "A" else (width, self._settings.rank)
        if self._source is not None:
            stored = self._read(self._source, module, letter).float()
            if tuple(stored.shape) != shape:
                raise self._refusal(
                    f"{module} has a factor {letter} of shape {list(stored.shape)}, the model asks for "
                    f"{list(shape)}"
                )
            return stored
        # One factor is zero, so that training starts at the base model. Like PEFT, choose A for an embedding.
        if letter == ("A" if is_embedding(module) else "B"):
            return torch.zeros(shape)
        # Seed by the layer's name: the values then depend neither on the order of the layers nor on their
        # ranks.
        digest = hashlib.sha256(f"{self._seed}:{module}".encode()).digest()
        # Seven bytes always fit into the signed 64-bit seed of a generator.
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        if letter == "B":
            return torch.randn(shape, generator=generator)
        if self._settings.init == "kaiming":
            # This is kaiming_uniform_ with a = sqrt(5), PEFT's choice, whose bound is 1 / sqrt(inputs).
            return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(width)
        deviation = (
            math.sqrt(2 / (width + self._settings.rank))
            if self._settings.init == "xavier"
            else 1 / self._settings.rank
        )
        return torch.randn(shape, generator=generator) * deviation

    def score(self) -> torch.Tensor | None:
        """Return the score layer [1, h] from the PEFT directory to continue from; None without such a
        directory, or if the model has no score layer."""
        return self._source.read(SAVED_SCORE) if self._source is not None and self._settings.scores else None

    def base_of(self, module: str) -> torch.Tensor | None:
        """Return a layer's base weight from the PEFT directory to continue from; None if it contains none.
        PEFT stores the base weight of an adapted embedding or output layer."""
        name = f"{PEFT_PREFIX}{module}{_BASE}"
        return self._source.read(name) if self._source is not None and name in self._source.keys() else None

    def _read(self, source: PeftDirectory, module: str, letter: str) -> torch.Tensor:
        if module not in self._stacked:
            return source.read(factor_name(module, letter))
        stored, (rows, columns) = self._stacked.taken(module, letter)
        name = factor_name(stored, letter)
        if name not in self._recent:
            # Cache the last four tensors: a layer has two stacks with two factors each, and its experts read
            # their parts of them one after another.
            self._recent = dict(list(self._recent.items())[-3:]) | {name: source.read(name)}
        return self._recent[name][rows, columns]

    def forget(self) -> None:
        """Release cached tensors. Call this once all factors have been read."""
        self._recent = {}

    def _require_same(self, source: PeftDirectory, modules: Collection[str]) -> None:
        wanted = {SAVED_SCORE} if self._settings.scores else set()
        for module in (*modules, *self._stacked.modules.values()):
            wanted |= {factor_name(module, "A"), factor_name(module, "B")}
        # PEFT also stores the base of an adapted embedding or output layer. It is left out here and compared
        # by base_of.
        stored = {name for name in source.keys() if not name.endswith(_BASE)}
        if stored != wanted:
            more, fewer = sorted(stored - wanted), sorted(wanted - stored)
            raise self._refusal(
                f"its layers differ: {more[:2]} are only in the adapter, {fewer[:2]} only in {KEY} "
                f"({len(more)}, {len(fewer)})"
            )
        if self._settings.scores and source.shape(SAVED_SCORE)[0] != 1:
            raise self._refusal(
                f"its score layer is {list(source.shape(SAVED_SCORE))}, a row for each label; one is needed",
                "take an adapter that was trained with num_labels=1",
            )
        for module in (*modules, *self._stacked.modules):
            if source.config.rank_of(module) != self._settings.rank:
                raise self._refusal(
                    f"{module} has rank {source.config.rank_of(module)} in the adapter, but "
                    f"{KEY}.dim is {self._settings.rank}"
                )
            if not math.isclose(source.config.scaling_of(module), self._settings.scaling):
                raise self._refusal(
                    f"{module} has scale {source.config.scaling_of(module):g} in the adapter, but "
                    f"{self._settings.scaling:g} here"
                )

    def _refusal(self, bound: str, fix: str = _AS_STORED) -> ConfigError:
        return ConfigError([Violation(f"{KEY}.adapter_path", str(self._settings.start), bound, fix)])


def factor_name(module: str, letter: str) -> str:
    """Return the name of a factor (``letter`` is A or B) in PEFT's weight files."""
    if is_embedding(module):
        return f"{PEFT_PREFIX}{module}.lora_embedding_{letter}"
    return f"{PEFT_PREFIX}{module}.lora_{letter}.weight"


def is_embedding(module: str) -> bool:
    """Return whether a layer name is that of the token embedding."""
    return module.endswith("embed_tokens")


def refuse_tied(is_tied: bool, settings: AdapterSettings) -> None:
    """Raise ConfigError if ``target_modules`` names the embedding or the output layer although they are
    tied."""
    for pattern in settings.targets if is_tied else ():
        for name in ("lm_head", "model.embed_tokens"):
            if is_named(name, (pattern,)) and not is_named(name, settings.excluded):
                bound = (
                    f"{pattern!r} names {name}, but embedding and output layer are one matrix "
                    "(tie_word_embeddings)"
                )
                fix = "add it to exclude_modules: with an adapter of one of them the two would differ"
                raise ConfigError([Violation(f"{KEY}.target_modules", list(settings.targets), bound, fix)])


def refuse_dropped_outputs(
    chosen: Collection[str], vocabulary: Iterable[str], settings: AdapterSettings
) -> None:
    """Raise ConfigError if dropout would apply to the output of an adapted output layer. The logits never
    exist all at once, and PEFT does not drop them either."""
    if (
        settings.dropout
        and not settings.drops_input
        and any(name in chosen for name in vocabulary if not is_embedding(name))
    ):
        bound = "the output layer has an adapter, whose output, the logits, cannot be dropped"
        raise ConfigError([Violation(f"{KEY}.dropout_position", "post", bound, "write pre")])


def refuse_other_base(module: str, settings: AdapterSettings) -> None:
    """Raise ConfigError on all ranks if the adapter to continue from was trained with another embedding or
    output layer than the model's. Collective over all ranks.

    Args:
        module: the layer of this rank that differs; empty if none does.
        settings: settings of the adapters.
    """
    everywhere = [""] * dist.get_world_size()
    # Raise on all ranks: a rank whose rows are equal would otherwise wait in the next collective.
    dist.all_gather_object(everywhere, module)
    modules = list(filter(None, everywhere))
    if modules:
        bound = f"it was trained with another {modules[0]} than that of the model, and holds a copy of it"
        fix = f"set policy.model_name to its own base, or start without {KEY}.adapter_path"
        raise ConfigError([Violation(f"{KEY}.adapter_path", str(settings.start), bound, fix)])


def drop(values: torch.Tensor, share: float, module: nn.Module) -> torch.Tensor:
    """Apply dropout with probability ``share`` if the module is in training mode."""
    return nn.functional.dropout(values, share) if share and module.training else values


@torch.no_grad()
def merged(weight: torch.Tensor, up: torch.Tensor, down: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return W + s B A of a shard, as a new tensor. It is summed in float32 and rounded once to the dtype of
    W.

    Args:
        weight: W, [m, n].
        up: this shard's rows of B, [m, R].
        down: this shard's columns of A, [R, n].
        scaling: s.
    """
    return torch.addmm(weight.float(), up.float(), down.float(), alpha=scaling).to(weight.dtype)


def write_peft(directory: Path, peft: AdapterConfig, factors: Mapping[str, torch.Tensor]) -> None:
    """Write an adapter directory that ``peft.PeftModel.from_pretrained`` can read.

    Args:
        directory: created here; must not exist.
        peft: result of ``AdapterSettings.as_peft``.
        factors: CPU tensors by PEFT's names.
    """
    directory.mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in factors.items()},
        directory / WEIGHTS_FILE,
        metadata={"format": "pt"},
    )
    (directory / ADAPTER_CONFIG).write_text(json.dumps(peft, indent=2) + "\n", encoding="utf-8")
