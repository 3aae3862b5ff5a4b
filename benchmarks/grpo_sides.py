"""The sides of a GRPO step: megarl's worker with the collector and the loss of a run, TRL's GRPOTrainer, and
a loop by hand.

All sides have the same model, prompts and reward, responses of a fixed number of tokens, and one optimizer
step on all responses.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.phases import REST, STEP, Phases
from benchmarks.timing import Spent

PHASES = ("generation", "logprobs", "training")
LEARNING_RATE, BETAS, EPSILON, CLIP = 1e-3, (0.9, 0.95), 1e-8, 1.0


@dataclass(frozen=True, slots=True)
class Task:
    """The work that every side does.

    Attributes:
        model: Hugging Face directory with its tokenizer.
        prompts: texts of the prompts.
        answers: responses per prompt.
        new_tokens: tokens per response.
    """

    model: Path
    prompts: tuple[str, ...]
    answers: int
    new_tokens: int

    @property
    def rows(self) -> int:
        """Number of rows of a step."""
        return len(self.prompts) * self.answers


def prompts_of(path: Path, count: int) -> tuple[str, ...]:
    """Return the texts of the first ``count`` problems of a quickstart file."""
    return tuple(json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines()[:count])


def reward(text: str) -> float:
    """Return the share of digits in a text, a reward that differs within a group."""
    return sum(character.isdigit() for character in text) / max(1, len(text))


class Ours:
    """A step as ``megarl.algorithms.grpo`` runs it, with the worker in this process, on this data-parallel
    rank's share of the prompts.

    Args:
        config: configuration of the policy.
        task: the work of every side; its prompts are divided among the ranks.
        on_policy: use a ratio of exactly 1 (``loss_fn.force_on_policy_ratio``), which needs no
            log-probabilities before training.
    """

    def __init__(self, config: Any, task: Task, on_policy: bool = False) -> None:
        from transformers import AutoTokenizer

        from benchmarks import tiny
        from benchmarks.subject import config_of
        from megarl.algorithms.loss_functions import ClippedPGLossFn
        from megarl.data.datasets import Example
        from megarl.rollout.collector import Collector

        self.worker = tiny.worker_of(config)
        self.task, self.phases = (
            task,
            Phases(*(phase for phase in PHASES if not (on_policy and phase == "logprobs"))),
        )
        tokenizer: Any = AutoTokenizer.from_pretrained(task.model)
        groups = self.worker.backend.groups
        share, rest = divmod(len(task.prompts), groups.data_size)
        assert not rest, f"{len(task.prompts)} prompts do not divide among {groups.data_size} ranks"
        self.share = slice(groups.data_rank * share, (groups.data_rank + 1) * share)
        # A model with half of the vocabulary lacks some tokens, so other tokens replace them; nobody reads
        # its responses.
        vocabulary = config_of(task.model).vocab_size
        ids = [
            [token % vocabulary for token in tokenizer(text)["input_ids"]]
            for text in task.prompts[self.share]
        ]
        self.records = [Example(index, tuple(prompt), (), "") for index, prompt in enumerate(ids)]
        self.loss_fn = ClippedPGLossFn({**tiny.CLIPPED_LOSS, "force_on_policy_ratio": on_policy})  # type: ignore[arg-type]
        timer: Any = self.phases
        self.collector = Collector(_OneRank(self.worker), tokenizer, _Digits(), timer, stop_token_ids=[])
        self.steps = 0

    def step(self, counts: bool = True) -> Any:
        """Run one step, and return the batch that was trained on and the result of training."""
        from megarl.rollout.samples import sampling_seeds

        with self.phases.step(counts):
            self.steps += 1
            of_all, answers = (
                sampling_seeds(1, self.steps, len(self.task.prompts), self.task.answers),
                self.task.answers,
            )
            # Take the seeds that these rows have in the whole batch, so that several ranks together sample
            # what one rank does.
            seeds = of_all[self.share.start * answers : self.share.stop * answers]
            batch = self._batch(self.collector.collect(self.records, self.task.answers, seeds).samples)
            with self.phases.phase("training"):
                self.worker.prepare_for_training()
                result = self.worker.train(data=batch, loss_fn=self.loss_fn)
        return batch, result

    def _batch(self, samples: Any) -> Any:
        from megarl.algorithms.advantages import group_advantages
        from megarl.distributed.batched_data_dict import BatchedDataDict
        from megarl.rollout.samples import MODEL_INPUTS

        inputs: BatchedDataDict[Any] = BatchedDataDict({key: samples[key] for key in MODEL_INPUTS})
        advantages = group_advantages(
            samples["prompt_ids"], samples["reward"], samples["sample_mask"], False, False
        )
        columns = {"advantages": advantages[:, None].expand_as(samples["input_ids"]).contiguous()}
        if not self.loss_fn.force_on_policy_ratio:
            with self.phases.phase("logprobs"):
                self.worker.prepare_for_lp_inference()
                columns["prev_logprobs"] = self.worker.get_logprobs(data=inputs)["logprobs"]
        return BatchedDataDict({**inputs, **columns, "generation_logprobs": samples["generation_logprobs"]})


class _OneRank:
    """The part of a policy that the collector needs, backed by one worker."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def prepare_for_generation(self) -> None:
        """Put the weights on the device, and switch to evaluation mode."""
        self._worker.prepare_for_generation()

    def generate(self, data: Any, greedy: bool) -> Any:
        """Return the responses of the worker."""
        return self._worker.generate(data=data, greedy=greedy)

    def finish_generation(self) -> None:
        """Do nothing: generation leaves no state."""


class _Digits:
    """An environment that scores with ``reward``."""

    def step(self, turn: Any) -> Any:
        """Return the rewards, and end every conversation."""
        from megarl.rollout.environment import EnvironmentReturn

        rewards = [reward(text) for text in turn.responses]
        return EnvironmentReturn(rewards, [True] * len(rewards), [False] * len(rewards))


class ByHand:
    """A loop as a person writes it on transformers: generate, log-probabilities, one step of fused Adam."""

    def __init__(self, task: Task) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.task, self.phases = task, Phases(*PHASES)
        self.model: Any = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
        # Pad on the left, so that all responses begin in the same column.
        self.tokenizer: Any = AutoTokenizer.from_pretrained(task.model, padding_side="left")
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=0.0, fused=True
        )

    @property
    def spent(self) -> dict[str, Spent]:
        """Seconds by phase."""
        return self.phases.spent

    def run(self, steps: int, warm_up: int, between: Callable[[bool], Any]) -> None:
        """Alternate steps of this side and calls of ``between``; the first ``warm_up`` ones do not count."""
        for turn in range(steps + warm_up):
            with self.phases.step(turn >= warm_up):
                self._step()
            between(turn >= warm_up)

    def _step(self) -> None:
        new = self.task.new_tokens
        with self.phases.phase("generation"), torch.no_grad():
            texts = [text for text in self.task.prompts for _ in range(self.task.answers)]
            asked = self.tokenizer(texts, padding=True, return_tensors="pt")
            # Responses have one length on every side. By default transformers samples among the 50 likeliest
            # tokens; 0 means all.
            options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "top_k": 0}
            ids = self.model.eval().generate(
                asked["input_ids"], attention_mask=asked["attention_mask"], **options
            )
        texts = self.tokenizer.batch_decode(ids[:, -new:], skip_special_tokens=True)
        rewards = torch.tensor([reward(text) for text in texts]).view(-1, self.task.answers)
        # Do not divide by the deviation, because the other sides do not.
        advantages = (rewards - rewards.mean(1, keepdim=True)).view(-1, 1)
        mask = torch.cat([asked["attention_mask"], torch.ones(len(ids), new, dtype=torch.int64)], 1)
        with self.phases.phase("logprobs"), torch.no_grad():
            before = answer_logprobs(self.model, ids, mask, new)
        with self.phases.phase("training"):
            self.model.train()
            policy_loss(answer_logprobs(self.model, ids, mask, new), before, advantages).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad()


def answer_logprobs(model: Any, ids: Tensor, mask: Tensor, new: int) -> Tensor:
    """Return the log-probabilities [rows, new] of the last tokens of left-padded rows."""
    # Positions do not count the padding on the left.
    places = (mask.cumsum(1) - 1).clamp(min=0)
    # The last token's logits predict a token that does not exist.
    logits = model(
        input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False, logits_to_keep=new + 1
    ).logits[:, :-1]
    return logits.float().log_softmax(-1).gather(-1, ids[:, -new:, None]).squeeze(-1)


def policy_loss(now: Tensor, before: Tensor, advantages: Tensor) -> Tensor:
    """Return the clipped policy-gradient loss of responses of equal length."""
    ratio = (now - before).exp()
    return torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()


class TRL:
    """TRL's GRPOTrainer. Its own training loop runs, and lets the other side run after each step."""

    def __init__(self, task: Task) -> None:
        self.task, self.phases = task, Phases("generation", "batch")

    @property
    def spent(self) -> dict[str, Spent]:
        """Seconds by phase. Creating a batch includes generation, and the rest of a step is training; no
        log-probabilities are computed."""
        found = self.phases.spent
        step, generation, batch = found[STEP], found["generation"], found["batch"]
        return {
            STEP: step,
            "generation": generation,
            "training": _less(step, batch),
            REST: _less(batch, generation),
        }

    def run(self, steps: int, warm_up: int, between: Callable[[bool], Any]) -> None:
        """Alternate steps of this side and calls of ``between``; the first ``warm_up`` ones do not count."""
        with tempfile.TemporaryDirectory() as directory:
            trainer = self._trainer(directory, steps + warm_up)
            self._watch(trainer)
            trainer.add_callback(_turns(self.phases, warm_up, between))
            trainer.train()

    def _trainer(self, directory: str, steps: int) -> Any:
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import GRPOConfig, GRPOTrainer

        new = self.task.new_tokens
        # Configure what the other sides do: no division by the rewards' deviation, no divergence, and one
        # update per batch.
        arguments = GRPOConfig(
            output_dir=directory,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=self.task.rows,
            num_generations=self.task.answers,
            max_completion_length=new,
            generation_kwargs={"min_new_tokens": new},
            max_steps=steps,
            num_iterations=1,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_epsilon=EPSILON,
            weight_decay=0.0,
            max_grad_norm=CLIP,
            beta=0.0,
            scale_rewards="none",
            gradient_checkpointing=False,
            shuffle_dataset=False,
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            # torch warns of pinned memory if there is no GPU.
            dataloader_pin_memory=False,
            seed=1,
        )
        return GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(self.task.model, dtype=torch.float32),
            reward_funcs=lambda completions, **_: [reward(text) for text in completions],
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": text} for text in self.task.prompts]),
            processing_class=AutoTokenizer.from_pretrained(self.task.model, padding_side="left"),
        )

    def _watch(self, trainer: Any) -> None:
        """Time the trainer's calls to generate, and those to create a batch, which include generation."""
        # Patch private methods of TRL, because none of its callbacks encloses them.
        generate, score = trainer._generate_single_turn, trainer._generate_and_score_completions

        def timed(*arguments: Any, **named: Any) -> Any:
            with self.phases.phase("generation"):
                return generate(*arguments, **named)

        def scored(*arguments: Any, **named: Any) -> Any:
            with self.phases.phase("batch"):
                return score(*arguments, **named)

        trainer._generate_single_turn, trainer._generate_and_score_completions = timed, scored


def _less(whole: Spent, part: Spent) -> Spent:
    wall, cpu = (
        [one - other for one, other in zip(*pair, strict=True)]
        for pair in ((whole.wall, part.wall), (whole.cpu, part.cpu))
    )
    return Spent(wall, cpu)


def _turns(phases: Phases, warm_up: int, between: Callable[[bool], Any]) -> Any:
    from transformers import TrainerCallback

    class Turns(TrainerCallback):
        """A callback that times each step of the trainer, and runs a step of the other side after it."""

        def __init__(self) -> None:
            self.open: Any = None

        def on_step_begin(self, arguments: Any, state: Any, control: Any, **named: Any) -> None:
            # Enter the context by hand, because no block can span two callbacks.
            self.open = phases.step(state.global_step >= warm_up)
            self.open.__enter__()

        def on_step_end(self, arguments: Any, state: Any, control: Any, **named: Any) -> None:
            self.open.__exit__(None, None, None)
            # The trainer's number already counts this step.
            between(state.global_step > warm_up)

    return Turns()


def assert_same(ours: Ours, model: Any) -> dict[str, float]:
    """Train megarl once on one of its batches, and return the largest differences between its numbers and
    those of a plain model with the same weights.

    Raises:
        AssertionError: log-probabilities or the gradient's norm differ by more than rounding.
    """
    batch, result = ours.step(counts=False)
    new, lengths = ours.task.new_tokens, batch["input_lengths"]
    width = int(lengths.max())
    ids, mask = (torch.zeros(len(lengths), width, dtype=torch.int64) for _ in range(2))
    for row, length in enumerate(lengths.tolist()):
        ids[row, width - length :], mask[row, width - length :] = batch["input_ids"][row, :length], 1
    # transformers gives the row of the padding token no gradient, even if that token was sampled as part of a
    # response.
    model.get_input_embeddings().padding_idx = None
    now = answer_logprobs(model, ids, mask, new)
    found = {
        name: batch[key]
        for name, key in (("logprobs", "prev_logprobs"), ("generation", "generation_logprobs"))
        if key in batch
    }
    policy_loss(now, now.detach(), _answers_of(batch["advantages"], lengths, new)).backward()
    # An infinite bound clips nothing, because only the norm is needed.
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")))
    off = {
        **{
            name: float((now - _answers_of(values, lengths, new)).detach().abs().max())
            for name, values in found.items()
        },
        "gradient": abs(norm - float(result["grad_norm"])) / norm,
    }
    assert max(off.values()) < 1e-3, f"megarl and a plain model of the same weights differ: {off}"
    return off


def _answers_of(columns: Tensor, lengths: Tensor, new: int) -> Tensor:
    return torch.stack(
        [row[length - new : length] for row, length in zip(columns, lengths.tolist(), strict=True)]
    )
