"""Measure on one GPU in about five minutes what training steps, moves, refits and checkpoints cost.

It also finds where the device waits. ``python -m benchmarks.gpu_probe --out probe.json`` measures Qwen2.5
1.5B with random weights and packed bfloat16 micro-batches of 8,192 tokens. Times are compared with a matrix
product on the same device, moves with their bytes. A part that fails is reported and the others still run;
the exit code is then 1. Neither Ray nor a network is needed. ``--device cpu --size tiny`` tries the program
itself.

Figures of an H200 are in ``benchmarks/results/gpu/``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import environment
from benchmarks.device import clock_of, gemm_rate, peak_of
from benchmarks.flops import forward_flops, training_flops

GIB = 2**30
SIZES = {
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 512,
    },
}
SHOWN = 25
"""Number of sync locations, and of kernels, that are listed."""
REFITS = 20
ANSWERS = 256
Figures = Iterator[tuple[str, Any]]


@dataclass(slots=True)
class Probe:
    """State that the parts share: the options, and the worker and its batches once they are built."""

    options: argparse.Namespace
    directory: Path
    gemm: float = 0.0
    worker: Any = None
    config: Any = None
    lengths: list[int] = field(default_factory=list)
    train_shard: Any = None
    logprob_shard: Any = None

    @property
    def on_gpu(self) -> bool:
        """True if a CUDA device is measured."""
        return bool(self.options.device == "cuda")

    def seconds(self, action: Callable[[], Any], repeats: int = 1) -> float:
        """Return the shortest time of ``repeats`` calls, each until the device has done its work."""
        clock, taken = clock_of(self.options.device), []
        for _ in range(repeats):
            clock.start()
            action()
            taken.append(clock.seconds())
        return min(taken)

    def allocated(self) -> int:
        """Return the bytes that torch has allocated on the device; 0 on a CPU."""
        return torch.cuda.memory_allocated() if self.on_gpu else 0

    def train(self) -> Any:
        """Run one training step and return its result."""
        from megarl.algorithms.loss_functions import NLLLoss

        return self.worker.train(data=self.train_shard, loss_fn=NLLLoss())


def facts(probe: Probe) -> Figures:
    """Yield the versions of the packages and, on a GPU, its name, memory and NCCL version."""
    from megarl.env import installed_version

    yield (
        "versions",
        {
            name: installed_version(name)
            for name in ("torch", "megatron-core", "transformers", "transformer-engine", "vllm")
        },
    )
    if probe.on_gpu:
        yield "device", torch.cuda.get_device_name(0)
        yield "memory free, total GiB", [round(figure / GIB, 1) for figure in torch.cuda.mem_get_info()]
        yield "NCCL", ".".join(map(str, torch.cuda.nccl.version()))


def gemm(probe: Probe) -> Figures:
    """Measure the rate of a matrix product, which all other rates are compared with."""
    probe.gemm = gemm_rate(probe.options.device)
    yield "product of matrices, TFLOP/s", round(probe.gemm / 1e12, 2)


def build(probe: Probe) -> Figures:
    """Build a worker on a model of random weights, and a batch to pack its micro-batches from."""
    from benchmarks.tiny import policy_config
    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.models.policy.batch_plan import shard_batch
    from megarl.models.policy.megatron_policy_worker import MegatronPolicyWorker

    options = probe.options
    model = options.model or save_model(probe.directory / "model", options)
    packing = {"enabled": True, "train_mb_tokens": options.tokens, "logprob_mb_tokens": options.tokens}
    probe.config = policy_config(
        model,
        micro_batch=1,
        train_global_batch_size=options.rows,
        logprob_batch_size=1,
        max_total_sequence_length=options.longest,
        precision="bfloat16",
        sequence_packing=packing,
        generation={"max_new_tokens": options.new_tokens, "pad_token_id": 0, "stop_token_ids": []},
        generation_batch_size=ANSWERS,
        megatron_cfg={"transformer_engine": options.transformer_engine},
    )
    begun = time.perf_counter()
    probe.worker = MegatronPolicyWorker(probe.config, None, init_reference_model=True)
    yield "build s", round(time.perf_counter() - begun, 1)
    yield "parameters", sum(parameter.numel() for _, parameter in probe.worker.backend.parameters())
    classes = Counter(
        type(module).__name__ for chunk in probe.worker.backend.chunks for module in chunk.modules()
    )
    yield "attention", sorted(name for name in classes if "Attention" in name)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(options.longest // 8, options.longest + 1, (options.rows,), generator=generator)
    inside = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    ids = (
        torch.randint(2, SIZES[options.size]["vocab_size"], tuple(inside.shape), generator=generator) * inside
    )
    batch = {"input_ids": ids, "input_lengths": lengths}
    targets = {"token_mask": inside.float(), "sample_mask": torch.ones(options.rows)}
    probe.lengths = lengths.tolist()
    probe.train_shard = shard_batch(
        BatchedDataDict({**batch, **targets}), probe.config, 1, phase="train", global_batch=options.rows
    ).shards[0]
    probe.logprob_shard = shard_batch(BatchedDataDict(batch), probe.config, 1, phase="logprob").shards[0]
    yield "tokens", sum(probe.lengths)
    yield "micro-batches", len(probe.train_shard.micro_batch_indices[0])


def save_model(directory: Path, options: argparse.Namespace) -> Path:
    """Save a Qwen2 of random bfloat16 weights in Hugging Face format, and return its directory."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {**SIZES[options.size], **({"num_hidden_layers": options.layers} if options.layers else {})}
    config = Qwen2Config(
        **sizes,
        max_position_embeddings=max(4096, options.longest),
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    with torch.device(options.device):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    return directory


def train(probe: Probe) -> Figures:
    """Measure a training step, after a first one that compiles and allocates memory."""
    from transformers import AutoConfig

    first = probe.train()
    if probe.on_gpu:
        # Memory that compilation takes does not belong to a step.
        torch.cuda.reset_peak_memory_stats()
    seconds = probe.seconds(probe.train, probe.options.steps)
    operations = training_flops(AutoConfig.from_pretrained(probe.config["model_name"]), probe.lengths)
    yield "train s", round(seconds, 3)
    yield "train tokens/s", round(sum(probe.lengths) / seconds)
    yield "train, share of the product's rate", round(operations / seconds / probe.gemm, 3)
    yield "loss", float(first["global_loss"].reshape(-1)[0])
    if probe.on_gpu:
        yield "train peak GiB", round(torch.cuda.max_memory_allocated() / GIB, 1)


def logprobs(probe: Probe) -> Figures:
    """Measure the log-probability phase, and the same with the reference policy, whose weights are loaded and
    offloaded again."""
    from transformers import AutoConfig

    def present() -> Any:
        return probe.worker.get_logprobs(data=probe.logprob_shard)

    def reference() -> Any:
        return probe.worker.get_reference_policy_logprobs(data=probe.logprob_shard)

    # The first call compiles, so it is not timed.
    present()
    each = [probe.seconds(present) for _ in range(probe.options.steps)]
    seconds = min(each)
    yield "log-probabilities s, one after another", [round(taken, 3) for taken in each]
    operations = forward_flops(AutoConfig.from_pretrained(probe.config["model_name"]), probe.lengths)
    yield "log-probabilities s", round(seconds, 3)
    yield "log-probabilities, share of the product's rate", round(operations / seconds / probe.gemm, 3)
    # The first call of the reference policy compiles too.
    reference()
    yield "reference policy s", round(probe.seconds(reference, probe.options.steps), 3)


def generation(probe: Probe) -> Figures:
    """Measure generation by the policy itself on ragged prompts; the first call compiles."""
    from megarl.distributed.batched_data_dict import BatchedDataDict

    rows, new, longest = min(ANSWERS, probe.options.rows * 4), probe.options.new_tokens, 64
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(longest // 4, longest + 1, (rows,), generator=generator)
    ids = torch.randint(2, SIZES[probe.options.size]["vocab_size"], (rows, longest), generator=generator)
    ids = ids * (torch.arange(longest)[None] < lengths[:, None])
    prompts = BatchedDataDict({"input_ids": ids, "input_lengths": lengths})
    probe.worker.prepare_for_generation()
    for turn in ("first", "second"):
        answers: list[Any] = []
        seconds = probe.seconds(lambda answers=answers: answers.append(probe.worker.generate(data=prompts)))
        tokens = int(answers[0]["generation_lengths"].sum())
        yield (
            f"generation of {rows} answers, {turn}: tokens, s, tokens/s",
            [tokens, round(seconds, 2), round(tokens / seconds)],
        )
        yield f"generation, {turn}: ms a token of each row", round(seconds / new * 1e3, 2)
    yield from _kernels_of(probe, "generation", lambda: probe.worker.generate(data=prompts))
    # Parts may be chosen individually, and each expects a worker that is ready to train.
    probe.worker.prepare_for_training()


def syncs(probe: Probe) -> Figures:
    """Find where the host waits for the device, by torch's sync debug mode. Each such sync lets the device
    run out of work."""
    if not probe.on_gpu:
        return
    for name, action in (
        ("log-probabilities", lambda: probe.worker.get_logprobs(data=probe.logprob_shard)),
        ("train", probe.train),
    ):
        seen: Counter[str] = Counter()

        def note(
            message: Any, category: Any, filename: str, line: int, *rest: Any, seen: Counter[str] = seen
        ) -> None:
            if "synchroniz" in str(message):
                seen["/".join(filename.split("/")[-3:]) + f":{line}"] += 1

        with warnings.catch_warnings():
            # By default each source line warns only once, but every wait has to count here.
            warnings.simplefilter("always")
            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
            try:
                action()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        yield f"syncs of {name}", sum(seen.values())
        yield f"syncs of {name}, where", seen.most_common(SHOWN)


def kernels(probe: Probe) -> Figures:
    """Report the kernels of a training step, and the share of its time in which a kernel runs."""
    yield from _kernels_of(probe, "a training step", probe.train)


def _kernels_of(probe: Probe, what: str, action: Callable[[], Any]) -> Figures:
    if not probe.on_gpu:
        return
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        seconds = probe.seconds(action)
    rows = [event for event in recorded.key_averages() if event.self_device_time_total > 0]
    rows.sort(key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in rows) / 1e6
    yield f"kernels of {what}", sum(event.count for event in rows)
    yield f"kernel seconds, seconds of {what}", [round(busy, 3), round(seconds, 3)]
    yield (
        f"longest kernels of {what}, ms and calls",
        [
            [event.key[:100], round(event.self_device_time_total / 1e3, 1), event.count]
            for event in rows[:SHOWN]
        ],
    )


def moves(probe: Probe) -> Figures:
    """Measure offloading all state to the host and loading it back, twice, because the first time allocates
    page-locked memory."""
    for turn in ("first", "second"):
        before = probe.allocated()
        out = probe.seconds(probe.worker.offload_after_refit)
        moved = before - probe.allocated()
        back = probe.seconds(probe.worker.prepare_for_training)
        yield f"to the host and back s, {turn}", [round(out, 3), round(back, 3)]
        if probe.on_gpu:
            yield (
                f"to the host and back GB/s, {turn}",
                [round(moved / seconds / 1e9, 1) for seconds in (out, back)],
            )


def export(probe: Probe) -> Figures:
    """Measure the export of all weights as Hugging Face tensors on the device, which is the input of
    a refit."""

    def all_weights() -> int:
        return sum(tensor.numel() * tensor.element_size() for _, tensor in probe.worker.backend.export_hf())

    size = all_weights()
    seconds = probe.seconds(all_weights, probe.options.steps)
    yield "export of all weights s, GB/s", [round(seconds, 3), round(size / seconds / 1e9, 1)]


def ipc(probe: Probe) -> Figures:
    """Measure refits to a second process on the same device: the number of wrong weights, the speed, and the
    memory that stays allocated."""
    probe.worker.prepare_for_lp_inference()
    description = probe.worker.prepare_refit_info()
    expected = {name: _fingerprint(tensor) for name, tensor in probe.worker.backend.export_hf()}
    size = sum(tensor.numel() * tensor.element_size() for _, tensor in probe.worker.backend.export_hf())
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    child = context.Process(
        target=_engine, args=(theirs, dict(description), probe.options.device), daemon=True
    )
    child.start()
    # Close the child's end here, so that the child's death ends recv().
    theirs.close()
    try:
        ours.recv()
        before, wrong, taken = probe.allocated(), 0, []
        for _ in range(REFITS):
            found: dict[str, float] = {}

            def refit(found: dict[str, float] = found) -> None:
                found.update(_refit(probe.worker, ours))

            taken.append(probe.seconds(refit))
            wrong += sum(found.get(name) != value for name, value in expected.items())
        yield "refits, weights that arrived wrong", [REFITS, wrong]
        yield "refit s, GB/s", [round(min(taken), 3), round(size / min(taken) / 1e9, 1)]
        # The first refit allocates the buffers, so compare with the second.
        yield "last refit over the second", round(taken[-1] / taken[1], 2)
        yield "MiB that refits keep on the device", round((probe.allocated() - before) / 2**20)
    finally:
        ours.close()
        child.join(timeout=30)
        child.kill()
    probe.worker.prepare_for_training()


def _refit(worker: Any, engine: Connection) -> dict[str, float]:
    """Run one refit, and return fingerprints of the weights that the engine read, by name."""
    from megarl.weight_sync.manifest import Manifest

    _, room = worker.prepare_weights_for_ipc()
    found: dict[str, float] = {}
    for group in Manifest.from_description(worker.prepare_refit_info()).groups(int(room)):
        engine.send(worker.get_weights_ipc_handles(group.names))
        found |= engine.recv()
    return found


def _engine(policy: Connection, description: Mapping[str, Any], device: str) -> None:
    """Serve as the engine in a second process: read the weights of each message until the pipe ends."""
    os.environ.update({"MEGARL_DEVICE": device, "LOCAL_RANK": "0"})
    from megarl.distributed.device import runtime
    from megarl.weight_sync.manifest import Manifest
    from megarl.weight_sync.session import WeightReceiver, payload_for

    receiver = WeightReceiver(Manifest.from_description(description), runtime().device)
    policy.send("ready")
    while True:
        try:
            handles = policy.recv()
        except EOFError:
            return
        with receiver.group(payload_for(handles, runtime().identity())) as weights:
            # Copy the weights, as an engine does: after the block the policy may fill the buffer again.
            copies = {name: tensor.clone() for name, tensor in weights}
        policy.send({name: _fingerprint(tensor) for name, tensor in copies.items()})


def _fingerprint(tensor: torch.Tensor) -> float:
    """Return a number that depends on the value and position of every element."""
    flat = tensor.flatten().double()
    places = torch.arange(flat.numel(), device=flat.device, dtype=torch.float64)
    # Factors start at 1, because an element with the factor 0 would not count.
    return float((flat * places.remainder_(8191).add_(1)).sum())


def checkpoint(probe: Probe) -> Figures:
    """Measure a checkpoint of weights and optimizer: seconds, bytes on disk, and device memory above that of
    training."""
    target = probe.directory / "saved"

    def save() -> None:
        probe.worker.save_checkpoint(str(target / "weights"), str(target / "optimizer"))

    taken: list[float] = []
    above = peak_of(lambda: taken.append(probe.seconds(save)), probe.options.device)
    written = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    yield "checkpoint s, GB", [round(taken[0], 1), round(written / 1e9, 2)]
    yield "memory above training MiB", round(above)


PARTS: Mapping[str, Callable[[Probe], Figures]] = {
    part.__name__: part
    for part in (
        facts,
        gemm,
        build,
        train,
        logprobs,
        generation,
        syncs,
        kernels,
        moves,
        export,
        ipc,
        checkpoint,
    )
}


def measure(probe: Probe, chosen: Sequence[str], out: Path | None) -> dict[str, Any]:
    """Run the chosen parts, and return their figures. All figures so far are written to ``out`` after each
    part, so that an interrupted probe keeps them."""
    found: dict[str, Any] = {
        "environment": environment.describe(probe.options.device),
        "commit": environment.commit(),
        "figures": {},
        "failed": {},
    }
    for name in chosen:
        begun = time.perf_counter()
        try:
            # Store each figure at once, so that a part that fails keeps the figures before.
            for key, value in PARTS[name](probe):
                found["figures"][key] = value
                sys.stdout.write(f"{key:<48} {value}\n")
                sys.stdout.flush()
        except Exception as error:
            traceback.print_exc()
            found["failed"][name] = f"{type(error).__name__}: {error}"[:500]
        found.setdefault("seconds", {})[name] = round(time.perf_counter() - begun, 1)
        if out is not None:
            out.write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a part failed, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_probe", description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=list(SIZES), default="1.5b")
    parser.add_argument("--layers", type=int, default=0, metavar="N", help="fewer layers than the size has")
    parser.add_argument("--rows", type=int, default=64, metavar="N", help="sequences of a batch (default 64)")
    parser.add_argument(
        "--longest", type=int, default=2048, metavar="N", help="tokens of the longest (default 2048)"
    )
    parser.add_argument(
        "--tokens", type=int, default=8192, metavar="N", help="of a packed micro-batch (default 8192)"
    )
    parser.add_argument(
        "--steps", type=int, default=3, metavar="N", help="repeats, of which the fastest counts (default 3)"
    )
    parser.add_argument("--new-tokens", type=int, default=64, metavar="N", help="of each answer (default 64)")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIRECTORY",
        help="a model that is there already, of the size's vocabulary",
    )
    parser.add_argument(
        "--transformer-engine", choices=["auto", "true", "false"], default="auto", help="the key of that name"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(PARTS),
        metavar="PART",
        help=f"of {', '.join(PARTS)}; gemm and build come with them",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures there, as JSON")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device cuda: torch sees no CUDA device; see megarl doctor, or try the program with --device "
            "cpu --size tiny"
        )
    from megarl.distributed.allocator import fast_pinning

    # Set these variables before the device is first used, because torch reads its allocator's settings only
    # once.
    if options.device == "cuda":
        os.environ.update(fast_pinning())
    options.transformer_engine = {"true": True, "false": False}.get(
        options.transformer_engine, options.transformer_engine
    )
    os.environ.update(
        {
            "MEGARL_DEVICE": options.device,
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
    )
    # Use a store within the process, because a single rank needs no port.
    dist.init_process_group(
        "nccl" if options.device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    wanted = {"gemm", "build", *options.only} if options.only else set(PARTS)
    with tempfile.TemporaryDirectory() as directory:
        found = measure(
            Probe(options, Path(directory)), [name for name in PARTS if name in wanted], options.out
        )
    dist.destroy_process_group()
    return int(bool(found["failed"]))


if __name__ == "__main__":
    sys.exit(main())
