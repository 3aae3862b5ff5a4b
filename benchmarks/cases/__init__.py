"""The cases, by name. Their modules are imported only to be run, because they need torch, Ray or Megatron."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """A case.

    Attributes:
        about: what is compared with what, in a line.
        module: has ``measure(quick) -> Iterator[Point]``, or ``measure(quick, options)`` where it takes any.
        takes: the options of ``benchmarks.options.Options`` that it follows.
        needs: those of them that it cannot do without; a run of all cases leaves it out where they are not chosen.
        load: processes that compute at the same time, and so the load that the case itself causes.
        by_name: it is measured where it is named; a run of all cases leaves it out.
    """

    about: str
    module: str
    takes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    load: float = 2.0
    by_name: bool = False


CASES = {
    "pack.quality": Case("bins of each packing algorithm against the lower bound L2", "benchmarks.cases.pack_quality"),
    "pack.time": Case("time of best-fit decreasing against sorted() of the same lengths", "benchmarks.cases.pack_time"),
    "logprob.cpu": Case("vocabulary-parallel log-probabilities against eager log_softmax and gather", "benchmarks.cases.logprob_cpu"),
    "logprob.passes": Case(
        "how often the log-probabilities read and write the logits, counted: PyTorch code and Triton kernels",
        "benchmarks.cases.logprob_passes",
    ),
    "redirect.cost": Case(
        "torch calls under the CUDA redirection against plain ones, and its share of a step", "benchmarks.cases.redirect_cost"
    ),
    "dispatch.ray": Case(
        "a batch of 1 and 16 MB to a worker group against one copy of it, an empty call and bare Ray actors",
        "benchmarks.cases.dispatch_ray",
    ),
    "scaling.batch": Case(
        "the driver's work between the phases of a step of 256 to 8,192 samples against one copy of the batch",
        "benchmarks.cases.scaling_batch",
    ),
    "convert.h2m": Case("import of a checkpoint against a plain copy and against transformers", "benchmarks.cases.convert_h2m"),
    "convert.m2h": Case("export of a checkpoint against a plain copy and against transformers", "benchmarks.cases.convert_m2h"),
    "refit.ipc": Case("weights handed over in 300 and 10,000 tensors against one flat copy of them", "benchmarks.cases.refit_ipc"),
    "refit.bcast": Case("weights sent in 300 and 10,000 tensors against one flat broadcast of them", "benchmarks.cases.refit_bcast"),
    "refit.export": Case(
        "all weights of mixtures of 12 and 125 experts a layer, about as many bytes, against one flat copy",
        "benchmarks.cases.refit_export",
    ),
    "refit.load": Case(
        "host seconds of loading experts into vLLM's model at a refit, a layer's together against one weight after another; needs vLLM",
        "benchmarks.cases.refit_load",
        by_name=True,
    ),
    "messages": Case(
        "messages and bytes of driver and ranks of a refit at 8 to 1,024 ranks, counted; fails above its bounds",
        "benchmarks.cases.messages",
    ),
    "rewards.pool": Case(
        "512 answers of 12 kB judged by a process a core against one that judges by itself", "benchmarks.cases.rewards_pool"
    ),
    "samples.cost": Case(
        "what the samples of a GRPO step cost it until they are handed over, and on disk, against the step, in CPU seconds",
        "benchmarks.cases.samples_cost",
    ),
    "train.packed": Case("valid tokens a second of packed and dynamic against padded micro-batches", "benchmarks.cases.train_packed"),
    "grpo.step": Case("a GRPO step by phase against TRL's GRPOTrainer, or a loop by hand", "benchmarks.cases.grpo_step"),
    "recipe.step": Case(
        "log-probabilities and training of a recipe in its layout on all nodes, against products of matrices there",
        "benchmarks.cases.recipe_step",
        takes=("device", "model", "tokens"),
        needs=("model",),
    ),
    "logprobs": Case(
        "the log-probability phase of each backend against the model of transformers with log_softmax",
        "benchmarks.cases.logprobs",
        takes=("device", "model", "tokens"),
    ),
    "head": Case(
        "output layer and log-probabilities, forward and backward, against log_softmax, chunked and fused ones",
        "benchmarks.cases.head",
        takes=("device", "tokens"),
    ),
    "scaling.ranks": Case(
        "core-seconds of a training step on 1 to 8 ranks against one rank, and against torch's FSDP2",
        "benchmarks.cases.scaling_ranks",
        takes=("device", "model", "tokens"),
        load=8.0,
    ),
    "scaling.tokens": Case(
        "a training step over the length of sequences against a bare loop, and against short ones",
        "benchmarks.cases.scaling_tokens",
        takes=("device", "model", "tokens"),
    ),
    "steps.200": Case(
        "memory over 200 training steps against that after the first 50, and against a bare loop's",
        "benchmarks.cases.steps_200",
        takes=("device", "model", "tokens"),
    ),
    "train.step": Case(
        "a training step of each backend and layout against a bare loop on transformers, and against torch's FSDP2",
        "benchmarks.cases.train_step",
        takes=("device", "model", "layout", "tokens"),
    ),
    "validation": Case(
        "150 prompts, or others, x 8 sampled answers in one call of a worker against calls of 32 prompts, with equal answers",
        "benchmarks.cases.validation",
        takes=("rows",),
    ),
    "startup": Case(
        "a command, a dry run and a tiny GRPO run until its first step, against an empty interpreter, import torch and TRL",
        "benchmarks.cases.startup",
    ),
    "data.start": Case(
        "the first and the second start with 50,000 rows of data, or others, against reading and tokenizing them alone",
        "benchmarks.cases.data_start",
        takes=("rows",),
    ),
    "generation": Case("generation by each backend, ragged prompts, against generate of transformers", "benchmarks.cases.generation"),
    "state.bytes": Case(
        "bytes that a save and a load of the optimizer allocate against the state in full, and that a step moves to the host",
        "benchmarks.cases.state_bytes",
    ),
    "loading.bytes": Case(
        "bytes of a model's files that ranks read and send to one another, counted, against one rank that sends all to every other",
        "benchmarks.cases.loading_bytes",
    ),
    "operations": Case(
        "operations and host syncs of a packed micro-batch of 2, 16 and 64 sequences, counted; fails above its bounds",
        "benchmarks.cases.operations",
    ),
    "ckpt.save": Case(
        "a save until the checkpoint has its name against a raw write of its bytes with fsync",
        "benchmarks.cases.ckpt_save",
        takes=("model",),
    ),
    "ckpt.ranks": Case(
        "bytes of the rank that writes most of a save, on 2 and 4 data-parallel ranks, against all; the save against a raw write",
        "benchmarks.cases.ckpt_ranks",
    ),
    "ckpt.load": Case("a checkpoint verified, and loaded, against a raw read of its bytes", "benchmarks.cases.ckpt_load", takes=("model",)),
    "ckpt.async_stall": Case(
        "how long training stands still for a checkpoint that is written beside it, against one copy of its bytes",
        "benchmarks.cases.ckpt_async_stall",
        takes=("model",),
    ),
    "ckpt.reshard": Case(
        "a checkpoint loaded by another layout of two ranks against the one that wrote it, and a raw read", "benchmarks.cases.ckpt_reshard"
    ),
    "recover.kill": Case(
        "seconds from SIGKILL to a worker to the next finished step against a start from nothing",
        "benchmarks.cases.recover_kill",
        by_name=True,
    ),
    "critic.cost": Case(
        "values and training of PPO's critic against log-probabilities and training of the actor, each backend",
        "benchmarks.cases.critic_cost",
        takes=("device", "model", "tokens"),
        by_name=True,
    ),
    "memory.context": Case("memory of a training step on 2 and 4 context ranks against one rank", "benchmarks.cases.memory_context"),
}
