"""Check that a case can run: the configuration is valid, and its batches can be divided into
micro-batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from converters.errors import ConversionError
from converters.families.read import read_architecture
from converters.model_config.megatron_settings import megatron_settings
from megarl.config import validate_policy_config
from megarl.config.backend import absent_hybrid_model
from megarl.config.losses import ClippedPGLossConfig, DPOLossConfig
from megarl.config.policy import PolicyConfig
from megarl.config.rules.losses import faults_of_loss, faults_of_preference_loss
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.env import installed_version
from megarl.errors import BatchError, ConfigError, PackingError, Violation
from megarl.key import defaults_of
from megarl.models.policy.batch_plan import shard_batch
from megarl.parity.batches import calls_of, logprob_shards, token_batch
from megarl.parity.case import CLASS_IN_TRANSFORMERS, DENSE, HEAD_NORMS, HYBRID, SPARSE, Case, idle_fields
from megarl.parity.losses import make_loss, policy_gradient_settings, preference_settings, rows_together
from megarl.parity.models import ModelShelf, model_config
from megarl.parity.settings import policy_config

# A norm over few elements magnifies rounding errors whenever all of them are small. With a width of 3, the
# same transformers model in float32 and in float64 already differs by 4e-5 after one optimizer step.
LEAST_HIDDEN = 16
LEAST_NORMED_HEAD = 10


def accepted_config(case: Case, model: Path) -> PolicyConfig:
    """Return the validated policy configuration of a case, with defaults filled in.

    Raises:
        ConfigError: the case cannot run. The error lists all violations of the first stage of checks that
            fails.
    """
    own = _own_violations(case)
    if own:
        raise ConfigError(own)
    config = validate_policy_config(policy_config(case, model), case.world)
    violations = _plan_violations(case, config)
    if violations:
        raise ConfigError(violations)
    return config


def refusal(case: Case, shelf: ModelShelf) -> ConfigError | None:
    """Return the error that says why the case cannot run; None if it can."""
    try:
        accepted_config(case, shelf.described(case))
    except ConfigError as error:
        return error
    return None


def absent_model_class() -> Violation | None:
    """Return the violation if the installed Megatron-Core has no HybridModel; None if it has one."""
    return absent_hybrid_model("case.model_class", installed_version("megatron-core") or "0")


def _own_violations(case: Case) -> list[Violation]:
    found: list[Violation] = []
    for name, owner in idle_fields(case).items():
        bound = f"it means nothing with {owner}"
        found.append(Violation(f"case.{name}", getattr(case, name), bound, "leave it out"))
    if case.hidden < LEAST_HIDDEN:
        bound = (
            f"with {case.heads} heads the model is {case.hidden} wide, too narrow for a norm to be "
            "well-conditioned"
        )
        found.append(
            Violation("case.width", case.width, bound, f"write {-(-LEAST_HIDDEN // case.heads)} or more")
        )
    if case.family in HEAD_NORMS and case.head < LEAST_NORMED_HEAD:
        bound = f"{case.family} normalises heads, which are too narrow for that to be well-conditioned"
        found.append(Violation("case.head", case.head, bound, f"write {LEAST_NORMED_HEAD} or more"))
    if case.lora and case.layout:
        bound = "a written layout may have a stage without a layer, which would have no adapter to train"
        found.append(Violation("case.lora", case.lora, bound, "write 0, or leave the layout out"))
    absent = absent_model_class() if case.model_class == "hybrid" else None
    if absent is not None:
        found.append(absent)
    if case.stacks and not case.lora:
        found.append(
            Violation(
                "case.stacks", True, "adapters of experts need a rank", "write a lora, or leave stacks out"
            )
        )
    if case.outer and (case.tied or not case.lora):
        bound = "adapters of embedding and output layer need a rank, and two matrices"
        found.append(Violation("case.outer", True, bound, "write a lora and tied=0, or leave outer out"))
    # The torch backends are compared with dense families only.
    if case.family not in DENSE:
        found += _faults_of_family(case)
    # With topk=1, transformers gives the single expert the weight 1 in both families, which Megatron-Core
    # cannot do.
    if case.family in SPARSE and not 2 <= case.topk <= case.experts:
        found.append(
            Violation(
                "case.topk",
                case.topk,
                f"a token goes to 2 to {case.experts} experts",
                "write a number in between",
            )
        )
    if case.loss_kind == "pg":
        settings = {**defaults_of(ClippedPGLossConfig), **policy_gradient_settings(case)}
        found += faults_of_loss(settings)
    if case.loss_kind == "dpo":
        found += faults_of_preference_loss(
            cast(DPOLossConfig, {**defaults_of(DPOLossConfig), **preference_settings(case)}), "loss_fn"
        )
    found += _faults_of_advantages(case)
    if case.filters and case.precision != "float32":
        bound = (
            f"rounding in {case.precision} moves tokens across the bounds of top-k and top-p, "
            "which causes large errors"
        )
        found.append(Violation("case.precision", case.precision, bound, "write float32"))
    return found


def _faults_of_family(case: Case) -> list[Violation]:
    """Return violations of cases whose family only the Megatron backend supports."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    found = []
    if case.backend != "megatron":
        found.append(
            Violation(
                "case.family",
                case.family,
                f"{case.backend} is not compared with it",
                f"write one of {', '.join(DENSE)}",
            )
        )
    if case.scores and case.family in HYBRID:
        found.append(
            Violation("case.loss", case.loss, f"{case.family} is not compared with scores", "write nll")
        )
    elif (
        case.scores
        and CLASS_IN_TRANSFORMERS.get(case.family, case.family)
        not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    ):
        found.append(
            Violation("case.loss", case.loss, f"transformers has no {case.family} that scores", "write nll")
        )
    if not found:
        # Check the variant with an output layer: these settings do not depend on a score layer.
        try:
            megatron_settings(read_architecture(model_config(replace(case, loss="nll"))))
        except ConversionError as error:
            found.append(Violation("case.rope", case.rope, str(error), "write default"))
    return found


def _faults_of_advantages(case: Case) -> list[Violation]:
    """Return violations between the source of advantages and the loss that reads them."""
    kind, found = case.advantages_kind, []
    if case.segments > 1 and kind != "given":
        bound = f"segments share a given advantage, but {kind} computes one for each row"
        found.append(Violation("case.segments", case.segments, bound, "write 1, or advantages=given"))
    if case.segments > 1 and case.global_batch == 1:
        found.append(
            Violation(
                "case.segments", case.segments, "a global batch has one row", "write 1, or a larger mbs"
            )
        )
    if case.loss_kind == "value" and kind not in ("given", "gae"):
        found.append(
            Violation(
                "case.advantages",
                case.advantages,
                "a value loss takes its returns from given or gae",
                "write gae",
            )
        )
    if case.takes_divergence_from_rewards and kind in ("given", "gdpo", "teacher"):
        bound = (
            f"in-reward subtracts the divergence from the reward of the advantages, but {kind} has "
            "no such reward"
        )
        found.append(
            Violation(
                "case.advantages",
                case.advantages,
                bound,
                "write grpo, rloo, reinforce or gae, or leave in-reward out",
            )
        )
    return found


def _plan_violations(case: Case, config: PolicyConfig) -> list[Violation]:
    """Return the violations that the driver would report when it divides the batches."""
    batch, together = token_batch(case), rows_together(make_loss(case))
    found: list[Violation] = []
    if case.batching == "fixed" and case.mbs % together:
        found.append(
            Violation(
                "case.mbs",
                case.mbs,
                f"the loss {case.loss_kind} reads {together} rows together",
                "write an even number",
            )
        )
    try:
        logprob_shards(case, config, batch)
        for data in calls_of(case, batch):
            rows: BatchedDataDict[Any] = BatchedDataDict(data)
            shard_batch(
                rows, config, case.dp, phase="train", global_batch=case.global_batch, rows_together=together
            )
    except (BatchError, PackingError) as error:
        found.append(
            Violation(
                "case.batching",
                case.batching,
                str(error),
                "change the sizes of the batch or its token budget",
            )
        )
    return found
