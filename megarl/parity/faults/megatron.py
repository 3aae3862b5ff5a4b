"""Known faults on Megatron: reductions at the end of a backward pass, the gradient norm, experts, the interleaved schedule."""

from __future__ import annotations

from typing import Any

from megarl.parity.batches import token_batch
from megarl.parity.case import Case
from megarl.parity.faults.patching import Mutation, is_clipped, many_tokens, replacing, sees_tokens

MEGATRON = "megarl.models.megatron"
HERE = ("megatron",)


def _norm_counts_copies(original: Any) -> Any:
    """Every parameter claims to be a part of a larger one, so that copies on tensor-parallel ranks count as parts."""

    def build(policy: Any, chunks: Any) -> Any:
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.tensor_model_parallel = True
        return original(policy, chunks)

    return build


def _norms_not_marked(original: Any) -> Any:
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        self.weight.sequence_parallel = False

    return init


def _decay_everywhere(original: Any) -> Any:
    def build(policy: Any, chunks: Any) -> Any:
        optimizer = original(policy, chunks)
        for group in optimizer.param_groups:
            group["wd_mult"] = 1.0
        return optimizer

    return build


def _unclipped(original: Any) -> Any:
    def config(policy: Any) -> Any:
        built = original(policy)
        built.clip_grad = float("inf")
        return built

    return config


def _in_one_batch(original: Any) -> Any:
    """Megatron's default for the interleaved schedule, with which two stages mix up what they send one another over gloo."""

    def config(*arguments: Any, **options: Any) -> Any:
        built = original(*arguments, **options)
        built.overlap_p2p_comm, built.batch_p2p_comm = False, True
        return built

    return config


def _experts_count_twice(original: Any) -> Any:
    def finish(model: Any, num_tokens: Any = None, **options: Any) -> None:
        original(model, num_tokens, **options)
        for chunk in model:
            for buffer in chunk.expert_parallel_buffers:
                buffer.grad_data.mul_(2)

    return finish


def _padding_is_routed(original: Any) -> Any:
    return lambda self, layer, logits, went_to, sequences: original(self, layer, logits, went_to, sequences.clamp(min=0))


def _trains_both_parts(case: Case) -> bool:
    """Rows are cut in two, and both ranks have tokens with gradients."""
    if case.tp != 2 or case.cp != 1 or case.batching != "fixed" or case.scores:
        return False
    multiple = case.share * case.pad
    half = -(-case.length // multiple) * multiple // 2
    batch = token_batch(case)
    trained = (batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:]  # column i is the target of token i
    return bool(trained[:, :half].any() and trained[:, half:].any())


def _ragged(case: Case) -> bool:
    """Routers see tokens that do not count: rows are padded or masked out."""
    return case.experts > 0 and case.batching == "fixed" and case.length >= 8 and case.global_batch >= 4


FAULTS: dict[str, Mutation] = {
    "norm-counts-copies": Mutation(
        "the gradient norm counts replicated parameters once for every tensor-parallel rank",
        lambda case: case.tp > 1 and sees_tokens(case),
        replacing(f"{MEGATRON}.backend", "build_optimizer", _norm_counts_copies),
        "tp=2",
        HERE,
    ),
    "sequence-parallel-gradients-local": Mutation(
        "gradients of norms are not summed over sequence-parallel ranks",
        lambda case: case.sp and _trains_both_parts(case),
        replacing(f"{MEGATRON}.specs:PortableRMSNorm", "__init__", _norms_not_marked),
        "tp=2 sp=1 cp=1 batching=fixed",
        HERE,
    ),
    "gradients-not-reduced": Mutation(
        "no gradient is summed over any ranks",
        lambda case: case.dp > 1 and not case.overlap and many_tokens(case),
        replacing(f"{MEGATRON}.schedule", "sum_gradients", lambda original: lambda model, num_tokens=None, **options: None),
        "dp=2 overlap=0",
        HERE,
    ),
    "tied-gradient-of-one-stage": Mutation(
        "the first and the last pipeline stage do not add their gradients of a tied embedding",
        lambda case: case.tied and case.pp > 1 and sees_tokens(case),
        replacing(
            "megatron.core.distributed.finalize_model_grads",
            "_allreduce_word_embedding_grads",
            lambda original: lambda *arguments, **options: None,
        ),
        "pp=2 tied=1",
        HERE,
    ),
    "clipping-forgotten": Mutation(
        "gradients are not clipped",
        is_clipped,
        replacing(f"{MEGATRON}.optimizer", "optimizer_config", _unclipped),
        "clip=0.05",
        HERE,
    ),
    "decay-on-vectors": Mutation(
        "norms and biases decay too", lambda case: True, replacing(f"{MEGATRON}.backend", "build_optimizer", _decay_everywhere), "", HERE
    ),
    "interleaved-in-one-batch": Mutation(
        "two interleaved pipeline stages mix up what they send one another",
        lambda case: case.vpp > 1 and case.pp == 2 and case.batching == "fixed" and case.micro > 2 and sees_tokens(case),
        replacing(f"{MEGATRON}.build", "transformer_config", _in_one_batch),
        "pp=2 vpp=2 batching=fixed micro=3",
        HERE,
    ),
    "expert-gradients-twice": Mutation(
        "gradients of experts are counted twice",
        lambda case: case.experts > 0 and sees_tokens(case),
        replacing(f"{MEGATRON}.schedule", "sum_gradients", _experts_count_twice),
        "family=mixtral",
        HERE,
    ),
    "balancing-forgotten": Mutation(
        "routers do not add their load-balancing loss",
        # where a token goes to all experts, all are in balance whatever the routers do
        lambda case: case.balance != "none" and not case.freeze and case.topk < case.experts and sees_tokens(case),
        replacing(f"{MEGATRON}.moe_router", "MoEAuxLossAutoScaler", lambda original: _NothingAdded),
        "family=qwen3_moe balance=aux freeze=0",
        HERE,
    ),
    "padding-is-routed": Mutation(
        "padding and masked samples count among the tokens of the experts",
        lambda case: _ragged(case),
        replacing(f"{MEGATRON}.moe_record:RoutingRecord", "report", _padding_is_routed),
        "family=mixtral batching=fixed",
        HERE,
    ),
}
"""The faults by name."""


class _NothingAdded:
    """Placeholder for what adds the gradient of a loss to that of the probabilities."""

    @staticmethod
    def apply(probabilities: Any, loss: Any) -> Any:
        return probabilities
