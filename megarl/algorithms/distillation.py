"""On-policy distillation: the policy samples responses, and is trained to match a teacher's distribution on
them (GKD, arXiv 2306.13649; MOPD, arXiv 2601.02780)."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired

from megarl.algorithms.algorithm import ACTOR, REFERENCE, ModelSection, Parts, Role
from megarl.algorithms.sampled import Sampled, SampledConfig, answer_metrics
from megarl.config.distillation import TEACHER, TEACHERS, teachers_of_sources
from megarl.config.environments import EnvConfig
from megarl.config.losses import ClippedPGLossConfig, DistillationLossConfig
from megarl.config.nested import at
from megarl.config.sections import RunConfig
from megarl.key import AT_LEAST_0, AT_LEAST_1, Key, Range

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.distributed.batched_data_dict import BatchedDataDict

TOPK = "topk"
REVERSE_KL = "reverse_kl_advantage"


class DistillationConfig(SampledConfig, DistillationLossConfig):
    """On-policy distillation from ``teacher``, or from one of ``teachers``. Only `reverse_kl_advantage` reads
    ``loss_fn``."""

    mode: NotRequired[
        Annotated[
            Literal["topk", "reverse_kl_advantage"],
            Key(
                "``topk``: the loss is the KL between teacher and policy over the teacher's "
                "``topk_logits_k`` most likely tokens at each position; ``reverse_kl_advantage``: a policy "
                "gradient in which a token's advantage is the teacher's log-probability minus the policy's.",
                default="topk",
            ),
        ]
    ]
    topk_logits_k: NotRequired[
        Annotated[
            int,
            Key(
                "``topk``: number of tokens, the teacher's most likely ones at each position, over which "
                "the KL is computed.",
                AT_LEAST_1,
                default=64,
            ),
        ]
    ]
    advantage_clip_low: NotRequired[
        Annotated[
            float | None,
            Key(
                "`reverse_kl_advantage`: lower bound to which a token's advantage is clipped; null for no "
                "bound.",
                Range(high=0),
                default=None,
            ),
        ]
    ]
    advantage_clip_high: NotRequired[
        Annotated[
            float | None,
            Key(
                "`reverse_kl_advantage`: upper bound to which a token's advantage is clipped; null for no "
                "bound.",
                AT_LEAST_0,
                default=None,
            ),
        ]
    ]
    teacher_of_source: NotRequired[
        Annotated[
            dict[str, str] | None,
            Key(
                "with several ``teachers``: mapping of each source in ``data.train`` to the name of its "
                "teacher. A source is identified by its ``env_name``; without one, by the last part of its "
                "``name`` (after the last `/`), or by the file name of its ``path`` without the extension. "
                "null if there is only one teacher.",
                default=None,
            ),
        ]
    ]
    num_generations_per_prompt: NotRequired[
        Annotated[
            int, Key("number of responses sampled per prompt in a training step.", AT_LEAST_1, default=1)
        ]
    ]


class Distillation(Sampled):
    """On-policy distillation. A step samples responses, computes the log-probabilities of their tokens under
    the teacher of each, and trains on them. Rewards are only reported."""

    SECTIONS = MappingProxyType(
        {"distillation": DistillationConfig, "env": EnvConfig, "loss_fn": ClippedPGLossConfig}
    )
    OPTIONAL = frozenset({"loss_fn"})
    MODELS = MappingProxyType(
        {
            TEACHER: ModelSection(
                "the teacher model, if there is one. It has the keys of ``policy``, and absent keys have the "
                "policy's values.",
                is_optional=True,
            ),
            TEACHERS: ModelSection(
                "teacher models by name, if there are several. Each has the keys of ``policy``, and absent "
                "keys have the policy's values.",
                by_name=True,
            ),
        }
    )
    PROMPTS = "distillation.num_prompts_per_step"
    GENERATIONS = "distillation.num_generations_per_prompt"

    config: DistillationConfig

    def __init__(self, parts: Parts) -> None:
        from megarl.algorithms.distillation_loss import DistillationLossFn
        from megarl.algorithms.loss_functions import policy_loss

        own: DistillationConfig = at(parts.config, self.section())
        self.is_topk = own["mode"] == TOPK
        super().__init__(
            parts, DistillationLossFn(own) if self.is_topk else policy_loss(parts.config["loss_fn"])
        )
        self.teachers = {role.section.rpartition(".")[2]: role for role in _teacher_roles(parts.config)}
        self.teacher_of_source = teachers_of_sources(parts.config)

    @classmethod
    def roles(cls, config: RunConfig) -> tuple[Role, ...]:
        """Return the roles of a run: the actor, the reference if the loss has a KL penalty, and the
        teachers."""
        penalty = at(config, "loss_fn.reference_policy_kl_penalty") or 0
        return ACTOR, *([REFERENCE] if penalty > 0 else []), *_teacher_roles(config)

    def step(self, step: int) -> dict[str, float]:
        """Sample responses to the next prompts, compute the teachers' log-probabilities, and train."""
        from megarl.distributed.batched_data_dict import BatchedDataDict
        from megarl.rollout.collector import add_metrics, part_metrics
        from megarl.rollout.segment_rows import SegmentRows

        self.turns.take(ACTOR)
        sampled = self.take(step)
        rollouts = sampled.rollouts
        rows = self.rows_of(rollouts)
        samples, records = rows.samples, [record.index for record in rows.records]
        batch, of_pass = self._own_columns(samples)
        rows_of = dict(self._rows_of_teachers(records))
        teacher_logprobs = self._ask_teachers(batch, rows_of)
        # The engine's log-probabilities exist in both modes; `topk` does not compute the policy's own.
        apart = (
            (teacher_logprobs - batch["generation_logprobs"])
            * batch["token_mask"]
            * batch["sample_mask"].unsqueeze(1)
        )
        if not self.is_topk:
            batch["advantages"], of_advantages = self.advantages(batch, teacher_logprobs)
            of_pass |= of_advantages
        if self.sample_log is not None:
            segments = SegmentRows.of(batch)
            scored: BatchedDataDict[Any] = BatchedDataDict({**batch, "apart": apart})
            scored = scored if segments is None else segments.by_response(scored)
            means = scored["apart"].sum(dim=1) / scored["token_mask"].sum(dim=1).clamp(min=1)
            self.sample_log.train(step, rollouts, means, scored, self.train_data.sources)
        # The teachers have used the devices since.
        self.turns.take(ACTOR)
        self.empty_steps.look(batch, rollouts.samples, step)
        trained = self.train_policy(batch, step, rows)
        self.done_steps = step
        own = {
            **trained,
            **_divergences(-apart, batch, rows_of),
            **answer_metrics(rollouts.samples),
            "num_tokens": int(samples["input_lengths"].sum()),
            **part_metrics([rollouts.samples]),
            **of_pass,
            **self.settle(samples, step),
            **self.age_metrics(batch, samples, step),
            "epoch": sampled.epoch,
        }
        return add_metrics(own, [rollouts.metrics])

    def _own_columns(self, samples: BatchedDataDict[Any]) -> tuple[BatchedDataDict[Any], dict[str, float]]:
        """Build the policy's columns of the training batch, and their metrics. For the policy gradient they
        include the log-probabilities under the policy before the update, and under the reference if
        needed."""
        from megarl.rollout.samples import mismatch_metrics

        if self.is_topk:
            return self.batch_of(samples, previous=False, reference=False), {}
        reference = bool(self.run_config["loss_fn"]["reference_policy_kl_penalty"])
        batch = self.batch_of(samples, previous=not self.anchors_at_engine, reference=reference)
        if self.anchors_at_engine:
            batch["prev_logprobs"] = batch["generation_logprobs"]
            return batch, {}
        counts = batch["token_mask"] * batch["sample_mask"].unsqueeze(1)
        return batch, mismatch_metrics(batch["generation_logprobs"], batch["prev_logprobs"], counts)

    def _rows_of_teachers(self, records: list[int]) -> Iterator[tuple[str, list[int]]]:
        """Yield the batch rows of each teacher that has any, in teacher order."""
        # Record indices run through all sources, in order.
        ends = [source.end for source in self.train_data.sources]
        names = [self.teacher_of_source[bisect.bisect_right(ends, record)] for record in records]
        # Go by teacher, not by row, so that each teacher is loaded onto the devices once per step.
        for name in self.teachers:
            rows = [row for row, other in enumerate(names) if other == name]
            if rows:
                yield name, rows

    def _ask_teachers(self, batch: BatchedDataDict[Any], rows_of: Mapping[str, list[int]]) -> Tensor:
        """Return the teachers' log-probabilities of the sampled tokens, [B, S] float32, 0 at tokens that do
        not count. In mode `topk`, also add their top-k logits and token ids to the batch."""
        import torch

        from megarl.algorithms.distillation_loss import TOPK_INDICES, TOPK_LOGITS
        from megarl.rollout.samples import MODEL_INPUTS

        inputs = batch.select_columns(MODEL_INPUTS)
        columns: dict[str, Tensor] = {}
        with self.timer.phase("teacher_logprobs"):
            for name, rows in rows_of.items():
                role = self.teachers[name]
                self.turns.take(role)
                teacher = self.models[role]
                teacher.prepare_for_lp_inference()
                asked = inputs if len(rows) == inputs.size else inputs.select_indices(rows)
                found: BatchedDataDict[Any]
                if self.is_topk:
                    # The teacher's vocabulary may be padded further than the policy's, which has no logits
                    # for those ids.
                    size = self.policy.vocab_size
                    found = teacher.get_topk_logits(
                        asked, self.config["topk_logits_k"], skip_masked=True, vocabulary_size=size
                    )
                else:
                    found = teacher.get_logprobs(asked, skip_masked=True)
                for key, values in found.items():
                    column = columns.setdefault(key, values.new_zeros(inputs.size, *values.shape[1:]))
                    column[torch.tensor(rows)] = values
        if self.is_topk:
            batch[TOPK_LOGITS], batch[TOPK_INDICES] = columns["topk_logits"], columns["topk_indices"]
        return columns["logprobs"]

    def advantages(
        self, batch: BatchedDataDict[Any], teacher_logprobs: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the advantages log p_teacher - log p_policy of valid tokens, [B, S] float32, clipped to the
        configured bounds (MOPD, equation 8); and their minimum and maximum as metrics. They are detached, so
        no gradient flows through them."""
        from megarl.algorithms.advantages import clipped

        counts = batch["token_mask"] * batch["sample_mask"].unsqueeze(1)
        apart = ((teacher_logprobs - batch["prev_logprobs"]) * counts).detach()
        advantages = clipped(apart, self.config["advantage_clip_low"], self.config["advantage_clip_high"])
        return advantages, {
            "advantages_min": float(advantages.min()),
            "advantages_max": float(advantages.max()),
        }


def _teacher_roles(config: RunConfig) -> tuple[Role, ...]:
    if at(config, TEACHER) is not None:
        # A teacher is never trained, so checkpoints have no directory for it.
        return (Role(TEACHER, None, section=TEACHER),)
    return tuple(
        Role(f"{TEACHER}_{name}", None, section=f"{TEACHERS}.{name}") for name in at(config, TEACHERS) or {}
    )


def _divergences(
    apart: Tensor, batch: BatchedDataDict[Any], rows_of: Mapping[str, list[int]]
) -> dict[str, float]:
    """Return ``sampled_reverse_kl``, the mean of log p_policy - log p_teacher over sampled tokens, which
    estimates KL(policy || teacher) per token. With several teachers, also one for each."""
    counts = batch["token_mask"] * batch["sample_mask"].unsqueeze(1)

    def mean(rows: Any) -> float:
        # float64: a float32 sum over all tokens of a step would lose digits of a small mean.
        return float(apart[rows].double().sum() / counts[rows].double().sum().clamp(min=1))

    name = "sampled_reverse_kl"
    of_each = (
        {f"{name}/{teacher}": mean(rows) for teacher, rows in rows_of.items()} if len(rows_of) > 1 else {}
    )
    return {name: mean(slice(None)), **of_each}
