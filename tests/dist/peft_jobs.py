"""What the pool's processes run of low-rank adapters, and what PEFT says of the same."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.tensor import DTensor

from tests.dist import jobs, mixtures
from tests.dist.reference import ReferenceTrainer
from tests.dist.remembered import remembered, without_layout
from tests.models import policy_config


class ExpertsApart(torch.nn.ModuleList):
    """Experts as modules of their own, as transformers had them before it stacked their matrices, and as
    adapters of each are published."""

    def __init__(self, stacked: Any) -> None:
        super().__init__()
        self.activation = [stacked.act_fn]  # no module of the list
        for both, last in zip(stacked.gate_up_proj, stacked.down_proj, strict=True):
            names = dict(zip(("gate_proj", "up_proj", "down_proj"), (*both.chunk(2), last), strict=True))
            self.append(
                torch.nn.ModuleDict(
                    {
                        name: torch.nn.Linear(*reversed(weight.shape), bias=False)
                        for name, weight in names.items()
                    }
                )
            )
            for name, weight in names.items():
                self[-1][name].weight = torch.nn.Parameter(weight.detach().clone())

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(hidden)
        for number, expert in enumerate(self):
            token, place = torch.where(chosen == number)
            inner = self.activation[0](expert["gate_proj"](hidden[token])) * expert["up_proj"](hidden[token])
            output = output.index_add(0, token, expert["down_proj"](inner) * weights[token, place, None])
        return output


def load(model: Path, *, apart: bool = False) -> torch.nn.Module:
    """The base, with its stacks of experts or each expert ``apart``."""
    base: Any = mixtures.load(model)
    # of a padding token that is part of a sequence transformers would keep the gradient back
    base.model.embed_tokens.padding_idx = None
    if apart:
        # PEFT changes names of experts by this
        base.config.model_type = "apart"
        for layer in base.model.layers:
            if hasattr(layer.mlp, "experts"):
                layer.mlp.experts = ExpertsApart(layer.mlp.experts)
    return base


def saved_by_peft(
    model: Path, directory: Path, targets: Sequence[str], *, apart: bool = False, **options: Any
) -> Path:
    """An adapter with factors that are all random, so that each has a gradient from the first step on."""
    torch.manual_seed(4)
    changed = get_peft_model(
        load(model, apart=apart),
        LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": list(targets), **options}),
    )
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.2)
    changed.save_pretrained(directory)
    return directory


def with_adapters(config: Mapping[str, Any], **section: Any) -> dict[str, Any]:
    return {**config, "peft": {"enabled": True, "dim": 3, "alpha": 5.0, **section}}


@remembered
def trained_by_peft(
    model: Path,
    adapter: Path,
    config: Mapping[str, Any],
    batches: Sequence[Mapping[str, Any]],
    loss_fn: Any,
    apart: bool,
) -> dict[str, Any]:
    """Losses, norms, factors by PEFT's names and merged weights after a step of float64 for each batch."""
    base: Any = load(model, apart=apart).double()
    tied, stacked = (
        base.config.tie_word_embeddings,
        not apart and any(".experts." in name for name, _ in base.named_parameters()),
    )
    trainer = ReferenceTrainer(PeftModel.from_pretrained(base, adapter, is_trainable=True).double(), config)
    exact = [
        {name: column.double() if column.is_floating_point() else column for name, column in batch.items()}
        for batch in batches
    ]
    measured = [trainer.step(batch, loss_fn) for batch in exact]
    factors = {
        name.replace(".default", ""): parameter.detach().clone()
        for name, parameter in trainer.model.named_parameters()
        if "lora_" in name
    }
    whole = trainer.model.merge_and_unload()  # type: ignore[operator]
    weights = (
        mixtures.weights_of(whole.float(), Path(adapter) / "merged") if stacked else dict(whole.state_dict())
    )
    if tied:
        weights.pop("lm_head.weight", None)
    return {
        "losses": [m[0] for m in measured],
        "norms": [m[1] for m in measured],
        "factors": factors,
        "weights": weights,
    }


def expected_of(
    model: Path, adapter: Path, batches: Sequence[Mapping[str, Any]], loss_fn: Any, *, apart: bool = False
) -> dict[str, Any]:
    """The same of the optimizer that the tests' configurations have, computed once for all layouts."""
    config = without_layout(policy_config(model, gbs=12, clip=0.5))
    found: dict[str, Any] = trained_by_peft(model, adapter, config, batches, loss_fn, apart)
    return found


def factors_of(worker: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone().cpu() for name, tensor in worker.backend.export_adapters()[1]}


def whole_factors(worker: Any) -> dict[str, torch.Tensor]:
    """This rank's copies of the factors that tensor-parallel ranks do not cut, as Megatron holds them."""
    return {
        name: parameter.detach().clone()
        for name, parameter in worker.backend.trainable()
        if not getattr(parameter, "tensor_model_parallel", True)
    }


def base_of(worker: Any) -> list[torch.Tensor]:
    return [
        parameter.detach().clone()
        for _, parameter in worker.backend.parameters()
        if not parameter.requires_grad
    ]


def train(config: Mapping[str, Any], batches: Sequence[Mapping[str, Any]], loss_fn: Any) -> dict[str, Any]:
    """What ``jobs.train`` says, with the factors, log-probabilities with and without adapters, and whether
    the base is what it was."""
    worker = jobs.build(config)
    base = base_of(worker)
    plain = jobs.logprobs_of(worker, batches[0], "get_reference_policy_logprobs")
    results = [worker.train(data=jobs.my_share(worker, batch), loss_fn=loss_fn) for batch in batches]
    weights, factors = jobs.full_weights(worker), factors_of(worker)
    after = jobs.logprobs_of(worker, batches[0], "get_reference_policy_logprobs")
    changed, again = (jobs.logprobs_of(worker, batches[0]) for _ in range(2))
    same = all(torch.equal(one, other) for one, other in zip(base, base_of(worker), strict=True))
    counts = [sum(tensor.numel() for _, tensor in worker.backend.trainable()), len(base)]
    copies = whole_factors(worker)
    worker.backend.close()
    return {
        "losses": [float(result["global_loss"]) for result in results],
        "norms": [float(result["grad_norm"]) for result in results],
        "weights": weights,
        "factors": factors,
        "copies": copies,
        "reference": (plain, after),
        "logprobs": changed,
        "base_is_the_same": same,
        "drops_nothing_when_scored": torch.equal(changed, again),
        "counts": counts,
    }


def logprobs_of_new_adapters(
    config: Mapping[str, Any], batch: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of adapters that begin, and those of the reference policy."""
    worker = jobs.build(config, init_optimizer=False)
    both = jobs.logprobs_of(worker, batch), jobs.logprobs_of(worker, batch, "get_reference_policy_logprobs")
    worker.backend.close()
    return both


def save_on_the_way(
    config: Mapping[str, Any], batches: Sequence[Mapping[str, Any]], loss_fn: Any, directory: Path
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses behind the first of two batches, after which a checkpoint is written, and the factors in the
    end."""
    worker = jobs.build(config, init_reference_model=False)
    losses = []
    for step, batch in enumerate(batches):
        losses.append(float(worker.train(data=jobs.my_share(worker, batch), loss_fn=loss_fn)["global_loss"]))
        if step == 0:
            worker.save_checkpoint(str(directory / "weights"), str(directory / "optimizer"))
    factors = factors_of(worker)
    worker.backend.close()
    return losses[1:], factors


def resume(
    config: Mapping[str, Any], batches: Sequence[Mapping[str, Any]], loss_fn: Any, directory: Path
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same from that checkpoint."""
    options = {"weights_path": str(directory / "weights"), "optimizer_path": str(directory / "optimizer")}
    worker = jobs.build(config, init_reference_model=False, **options)
    losses = [
        float(worker.train(data=jobs.my_share(worker, batch), loss_fn=loss_fn)["global_loss"])
        for batch in batches[1:]
    ]
    factors = factors_of(worker)
    worker.backend.close()
    return losses, factors


# what tensor-parallel ranks do not cut, by transformers' names
_WHOLE = re.compile(r"(?:[qkv]|gate|up)_proj\.lora_A|(?:o|down)_proj\.lora_B")


def copies_after_resume(
    config: Mapping[str, Any], batches: Sequence[Mapping[str, Any]], loss_fn: Any, directory: Path
) -> dict[str, torch.Tensor]:
    """This rank's copies of the factors that tensor-parallel ranks do not cut, behind the same steps."""
    options = {"weights_path": str(directory / "weights"), "optimizer_path": str(directory / "optimizer")}
    worker = jobs.build(config, init_reference_model=False, **options)
    for batch in batches[1:]:
        worker.train(data=jobs.my_share(worker, batch), loss_fn=loss_fn)
    copies = {
        name: (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().clone()
        for name, parameter in worker.backend.trainable()
        if not getattr(parameter, "tensor_model_parallel", not _WHOLE.search(name))
    }
    worker.backend.close()
    return copies


def train_and_export(
    config: Mapping[str, Any], batch: Mapping[str, Any], loss_fn: Any, directory: Path
) -> torch.Tensor:
    """Log-probabilities after a step, and an export, beside a checkpoint of the weights."""
    worker = jobs.build(config, init_reference_model=False)
    worker.train(data=jobs.my_share(worker, batch), loss_fn=loss_fn)
    worker.export_hf(str(directory))
    worker.save_checkpoint(str(directory.with_name("weights")))
    found = jobs.logprobs_of(worker, batch)
    worker.backend.close()
    return found


def load_error(config: Mapping[str, Any], weights: Path) -> str:
    worker = jobs.build(config, init_optimizer=False, init_reference_model=False)
    said = jobs.said(lambda: worker.load_checkpoint(str(weights)))
    worker.backend.close()
    return said
