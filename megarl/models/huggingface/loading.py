"""Builds a transformers model without its weights, and checks that a checkpoint matches it.

Parameters are on the meta device, so that no rank ever holds more of a model than its shards; a backend
shards them and then reads its own slices. Buffers (rotary frequencies) are real from the start, because the
model's constructor computes them.
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
# Old checkpoints contain the rotary frequencies, which every model computes from its config.
_IGNORABLE = re.compile(r"(.*\.)?rotary_emb\.inv_freq")


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within the context, move every parameter that a module registers to the meta device. Buffers are not
    moved."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        original(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            module._parameters[name] = nn.Parameter(
                parameter.to("meta"), requires_grad=parameter.requires_grad
            )

    # Patch the class, because the constructors of all inner modules call it.
    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def build_on_meta(
    hf_config: Any, *, vocabulary: int | None = None, scores: bool = False, trust_remote_code: bool = False
) -> Any:
    """Build a causal language model with float32 parameters on the meta device, real buffers, and the
    engine's attention.

    With ``scores``, build a reward or value model instead: its ``logits`` [n, t, 1] are the scores of every
    token. transformers' own model returns only the score of the last token that is not padding.

    The embedding row of the padding token is trained like any other, as in Megatron. Otherwise a model whose
    padding token is also its end-of-text token would never learn the latter's embedding.

    Args:
        hf_config: the model's config; not modified.
        vocabulary: rows of embedding and output layer, at least the true size; None for the true size.
        scores: build a model with a score layer; its config must come from ``megarl.models.engine.scoring``.
        trust_remote_code: run code that comes with the model.

    Raises:
        ModelError: vLLM would compute another model from the config, or the model has inputs other than text.
    """
    # Copy, because vocabulary and dropout are changed below, and the caller exports its own config.
    config = copy.deepcopy(hf_config)
    text = config.get_text_config()
    if text is not config:
        seeing = " and ".join(sorted(family.model_type for family in FAMILIES.values() if family.sees))
        raise ModelError(
            f"policy.model_name: a {config.model_type} model also sees or hears, but the torch "
            "backends run only text models. Fix: use a text model, or set "
            f"policy.megatron_cfg.enabled to true, which trains the text part of {seeing}"
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
            # With dropout, log-probabilities in a training step would differ from those computed before it.
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
    """Return whether embedding and output layer share one parameter; False for a module that lacks them."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    return output is not None and output.weight is model.get_input_embeddings().weight


def tie(model: Any) -> None:
    """Make the output layer share the embedding's parameter."""
    model.get_output_embeddings().weight = model.get_input_embeddings().weight


def layers_of(model: Any) -> list[nn.Module]:
    """Return the model's transformer layers, in order.

    Raises:
        ModelError: the model does not name its layer classes (``_no_split_modules``).
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} does not name its layer classes (_no_split_modules); choose a "
            "model of transformers"
        )
    return layers


def recompute_layers(model: Any) -> None:
    """Enable activation checkpointing: keep only each layer's input, and recompute the layer in the backward
    pass.

    ``forward`` is wrapped inside all hooks, so that parameters are gathered outside of the recomputed
    function.
    """
    for layer in layers_of(model):
        # The reentrant variant accepts no keyword arguments, by which sequence layouts are passed.
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def check_fits(model: nn.Module, source: HuggingFaceSource, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a checkpoint matches a model (``check_names``) and that the model has no persistent
    buffers.

    Raises:
        ModelError: the model has a persistent buffer, or as in ``check_names``.
    """
    if buffers := model.state_dict().keys() & dict(model.named_buffers(remove_duplicate=False)).keys():
        raise ModelError(
            f"{type(model).__name__} keeps {min(buffers)} in its checkpoints, which is no parameter; use "
            "another model"
        )
    check_names(source, shapes, tied=is_tied(model))


def check_names(source: HuggingFaceSource, shapes: Mapping[str, tuple[int, ...]], *, tied: bool) -> None:
    """Check that a checkpoint has exactly a model's tensors, in the right shapes. Only file headers are
    read.

    Args:
        source: the checkpoint.
        shapes: the model's shapes by name, without vocabulary padding.
        tied: the checkpoint may additionally contain the tied output layer.

    Raises:
        ModelError: a tensor is missing, unknown or of another shape; the message lists the first ten.
    """
    problems = [f"missing: {name} {list(shape)}" for name, shape in shapes.items() if name not in source]
    for name, shape in shapes.items():
        if name in source and source.shape(name) != shape:
            found = list(source.shape(name))
            problems.append(f"shape: {name} is {found}, config.json asks for {list(shape)}")
    accounted = {*shapes, HEAD} if tied else set(shapes)
    for name in source.names():
        if name not in accounted and not _IGNORABLE.fullmatch(name):
            problems.append(f"unknown: {name}")
    if problems:
        shown = "\n  ".join(problems[:10])
        raise ModelError(
            f"the weights in {source.directory} do not fit their config.json ({len(problems)} problems); "
            "use the config.json that "
            f"belongs to these weights, and complete weights:\n  {shown}"
        )
