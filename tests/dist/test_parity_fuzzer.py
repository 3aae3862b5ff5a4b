"""The fuzzer at work: a fixed set of cases, a few fresh ones, planted faults caught, and a failure shrunk to
what it needs.

The seed of the fresh cases is the day's date; it is printed with every failure, and ``megarl parity --case``
runs a printed line alone.
"""

from __future__ import annotations

import datetime
from dataclasses import replace

import pytest

from megarl import env
from megarl.parity.case import BACKENDS, Case
from megarl.parity.draw import Drawer
from megarl.parity.faults import FAULTS
from megarl.parity.lines import parse
from megarl.parity.models import ModelShelf
from megarl.parity.pool import WorkerPool
from megarl.parity.prove import cases_of
from megarl.parity.runner import CaseRunner
from megarl.parity.shrink import shrink
from tests.parts import MODEL_CLASS
from tests.tiers import newest_megatron, sampled, slow

FRESH = 3
FIXED = (
    # weights of norms that are made with the sum before them, on their way from other ranks
    "family=qwen2 layers=3 group=2 head=10 ffn=55 vocab=29 dp=2 batching=dynamic mbs=2 micro=3 room=26 "
    "round=8 length=18 loss=nll "
    "warmup=1 schedule=linear steps=4 distopt=1 overlap=1 bucket=500",
    # a plan that was written for a policy, with its output layer
    "backend=dtensor seed=213721 kv=2 ffn=6 tp=2 plan=written mbs=2 loss=rm",
    "family=llama rope=llama3 layers=3 kv=2 group=3 head=10 ffn=26 vocab=31 tp=2 sp=1 cp=2 batching=packed "
    "mbs=2 micro=2 room=20 "
    "length=13 loss=pg+kl+is+dual temperature=0.7 clip=0.05 distopt=1 reference=1",
    "family=qwen3 tied=1 layers=3 kv=2 group=2 head=12 ffn=26 vocab=29 tp=2 pp=2 first=2 last=1 "
    "batching=dynamic mbs=2 micro=2 room=18 "
    "round=4 length=11 loss=dpo+sft masked=some distopt=1 overlap=1 together=1",
    "family=qwen2 tied=1 layers=4 kv=2 group=3 ffn=21 vocab=23 pp=2 vpp=2 cp=2 micro=3 length=9 loss=pg+seq "
    "optimizer=sgd evaluate=1 "
    "warmup=1 schedule=cosine decay=linear steps=3",
    "family=qwen2 layers=4 kv=2 group=2 ffn=22 vocab=23 pp=2 vpp=2 mbs=2 micro=3 length=9 masked=some "
    "loss=pg+kl "
    "advantages=reinforce-baseline",
    (
        "family=mistral window=3 layers=2 kv=1 group=3 ffn=22 vocab=19 dp=3 mbs=2 length=12 masked=rank "
        "loss=nll warmup=1 recompute=1 rows=4"
    ),
    "family=mixtral layers=3 kv=2 group=2 ffn=20 vocab=17 experts=4 topk=2 balance=aux router=fp64 tp=2 "
    "sp=1 ep=2 dp=2 "
    "dispatcher=allgather mbs=2 length=10 loss=pg distopt=1",
    "family=qwen3_moe layers=1 kv=1 group=3 head=10 ffn=20 vocab=17 experts=6 topk=3 expert=7 balance=seq "
    "zloss=1 ep=2 dp=2 micro=2 "
    "length=8 batching=packed room=9 loss=pg+kl eps=1e-08",
    "backend=dtensor family=qwen2 tied=1 layers=3 kv=2 group=3 ffn=22 vocab=23 tp=2 sp=1 cp=2 "
    "batching=packed mbs=2 micro=2 room=15 "
    "length=13 loss=pg+kl+dual clip=0.05 warmup=1 reference=1 eps=1e-08",
    "backend=dtensor family=llama rope=yarn layers=2 kv=2 group=2 ffn=10 vocab=11 tp=2 plan=names dp=2 "
    "batching=dynamic mbs=2 room=12 "
    "length=9 loss=dpo recompute=1 masked=some warmup=1 schedule=linear steps=4",
    "backend=fsdp1 family=qwen3 tied=1 layers=2 kv=1 group=2 head=10 ffn=9 vocab=11 dp=2 batching=packed "
    "mbs=2 micro=2 room=18 length=9 "
    "loss=pg+is+seq together=1 evaluate=1 eps=1e-08",
    "masked=all dp=2 mbs=2 length=6 loss=pg+kl distopt=1",
    # all gradients of a step cancel but for rounding: no pair counts, and every token goes to all experts
    "seed=186207 family=mixtral group=2 experts=3 topk=3 balance=aux mbs=2 length=9 masked=some loss=dpo",
    "family=qwen2 layers=2 kv=2 group=2 ffn=22 vocab=23 tp=2 cp=2 batching=packed mbs=2 micro=2 room=15 "
    "length=13 loss=pg+kl+is "
    "temperature=1.5 keep=7 nucleus=0.8 clip=0.05 reference=1",
    (
        "backend=dtensor family=llama layers=1 kv=2 group=2 ffn=22 vocab=23 tp=2 dp=2 mbs=2 length=9 loss=pg "
        "nucleus=0.4"
    ),
    (
        "family=llama layers=3 kv=2 group=2 ffn=22 vocab=23 tp=2 pp=2 layout=Et*2|tL micro=2 length=9 "
        "loss=pg "
        "precision=bfloat16 lr=0.02"
    ),
    (
        "backend=dtensor family=qwen2 layers=2 kv=2 group=2 ffn=22 vocab=23 tp=2 sp=1 mbs=2 length=9 "
        "loss=nll "
        "precision=float16 lr=0.02"
    ),
    "family=llama layers=2 kv=2 group=2 ffn=22 vocab=23 tp=2 cp=2 batching=packed mbs=2 micro=3 room=15 "
    "length=13 "
    "loss=pg+seq+gspo+is+icepop",
    "family=qwen2 layers=2 kv=2 group=2 ffn=22 vocab=23 pp=2 dp=2 batching=dynamic mbs=2 micro=2 room=12 "
    "round=4 length=13 "
    "loss=pg+seq+kl+gspo-token+k1 masked=some",
    "backend=dtensor family=llama layers=2 kv=2 group=2 ffn=22 vocab=23 cp=2 dp=2 batching=packed mbs=2 "
    "micro=2 room=15 length=13 "
    "loss=pg+kl+is+cispo+seq-mask+k1+in-reward advantages=reinforce",
    "backend=fsdp1 family=llama layers=2 kv=2 group=2 ffn=22 vocab=23 dp=2 mbs=3 length=12 "
    "loss=pg+seq+constant:2.5+kl+forced+k2+kl-input-clamp:0.3 advantages=gdpo+plain+clip",
    "family=qwen2 layers=2 kv=2 group=2 ffn=22 vocab=23 tp=2 dp=2 batching=packed mbs=2 micro=2 room=18 "
    "length=13 "
    "loss=dpo+ipo+mean+sft+sft-mean masked=some",
    "family=qwen2 tied=1 layers=3 kv=2 group=2 ffn=22 vocab=23 tp=2 sp=1 pp=2 first=2 last=1 "
    "batching=packed mbs=2 micro=2 room=15 "
    "length=13 loss=rm masked=some",
    "backend=dtensor family=llama layers=2 kv=2 group=2 ffn=22 vocab=23 tp=2 sp=1 cp=2 batching=dynamic "
    "mbs=2 room=12 round=4 length=11 "
    "loss=value+clip clip=0.05",
    "family=qwen2 tied=1 layers=3 kv=2 group=2 ffn=22 vocab=23 tp=2 sp=1 pp=2 first=2 last=1 "
    "batching=packed mbs=2 micro=2 room=15 "
    "length=13 loss=distill+mixed masked=some temperature=0.7 chunk=5",
    # the teacher's tokens are all of the vocabulary
    "family=llama layers=2 kv=2 group=2 ffn=6 vocab=5 tp=2 mbs=2 length=9 loss=distill+forward+topk:5",
    "backend=dtensor family=llama layers=2 kv=2 group=2 ffn=22 vocab=23 tp=2 sp=1 cp=2 batching=dynamic "
    "mbs=2 room=12 round=4 length=11 "
    "loss=distill+renorm clip=0.05",
    "backend=fsdp1 family=qwen3 tied=1 layers=2 kv=1 group=2 head=10 ffn=9 vocab=11 dp=2 batching=packed "
    "mbs=2 micro=2 room=18 length=9 "
    "loss=distill+forward together=1 evaluate=1",
    "family=qwen2 layers=2 kv=2 group=2 ffn=22 vocab=23 tp=2 dp=2 batching=packed mbs=2 micro=2 room=18 "
    "length=13 "
    "loss=pg+cispo+kl:0.5+pathwise+cliprange:1:0.28 advantages=gae+gamma:0.9+lambda:0.6+bootstrap+white "
    "masked=some",
    "backend=dtensor family=llama layers=2 kv=2 group=2 ffn=22 vocab=23 cp=2 mbs=2 micro=3 length=12 "
    "loss=value+clip advantages=gae+bootstrap",
    "family=llama layers=2 kv=2 group=2 ffn=22 vocab=23 tp=2 cp=2 batching=dynamic mbs=2 micro=2 room=12 "
    "round=4 length=13 "
    "loss=pg+seq+gspo+cliprange:0.0003:0.0004+entropy:0.05 advantages=teacher+clip:-0.5:none",
    # gradients that cancel: plain transformers in float32 is farther from float64 than one bound for all
    # allows
    "seed=229145 tied=1 kv=2 group=2 vocab=15 length=9 loss=pg+kl+kl-output-clamp:0.06 advantages=gae",
    "seed=900890 family=qwen2 group=3 head=12 width=9 ffn=18 vocab=31 dp=2 micro=3 length=16 lpbs=2 "
    "loss=distill+renorm+forward "
    "temperature=0.7 eps=1e-08 clip=1 distopt=1",
)
PLANTED = [(name, case) for name, fault in FAULTS.items() for case in cases_of(fault, BACKENDS, 8, 0, {})]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> ModelShelf:
    return ModelShelf(tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="module")
def runner(pool: WorkerPool, shelf: ModelShelf) -> CaseRunner:
    return CaseRunner(shelf, pool)


def check(runner: CaseRunner, case: Case) -> None:
    if case.backend == "megatron" and env.text(MODEL_CLASS):
        case = replace(case, model_class=env.text(MODEL_CLASS) or "")
    outcome = runner.run(case)
    assert outcome.passes, f'megarl parity --case "{case}"\n' + "\n".join(
        [*outcome.summary(8), outcome.error]
    )


@newest_megatron(line=[line for line in FIXED if "backend=" not in line])
@sampled(2)
@pytest.mark.parametrize("line", FIXED, ids=lambda line: "-".join(line.split()[:2]))
def test_fixed_cases_agree(runner: CaseRunner, line: str) -> None:
    check(runner, parse(line))


@sampled("values")
@pytest.mark.parametrize("number", range(FRESH))
@pytest.mark.parametrize("backend", BACKENDS)
def test_fresh_cases_agree(runner: CaseRunner, shelf: ModelShelf, backend: str, number: int) -> None:
    seed = int(datetime.date.today().strftime("%Y%m%d"))
    case = Drawer(shelf, [backend], 4).draw(seed, number)
    print(f"seed {seed}, case {number}: {case}")
    check(runner, case)


@newest_megatron
@sampled(3)
@pytest.mark.parametrize(
    ("name", "case"), PLANTED, ids=lambda value: value if isinstance(value, str) else value.backend
)
def test_planted_faults_are_caught(runner: CaseRunner, name: str, case: Case) -> None:
    check(runner, case)
    outcome = runner.run(case, FAULTS[name])
    assert FAULTS[name].kind in {found.kind for found in outcome.mismatches}, f"{name} survived in {case}"
    assert not outcome.error


@slow
@pytest.mark.parametrize("name", ["gradient-averaged-over-data", "dtensor-norm-counts-copies"])
def test_planted_faults_are_caught_in_16_bit(runner: CaseRunner, name: str) -> None:
    case = cases_of(FAULTS[name], BACKENDS, 8, 0, {"precision": "bfloat16", "lr": 0.02})[0]
    check(runner, case)
    assert runner.run(case, FAULTS[name]).mismatches, f"{name} survived in {case}"


@slow
def test_a_fault_is_shrunk_to_the_ranks_it_needs(runner: CaseRunner) -> None:
    case = parse(
        "tp=2 sp=1 kv=2 ffn=6 layers=2 dp=2 length=7 loss=pg+kl temperature=0.7 warmup=1 distopt=1 vocab=11"
    )
    fault = FAULTS["norm-counts-copies"]
    assert runner.run(case, fault).mismatches
    smallest = shrink(case, lambda smaller: not runner.run(smaller, fault).passes, runner.possible)
    assert str(smallest) == "backend=megatron seed=0 kv=2 ffn=6 tp=2"
