"""What the cases are made of: options, layouts, clocks, phases, counted operations, and the loops that
workers are measured against."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import __main__ as command
from benchmarks import collectives, device, tiny
from benchmarks.cases import CASES, grpo_step
from benchmarks.flops import forward_flops, training_flops
from benchmarks.options import ONE_RANK, Layout, Options, layout_of, numbers_of
from benchmarks.phases import Phases
from benchmarks.ranks import Ranks
from benchmarks.subject import NARROW, Work, batch_of, fits, model_of, policy_of, rows_at_once
from benchmarks.timing import Spent, over_ranks


def test_a_layout_is_read_as_it_is_written() -> None:
    assert layout_of("tp=2,pp=2") == Layout(tp=2, pp=2)
    assert str(layout_of("dp=4")) == "dp=4"
    assert (str(ONE_RANK), layout_of("tp=2, cp=3,dp=2").ranks) == ("one rank", 12)
    for wrong in ("tp=0", "tp", "vp=2", "tp=2,tp=4", ""):
        with pytest.raises(ValueError, match="at most once"):
            layout_of(wrong)
    assert numbers_of("128,512") == (128, 512)
    with pytest.raises(ValueError, match="above 0"):
        numbers_of("128,0")


def test_a_choice_that_no_case_can_follow_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["run", "logprobs", "train.step", "--layout", "tp=2"]) == 2
    assert (
        "--layout: logprobs cannot follow it. Fix: leave it out, or choose from train.step"
        in capsys.readouterr().err
    )
    with pytest.raises(SystemExit):
        command.main(["run", "train.step", "--layout", "xp=2"])
    assert "is no axis with its ranks" in capsys.readouterr().err
    assert "train.step" in command._cases_that_take(Options(layout=Layout(tp=2)))
    everything = command._cases_that_take(Options())
    assert [name for name in CASES if name not in everything] == [
        name for name, case in CASES.items() if case.needs or case.by_name
    ]


class FakeCuda:
    """A CUDA device that is done with its work only when somebody waits for it."""

    def __init__(self) -> None:
        self.now, self.queued, self.allocated, self.peak = 0.0, 0.0, 100, 900

    def give(self, milliseconds: float) -> None:
        self.queued += milliseconds

    def synchronize(self) -> None:
        self.now, self.queued = self.now + self.queued, 0.0

    def Event(self, enable_timing: bool) -> Any:
        cuda = self

        class Event:
            def record(self) -> None:
                self.at = cuda.now + cuda.queued

            def elapsed_time(self, later: Any) -> float:
                assert later.at <= cuda.now, "the event has not happened yet"
                return later.at - self.at

        return Event()

    def empty_cache(self) -> None: ...

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.allocated

    def memory_allocated(self) -> int:
        return self.allocated

    def max_memory_allocated(self) -> int:
        return self.peak


def test_a_cuda_clock_waits_for_what_was_given_before_and_inside() -> None:
    cuda = FakeCuda()
    clock = device.CudaClock(cuda)
    cuda.give(500.0)
    clock.start()
    assert cuda.queued == 0.0, "what was given before is done"
    cuda.give(20.0)
    assert clock.seconds() == pytest.approx(0.020)


def test_the_peak_of_a_cuda_device_leaves_out_what_was_there_and_earlier_peaks() -> None:
    cuda = FakeCuda()

    def action() -> None:
        cuda.peak = 100 + 3 * device.memory.MEBIBYTE

    assert device.peak_of(action, "cuda", cuda) == 3.0


def test_phases_add_up_and_the_rest_is_what_no_phase_covers() -> None:
    phases = Phases("generation", "training")
    for counts in (False, True):
        with phases.step(counts):
            for _ in range(2):
                with phases.phase("generation"):
                    time.sleep(0.02)
            with phases.phase("reward"):
                time.sleep(0.03)
    spent = phases.spent
    assert {name: len(taken.wall) for name, taken in spent.items()} == {
        "step": 1,
        "generation": 1,
        "training": 1,
        "rest": 1,
    }
    assert spent["generation"].wall[0] >= 0.04 and spent["training"].wall == [0.0]
    assert spent["rest"].wall[0] >= 0.03
    assert spent["step"].wall[0] == pytest.approx(spent["generation"].wall[0] + spent["rest"].wall[0])


def test_ranks_take_as_long_as_the_slowest_and_as_many_core_seconds_as_all() -> None:
    both = over_ranks([Spent([1.0, 4.0], [1.0, 1.0]), Spent([2.0, 3.0], [2.0, 2.5])])
    assert (both.wall, both.cpu) == ([2.0, 4.0], [3.0, 3.5])


def test_operations_are_those_of_torch_s_own_count(tmp_path: Path) -> None:
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        tiny.save_model(tmp_path, 64, **NARROW), attn_implementation="eager"
    )
    ids = torch.arange(2, 66)[None]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    # torch counts the whole square of attention, of which half is masked
    square = 2 * model.config.num_hidden_layers * model.config.hidden_size * 64 * 64
    assert forward_flops(model.config, [64]) + square == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert training_flops(model.config, [64]) == 3 * forward_flops(model.config, [64])


def test_a_policy_has_the_layout_that_was_asked_for(tmp_path: Path) -> None:
    model = model_of(Options(), tmp_path, 32, **NARROW)
    policy = policy_of(model, "megatron", Work(8, 32, 2), Layout(tp=2, pp=2, dp=2))
    sizes = policy["megatron_cfg"]
    assert (sizes["tensor_model_parallel_size"], sizes["pipeline_model_parallel_size"]) == (2, 2)
    assert (policy["train_micro_batch_size"], policy["train_global_batch_size"]) == (2, 8)
    assert sizes["optimizer"]["lr"] == tiny.LEARNING_RATE, "other keys of the section stay"
    with pytest.raises(ValueError, match="fsdp1 has no such axis"):
        policy_of(model, "fsdp1", Work(8, 32), Layout(tp=2))
    with pytest.raises(ValueError, match="they do not divide"):
        rows_at_once(Work(8, 32, 3))
    assert fits("dtensor", Work(8, 32), Layout(tp=2, dp=2)) and not fits("dtensor", Work(8, 32), Layout(pp=2))
    assert not fits("megatron", Work(8, 32, 8), Layout(dp=2))


def test_there_are_as_many_ranks_as_devices_and_on_a_cpu_more_than_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with Ranks("cuda") as on_gpus, Ranks("cpu") as on_cpu:
        assert on_gpus.most == 3
        assert on_cpu.most >= 8


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere does not exist\. Fix: name a Hugging Face config\.json"):
        model_of(Options(model=str(tmp_path / "nowhere")), tmp_path, 8)
    shapes = tiny.save_model(tmp_path / "shapes", 32, **NARROW)
    made = model_of(Options(model=str(shapes)), tmp_path / "made", 8)
    assert batch_of(made, Work(2, 8))["input_ids"].max() < NARROW["vocab_size"]


def test_collectives_are_recorded_with_the_ranks_of_their_group_and_sent_to_as_many() -> None:
    store = FakeStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=4)
    try:
        pair, alone = dist.new_group([0, 1]), dist.new_group([0])
        value = torch.ones(3)
        with collectives.Recorded() as recorded:
            for group in (None, pair, alone):
                dist.all_reduce(value, group=group)
        of_all = collectives.Collective("all_reduce", 3, torch.float32, 4)
        assert recorded.found == [of_all, replace(of_all, ranks=2)], "one rank by itself sends nothing"
        assert len(collectives.send([of_all], repeats=2).wall) == 2
        with pytest.raises(ValueError, match=r"ranks=2.* and there are 4: .*Fix: "):
            collectives.send(recorded.found, repeats=2)
    finally:
        dist.destroy_process_group()


def test_a_result_says_how_many_ranks_its_collectives_had() -> None:
    spent = Spent([1.0], [1.0])
    rank = {"ours": dict.fromkeys(("step", "generation", "training"), spent), "numbers": [1.0, 2.0]}
    rank |= {"collectives": spent, "number": 7, "group": 2}
    metrics = grpo_step._of_layout([rank, rank], [rank], [rank, rank], "two ranks apart")
    assert (metrics["collectives"].samples, metrics["collectives_ranks"].samples) == ((7.0,), (2.0,))
