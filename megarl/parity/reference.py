"""Independent reference trainer: plain transformers and torch optimizers in one process, which computes each
global batch at once and shares no code with the engine."""

from __future__ import annotations

import copy
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.models.generation.sampling import MODEL_ITSELF, SamplingSettings
from megarl.observe.metrics import Reduction, default_reduction
from megarl.parity.batches import Batch, calls_of, in_parts, rows_of
from megarl.parity.case import CLASS_IN_TRANSFORMERS, Case
from megarl.parity.errors import BOUND, ROUNDING
from megarl.parity.losses import rows_together
from megarl.parity.reference_advantages import Columns
from megarl.parity.reference_losses import reference_loss, responses
from megarl.parity.routers import Routers
from megarl.parity.settings import ADAPTER_SCALE, BETAS, MOMENTUM, STACKS, Hyperparameters, hyperparameters

SMALL_CHANGE = 1e-3
# GPT-OSS stacks the bias vectors of all experts in one matrix; these names have this suffix.
_STACKED_BIAS = "_proj_bias"


class _Adapted(torch.nn.Linear):
    """Linear layer with a LoRA adapter, of which only the factors are trained."""

    lora_A: torch.nn.Parameter
    lora_B: torch.nn.Parameter

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs [..., in] to outputs [..., out]."""
        return super().forward(inputs) + ADAPTER_SCALE * ((inputs @ self.lora_A.T) @ self.lora_B.T)


class _AdaptedEmbedding(torch.nn.Embedding):
    """Embedding with a LoRA adapter, of which only the factors are trained."""

    lora_A: torch.nn.Parameter
    lora_B: torch.nn.Parameter

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [...] to embeddings [..., h]."""
        columns = torch.nn.functional.embedding(tokens, self.lora_A.T)
        return super().forward(tokens) + ADAPTER_SCALE * (columns @ self.lora_B.T)


def _with_adapter(experts: Any, stack: str) -> Tensor:
    """Return stacked expert weights plus their LoRA product, differentiable."""
    weight = experts._parameters[stack]
    # Use PEFT's views of the factors: A is [experts, rank, in], and B is [out, rank, experts].
    down = experts.get_parameter(f"lora_A_{stack}").unflatten(0, (weight.shape[0], -1))
    up = experts.get_parameter(f"lora_B_{stack}").unflatten(1, (-1, weight.shape[0]))
    axes = "ore,eri->eio" if getattr(experts, "is_transposed", False) else "ore,eri->eoi"
    return weight + ADAPTER_SCALE * torch.einsum(axes, up, down)


class _AdaptedStacks(torch.nn.Module):
    """Mixin for an experts module with LoRA adapters on its stacked weights; only the factors are trained."""

    gate_up_proj = property(lambda experts: _with_adapter(experts, "gate_up_proj"))
    down_proj = property(lambda experts: _with_adapter(experts, "down_proj"))


def _put_adapters(model: torch.nn.Module, directory: Path) -> None:
    """Load the stored LoRA factors into their layers, and freeze all other parameters."""
    from safetensors.torch import load_file

    stored = load_file(directory / "adapter_model.safetensors")
    model.requires_grad_(False)
    for name, module in model.named_modules():
        is_stack = name.endswith(".experts")
        # PEFT wraps a module once for each of its parameters; the wrapper of the last one is the outermost.
        wrappers = zip(STACKS, (f"{name}.base_layer", name), strict=True) if is_stack else [("", name)]
        for stack, wrapper in wrappers:
            is_embedding = isinstance(module, torch.nn.Embedding)
            form = "lora_embedding_{}" if is_embedding else "lora_{}.weight"
            factors = [
                stored.pop(f"base_model.model.{wrapper}.{form.format(letter)}", None) for letter in "AB"
            ]
            if factors[0] is None or factors[1] is None:
                continue
            for letter, values in zip("AB", factors, strict=True):
                assert isinstance(values, Tensor)
                parameter = torch.nn.Parameter(values.to(next(model.parameters()).dtype))
                module.register_parameter(f"lora_{letter}{'_' * is_stack}{stack}", parameter)
            if not is_stack:
                # Replacing the class instead of the module keeps the parameter names.
                module.__class__ = _AdaptedEmbedding if is_embedding else _Adapted
            elif stack == STACKS[-1]:
                module.__class__ = type("AdaptedExperts", (_AdaptedStacks, type(module)), {})
    assert not stored, f"factors of no layer: {sorted(stored)[:3]}"


def load_model(
    directory: Path | str, dtype: torch.dtype = torch.float32, adapter: Path | None = None
) -> torch.nn.Module:
    """Load the transformers model of a directory in evaluation mode, with the LoRA adapter of the directory
    ``adapter`` if one is given."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    content = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    known = CLASS_IN_TRANSFORMERS.get(content["model_type"])
    config = (
        AutoConfig.from_pretrained(directory)
        if known is None
        else AutoConfig.for_model(**content | {"model_type": known})
    )
    [name] = config.architectures
    auto = (
        AutoModelForSequenceClassification
        if name.endswith("ForSequenceClassification")
        else AutoModelForCausalLM
    )
    # Eager experts: the grouped matmul that transformers prefers requires row sizes that are multiples of 16
    # bytes.
    model: torch.nn.Module = auto.from_pretrained(
        directory, config=config, dtype=dtype, experts_implementation="eager"
    ).eval()
    # For float16, transformers keeps some norms in float32, which no backend does. Convert them, because the
    # reference must round them as the backends do.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    if adapter is not None:
        _put_adapters(model, adapter)
    return model


def saved_weights(model: Any) -> dict[str, Tensor]:
    """Return the weights as ``save_pretrained`` stores them: with the names on disk, tied weights once, and
    LoRA adapters merged."""
    from safetensors.torch import load_file

    state = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
    for name, module in model.named_modules():
        if isinstance(module, _Adapted | _AdaptedEmbedding):
            added = ADAPTER_SCALE * (module.lora_B.float() @ module.lora_A.float())
            added = added.T if isinstance(module, _AdaptedEmbedding) else added
            state[f"{name}.weight"] = (module.weight.float() + added).to(module.weight.dtype).detach()
        elif isinstance(module, _AdaptedStacks):
            # Merge in float32, then round once.
            wide: Any = copy.deepcopy(module).float()
            for stack in STACKS:
                state[f"{name}.{stack}"] = getattr(wide, stack).to(model.dtype).detach()
    weights: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory, state_dict=state)
        for file in Path(directory).glob("*.safetensors"):
            weights |= load_file(file)
    return weights


def distributions(model: torch.nn.Module, data: Columns, sampling: SamplingSettings = MODEL_ITSELF) -> Tensor:
    """Return the log-probabilities [B, S-1, V] of the distributions that the next tokens are sampled from;
    float32, differentiable.

    Padding is masked out of the attention.
    """
    mask = torch.arange(data["input_ids"].shape[1])[None] < data["input_lengths"][:, None]
    logits = (
        model(input_ids=data["input_ids"], attention_mask=mask.long()).logits[:, :-1].float()
        / sampling.temperature
    )
    return _kept(logits, data["input_ids"][:, 1:, None], sampling).log_softmax(-1)


def next_token_logprobs(
    model: torch.nn.Module, data: Columns, sampling: SamplingSettings = MODEL_ITSELF
) -> Tensor:
    """Return the log-probabilities [B, S-1] of the next tokens; float32, differentiable."""
    return _of_next_tokens(distributions(model, data, sampling), data)


def _of_next_tokens(logarithms: Tensor, data: Columns) -> Tensor:
    return logarithms.gather(2, data["input_ids"][:, 1:, None]).squeeze(2)


def entropies_of(logarithms: Tensor) -> Tensor:
    """Return the entropies [...] in nats of distributions with log-probabilities [..., V]; differentiable."""
    # A token with probability 0 must add neither to the value nor to the gradient; 0 * -inf would be NaN.
    can_be = logarithms.isfinite()
    return -torch.where(
        can_be, logarithms.exp() * logarithms.where(can_be, torch.zeros_like(logarithms)), 0.0
    ).sum(-1)


def _kept(logits: Tensor, targets: Tensor, sampling: SamplingSettings) -> Tensor:
    """Return the logits with -inf for tokens that transformers' top-k or top-p filter removes, except for the
    target tokens."""
    from transformers import LogitsProcessor, LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

    warpers: list[LogitsProcessor] = [] if sampling.top_k is None else [TopKLogitsWarper(sampling.top_k)]
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    flat = logits.flatten(0, 1)
    left: Tensor = LogitsProcessorList(warpers)(targets.flatten(0, 1), flat)
    targeted = torch.zeros_like(flat, dtype=torch.bool).scatter(1, targets.flatten(0, 1), True)
    return flat.where(targeted | left.isfinite(), left).view_as(logits) if warpers else logits


def read_by_loss(model: Any, data: Columns, sampling: SamplingSettings = MODEL_ITSELF) -> Tensor:
    """Return the model outputs that a loss reads; float32, differentiable.

    For a language model these are next-token log-probabilities [B, S-1]; for a model with a score layer,
    values [B, S] that are 0 in padding.
    """
    if not hasattr(model, "score"):
        return next_token_logprobs(model, data, sampling)
    inside = torch.arange(data["input_ids"].shape[1])[None] < data["input_lengths"][:, None]
    hidden = model.model(input_ids=data["input_ids"], attention_mask=inside.long()).last_hidden_state
    return model.score(hidden).squeeze(-1).float() * inside


def token_logprobs(
    model: torch.nn.Module, data: Columns, sampling: SamplingSettings = MODEL_ITSELF
) -> Tensor:
    """Return log-probabilities [B, S] in float32, with 0 in column 0 and in padding; values for a model with
    a score layer.

    A token with probability 1, as after diverging training, gets the negative number closest to 0 instead of
    0, so that 0 always means padding.
    """
    with torch.no_grad():
        values = read_by_loss(model, data, sampling)
    values = values.where(values != 0, -torch.finfo(values.dtype).tiny)
    if not hasattr(model, "score"):
        values = torch.nn.functional.pad(values, (1, 0))
    inside = torch.arange(values.shape[1])[None] < data["input_lengths"][:, None]
    return values.where(inside, torch.zeros_like(values))


@dataclass
class Expected:
    """Values that the workers must report, with one list entry per ``train()`` call.

    Attributes:
        losses: one loss per global batch.
        norms: one gradient norm per global batch, before clipping.
        norm_scales: scale for the relative error of each gradient norm: the size of the terms whose sum the
            gradient is.
        metrics: metrics, reduced over the global batches of the call.
        scales: scale for the relative error of each metric: the summed size of its terms, or their change
            with the log-probabilities if that is larger. A metric itself may be much smaller, because terms
            cancel.
        weights: weights after training, by Hugging Face name.
        logprobs: [B, S] log-probabilities after training.
        base_logprobs: [B, S] log-probabilities of the reference policy; None if that is the model before
            training.
        distributions: [B, S-1, V] log-probabilities of the sampling distributions before and after training;
            empty unless the case needs the most likely tokens.
    """

    losses: list[list[float]] = field(default_factory=list)
    norms: list[list[float]] = field(default_factory=list)
    norm_scales: list[list[float]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    scales: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    logprobs: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    base_logprobs: Tensor | None = None
    distributions: list[Tensor] = field(default_factory=list)


class _Step(NamedTuple):
    """Result of one optimizer step: loss, gradient norm and metrics of its global batch, with their
    scales."""

    loss: float
    norm: float
    norm_scale: float
    metrics: dict[str, float]
    scales: dict[str, float]


def _as_it_is(scores: Tensor) -> Tensor:
    return scores


class ReferenceTrainer:
    """Trainer that updates a model in place. A step computes the gradient of a whole global batch, clips it
    by its norm, and runs the optimizer once.

    In 16-bit precision, the optimizer updates float32 master weights, from which the model's parameters are
    rounded.

    Args:
        model: a transformers model.
        hyper: optimizer settings.
        loss_fn: a ``LossFunction``.
        sampling: temperature, top-k and top-p of the sampling distribution.
        loss_scale: factor on the loss in the backward pass; gradients are divided by it.
        read: function applied to the model outputs before the loss reads them, to add noise.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        hyper: Hyperparameters,
        loss_fn: Any,
        sampling: SamplingSettings,
        loss_scale: float = 1.0,
        read: Callable[[Tensor], Tensor] = _as_it_is,
    ) -> None:
        self.model = model.train()
        self._read = read
        self._loss_scale = loss_scale
        self._hyper = hyper
        self._loss_fn = loss_fn
        self._sampling = sampling
        self._together = rows_together(loss_fn)
        self._routers = Routers(model, hyper.balancing)
        self._parameters, self._master, decays = list[Tensor](), list[Tensor](), list[bool]()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._parameters.append(parameter)
                self._master.append(parameter.detach().float().clone())
                # Megatron-Core decays only matrices. transformers stacks the biases of all experts, which
                # makes a matrix of vectors.
                decays.append(parameter.ndim > 1 and not name.endswith(_STACKED_BIAS))
        self._optimizer = _optimizer(self._master, decays, hyper)

    def call(self, batches: Sequence[Columns], number: int, expected: Expected) -> None:
        """Run call ``number`` of ``train()`` on its global batches, and append the values to report to
        ``expected``."""
        rate, decay = self._hyper.rate(number), self._hyper.weight_decay(number)
        steps = zip(*(self._step(batch, rate, decay) for batch in batches), strict=True)
        losses, norms, norm_scales, metrics, scales = map(list, steps)
        expected.losses.append(losses)
        expected.norms.append(norms)
        expected.norm_scales.append(norm_scales)
        expected.metrics.append(self._over_batches(metrics))
        expected.scales.append(self._over_batches(scales))

    def _step(self, data: Columns, rate: float, decay: float) -> _Step:
        sequences = torch.tensor(float(responses(data)))
        tokens = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()
        self.model.zero_grad()
        self._routers.forget()
        scores = list(map(self._read, self._scores(data)))
        loss, metrics = self._loss_fn(data, sequences, tokens, *scores)
        routing = self._routers.judged(data)
        # This must precede the backward pass, which frees the graph.
        balancing = self._size_of_gradients(routing.by_expert)
        ((loss if routing.loss is None else loss + routing.loss) * self._loss_scale).backward()
        norm = self._update(rate, decay)
        known = {
            "global_valid_seqs": float(sequences),
            "global_valid_toks": float(tokens),
            "lr": rate,
            "wd": decay,
            "grad_norm": norm,
            "skipped_steps": 0.0,
            **routing.metrics,
        }
        values = {name: float(value) for name, value in metrics.items()}
        scales = self._scales(data, sequences, tokens, [values.detach() for values in scores]) | known
        for name, value in routing.metrics.items():
            # Loads are relative to the mean load. An expert without tokens has load 0, and rounding may send
            # it a token.
            if name.startswith("moe_expert_load_"):
                scales[name] = max(1.0, value)
        return _Step(float(loss.detach()), norm, max(norm, balancing), {**values, **known}, scales)

    def _scores(self, data: Columns) -> list[Tensor]:
        """Return the differentiable inputs of the loss: log-probabilities, followed by entropies or by
        log-probabilities of further tokens if the loss needs them, or values."""
        if self._loss_fn.scored_tokens is not None:
            logarithms = distributions(self.model, data, self._sampling)
            return [
                _of_next_tokens(logarithms, data),
                logarithms.gather(2, data[self._loss_fn.scored_tokens][:, :-1]),
            ]
        if not getattr(self._loss_fn, "needs_entropies", False):
            return [read_by_loss(self.model, data, self._sampling)]
        logarithms = distributions(self.model, data, self._sampling)
        return [_of_next_tokens(logarithms, data), entropies_of(logarithms)]

    def _size_of_gradients(self, terms: Tensor | None) -> float:
        """Return the sum of the gradient norms of the individual ``terms``; 0 for None.

        The gradient of the terms' sum may be much smaller, because the terms cancel.
        """
        if terms is None:
            return 0.0
        size = 0.0
        for term in terms:
            gradients = torch.autograd.grad(
                term * self._loss_scale, self._parameters, retain_graph=True, allow_unused=True
            )
            found = [gradient.float() / self._loss_scale for gradient in gradients if gradient is not None]
            size += float(torch.nn.utils.get_total_norm(found))
        return size

    def _update(self, rate: float, decay: float) -> float:
        for master, parameter in zip(self._master, self._parameters, strict=True):
            # For a parameter without a gradient, the buffers of a backend contain zeros, and weight decay
            # still changes it.
            master.grad = (
                torch.zeros_like(master)
                if parameter.grad is None
                else parameter.grad.float() / self._loss_scale
            )
        # With an infinite bound nothing is clipped, but the norm is still returned.
        norm = torch.nn.utils.clip_grad_norm_(self._master, self._hyper.clip or float("inf"))
        # The schedules are computed without torch's schedulers, which a backend uses.
        for group in self._optimizer.param_groups:
            group["lr"] = rate
            group["weight_decay"] = decay if group["decays"] else 0.0
        self._optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self._master, self._parameters, strict=True):
                parameter.copy_(master)
        return float(norm)

    def _scales(
        self, data: Columns, sequences: Tensor, tokens: Tensor, scores: Sequence[Tensor]
    ) -> dict[str, float]:
        """Return the scale of each metric: the sum of its absolute values over rows, or its slope with
        respect to the model outputs if that is larger.

        The slope is the factor by which an error of the outputs (relative to their size, at least 1) changes
        the metric. If terms cancel within a token, the scale is raised until their rounding errors are within
        ``BOUND``.
        """
        # A finite difference also gives the slope of metrics that are computed without autograd.
        moved = [values + SMALL_CHANGE * values.abs().clamp(min=1.0) for values in scores]
        parts: dict[str, list[float]] = {}
        # Separately for each row (or pair), so that terms of different rows cannot cancel.
        for first in range(0, data["input_ids"].shape[0], self._together):
            rows = slice(first, first + self._together)
            part = rows_of(data, first, self._together)
            _, here = self._loss_fn(part, sequences, tokens, *(values[rows] for values in scores))
            _, there = self._loss_fn(part, sequences, tokens, *(values[rows] for values in moved))
            for name, value in here.items():
                slope = (float(there[name]) - float(value)) / SMALL_CHANGE
                parts.setdefault(name, []).append(max(abs(float(value)), abs(slope)))
        found: dict[str, float] = {}
        for name, sizes in parts.items():
            size = self._joined(name, list(filter(math.isfinite, sizes)))
            # A share is relative to the whole: with other rounding, a share of 0 may become the share of one
            # token.
            found[name] = max(size, 1.0) if name.endswith("_share") else size
        rounded = self._loss_fn.rounded(data, float(sequences), float(tokens), *scores)
        for name, size in rounded.items():
            found[name] = max(found[name], ROUNDING / BOUND * size)
        return found

    def _joined(self, name: str, sizes: Sequence[float]) -> float:
        """Combine the sizes of a metric's rows by its reduction: the sum, or the largest for minima and
        maxima."""
        return sum(sizes) if self._reduction(name) is Reduction.SUM else max(sizes, default=0.0)

    def _reduction(self, name: str) -> Reduction:
        declared: Mapping[str, Reduction] = self._loss_fn.metric_reductions
        return declared[name] if name in declared else default_reduction(name)

    def _over_batches(self, batches: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Reduce metrics over the global batches of a call: the mean of sums and means, and the extreme of
        minima and maxima."""
        combined = {}
        for name in batches[0]:
            values = [batch[name] for batch in batches]
            reduction = self._reduction(name)
            extreme = {Reduction.MIN: min, Reduction.MAX: max}.get(reduction)
            combined[name] = extreme(values) if extreme else sum(values) / len(values)
        return combined


def _optimizer(
    parameters: Sequence[Tensor], decays: Sequence[bool], hyper: Hyperparameters
) -> torch.optim.Optimizer:
    """Return AdamW or SGD. Only parameters that ``decays`` marks have weight decay; norms and biases do
    not."""
    groups: list[dict[str, Any]] = [{"params": [], "decays": True}, {"params": [], "decays": False}]
    for parameter, decayed in zip(parameters, decays, strict=True):
        groups[not decayed]["params"].append(parameter)
    if hyper.kind == "sgd":
        return torch.optim.SGD(groups, lr=hyper.peak, momentum=MOMENTUM)
    return torch.optim.AdamW(groups, lr=hyper.peak, betas=BETAS, eps=hyper.epsilon)


def trained(
    case: Case,
    model: torch.nn.Module,
    batch: Batch,
    loss_scale: float = 1.0,
    read: Callable[[Tensor], Tensor] = _as_it_is,
) -> Expected:
    """Train ``model`` in place on the batch of a case, call by call, and return the values that the workers
    must report.

    Args:
        case: the case.
        model: a transformers model.
        batch: the complete batch.
        loss_scale: factor on the loss in the backward pass.
        read: function applied to the model outputs before the loss reads them.
    """
    expected = Expected()

    def look() -> None:
        if case.likeliest:
            with torch.no_grad():
                expected.distributions.append(distributions(model.eval(), batch, case.sampling))

    look()
    trainer = ReferenceTrainer(
        model, hyperparameters(case), reference_loss(case), case.sampling, loss_scale, read
    )
    for number, data in enumerate(calls_of(case, batch)):
        trainer.call(in_parts(data, case.global_batch), number, expected)
    expected.weights = saved_weights(model)
    expected.logprobs = token_logprobs(model.eval(), batch, case.sampling)
    look()
    return expected
