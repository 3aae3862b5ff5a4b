"""The loss of distillation against its equations, worked out token by token in float64: values, gradients by
the logits, and metrics."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms.distillation_loss import DistillationLossFn
from megarl.algorithms.interfaces import LossFunction, check_loss
from megarl.errors import BatchError
from megarl.models.engine.logprobs import VocabularyShard, vocab_parallel_scores
from megarl.models.engine.topk import largest_tokens
from megarl.observe.metrics import Reduction

TOKENS = 23.0
"""Valid tokens of the global batch, of which a test has a micro-batch."""
KINDS = ("forward", "reverse", "mixed")


def drawn(
    seed: int, rows: int, length: int, vocabulary: int, count: int, spread: float = 2.0
) -> dict[str, Any]:
    """A batch with the teacher's tokens, and the logits of the policy [rows, length - 1, vocabulary]."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    teacher = (spread * normal(rows, length, vocabulary)).log_softmax(-1)
    indices = largest_tokens(teacher.flatten(0, 1), VocabularyShard(vocabulary), count).view(
        rows, length, count
    )
    return {
        "input_ids": torch.randint(vocabulary, (rows, length), generator=generator),
        "token_mask": (torch.rand(rows, length, generator=generator) < 0.6).double(),
        "sample_mask": (torch.rand(rows, generator=generator) < 0.8).double(),
        "teacher_topk_logits": teacher.gather(2, indices),
        "teacher_topk_indices": indices,
        "teacher": teacher,
        "logits": (spread * normal(rows, length - 1, vocabulary)).requires_grad_(),
    }


def computed(batch: dict[str, Any], **config: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """As the engine computes it: from logits to the loss."""
    targets, further = batch["input_ids"][:, 1:], batch["teacher_topk_indices"][:, :-1]
    vocabulary = batch["logits"].shape[-1]
    scores = vocab_parallel_scores(batch["logits"], targets, VocabularyShard(vocabulary), further=further)
    given = torch.tensor(1.0), torch.tensor(TOKENS), scores.logprobs, scores.further
    return DistillationLossFn(config)(batch, *given)  # type: ignore[arg-type]


def worked_out(
    batch: dict[str, Any], kind: str, weight: float, outside: str
) -> tuple[dict[str, float], Tensor]:
    """Metrics and the gradient by the logits, by sums over single tokens."""
    out = dict.fromkeys(("loss", "forward_kl", "reverse_kl", "teacher_mass", "policy_mass"), 0.0)
    logits = batch["logits"].detach()
    gradient = torch.zeros_like(logits)
    share = {"forward": 1.0, "reverse": 0.0, "mixed": weight}[kind]
    for row, place in itertools.product(*map(range, logits.shape[:2])):
        if not batch["token_mask"][row, place + 1] * batch["sample_mask"][row]:
            continue
        total = math.fsum(math.exp(float(x)) for x in logits[row, place])
        q = [math.exp(float(x)) / total for x in logits[row, place]]
        chosen = batch["teacher_topk_indices"][row, place].tolist()
        others = [v for v in range(len(q)) if v not in chosen]
        p_of = dict(
            zip(chosen, (math.exp(float(x)) for x in batch["teacher_topk_logits"][row, place]), strict=True)
        )
        mass_p, mass_q = math.fsum(p_of.values()), math.fsum(q[v] for v in chosen)
        # not the difference from 1, which has fewer digits
        rest_p, rest_q = (
            math.fsum(math.exp(float(batch["teacher"][row, place, v])) for v in others),
            math.fsum(q[v] for v in others),
        )
        out["teacher_mass"] += mass_p / TOKENS
        out["policy_mass"] += mass_q / TOKENS
        if outside == "renormalize":
            pairs = [(p_of[v] / mass_p, q[v] / mass_q) for v in chosen]
        else:
            pairs = [(p_of[v], q[v]) for v in chosen] + ([(rest_p, rest_q)] if others else [])
        forward = math.fsum(p * math.log(p / q_) for p, q_ in pairs)
        reverse = math.fsum(q_ * math.log(q_ / p) for p, q_ in pairs)
        out["forward_kl"] += forward / TOKENS
        out["reverse_kl"] += reverse / TOKENS
        out["loss"] += (share * forward + (1 - share) * reverse) / TOKENS
        # by the logarithm of each outcome's probability, and of that by each logit
        by_outcome = [share * -p + (1 - share) * q_ * (math.log(q_ / p) + 1) for p, q_ in pairs]
        for w in range(len(q)):
            slopes = []
            for number in range(len(pairs)):
                if outside == "renormalize":
                    slope = (chosen[number] == w) - (q[w] / mass_q if w in chosen else 0.0)
                elif number < len(chosen):
                    slope = (chosen[number] == w) - q[w]
                else:
                    slope = (0.0 if w in chosen else q[w] / rest_q) - q[w]
                slopes.append(by_outcome[number] * slope)
            gradient[row, place, w] = math.fsum(slopes) / TOKENS
    return {**out, "num_valid_samples": float(batch["sample_mask"].sum())}, gradient


@settings(max_examples=120, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    weight=st.floats(0, 1),
    outside=st.sampled_from(["rest", "renormalize"]),
    vocabulary=st.integers(2, 9),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_values_and_gradients_equal_the_sums(
    kind: str, weight: float, outside: str, vocabulary: int, seed: int, data: st.DataObject
) -> None:
    batch = drawn(seed, 3, 4, vocabulary, data.draw(st.integers(1, vocabulary)), spread=1.0)
    loss, metrics = computed(batch, kl_type=kind, mixed_kl_weight=weight, outside_topk=outside)
    loss.backward()
    expected, gradient = worked_out(batch, kind, weight, outside)
    assert metrics.keys() == expected.keys() == DistillationLossFn.metric_reductions.keys()
    for name, value in expected.items():
        assert float(metrics[name]) == pytest.approx(value, rel=1e-12, abs=1e-12), name
    torch.testing.assert_close(batch["logits"].grad, gradient, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_all_tokens_give_the_divergence_over_the_vocabulary_and_fewer_a_lower_bound(kind: str) -> None:
    bounds = []
    for count in range(1, 8):
        batch = drawn(3, 4, 5, 7, count)
        batch["token_mask"], batch["sample_mask"] = torch.ones(4, 5).double(), torch.ones(4).double()
        bounds.append(float(computed(batch, kl_type=kind)[0].detach()))
    one, other = batch["teacher"][:, :-1], batch["logits"].detach().log_softmax(-1)
    one, other = (one, other) if kind == "forward" else (other, one)
    # with one token left, the other outcome is that token
    assert (
        all(later > before - 1e-12 for before, later in itertools.pairwise(bounds))
        and bounds[0] < 0.8 * bounds[-1]
    )
    assert bounds[-1] == pytest.approx(float((one.exp() * (one - other)).sum()) / TOKENS, rel=1e-12)


@pytest.mark.parametrize(("kind", "outside"), itertools.product(KINDS, ("rest", "renormalize")))
def test_a_policy_that_is_its_teacher_has_nothing_to_learn(kind: str, outside: str) -> None:
    batch = drawn(5, 3, 4, 9, 4)
    batch["logits"] = batch["teacher"][:, :-1].clone().requires_grad_()
    loss, metrics = computed(batch, kl_type=kind, outside_topk=outside)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0, abs=1e-15)
    assert batch["logits"].grad.abs().max() < 1e-15
    assert float(metrics["policy_mass"]) == pytest.approx(float(metrics["teacher_mass"]), rel=1e-14)


@pytest.mark.parametrize("outside", ["rest", "renormalize"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_masked_reaches_nothing(outside: str, value: float) -> None:
    config = {"kl_type": "mixed", "outside_topk": outside}
    batch = drawn(7, 4, 5, 6, 3)
    clean, metrics = computed(batch, **config)
    clean.backward()
    spoiled = {
        **batch,
        "teacher_topk_logits": batch["teacher_topk_logits"].clone(),
        "logits": batch["logits"].detach().clone(),
    }
    masked = (batch["token_mask"] * batch["sample_mask"][:, None]) == 0
    spoiled["teacher_topk_logits"][:, :-1][masked[:, 1:]] = value
    spoiled["teacher_topk_logits"][:, -1] = value
    loss, found = computed({**spoiled, "logits": spoiled["logits"].requires_grad_()}, **config)
    loss.backward()
    assert float(loss.detach()) == float(clean.detach()) and {k: float(v) for k, v in found.items()} == {
        k: float(v) for k, v in metrics.items()
    }
    assert torch.equal(spoiled["logits"].grad, batch["logits"].grad)


def test_a_token_that_the_teacher_excludes_is_free_forward_and_costs_everything_in_reverse() -> None:
    batch = drawn(9, 1, 2, 4, 4)
    batch["token_mask"], batch["sample_mask"] = torch.ones(1, 2).double(), torch.ones(1).double()
    batch["teacher_topk_logits"] = torch.tensor([0.5, 0.3, 0.2, 0.0]).double().log().expand(1, 2, 4)
    forward, _ = computed(batch, kl_type="forward")
    assert math.isfinite(float(forward.detach()))
    reverse, _ = computed(batch, kl_type="reverse")
    assert float(reverse.detach()) == math.inf


def test_a_number_that_is_none_is_seen() -> None:
    batch = drawn(9, 2, 3, 4, 2)
    batch["token_mask"], batch["sample_mask"] = torch.ones(2, 3).double(), torch.ones(2).double()
    batch["teacher_topk_logits"][0, 0, 1] = math.nan
    for kind, outside in itertools.product(KINDS, ("rest", "renormalize")):
        assert math.isnan(float(computed(batch, kl_type=kind, outside_topk=outside)[0].detach())), (
            kind,
            outside,
        )


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_in_float32_a_confident_teacher_makes_no_infinity(scale: float) -> None:
    batch = drawn(11, 3, 4, 50, 3, spread=scale)
    single = {name: value.float() if value.is_floating_point() else value for name, value in batch.items()}
    single["logits"] = batch["logits"].detach().float().requires_grad_()
    for kind in KINDS:
        loss, _ = computed(single, kl_type=kind)
        exact, _ = computed(batch, kl_type=kind)
        loss.backward()
        assert torch.isfinite(single["logits"].grad).all()
        # where the exact rest is below what float32 can tell from 0, it counts as that much, and divergences
        # from it are less
        least = 1 - 1e-4 if scale == 1.0 else 0.0
        assert least * float(exact.detach()) <= float(loss.detach()) <= (1 + 1e-4) * float(exact.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_the_rest_is_at_least_sixteen_units_of_rounding_and_has_no_gradient_there(
    kind: str, dtype: torch.dtype
) -> None:
    """The teacher has K = 2 tokens of the vocabulary's 3 and 1/4 of its probability outside; the policy has
    nothing outside of them."""
    least = 16 * torch.finfo(dtype).eps
    teacher, policy = (
        torch.tensor([0.5, 0.25], dtype=dtype).log(),
        torch.tensor([0.75, 0.25], dtype=dtype).log(),
    )
    data: Any = {
        "teacher_topk_logits": teacher.expand(1, 2, 2),
        "teacher_topk_indices": torch.arange(2).expand(1, 2, 2),
        "token_mask": torch.ones(1, 2),
        "sample_mask": torch.ones(1),
    }
    scored = policy.expand(1, 1, 2).clone().requires_grad_()
    loss, _ = DistillationLossFn({"kl_type": kind})(
        data, torch.tensor(1.0), torch.tensor(1.0), scored[..., 0].detach(), scored
    )  # type: ignore[typeddict-item]
    p, q = (0.5, 0.25, 0.25), (0.75, 0.25, least)
    if kind == "reverse":
        p, q = q, p
    assert float(loss.detach()) == pytest.approx(
        math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True)), rel=1e-6
    )
    (gradient,) = torch.autograd.grad(loss, scored)
    expected = [-0.5, -0.25] if kind == "forward" else [0.75 * (math.log(1.5) + 1), 0.25]
    assert gradient.flatten().tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("mass", [1e-7, 3e-4, 0.3, 0.49, 0.51, 0.9, 0.9999])
def test_loss_and_gradient_of_a_token_are_those_of_float64(mass: float) -> None:
    """Neither a token that is nearly sure nor one that is hardly possible loses digits: in float32 the loss
    is that of float64 to 1e-6, and so is the gradient."""
    found = []
    for dtype in (torch.float32, torch.float64):
        teacher = torch.tensor(0.09).log().to(dtype)
        scored = torch.tensor(mass).log().to(dtype).reshape(1, 1, 1).requires_grad_()
        data: Any = {
            "teacher_topk_logits": teacher.expand(1, 2, 1),
            "teacher_topk_indices": torch.zeros(1, 2, 1, dtype=torch.long),
            "token_mask": torch.ones(1, 2),
            "sample_mask": torch.ones(1),
        }
        loss, _ = DistillationLossFn({"kl_type": "reverse"})(
            data, torch.tensor(1.0), torch.tensor(1.0), scored[..., 0].detach(), scored
        )  # type: ignore[typeddict-item]
        (gradient,) = torch.autograd.grad(loss, scored)
        found.append((float(loss.detach()), float(gradient)))
    (loss, gradient), (exact_loss, exact_gradient) = found
    assert loss == pytest.approx(exact_loss, rel=1e-6)
    assert gradient == pytest.approx(exact_gradient, rel=1e-6)


def test_a_batch_that_does_not_fit_is_refused() -> None:
    batch = drawn(1, 3, 4, 6, 2)
    loss_fn: Any = DistillationLossFn({})
    assert isinstance(loss_fn, LossFunction)
    check_loss(loss_fn)
    assert set(loss_fn.metric_reductions.values()) == {Reduction.SUM}
    logprobs, scored = torch.zeros(3, 3), torch.zeros(3, 3, 2)
    sizes = torch.tensor(1.0), torch.tensor(1.0)
    with pytest.raises(BatchError, match=r"scored_logprobs has the shape None, expected \[3, 3, 2\]"):
        loss_fn(batch, *sizes, logprobs)
    with pytest.raises(BatchError, match=r"scored_logprobs has the shape \[3, 3, 1\]"):
        loss_fn(batch, *sizes, logprobs, scored[..., :1])
    for key, changed in {
        "teacher_topk_logits": batch["teacher_topk_logits"][:, 1:],
        "token_mask": batch["token_mask"][:, 1:],
        "sample_mask": batch["sample_mask"][1:],
    }.items():
        with pytest.raises(BatchError, match=f"'{key}' has the shape .*expected"):
            loss_fn({**batch, key: changed}, *sizes, logprobs, scored)
        with pytest.raises(BatchError, match=f"'{key}' has the shape None"):
            loss_fn({name: value for name, value in batch.items() if name != key}, *sizes, logprobs, scored)
