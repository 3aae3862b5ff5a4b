"""What the tiers are worth: known faults go in, and the tests that cover them have to fail.

Each break below is one line of the library said otherwise; the rest are the faults that ``megarl parity --prove`` plants, put into every
job that the pool of workers runs (``MEGARL_TEST_FAULT``). A break is put into a copy of the tree, and the tests of a tier that cover it run
there until the first failure.

    python -m tests.breaks                      every break and fault against the default tier
    python -m tests.breaks --all NAME ...       some of them against everything
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.parity.faults.mutations import MUTATIONS
from tests.dist.pool import FAULT_VARIABLE
from tests.tiers import SEED_VARIABLE

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Break:
    """One line of a file said otherwise, and the tests that cover the file: paths below ``tests/``, those that should see it first."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]


BREAKS: Mapping[str, Break] = {
    "config: ranks that do not divide": Break(
        "megarl/config/rules/parallel.py", "if world % copy == 0:", "if True:", ("unit/test_config_rules.py", "unit/test_config_layout.py")
    ),
    "data: an epoch begins with its second record": Break(
        "megarl/data/sampler.py",
        "self._go_to(self._epoch + 1, 0)",
        "self._go_to(self._epoch + 1, 1 % self.size)",
        ("unit/test_sampler.py",),
    ),
    "data: a file that changes is taken as it was begun": Break(
        "megarl/data/datasets.py", " and content_digest(self._source) != self._digest:", " and False:", ("unit/test_odd_files.py",)
    ),
    "data: a text is too long by its first token": Break(
        "megarl/data/tokenization.py", "> 2 * limit + _FEW_TOKENS:", "> 0:", ("unit/test_odd_files.py",)
    ),
    "restarts: one more than allowed": Break(
        "megarl/algorithms/restarts.py", "self.workers >= self.most", "self.workers > self.most", ("unit/test_restarts.py",)
    ),
    "restarts: what the lost workers logged stays": Break(
        "megarl/algorithms/run.py",
        "sinks.truncate_after(start.step if start.step else -1)",
        "sinks.truncate_after(start.step if start.step else -1) if launch.restarts.workers == 0 else None",
        ("unit/test_restarts.py",),
    ),
    "restarts: rows that wait for a full disk do so twice": Break(
        "megarl/observe/sinks.py",
        "for each in self._waiting if each[0] <= step",
        "for each in self._waiting",
        ("unit/test_observe_sinks.py",),
    ),
    "restarts: the start of Ray counts again": Break(
        "megarl/algorithms/start.py",
        '_ray_start["seconds"], 0.0',
        '_ray_start["seconds"], _ray_start["seconds"]',
        ("unit/test_restarts.py",),
    ),
    "places: what is read slowly is given up": Break(
        "megarl/config/places.py", "if used > busy + _BUSY_S:", "if False:", ("unit/test_places.py",)
    ),
    "rewards: what a function prints has its secrets": Break(
        "megarl/redaction.py",
        'redacted_text(self._begun.decode(errors="backslashreplace"))',
        'self._begun.decode(errors="backslashreplace")',
        ("unit/test_redaction.py", "unit/test_rewards.py"),
    ),
    "ray: a local one asks for no token": Break(
        "megarl/distributed/ray_runtime.py", 'env.set_variables({"RAY_AUTH_MODE": "token"})', "pass", ("unit/test_ray_runtime.py",)
    ),
    "restarts: an engine that is gone counts as alive": Break(
        "megarl/algorithms/refit.py", "if self.generation.is_alive():", "if True:", ("unit/test_engine_restarts.py",)
    ),
    "run: its directory may go": Break(
        "megarl/checkpoint/lock.py", "if not self.held or _file_at", "if True or _file_at", ("unit/test_places.py",)
    ),
    "data: a source that is not behind may come next": Break(
        "megarl/data/sampler.py", "if lag >= self._total]", "if True]", ("unit/test_sampler.py",)
    ),
    "data: a mixture begins its sources anew": Break(
        "megarl/data/sampler.py", "sampler.go_to(count)", "sampler.go_to(0)", ("unit/test_sampler.py",)
    ),
    "data: a record is a token too long": Break(
        "megarl/data/datasets.py",
        "if length > self._limit:",
        "if length > self._limit + 1:",
        ("unit/test_sources.py", "unit/test_tokenization.py"),
    ),
    "data: other tokens of another tokenizer are taken": Break(
        "megarl/data/datasets.py", "_tokenizer_identity(reading.tokenizer), ", "", ("unit/test_sources.py",)
    ),
    "data: the word of another judge is taken": Break(
        "megarl/data/datasets.py", "f\"judged-{_digest([reading.judge, source.get('env_name')])}\"", '"judged"', ("unit/test_sources.py",)
    ),
    "data: what is before a turn of the assistant is learned": Break(
        "megarl/data/conversations.py", "spans.append((first, end))", "spans.append((first - 1, end))", ("unit/test_sources.py",)
    ),
    "data: of a conversation the last turn alone is learned": Break(
        "megarl/distributed/token_batches.py", "in example.targets or", "in (example.targets or ())[-1:] or", ("unit/test_sources.py",)
    ),
    "data: the chat template does not get its values": Break(
        "megarl/data/chat_template.py",
        "**options, **further, **self._clock, **self._values",
        "**options, **further, **self._clock",
        ("unit/test_sources.py",),
    ),
    "data: a key finds the first member of a list": Break(
        "megarl/data/rows.py", "value = value[step]", "value = value[step if isinstance(step, str) else 0]", ("unit/test_sources.py",)
    ),
    "data: packing spreads over too few bins": Break(
        "megarl/data/packing/algorithms.py", "if wanted > len(bins):", "if wanted > len(bins) + 1:", ("unit/test_packing.py",)
    ),
    "distributed: shards overlap by a row": Break(
        "megarl/distributed/batched_data_dict.py",
        "return self.slice(rank * share, (rank + 1) * share)",
        "return self.slice(max(0, rank * share - 1), (rank + 1) * share - (rank > 0))",
        ("unit/test_batched_data_dict.py", "unit/test_batched_data_dict_sharding.py"),
    ),
    "distributed: a group of another run is let in": Break(
        "megarl/distributed/rendezvous.py",
        "    check_membership(store, endpoint, rank, world_size)\n",
        "",
        ("system/test_rendezvous.py", "system/test_worker_groups.py"),
    ),
    "algorithms: the baseline counts its own row": Break(
        "megarl/algorithms/advantages.py", "others = count - own_count", "others = count", ("unit/test_advantages.py",)
    ),
    "algorithms: clipping takes the smaller loss": Break(
        "megarl/algorithms/loss_functions.py",
        "values = torch.maximum(-advantages * ratio",
        "values = torch.minimum(-advantages * ratio",
        ("unit/test_losses.py",),
    ),
    "algorithms: an importance weight has a gradient": Break(
        "megarl/algorithms/loss_functions.py",
        "drawn_apart = (previous - generation).detach()",
        "drawn_apart = current - generation",
        ("unit/test_losses.py",),
    ),
    "algorithms: a divergence has half of its gradient": Break(
        "megarl/algorithms/loss_functions.py",
        "if self.exact_kl_gradient:",
        "if not self.exact_kl_gradient:",
        ("unit/test_losses.py",),
    ),
    "algorithms: advantages of rounding": Break(
        "megarl/algorithms/advantages.py", ".abs().clamp(min=1.0)", ".abs()", ("unit/test_advantages.py",)
    ),
    "rewards: a reference is read without its box": Break(
        "megarl/rollout/mathematics.py",
        'answer if _DELIMITED.search(answer) else f"\\\\boxed{{{answer}}}"',
        "answer",
        ("unit/test_mathematics.py",),
    ),
    "engine: a step whatever the loss": Break(
        "megarl/models/engine/step.py", "loss_is_finite and math.isfinite(norm)", "True", ("dist/test_nonfinite.py",)
    ),
    "engine: weights are not looked at before a save": Break(
        "megarl/models/engine/nonfinite.py", "if on_all_ranks(all(finite), device):", "if True:", ("dist/test_nonfinite.py",)
    ),
    "checkpoint: an index may name anything": Break(
        "converters/checkpoint/restricted.py",
        "if found is None:",
        "if False:",
        ("unit/test_converters_hostile.py", "dist/test_checkpoint_payloads.py"),
    ),
    "resume: damaged checkpoints are forgotten": Break(
        "megarl/algorithms/resume.py", 'if damaged and resume != "never":', "if False:", ("unit/test_drivers.py",)
    ),
    "policy: vectors decay whatever is asked": Break(
        "megarl/models/huggingface/optimizer.py",
        'decays = chosen["weight_decay_on_vectors"] or',
        "decays = True or",
        ("unit/test_torch_optimizer.py",),
    ),
    "policy: a loss for logits goes to the workers": Break(
        "megarl/algorithms/interfaces.py", "    if takes_logits:", "    if False:", ("unit/test_losses.py",)
    ),
    "config: what is proposed is not tried": Break(
        "megarl/config/proposals.py", "        if not faults:", "        if not faults or changes:", ("unit/test_config_proposals.py",)
    ),
    "cli: a closed pipe is an error": Break(
        "converters/command.py", "        if not _is_unread(sys.stdout):", "        if True:", ("unit/test_listings.py",)
    ),
    "config: an engine of any size passes": Break(
        "megarl/models/generation/vllm/configuration.py",
        "    if needed.weights < needed.budget:",
        "    if True:",
        ("unit/test_config_memory.py",),
    ),
    "config: an engine has the rows of all engines": Break(
        "megarl/models/generation/vllm/configuration.py",
        "min(-(-rows // engines), MAX_NUM_SEQS)",
        "min(rows, MAX_NUM_SEQS)",
        ("unit/test_config_memory.py",),
    ),
    "vllm: a batch between two steps has no graph": Break(
        "megarl/models/generation/vllm/options.py", " | {largest})", " | {1})", ("unit/test_vllm_options.py",)
    ),
    "config: state that no device has room for passes": Break(
        "megarl/config/plan.py", "    if needed > gib * GIB:", "    if False:", ("unit/test_memory_fit.py",)
    ),
    "config: a plan forgets what a CPU keeps of a gated MLP": Break(
        "megarl/config/activations.py", "norm=8, gated=5", "norm=8, gated=4", ("dist/test_memory_plan.py",)
    ),
    "config: logits are counted once more beside themselves": Break(
        "megarl/config/memory.py",
        "return _Logits(training * columns * (element",
        "return _Logits(training * columns * (4 + element",
        ("dist/test_memory_plan.py",),
    ),
    "run: a profile ends with the run": Break(
        "megarl/algorithms/profiling.py", "        if step + 1 not in self._steps:", "        if False:", ("unit/test_drivers.py",)
    ),
    "run: checkpoints are ranked by a metric of no step": Break(
        "megarl/algorithms/loop.py", "            checkpoints.require_metric(metrics)", "            pass", ("unit/test_drivers.py",)
    ),
    "policy: calls of one that is gone": Break(
        "megarl/distributed/worker_groups.py",
        "        if not self._workers:\n            raise StateError(",
        "        if False:\n            raise StateError(",
        ("system/test_policy.py",),
    ),
    "deadlines: the fastest of the last ten counts": Break(
        "megarl/distributed/deadlines.py", "self._multiple * max(known)", "self._multiple * min(known)", ("unit/test_deadlines.py",)
    ),
    "deadlines: what new workers compile is forgotten": Break(
        "megarl/distributed/deadlines.py", "known.append(durations.first[call.method])", "pass", ("unit/test_deadlines.py",)
    ),
    "deadlines: nobody sees that a process is stopped": Break(
        "megarl/distributed/worker_watch.py",
        "        if any_is_stopped(self._looks[-1]):",
        "        if False:",
        ("unit/test_worker_watch.py", "system/test_worker_groups.py"),
    ),
    "deadlines: one rank at rest is enough": Break(
        "megarl/distributed/worker_watch.py",
        "return all(_stands_still(of_one)",
        "return any(_stands_still(of_one)",
        ("unit/test_worker_watch.py",),
    ),
    "deadlines: a start of Ray that hangs is the user's fault": Break(
        "megarl/distributed/ray_runtime.py",
        "return DeadlineError if isinstance",
        "return ClusterError if isinstance",
        ("unit/test_ray_runtime.py",),
    ),
    "restarts: places of engines apart are not counted": Break(
        "megarl/distributed/virtual_cluster.py",
        "        nodes = cluster.check_places(nodes)",
        "        cluster.check_places(nodes)",
        ("system/test_virtual_cluster.py",),
    ),
    "checkpoints: a save that fails ends the run": Break(
        "megarl/algorithms/resume.py", "len(self.failed) < self.most_failed", "False", ("unit/test_failed_saves.py",)
    ),
    "checkpoints: any signature is taken": Break(
        "converters/checkpoint/signature.py",
        "not hmac.compare_digest(given.encode(), signature_of(manifest, key).encode())",
        "False",
        ("unit/test_signed_checkpoints.py",),
    ),
    "checkpoints: a signed one may have further files": Break(
        "megarl/checkpoint/manifest.py",
        "sorted(set(_file_names(root)) - set(manifest",
        "sorted(set() - set(manifest",
        ("unit/test_signed_checkpoints.py",),
    ),
    "checkpoints: a key may be read by others": Break(
        "converters/checkpoint/signature.py", "status.st_mode & 0o177", "status.st_mode & 0o002", ("unit/test_signed_checkpoints.py",)
    ),
    "conversion: a signed source may have other bytes": Break(
        "converters/checkpoint/signature.py", 'entry != {"size"', 'False and entry != {"size"', ("unit/test_signed_checkpoints.py",)
    ),
    "checkpoints: a moment without storage is damage": Break(
        "megarl/checkpoint/storage.py", "for pause in (*PAUSES_S, None):", "for pause in (None,):", ("unit/test_storage.py",)
    ),
    "checkpoints: the first rank fails alone": Break(
        "megarl/models/megatron/sharded_save.py",
        "self._failure = self._failure or error",
        "raise",
        ("dist/test_checkpoint_collective.py",),
    ),
    "checkpoints: two are written at a time": Break(
        "megarl/algorithms/resume.py", "        self.settle(wait=True)\n        info =", "        info =", ("unit/test_async_saves.py",)
    ),
    "checkpoints: ranks of another node find no directory": Break(
        "megarl/checkpoint/collective.py",
        "paths.index(str(directory)) == dist.get_rank()",
        "dist.get_rank() == 0",
        ("dist/test_checkpoint_collective.py",),
    ),
    "checkpoints: a node's memory outlives its run": Break(
        "megarl/checkpoint/node_memory.py",
        "        _remove(source)\n        if not",
        "        if not",
        ("unit/test_node_memory.py",),
    ),
    "checkpoints: a staged part of a tensor has the strides of the whole": Break(
        "megarl/checkpoint/staging.py",
        'like = values if is_alone else torch.empty_like(values, device="meta")',
        "like = values",
        ("unit/test_staging.py",),
    ),
    "checkpoints: another process's memory is taken for a rank's": Break(
        "megarl/checkpoint/staged_file.py",
        '(status.st_dev, status.st_ino) != (address["device"], address["inode"])',
        "False",
        ("unit/test_staging.py",),
    ),
    "stopping: what ends a run inside Ray ends it with 1": Break(
        "megarl/algorithms/stopping.py", "raise SystemExit(self._ended_with) from None", "raise", ("unit/test_stopping.py",)
    ),
    "rewards: a parameter of any name is given something": Break(
        "megarl/config/reward_arguments.py",
        "if not _is_known(name) and name not in columns]",
        "if False]",
        ("unit/test_reward_arguments.py",),
    ),
    "algorithms: checkpoints one step late": Break(
        "megarl/algorithms/resume.py",
        "step % self.save_period == 0",
        "step % self.save_period == 1",
        ("unit/test_drivers.py", "unit/test_stopping.py"),
    ),
    "signals: Ray's processes stay in the driver's group": Break(
        "megarl/distributed/ray_processes.py", '"start_new_session": True', '"start_new_session": False', ("unit/test_ray_processes.py",)
    ),
    "signals: what Ray leaves is not killed": Break(
        "megarl/distributed/ray_keeper.py", "os.kill(process, signal.SIGKILL)", "pass", ("unit/test_ray_processes.py",)
    ),
    "signals: Ctrl-C ends like SIGTERM": Break(
        "megarl/algorithms/stopping.py", "INTERRUPTED if self._signal is signal.SIGINT else STOPPED", "STOPPED", ("unit/test_stopping.py",)
    ),
    "signals: a closed terminal is written to": Break(
        "megarl/algorithms/stopping.py", "            os.dup2(nowhere, descriptor)\n", "            pass\n", ("unit/test_stopping.py",)
    ),
    "signals: time for a step, and none for its checkpoint": Break(
        "megarl/algorithms/time_left.py",
        "_SAFETY * (step + max(self._saves, default=step))",
        "_SAFETY * step",
        ("unit/test_time_left.py",),
    ),
    "signals: a lost Ray is waited for": Break(
        "megarl/distributed/ray_watch.py", "if fault == 0:", "if True:", ("unit/test_ray_watch.py",)
    ),
    "signals: a lost raylet is not seen": Break(
        "megarl/distributed/ray_watch.py",
        "if all(descriptor != self._closed",
        "if not all(descriptor != self._closed",
        ("unit/test_ray_watch.py",),
    ),
    "signals: a port that is open counts as an answer": Break(
        "megarl/distributed/ray_watch.py", "            connected.recv(1)\n", "", ("unit/test_ray_watch.py",)
    ),
    "signals: a call of Ray has no bound": Break(
        "megarl/distributed/ray_calls.py", "if time.monotonic() > late:", "if False:", ("unit/test_ray_calls.py",)
    ),
    "secrets: a message shows the value of a key": Break(
        "megarl/redaction.py", "        return repr(_hidden(value))\n", "        return repr(value)\n", ("unit/test_redaction.py",)
    ),
    "secrets: addresses keep their passwords": Break(
        "megarl/redaction.py", 'rf"\\g<1>{HIDDEN}@"', 'r"\\g<0>"', ("unit/test_redaction.py",)
    ),
    "secrets: any configuration reads the environment": Break(
        "megarl/config/load.py", "if name == _ENVIRONMENT and not allow_env:", "if False:", ("unit/test_redaction.py",)
    ),
    "secrets: what the environment said is written": Break(
        "megarl/redaction.py", "return redacted_text(value.written)", "return str(value)", ("unit/test_redaction.py",)
    ),
    "secrets: everybody may join a refit": Break(
        "megarl/weight_sync/rendezvous.py",
        'if not proves(came["proof"], "hello", self._nonce, challenge, hello):',
        "if False:",
        ("unit/test_run_secret.py",),
    ),
    "secrets: everybody may send a refit": Break(
        "megarl/weight_sync/rendezvous.py",
        'not proves(self._said(f"proof/{number}"), "verdict", nonce, challenge, text)',
        "False",
        ("unit/test_run_secret.py",),
    ),
    "secrets: everybody may be a rank": Break(
        "megarl/distributed/rendezvous.py",
        'if not hmac.compare_digest(given.encode(), _proof(endpoint, "rank", rank).encode()):',
        "if False:",
        ("unit/test_run_secret.py",),
    ),
    "environments: white space counts": Break(
        "megarl/rollout/rewards.py",
        "task.response.strip() == task.answer.strip()",
        "task.response == task.answer.strip()",
        ("unit/test_rewards.py",),
    ),
    "environments: of several rewards the weights do not count": Break(
        "megarl/rollout/environment.py",
        "part.weight * value for part, value",
        "value for part, value",
        ("unit/test_several_rewards.py",),
    ),
    "environments: what cannot be scored is trained on": Break(
        "megarl/rollout/environment.py",
        'return bool(decision == "mask")',
        "return False",
        ("unit/test_several_rewards.py",),
    ),
    "engine: the first token counts as valid": Break(
        "megarl/models/engine/normalizers.py", 'data["token_mask"][:, 1:]', 'data["token_mask"]', ("dist/test_megatron_parity.py",)
    ),
    "engine: context-parallel parts are not balanced back": Break(
        "megarl/models/engine/context.py",
        "last = 2 * self.size - 1 - self.rank",
        "last = self.size + self.rank",
        ("unit/test_context.py", "dist/test_megatron_layouts.py"),
    ),
    "generation: top-p leaves out the token that reaches it": Break(
        "megarl/models/generation/sampling.py",
        "(before < settings.top_p).sum(dim=-1, keepdim=True).sub_(1)",
        "(before < settings.top_p).sum(dim=-1, keepdim=True).sub_(2)",
        ("unit/test_sampling.py",),
    ),
    "generation: stop strings of one row stop all": Break(
        "megarl/models/generation/stopping.py",
        "any(stop in text for stop in self._strings[row])",
        "any(stop in text for stops in self._strings for stop in stops)",
        ("unit/test_sampling.py", "unit/test_generation_interfaces.py", "dist/test_fsdp1_worker.py", "dist/test_megatron_worker.py"),
    ),
    "megatron: a stage's layers are numbered from one": Break(
        "megarl/models/megatron/hf_state.py",
        "layer.layer_number - 1}",
        "index}",
        ("dist/test_megatron_experts.py", "dist/test_megatron_parity.py"),
    ),
    "dtensor: a piece is sent from its second element": Break(
        "megarl/models/dtensor/weight_stream.py",
        "space[: len(piece)].copy_(piece)",
        "space[: len(piece)].copy_(piece.roll(1))",
        ("dist/test_dtensor_worker.py",),
    ),
    "checkpoint: damaged bytes are not seen": Break(
        "megarl/checkpoint/manifest.py",
        "found = read_again(lambda: _hash(root / name), str(root / name))",
        "found = expected",
        ("unit/test_checkpoint_manager.py", "unit/test_checkpoint_faults.py"),
    ),
    "checkpoint: the best is not kept": Break(
        "megarl/checkpoint/manager.py",
        "ranked_steps(metrics, higher_is_better)[:keep_top_k]",
        "ranked_steps(metrics, not higher_is_better)[:keep_top_k]",
        ("unit/test_checkpoint_manager.py",),
    ),
    "weight_sync: a checksum is not compared": Break(
        "megarl/weight_sync/colocated.py",
        'if payload["checksum"] is not None and',
        'if payload["checksum"] is False and',
        ("unit/test_weight_sync.py",),
    ),
    "weight_sync: a group out of order is taken": Break(
        "megarl/weight_sync/colocated.py", 'or payload["first"] != self._next:', "or False:", ("unit/test_weight_sync.py",)
    ),
    "observe: extremes are added": Break(
        "megarl/observe/metrics.py",
        'if bare_name.endswith("_min"):',
        'if bare_name.endswith("_minimum"):',
        ("unit/test_observe_metrics.py",),
    ),
    "converters: ranks read one another's rows": Break(
        "converters/mapping/layouts.py",
        "spans = tuple(_clip(_qkv_spans(rule, head_dim), start, stop))",
        "spans = tuple(_clip(_qkv_spans(rule, head_dim), 0, stop - start))",
        ("unit/test_converters_shards.py",),
    ),
    "converters: configurations are not compared": Break(
        "converters/verify.py",
        "    yield from config_differences(one.model.architecture, other.model.architecture)\n",
        "",
        ("unit/test_convert_command.py", "unit/test_prediction_layers.py", "unit/test_converters_verify.py"),
    ),
    "converters: special tokens are not compared": Break(
        "converters/verify.py",
        "        yield from setting_differences(one.config, other.config)\n",
        "        pass\n",
        ("unit/test_converters_beside.py",),
    ),
    "converters: changed files are exported": Break(
        "converters/checkpoint/artifacts.py",
        "    changes = changed_files(directory, recorded) if recorded else {}",
        "    changes: dict[str, str] = {}",
        ("unit/test_converters_beside.py",),
    ),
    "converters: any class is unpickled": Break(
        "converters/checkpoint/restricted.py",
        "found = self._known(module, name)",
        "found = self._known(module, name) or super().find_class(module, name)",
        ("unit/test_converters_hostile.py", "unit/test_checkpoint_manager.py"),
    ),
    "launch: a stopped job is not requeued": Break(
        "launch/slurm_job.sh", "75) go_on_later", "74) go_on_later", ("launch/test_slurm_scripts.py",)
    ),
    "launch: an environment is never made again": Break(
        "launch/environment.sh", "for path in sys.argv[3:]:", "for path in []:", ("launch/test_scripts.py",)
    ),
    "doctor: what is installed loads": Break(
        "megarl/doctor/builds.py", 'error = load_error("transformer_engine.pytorch")', 'error = ""', ("unit/test_doctor_builds.py",)
    ),
    "doctor: two packages may own a library": Break(
        "megarl/doctor/builds.py", "if len(set(names)) > 1", "if len(set(names)) > 9", ("unit/test_doctor_builds.py",)
    ),
    "doctor: any entry point will do": Break(
        "megarl/doctor/builds.py", "    if wanted in found:", "    if found:", ("unit/test_doctor_builds.py",)
    ),
    "doctor: kernels of any kind of GPU will do": Break(
        "megarl/doctor/devices.py", "or built[0] == capability[0]", "or True", ("unit/test_doctor.py",)
    ),
    "doctor: GPUs of one node serve another": Break(
        "megarl/doctor/nodes.py",
        "sum(count >= wanted for count in have.values()) >=",
        "sum(have.values()) >=",
        ("unit/test_doctor_nodes.py",),
    ),
    "doctor: nodes may have different versions": Break(
        "megarl/doctor/nodes.py", "        if len(hosts) > 1:", "        if len(hosts) > len(facts):", ("unit/test_doctor_nodes.py",)
    ),
    "doctor: any sum is right": Break(
        "megarl/doctor/nodes.py", "    if wrong:", "    if False:", ("unit/test_doctor_nodes.py", "system/test_doctor_nodes.py")
    ),
    "devices: a GPU is used beside which the CPU was chosen": Break(
        "megarl/distributed/device.py", 'if wanted == "cpu" or not available:', "if not available:", ("unit/test_device.py",)
    ),
    "devices: the CPU takes over in a job of Slurm": Break(
        "megarl/algorithms/start.py", "    if job is None and not present:", "    if not present:", ("unit/test_device.py",)
    ),
    "devices: products may be added up in 16 bits": Break(
        "megarl/distributed/device.py",
        "allow_bf16_reduced_precision_reduction = products",
        "allow_tf32 = products",
        ("unit/test_arithmetic.py",),
    ),
    "devices: a variable may contradict deterministic": Break(
        "megarl/distributed/device.py", "            if found not in values:", "            if False:", ("unit/test_arithmetic.py",)
    ),
    "run: engines start beside a policy that trains": Break(
        "megarl/models/generation/engines.py", "    policy.offload_after_refit()\n", "    pass\n", ("unit/test_start_engines.py",)
    ),
    "refit: a group is acknowledged before it was copied": Break(
        "megarl/weight_sync/colocated.py",
        "would read that\n            self._runtime.synchronize()\n",
        "would read that\n",
        ("unit/test_weight_devices.py",),
    ),
    "refit: a slice lies where it lies in the whole weight": Break(
        "megarl/models/megatron/weight_stream.py",
        "(both[0].start - wanted[0].start) * len(wanted[1])",
        "both[0].start * len(wanted[1])",
        ("dist/test_refit_slices.py",),
    ),
    "refit: a rank is believed to have of its neighbour's shard what an engine reads": Break(
        "megarl/models/megatron/weight_stream.py",
        "return sum(count for count in found if count > 0) == stop - start",
        "return sum(count for count in found if count > 0) > 0",
        ("dist/test_refit_slices.py",),
    ),
    "refit: an expert stays on its rank whoever reads it": Break(
        "megarl/models/megatron/weight_stream.py",
        "if of_expert and any(",
        "if not of_expert and any(",
        ("dist/test_refit_slices.py",),
    ),
    "refit: a weight of which nothing is read is sent whole": Break(
        "megarl/weight_sync/slices.py",
        "return Slice(0, 0, 0) if whole else None",
        "return None",
        ("unit/test_weight_slices.py",),
    ),
    "refit: what is not there of a weight is taken from what is": Break(
        "megarl/weight_sync/slices.py",
        "needed.start < where.start or needed.stop > where.stop",
        "needed.stop - needed.start > where.length",
        ("unit/test_weight_slices.py",),
    ),
    "megatron: a recomputed layer's norm is taken without its gradient": Break(
        "megarl/models/megatron/specs.py",
        " and ready[1].grad_fn is x.grad_fn and torch.is_grad_enabled() == ready[1].requires_grad",
        "",
        ("unit/test_residual_norm.py",),
    ),
    "megatron: the gradient of a sum goes by way of its norm alone": Break(
        "megarl/models/megatron/residual_norm.py",
        ".mean(-1, keepdim=True)) + of_total",
        ".mean(-1, keepdim=True))",
        ("unit/test_residual_norm.py",),
    ),
    "megatron: a Transformer Engine that fails stays in the way": Break(
        "megarl/models/megatron/transformer_engine.py",
        "        _hide()\n        return Finding(_told(",
        "        return Finding(_told(",
        ("unit/test_transformer_engine.py",),
    ),
    "megatron: Transformer Engine is optional where it is demanded": Break(
        "megarl/models/megatron/transformer_engine.py", "    if wanted is True:", "    if False:", ("unit/test_transformer_engine.py",)
    ),
    "megatron: dense models in bfloat16 take Transformer Engine unasked": Break(
        "megarl/models/megatron/transformer_engine.py",
        'return policy["precision"] == "bfloat16" and not has_experts',
        "return False",
        ("unit/test_transformer_engine.py",),
    ),
    "megatron: the output layer adds by a kernel that is not there": Break(
        "megarl/models/megatron/build.py",
        "if chunk.post_process and not layers._grad_accum_fusion_available:",
        "if False:",
        ("dist/test_transformer_engine.py",),
    ),
    "megatron: float32 logits are rounded": Break(
        "megarl/models/megatron/build.py",
        "product = rows.float() @ weight.float().t()",
        "product = (rows @ weight.t()).float()",
        ("unit/test_output_layer.py",),
    ),
    "megatron: gradients are rotated onwards": Break(
        "megarl/models/megatron/rotary.py", "torch.sub if back else torch.add", "torch.add", ("unit/test_rotary.py",)
    ),
    "megatron: every piece of a state is the first": Break(
        "megarl/models/megatron/state_stream.py", "[first - begin : last - begin])", "[: last - first])", ("dist/test_save_shares.py",)
    ),
    "checkpoints: the first data-parallel rank writes the weights": Break(
        "megarl/models/megatron/sharded_save.py", "for group in _groups_of_holders():", "for group in ():", ("dist/test_save_shares.py",)
    ),
    "checkpoints: ranks of other groups write what the main replica's write": Break(
        "megarl/models/megatron/state_stream.py",
        "if not _is_of_main_group(outline.replica_id):",
        "if False:",
        ("dist/test_save_shares.py",),
    ),
    "megatron: every slice of a state that is loaded goes to the first place": Break(
        "megarl/models/megatron/state_stream.py",
        "[position - begin : behind - begin]",
        "[: behind - position]",
        ("dist/test_memory_counts.py",),
    ),
    "megatron: each rank chooses its own layers": Break(
        "megarl/models/megatron/transformer_engine.py",
        "return on_all == 1, on_any == -1",
        "return works, works",
        ("dist/test_transformer_engine.py",),
    ),
    "policy: the first stages do not know which tokens count": Break(
        "megarl/models/policy/batch_plan.py", '"token_mask", "sample_mask"))', '"sample_mask"))', ("unit/test_batch_plan.py",)
    ),
    "attention: a kernel's window is one token wider": Break(
        "megarl/models/engine/attention.py",
        "-1 if window is None else window - 1, 0",
        "-1 if window is None else window, 0",
        ("unit/test_varlen_attention.py",),
    ),
    "launch: a job runs on nodes that failed their check": Break(
        "launch/ray_node.sh", "    check_cluster\n    run_driver", "    run_driver", ("launch/test_slurm_scripts.py",)
    ),
    "launch: a job of Ray is not checked": Break(
        "launch/slurm_job.sh", '[[ "${MEGARL_CHECK_NODES:-1}" == 0 ]] ||', "true ||", ("launch/test_slurm_scripts.py",)
    ),
    "launch: Transformer Engine is compiled for another torch": Break(
        "launch/gpu_environment.sh", "--no-build-isolation \\\n", "\\\n", ("launch/test_gpu_environment.py",)
    ),
    "observe: a repeated step is logged twice": Break(
        "megarl/observe/metrics_file.py",
        'row["step"] > step:',
        'row["step"] > step + 1:',
        ("unit/test_observe_sinks.py", "system/test_resume.py"),
    ),
    "run: a resumed run begins its records anew": Break(
        "megarl/algorithms/run.py", "sampler.load_state(start.sampler_state)", "pass", ("unit/test_drivers.py", "system/test_resume.py")
    ),
    "cli: every error ends with 1": Break(
        "megarl/cli.py",
        "code = USER_FAULT if found_by_worker or limit is not None else error.exit_code",
        "code = 1",
        ("unit/test_cli.py", "system/test_bad_input.py"),
    ),
}
# by backend of a fault: the tests that train and compare; mixtures have faults of their own
PARITY = {
    "dense": (
        "dist/test_megatron_parity.py",
        "dist/test_megatron_layouts.py",
        "dist/test_parity_fuzzer.py",
        "dist/test_dtensor_parity.py",
        "dist/test_megatron_worker.py",
    ),
    "mixtures": ("dist/test_megatron_experts.py", "dist/test_megatron_unusual_models.py", "dist/test_parity_fuzzer.py"),
    "dtensor": ("dist/test_dtensor_parity.py", "dist/test_parity_fuzzer.py", "dist/test_dtensor_worker.py"),
    "fsdp1": ("dist/test_fsdp1_parity.py", "dist/test_parity_fuzzer.py", "dist/test_fsdp1_worker.py"),
}


def covering(name: str) -> tuple[str, ...]:
    """The tests that cover a break, or a fault of the prover's."""
    if name in BREAKS:
        return BREAKS[name].tests
    fault = MUTATIONS[name]
    if "megatron" in fault.backends:
        needs = " ".join(fault.each_need)
        return PARITY["mixtures" if "family=mixtral" in needs or "_moe" in needs else "dense"]
    return tuple(path for backend in fault.backends for path in PARITY[backend])


def caught_by(name: str, everything: bool) -> str | None:
    """The first test that fails with a break or fault, and why, as pytest says it; None if it survives.

    Raises:
        RuntimeError: the tests did not run, or the break does not fit the file any more.
    """
    with tempfile.TemporaryDirectory(prefix="megarl-break-") as directory:
        tree = Path(directory) / "tree"
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for path in filter(None, listed.split("\0")):
            if (ROOT / path).is_file():
                (tree / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, tree / path)
        variables = {**os.environ, "PYTHONPATH": str(tree), SEED_VARIABLE: os.environ.get(SEED_VARIABLE, "0"), "COLUMNS": "300"}
        if name in BREAKS:
            each = BREAKS[name]
            text = (tree / each.file).read_text()
            if text.count(each.old) != 1:
                raise RuntimeError(f"{name}: {each.old!r} stands {text.count(each.old)} times in {each.file}, once is wanted")
            (tree / each.file).write_text(text.replace(each.old, each.new))
        else:
            variables[FAULT_VARIABLE] = name
        chosen = [f"tests/{path}" for path in covering(name)]
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *(["--all"] if everything else []), *chosen]
        done = subprocess.run(command, cwd=tree, env=variables, capture_output=True, text=True, check=False)
    failed = [line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode == 1 and failed:
        return failed[0]
    if done.returncode == 0:
        return None
    raise RuntimeError(f"{name}: pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints each break with the test that caught it; the exit code is 1 when one survives."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.breaks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="against everything, not the default tier alone")
    parser.add_argument("names", nargs="*", metavar="NAME", help="breaks or faults (default: all)")
    chosen = parser.parse_args(arguments)
    survived = []
    for name in chosen.names or [*BREAKS, *MUTATIONS]:
        started = time.monotonic()
        caught = caught_by(name, chosen.all)
        survived += [] if caught else [name]
        print(f"{time.monotonic() - started:5.0f} s  {name}: {caught or 'SURVIVES'}", flush=True)
    print(f"{len(survived)} survive{': ' if survived else ''}{'; '.join(survived)}")
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main())
