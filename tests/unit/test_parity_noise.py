"""What 16 bit may differ by: as much as plain transformers in 16 bit does, and not much more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarl.parity.batches import Batch, token_batch, with_signals
from megarl.parity.case import Case
from megarl.parity.errors import BOUND, root_mean_square, tensor_error, token_errors
from megarl.parity.lines import parse
from megarl.parity.models import ModelShelf
from megarl.parity.noise import LOGPROBS, LOSS_SCALES, MEAN_LOGPROBS, Bounds, bounds_of
from megarl.parity.reference import Expected, load_model, token_logprobs, trained

CASE = parse(
    "seed=3 layers=2 kv=2 group=2 width=5 ffn=11 vocab=23 mbs=2 micro=2 length=9 lr=0.02 loss=pg+kl+is"
)


class Prepared:
    """A case with its reference in float32 and its bounds."""

    def __init__(self, directory: Path, case: Case) -> None:
        self.case = case
        self.model = ModelShelf(directory).complete(case)
        exact, tokens = load_model(self.model), token_batch(case)
        self.logprobs = token_logprobs(exact, tokens, case.sampling)
        self.batch: Batch = with_signals(case, tokens, self.logprobs)
        self.expected = trained(case, exact, self.batch)
        self.bounds = bounds_of(case, self.model, self.batch, self.logprobs, self.expected)

    def outside(self, logprobs: torch.Tensor, found: Expected) -> list[str]:
        """The quantities that are out of bounds."""
        by_token = token_errors(logprobs, self.logprobs)
        errors = {
            LOGPROBS: float(by_token.max()),
            MEAN_LOGPROBS: root_mean_square(by_token[self.logprobs != 0]),
        }
        for name, weight in self.expected.weights.items():
            errors[f"weight {name}"] = tensor_error(found.weights[name], weight)
        for call, losses in enumerate(self.expected.losses):
            scale = max(self.expected.scales[call]["loss"], abs(losses[0]))
            errors[f"call {call} loss 0"] = abs(found.losses[call][0] - losses[0]) / scale
            norm = self.expected.norms[call][0]
            errors[f"call {call} grad_norm"] = abs(found.norms[call][0] - norm) / norm
        return [name for name, error in errors.items() if error > self.bounds.of(name)]


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return Prepared(tmp_path_factory.mktemp("models"), replace(CASE, precision=request.param))


CANCELLING = parse(
    "seed=229145 tied=1 kv=2 group=2 vocab=15 length=9 loss=pg+kl+kl-output-clamp:0.06 advantages=gae"
)
"""Gradients of its tokens cancel so far that the norm of plain transformers in float32 is 2e-5 from that in
float64."""


def test_what_float32_may_differ_by_is_more_than_its_one_bound_only_where_gradients_cancel(
    tmp_path: Path,
) -> None:
    assert (
        Bounds().of(LOGPROBS) == BOUND and not CASE.has_measured_bounds and not CANCELLING.has_measured_bounds
    )
    usual, cancelling = (Prepared(tmp_path, case).bounds for case in (CASE, CANCELLING))
    assert {name for name in usual.noise if usual.of(name) > BOUND} == set()
    assert BOUND < cancelling.of("call 1 grad_norm") < 20 * BOUND


def test_adam_with_the_epsilon_of_recipes_has_measured_bounds_that_see_another(tmp_path: Path) -> None:
    prepared = Prepared(tmp_path, replace(CASE, lr=0.002, eps=1e-8))
    assert 0 < max(prepared.bounds.noise.values()) < BOUND
    for epsilon, seen in ((1e-8, False), (1e-7, True), (1e-6, True)):
        trainer = trained(replace(prepared.case, eps=epsilon), load_model(prepared.model), prepared.batch)
        assert bool(prepared.outside(prepared.logprobs, trainer)) == seen, epsilon


ALONE = parse(
    "seed=500116 family=deepseek_v2 layers=2 group=3 head=12 width=8 ffn=15 vocab=83 experts=3 topk=2 "
    "expert=5 balance=seq batching=packed mbs=3 room=17 length=13 rows=1 lpbs=2 masked=some reference=1 "
    "loss=pg+kl:0.5+seq+cliprange:1:0.28+kl-output-clamp:0.06 temperature=1.5 eps=1e-08 clip=1 chunk=17"
)
"""In its first call only tokens count that see nothing but themselves, so that no query and no key has a
gradient but by rounding, which Adam with this epsilon turns into a hundredth of a step."""


def test_a_gradient_that_is_0_but_for_rounding_has_a_wider_bound(tmp_path: Path) -> None:
    bounds = Prepared(tmp_path, ALONE).bounds
    assert BOUND < bounds.of("weight model.layers.0.self_attn.q_proj.weight") < 50 * BOUND
    assert bounds.of("weight model.layers.0.self_attn.o_proj.weight") == BOUND


def test_plain_transformers_in_16_bit_is_within_bounds(prepared: Prepared) -> None:
    model = load_model(prepared.model, getattr(torch, prepared.case.precision))
    logprobs = token_logprobs(model, prepared.batch)
    found = trained(prepared.case, model, prepared.batch, LOSS_SCALES[prepared.case.precision])
    assert prepared.outside(logprobs, found) == []


def test_bounds_are_those_of_16_bit_and_no_wider(prepared: Prepared) -> None:
    unit = torch.finfo(getattr(torch, prepared.case.precision)).eps
    for name in (
        LOGPROBS,
        MEAN_LOGPROBS,
        "call 0 loss 0",
        "call 1 loss 0",
        "call 0 grad_norm",
        "weight model.norm.weight",
    ):
        assert 0.1 * unit < prepared.bounds.of(name) < 20 * unit, name


def test_what_rounding_does_not_touch_keeps_the_bound_of_float32(prepared: Prepared) -> None:
    for name in ("lr", "wd", "global_valid_toks", "num_valid_samples", "skipped_steps"):
        assert prepared.bounds.of(f"call 1 {name}") == BOUND, name


def test_small_faults_are_out_of_bounds(prepared: Prepared) -> None:
    """Faults of a few per cent, in float32, so that nothing but the fault is there."""
    exact = load_model(prepared.model)
    fewer = {**prepared.batch, "token_mask": prepared.batch["token_mask"].clone()}
    fewer["token_mask"][0, 1:] = 0.0
    assert "call 0 grad_norm" in prepared.outside(prepared.logprobs, trained(prepared.case, exact, fewer))
    hotter = trained(prepared.case, load_model(prepared.model), prepared.batch)
    assert MEAN_LOGPROBS in prepared.outside(prepared.logprobs / 1.1, hotter)
    slower = trained(replace(prepared.case, lr=0.01), load_model(prepared.model), prepared.batch)
    assert any(name.startswith("weight") for name in prepared.outside(prepared.logprobs, slower))


def test_bounds_of_a_case_are_the_same_again(prepared: Prepared) -> None:
    assert (
        bounds_of(prepared.case, prepared.model, prepared.batch, prepared.logprobs, prepared.expected)
        == prepared.bounds
    )


def test_a_mixture_has_bounds_too(tmp_path: Path) -> None:
    case = parse(
        "seed=4 family=mixtral experts=3 topk=2 layers=2 width=16 ffn=9 vocab=23 mbs=2 micro=2 length=7 "
        "precision=bfloat16 lr=0.02"
    )
    made = Prepared(tmp_path, case)
    assert made.bounds.of(LOGPROBS) > BOUND and made.bounds.of("call 0 moe_aux_loss") > BOUND


def test_more_members_only_widen_what_they_find_more_of(prepared: Prepared) -> None:
    wider = bounds_of(
        prepared.case, prepared.model, prepared.batch, prepared.logprobs, prepared.expected, members=12
    )
    weights = [name for name in prepared.bounds.noise if name.startswith("weight")]
    assert all(wider.of(name) >= prepared.bounds.of(name) for name in weights)
    assert any(wider.of(name) > prepared.bounds.of(name) for name in weights)


UNDECIDED = parse(
    "seed=695014 family=qwen2 tied=1 kv=2 group=3 head=6 width=5 ffn=48 vocab=61 mbs=2 length=9 loss=dpo+ipo "
    "temperature=0.7 steps=3 precision=float16"
)
"""In its first call the rewards of the only pair are 0.03 apart, sums of log-probabilities of 20 and more;
later 0.13 and 0.23."""


def test_an_accuracy_may_differ_only_where_a_pair_is_undecided(tmp_path: Path) -> None:
    prepared = Prepared(tmp_path, UNDECIDED)
    allowed = [
        prepared.bounds.of(f"call {call} accuracy") * prepared.expected.scales[call]["accuracy"]
        for call in range(3)
    ]
    assert [metrics["accuracy"] for metrics in prepared.expected.metrics] == [1, 1, 1]
    assert allowed[0] > 1 > max(allowed[1:])
    # of a pair of which no member changes sides too, as much as the error of a log-probability would move its
    # margin
    assert min(allowed[1:]) > 0.1


def test_a_square_keeps_float16_within_its_range(tmp_path: Path) -> None:
    """Loss scaling starts with a factor that this gradient, of a margin far from IPO's, would not bear at a
    DPO loss's weight."""
    case = parse(
        "seed=695014 family=qwen2 tied=1 kv=2 group=3 head=6 width=5 ffn=48 vocab=61 mbs=2 length=18 lpbs=2 "
        "masked=some "
        "loss=dpo+ipo+beta:0.1+weight:0.5 temperature=0.7 lr=0.02 schedule=cosine steps=4"
    )
    prepared = Prepared(tmp_path, replace(case, precision="float16"))
    norms = [norm for norms in prepared.expected.norms for norm in norms]
    assert max(norms) * LOSS_SCALES["float16"] < torch.finfo(torch.float16).max, norms


UNREAD = parse(
    "seed=356835 family=qwen2_moe layers=3 group=3 head=6 width=13 ffn=24 vocab=113 experts=4 topk=2 "
    "expert=8 freeze=1 mbs=3 "
    "micro=2 length=5 pad=3 loss=distill+renorm+forward temperature=1.5 eps=1e-08 clip=0.05 steps=2"
)
"""No teacher names 70 tokens of its vocabulary: the gradients of their rows of the output layer are rounding
errors, which Adam divides."""


def test_probabilities_of_a_few_tokens_add_up_to_one_but_for_the_rounding_of_their_logarithms(
    tmp_path: Path,
) -> None:
    assert Prepared(tmp_path, UNREAD).bounds.of("weight lm_head.weight") > 3 * BOUND
