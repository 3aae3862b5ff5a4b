"""A transformers model without its weights, and what of a checkpoint belongs into it.

Parameters are built on the meta device, so that no rank ever holds a model it does not keep; a backend
divides them and then reads its own slices. Buffers (rotary frequencies) are real from the start: they come
from the model's own constructor.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils import ModelOutput

from converters.checkpoint.source import HuggingFaceSource
from converters.families import FAMILIES
from converters.model_config.rope import rotary_disagreements
from megarl.errors import ModelError
from megarl.models.huggingface.attention import IMPLEMENTATION

logger = logging.getLogger(__name__)

HEAD = "lm_head.weight"
# old checkpoints store the rotary frequencies, which every model computes from its config
_IGNORABLE = re.compile(r"(.*\.)?rotary_emb\.inv_freq")


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, every parameter that a module registers is moved to the meta device at once; buffers stay where
    they are made."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        original(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            module._parameters[name] = nn.Parameter(
                parameter.to("meta"), requires_grad=parameter.requires_grad
            )

    # On the class: constructors of all modules below call it.
    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def build_on_meta(
    hf_config: Any, *, vocabulary: int | None = None, scores: bool = False, trust_remote_code: bool = False
) -> Any:
    """A causal language model with float32 parameters on the meta device, real buffers, and the engine's
    attention.

    Or with ``scores`` a model that scores, whose ``logits`` [n, t, 1] are what its score layer says at every
    token, where transformers' own gives those of the last one that is no padding.

    The embedding row of the padding token is trained like any other, as in Megatron: a model whose padding
    token is also its end-of-text token would otherwise never learn to read the end.

    Args:
        hf_config: the model's config; left as it is.
        vocabulary: rows of embedding and output layer, at least the true size; the true size when None.
        scores: its config is one of ``megarl.models.engine.scoring``.
        trust_remote_code: run code that comes with the model.

    Raises:
        ModelError: vLLM would compute another model from the config, or its model also sees.
    """
    # A copy, because the vocabulary and dropout below are changed; the caller exports its own.
    config = copy.deepcopy(hf_config)
    text = config.get_text_config()
    if text is not config:
        seeing = " and ".join(sorted(family.model_type for family in FAMILIES.values() if family.sees))
        raise ModelError(
            f"policy.model_name: a {config.model_type} model also sees or hears, and the torch backends run "
            "models of text alone. "
            "Fix: take one of these, or set policy.megatron_cfg.enabled to true, which trains the text of "
            f"{seeing}"
        )
    if disagreements := rotary_disagreements(text.to_dict()):
        raise ModelError(
            f"config.json: {'; '.join(disagreements)}. Fix: take "
            f"{'it' if len(disagreements) == 1 else 'them'} out of rope_scaling if the "
            "model was trained without"
        )
    for name in (
        "attention_dropout",
        "hidden_dropout",
        "residual_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
    ):
        if getattr(text, name, 0.0):
            # with dropout the log-probabilities of a training step would not be those that were computed
            # before it
            logger.warning("%s = %s in the model's config.json: training uses 0", name, getattr(text, name))
            setattr(text, name, 0.0)
    if vocabulary is not None:
        text.vocab_size = vocabulary
    with parameters_on_meta():
        auto = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
        model = auto.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=IMPLEMENTATION,
            trust_remote_code=trust_remote_code,
        )
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding):
        embedding.padding_idx = None
    if scores:
        _score_every_token(model)
    return model


def _score_every_token(model: Any) -> None:
    def forward(input_ids: torch.Tensor, **options: Any) -> ModelOutput:
        hidden = getattr(model, model.base_model_prefix)(input_ids=input_ids, **options).last_hidden_state
        return ModelOutput(logits=model.score(hidden))

    model.forward = forward


def is_tied(model: Any) -> bool:
    """Return whether embedding and output layer are one parameter; False for a module without these."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    return output is not None and output.weight is model.get_input_embeddings().weight


def tie(model: Any) -> None:
    """Make the embedding's parameter the output layer's as well."""
    model.get_output_embeddings().weight = model.get_input_embeddings().weight


def layers_of(model: Any) -> list[nn.Module]:
    """The model's transformer layers, in order."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} does not say what its layers are (_no_split_modules); choose a model "
            "of transformers"
        )
    return layers


def recompute_layers(model: Any) -> None:
    """Keep of every layer only its input, and compute it again in the backward pass.

    What is wrapped is the layer's ``forward``, inside of all hooks: parameters are gathered around it, not by
    it.
    """
    for layer in layers_of(model):
        # The reentrant kind takes no keyword arguments, by which sequence layouts travel.
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a checkpoint holds, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def check_fits(model: nn.Module, source: HuggingFaceSource, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """``check_names`` for a model; all that its checkpoints hold has to be parameters.

    Raises:
        ModelError: it keeps a buffer in them; or as ``check_names`` does.
    """
    if buffers := persistent_buffers(model):
        raise ModelError(
            f"{type(model).__name__} keeps {min(buffers)} in its checkpoints, which is no parameter; use "
            "another model"
        )
    check_names(source, shapes, tied=is_tied(model))


def check_names(source: HuggingFaceSource, shapes: Mapping[str, tuple[int, ...]], *, tied: bool) -> None:
    """Check that a checkpoint has every tensor of a model, no other, in the right shapes. Reads headers only.

    Args:
        source: the checkpoint.
        shapes: true shapes by name, padding left out.
        tied: the checkpoint may store the output layer once more.

    Raises:
        ModelError: with every tensor that is missing, unknown or of another shape.
    """
    problems = [f"missing: {name} {list(shape)}" for name, shape in shapes.items() if name not in source]
    problems += [
        f"shape: {name} is {list(source.shape(name))}, config.json asks for {list(shape)}"
        for name, shape in shapes.items()
        if name in source and source.shape(name) != shape
    ]
    accounted = {*shapes, HEAD} if tied else set(shapes)
    problems += [
        f"unknown: {name}"
        for name in source.names()
        if name not in accounted and not _IGNORABLE.fullmatch(name)
    ]
    if problems:
        shown = "\n  ".join(problems[:10])
        raise ModelError(
            f"the weights in {source.directory} do not fit their config.json ({len(problems)} problems); "
            "use the config.json that "
            f"belongs to these weights, and complete weights:\n  {shown}"
        )
