"""Faults that are written by hand: one text of a file changed, and the tests or the cases of ``megarl
parity`` that have to see it.

The first are one line of the library said otherwise, over all packages and scripts. The others are mistakes
of training code that no operation of the mutator makes: a wrong group, an all-reduce that is missing, weights
or a gradient that are those of something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """A fault.

    Attributes:
        file: the changed file.
        old: a text that the file has once.
        new: the text in its place.
        tests: paths below ``tests/`` of those that cover the file, those that should see it first.
        cases: lines of cases of ``megarl parity``, one of which has to show it.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()


TABLE: Mapping[str, Row] = {
    "config: ranks that do not divide": Row(
        "megarl/config/rules/parallel.py",
        "if world % copy == 0:",
        "if True:",
        ("unit/test_config_rules.py", "unit/test_config_layout.py"),
    ),
    "data: an epoch begins with its second record": Row(
        "megarl/data/sampler.py",
        "self._go_to(self._epoch + 1, 0)",
        "self._go_to(self._epoch + 1, 1 % self.size)",
        ("unit/test_sampler.py",),
    ),
    "data: a file that changes is taken as it was begun": Row(
        "megarl/data/datasets.py",
        " and content_digest(self._source) != self._digest:",
        " and False:",
        ("unit/test_odd_files.py",),
    ),
    "data: a text is too long by its first token": Row(
        "megarl/data/tokenization.py", "> 2 * limit + _FEW_TOKENS:", "> 0:", ("unit/test_odd_files.py",)
    ),
    "restarts: one more than allowed": Row(
        "megarl/run/restarts.py",
        "self.workers >= self.most",
        "self.workers > self.most",
        ("unit/test_restarts.py",),
    ),
    "restarts: what the lost workers logged stays": Row(
        "megarl/run/run.py",
        "sinks.truncate_after(start.step if start.step else -1)",
        "sinks.truncate_after(start.step if start.step else -1) if launch.restarts.workers == 0 else None",
        ("unit/test_restarts.py",),
    ),
    "restarts: rows that wait for a full disk do so twice": Row(
        "megarl/observe/sinks.py",
        "for each in self._waiting if each[0] <= step",
        "for each in self._waiting",
        ("unit/test_observe_sinks.py",),
    ),
    "restarts: the start of Ray counts again": Row(
        "megarl/run/start.py",
        '_ray_start["seconds"], 0.0',
        '_ray_start["seconds"], _ray_start["seconds"]',
        ("unit/test_restarts.py",),
    ),
    "places: what is read slowly is given up": Row(
        "megarl/config/places.py", "if used > busy + _BUSY_S:", "if False:", ("unit/test_places.py",)
    ),
    "rewards: what a function prints has its secrets": Row(
        "megarl/redaction.py",
        'redacted_text(self._begun.decode(errors="backslashreplace"))',
        'self._begun.decode(errors="backslashreplace")',
        ("unit/test_redaction.py", "unit/test_rewards.py"),
    ),
    "ray: a local one asks for no token": Row(
        "megarl/distributed/ray_runtime.py",
        'env.set_variables({"RAY_AUTH_MODE": "token"})',
        "pass",
        ("unit/test_ray_runtime.py",),
    ),
    "restarts: an engine that is gone counts as alive": Row(
        "megarl/algorithms/refit.py",
        "if self.generation.is_alive():",
        "if True:",
        ("unit/test_engine_restarts.py",),
    ),
    "run: its directory may go": Row(
        "megarl/checkpoint/lock.py",
        "if not self.held or _file_at",
        "if True or _file_at",
        ("unit/test_places.py",),
    ),
    "data: a source that is not behind may come next": Row(
        "megarl/data/sampler.py", "if lag >= self._total]", "if True]", ("unit/test_sampler.py",)
    ),
    "data: a mixture begins its sources anew": Row(
        "megarl/data/sampler.py", "sampler.go_to(count)", "sampler.go_to(0)", ("unit/test_sampler.py",)
    ),
    "data: a record is a token too long": Row(
        "megarl/data/datasets.py",
        "if length > self._limit:",
        "if length > self._limit + 1:",
        ("unit/test_sources.py", "unit/test_tokenization.py"),
    ),
    "data: other tokens of another tokenizer are taken": Row(
        "megarl/data/datasets.py",
        "            _tokenizer_identity(reading.tokenizer),\n",
        "",
        ("unit/test_sources.py",),
    ),
    "data: the word of another judge is taken": Row(
        "megarl/data/datasets.py",
        "f\"judged-{_digest([reading.judge, source.get('env_name')])}\"",
        '"judged"',
        ("unit/test_sources.py",),
    ),
    "data: what is before a turn of the assistant is learned": Row(
        "megarl/data/conversations.py",
        "spans.append((first, end))",
        "spans.append((first - 1, end))",
        ("unit/test_sources.py",),
    ),
    "data: of a conversation the last turn alone is learned": Row(
        "megarl/distributed/token_batches.py",
        "in example.targets or",
        "in (example.targets or ())[-1:] or",
        ("unit/test_sources.py",),
    ),
    "data: the chat template does not get its values": Row(
        "megarl/data/chat_template.py",
        "**options, **further, **self._clock, **self._values",
        "**options, **further, **self._clock",
        ("unit/test_sources.py",),
    ),
    "data: a key finds the first member of a list": Row(
        "megarl/data/rows.py",
        "value = value[step]",
        "value = value[step if isinstance(step, str) else 0]",
        ("unit/test_sources.py",),
    ),
    "data: packing spreads over too few bins": Row(
        "megarl/data/packing/algorithms.py",
        "if wanted > len(bins):",
        "if wanted > len(bins) + 1:",
        ("unit/test_packing.py",),
    ),
    "distributed: shards overlap by a row": Row(
        "megarl/distributed/batched_data_dict.py",
        "return self.slice(rank * share, (rank + 1) * share)",
        "return self.slice(max(0, rank * share - 1), (rank + 1) * share - (rank > 0))",
        ("unit/test_batched_data_dict.py", "unit/test_batched_data_dict_sharding.py"),
    ),
    "distributed: a group of another run is let in": Row(
        "megarl/distributed/rendezvous.py",
        "    check_membership(store, endpoint, rank, world_size)\n",
        "",
        ("system/test_rendezvous.py", "system/test_worker_groups.py"),
    ),
    "algorithms: the baseline counts its own row": Row(
        "megarl/algorithms/advantages.py",
        "others = count - own_count",
        "others = count",
        ("unit/test_advantages.py",),
    ),
    "algorithms: clipping takes the smaller loss": Row(
        "megarl/algorithms/loss_functions.py",
        "values = torch.maximum(-advantages * ratio",
        "values = torch.minimum(-advantages * ratio",
        ("unit/test_losses.py",),
    ),
    "algorithms: an importance weight has a gradient": Row(
        "megarl/algorithms/loss_functions.py",
        "drawn_apart = (previous - generation).detach()",
        "drawn_apart = current - generation",
        ("unit/test_losses.py",),
    ),
    "algorithms: a divergence has half of its gradient": Row(
        "megarl/algorithms/loss_functions.py",
        "if self.exact_kl_gradient:",
        "if not self.exact_kl_gradient:",
        ("unit/test_losses.py",),
    ),
    "algorithms: advantages of rounding": Row(
        "megarl/algorithms/advantages.py", ".abs().clamp(min=1.0)", ".abs()", ("unit/test_advantages.py",)
    ),
    "rewards: a reference is read without its box": Row(
        "megarl/rollout/mathematics.py",
        'answer if _DELIMITED.search(answer) else f"\\\\boxed{{{answer}}}"',
        "answer",
        ("unit/test_mathematics.py",),
    ),
    "engine: a step whatever the loss": Row(
        "megarl/models/engine/step.py",
        "loss_is_finite and math.isfinite(norm)",
        "True",
        ("dist/test_nonfinite.py",),
    ),
    "engine: weights are not looked at before a save": Row(
        "megarl/models/engine/nonfinite.py",
        "if on_all_ranks(all(finite), device):",
        "if True:",
        ("dist/test_nonfinite.py",),
    ),
    "checkpoint: an index may name anything": Row(
        "converters/files/restricted.py",
        "if found is None:",
        "if False:",
        ("unit/test_converters_hostile.py", "dist/test_checkpoint_payloads.py"),
    ),
    "resume: damaged checkpoints are forgotten": Row(
        "megarl/run/resume.py", 'if damaged and resume != "never":', "if False:", ("unit/test_drivers.py",)
    ),
    "policy: vectors decay whatever is asked": Row(
        "megarl/models/huggingface/optimizer.py",
        'decays = chosen["weight_decay_on_vectors"] or',
        "decays = True or",
        ("unit/test_torch_optimizer.py",),
    ),
    "policy: a loss for logits goes to the workers": Row(
        "megarl/algorithms/interfaces.py", "    if takes_logits:", "    if False:", ("unit/test_losses.py",)
    ),
    "config: what is proposed is not tried": Row(
        "megarl/config/proposals.py",
        "        if not faults:",
        "        if not faults or changes:",
        ("unit/test_config_proposals.py",),
    ),
    "cli: a closed pipe is an error": Row(
        "converters/command.py",
        "        if not _is_unread(sys.stdout):",
        "        if True:",
        ("unit/test_listings.py",),
    ),
    "config: an engine of any size passes": Row(
        "megarl/models/generation/vllm/configuration.py",
        "    if needed.weights < needed.budget:",
        "    if True:",
        ("unit/test_config_memory.py",),
    ),
    "config: an engine has the rows of all engines": Row(
        "megarl/models/generation/vllm/configuration.py",
        "min(-(-rows // engines), MAX_NUM_SEQS)",
        "min(rows, MAX_NUM_SEQS)",
        ("unit/test_config_memory.py",),
    ),
    "vllm: a batch between two steps has no graph": Row(
        "megarl/models/generation/vllm/options.py", " | {largest})", " | {1})", ("unit/test_vllm_options.py",)
    ),
    "config: state that no device has room for passes": Row(
        "megarl/config/plan.py", "    if needed > gib * GIB:", "    if False:", ("unit/test_memory_fit.py",)
    ),
    "config: a plan forgets what a CPU keeps of a gated MLP": Row(
        "megarl/config/activations.py", "norm=8, gated=5", "norm=8, gated=4", ("dist/test_memory_plan.py",)
    ),
    "config: logits are counted once more beside themselves": Row(
        "megarl/config/memory.py",
        "        training * columns * (element",
        "        training * columns * (4 + element",
        ("dist/test_memory_plan.py",),
    ),
    "run: a profile ends with the run": Row(
        "megarl/run/profiling.py",
        "        if step + 1 not in self._steps:",
        "        if False:",
        ("unit/test_drivers.py",),
    ),
    "run: checkpoints are ranked by a metric of no step": Row(
        "megarl/run/loop.py",
        "            checkpoints.require_metric(metrics)",
        "            pass",
        ("unit/test_drivers.py",),
    ),
    "policy: calls of one that is gone": Row(
        "megarl/distributed/worker_groups.py",
        "        if not self._workers:\n            raise StateError(",
        "        if False:\n            raise StateError(",
        ("system/test_policy.py",),
    ),
    "deadlines: the fastest of the last ten counts": Row(
        "megarl/distributed/deadlines.py",
        "self._multiple * max(known)",
        "self._multiple * min(known)",
        ("unit/test_deadlines.py",),
    ),
    "deadlines: what new workers compile is forgotten": Row(
        "megarl/distributed/deadlines.py",
        "known.append(durations.first[call.method])",
        "pass",
        ("unit/test_deadlines.py",),
    ),
    "deadlines: nobody sees that a process is stopped": Row(
        "megarl/distributed/worker_watch.py",
        "        if any_is_stopped(self._looks[-1]):",
        "        if False:",
        ("unit/test_worker_watch.py", "system/test_worker_groups.py"),
    ),
    "deadlines: one rank at rest is enough": Row(
        "megarl/distributed/worker_watch.py",
        "return all(map(_stands_still",
        "return any(map(_stands_still",
        ("unit/test_worker_watch.py",),
    ),
    "deadlines: a start of Ray that hangs is the user's fault": Row(
        "megarl/distributed/ray_runtime.py",
        "return DeadlineError if isinstance",
        "return ClusterError if isinstance",
        ("unit/test_ray_runtime.py",),
    ),
    "restarts: places of engines apart are not counted": Row(
        "megarl/distributed/virtual_cluster.py",
        "        nodes = cluster.check_places(nodes)",
        "        cluster.check_places(nodes)",
        ("system/test_virtual_cluster.py",),
    ),
    "checkpoints: a save that fails ends the run": Row(
        "megarl/run/resume.py", "len(self.failed) < self.most_failed", "False", ("unit/test_failed_saves.py",)
    ),
    "checkpoints: any signature is taken": Row(
        "converters/files/signature.py",
        "or not hmac.compare_digest(\n        given.encode(), signature_of(manifest, key).encode()\n    ):",
        ":",
        ("unit/test_signed_checkpoints.py",),
    ),
    "checkpoints: a signed one may have further files": Row(
        "megarl/checkpoint/manifest.py",
        "sorted(set(_file_names(root)) - set(manifest",
        "sorted(set() - set(manifest",
        ("unit/test_signed_checkpoints.py",),
    ),
    "checkpoints: a key may be read by others": Row(
        "converters/files/signature.py",
        "status.st_mode & 0o177",
        "status.st_mode & 0o002",
        ("unit/test_signed_checkpoints.py",),
    ),
    "conversion: a signed source may have other bytes": Row(
        "converters/files/signature.py",
        'entry != {"size"',
        'False and entry != {"size"',
        ("unit/test_signed_checkpoints.py",),
    ),
    "checkpoints: a moment without storage is damage": Row(
        "megarl/checkpoint/storage.py",
        "for pause in (*PAUSES_S, None):",
        "for pause in (None,):",
        ("unit/test_storage.py",),
    ),
    "checkpoints: the first rank fails alone": Row(
        "megarl/models/megatron/sharded_save.py",
        "self._failure = self._failure or error",
        "raise",
        ("dist/test_checkpoint_collective.py",),
    ),
    "checkpoints: two are written at a time": Row(
        "megarl/run/resume.py",
        "        self.settle(wait=True)\n        info: TrainingInfo =",
        "        info: TrainingInfo =",
        ("unit/test_async_saves.py",),
    ),
    "checkpoints: ranks of another node find no directory": Row(
        "megarl/checkpoint/collective.py",
        "gather_objects(str(directory)).index(str(directory)) == dist.get_rank()",
        "dist.get_rank() == 0",
        ("dist/test_checkpoint_collective.py",),
    ),
    "checkpoints: a node's memory outlives its run": Row(
        "megarl/checkpoint/node_memory.py",
        "        _remove(source)\n        if not",
        "        if not",
        ("unit/test_node_memory.py",),
    ),
    "checkpoints: a staged part of a tensor has the strides of the whole": Row(
        "megarl/checkpoint/staging.py",
        'like = values if is_alone else torch.empty_like(values, device="meta")',
        "like = values",
        ("unit/test_staging.py",),
    ),
    "checkpoints: another process's memory is taken for a rank's": Row(
        "megarl/checkpoint/staged_file.py",
        '(status.st_dev, status.st_ino) != (address["device"], address["inode"])',
        "False",
        ("unit/test_staging.py",),
    ),
    "stopping: what ends a run inside Ray ends it with 1": Row(
        "megarl/run/stopping.py",
        "raise SystemExit(self._ended_with) from None",
        "raise",
        ("unit/test_stopping.py",),
    ),
    "rewards: a parameter of any name is given something": Row(
        "megarl/config/reward_arguments.py",
        "if is_required and not _is_known(each.name)",
        "if False and not _is_known(each.name)",
        ("unit/test_reward_arguments.py",),
    ),
    "algorithms: checkpoints one step late": Row(
        "megarl/run/resume.py",
        "step % self.save_period == 0",
        "step % self.save_period == 1",
        ("unit/test_drivers.py", "unit/test_stopping.py"),
    ),
    "signals: Ray's processes stay in the driver's group": Row(
        "megarl/distributed/ray_processes.py",
        '"start_new_session": True',
        '"start_new_session": False',
        ("unit/test_ray_processes.py",),
    ),
    "signals: what Ray leaves is not killed": Row(
        "megarl/distributed/ray_keeper.py",
        "os.kill(process, signal.SIGKILL)",
        "pass",
        ("unit/test_ray_processes.py",),
    ),
    "signals: Ctrl-C ends like SIGTERM": Row(
        "megarl/run/stopping.py",
        "INTERRUPTED if self._signal is signal.SIGINT else STOPPED",
        "STOPPED",
        ("unit/test_stopping.py",),
    ),
    "signals: a closed terminal is written to": Row(
        "megarl/run/stopping.py",
        "            os.dup2(nowhere, descriptor)\n",
        "            pass\n",
        ("unit/test_stopping.py",),
    ),
    "signals: time for a step, and none for its checkpoint": Row(
        "megarl/run/time_left.py",
        "_SAFETY * (step + max(self._saves, default=step))",
        "_SAFETY * step",
        ("unit/test_time_left.py",),
    ),
    "signals: a lost Ray is waited for": Row(
        "megarl/distributed/ray_watch.py", "if fault == 0:", "if True:", ("unit/test_ray_watch.py",)
    ),
    "signals: a lost raylet is not seen": Row(
        "megarl/distributed/ray_watch.py",
        "if self._closed not in dict(ready)",
        "if self._closed in dict(ready)",
        ("unit/test_ray_watch.py",),
    ),
    "signals: a port that is open counts as an answer": Row(
        "megarl/distributed/ray_watch.py", "            connected.recv(1)\n", "", ("unit/test_ray_watch.py",)
    ),
    "signals: a call of Ray has no bound": Row(
        "megarl/distributed/ray_calls.py",
        "if time.monotonic() > late:",
        "if False:",
        ("unit/test_ray_calls.py",),
    ),
    "secrets: a message shows the value of a key": Row(
        "megarl/redaction.py",
        "        return repr(_hidden(value))\n",
        "        return repr(value)\n",
        ("unit/test_redaction.py",),
    ),
    "secrets: addresses keep their passwords": Row(
        "megarl/redaction.py", 'rf"\\g<1>{HIDDEN}@"', 'r"\\g<0>"', ("unit/test_redaction.py",)
    ),
    "secrets: any configuration reads the environment": Row(
        "megarl/config/load.py",
        "if name == _ENVIRONMENT and not allow_env:",
        "if False:",
        ("unit/test_redaction.py",),
    ),
    "secrets: what the environment said is written": Row(
        "megarl/redaction.py",
        "return redacted_text(value.written)",
        "return str(value)",
        ("unit/test_redaction.py",),
    ),
    "secrets: everybody may join a refit": Row(
        "megarl/weight_sync/rendezvous.py",
        '(said if proves(came["proof"], "hello", nonce, challenge, hello) else None), challenge',
        "said, challenge",
        ("unit/test_run_secret.py",),
    ),
    "secrets: everybody may send a refit": Row(
        "megarl/weight_sync/rendezvous.py",
        'if not verdict["error"] and not proves(',
        'if not verdict["error"] and not (',
        ("unit/test_run_secret.py",),
    ),
    "secrets: everybody may be a rank": Row(
        "megarl/distributed/rendezvous.py",
        'if not hmac.compare_digest(given.encode(), _proof(endpoint, "rank", rank).encode()):',
        "if False:",
        ("unit/test_run_secret.py",),
    ),
    "environments: white space counts": Row(
        "megarl/rollout/rewards.py",
        "task.response.strip() == task.answer.strip()",
        "task.response == task.answer.strip()",
        ("unit/test_rewards.py",),
    ),
    "conversations: what is observed counts as sampled": Row(
        "megarl/rollout/trajectory.py",
        "are_sampled.append(logprobs is not None)",
        "are_sampled.append(True)",
        ("unit/test_episodes.py",),
    ),
    "conversations: every turn draws by the first one's seed": Row(
        "megarl/rollout/episodes.py",
        "if episode.seed is None or not episode.turns\n",
        "if True\n",
        ("unit/test_episodes.py",),
    ),
    "conversations: the end of a turn stands twice": Row(
        "megarl/data/observations.py",
        "return ids[ids.index(last) + 1 :]",
        "return ids[ids.index(last) :]",
        ("unit/test_observations.py",),
    ),
    "conversations: one that is lost is trained on": Row(
        "megarl/rollout/episodes.py",
        "episode.masked |= masked",
        "episode.masked |= False",
        ("unit/test_episodes.py",),
    ),
    "conversations: a call that does not end is made": Row(
        "megarl/rollout/tools/parsers.py",
        'raise BadCallError("it does not end")',
        "return body",
        ("unit/test_tools.py",),
    ),
    "segments: a history that the template writes otherwise is not followed": Row(
        "megarl/data/observations.py",
        "return None if goes_on else self._rewritten_prompt()",
        "return None",
        ("unit/test_observations.py", "unit/test_segments.py"),
    ),
    "segments: normalisers count rows": Row(
        "megarl/models/engine/normalizers.py",
        'if "response_tokens" in data:',
        "if False:",
        ("unit/test_segments.py",),
    ),
    "segments: a mean runs over the tokens of one segment": Row(
        "megarl/algorithms/loss_functions.py",
        'data.get("response_tokens") if self.sequence_normalizer is None',
        "None if self.sequence_normalizer is None",
        ("unit/test_segments.py",),
    ),
    "segments: a segment is compared with the others of its response": Row(
        "megarl/algorithms/grpo.py",
        "segments = SegmentRows.of(batch)\n        if segments is None:\n            advantages, metrics",
        "segments = None\n        if segments is None:\n            advantages, metrics",
        ("unit/test_segments.py",),
    ),
    "segments: a filling row counts": Row(
        "megarl/rollout/segment_rows.py",
        'filled["sample_mask"].masked_fill(filling, 0)',
        'filled["sample_mask"].masked_fill(filling, 1)',
        ("unit/test_segments.py",),
    ),
    "conversations: an interpreter outlives its driver": Row(
        "megarl/rollout/tools/python.py",
        "signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)",
        "pass",
        ("unit/test_tools.py",),
    ),
    "asynchrony: a checkpoint is seen before its figures are there": Row(
        "megarl/run/loop.py",
        "is_validated=not is_beside",
        "is_validated=True",
        ("unit/test_validation_beside.py",),
    ),
    "asynchrony: a validation is asked of engines that may get new weights": Row(
        "megarl/algorithms/ahead.py",
        "self._engines.held, self._sampled_step = True, ahead",
        "self._engines.held, self._sampled_step = is_sampled, ahead",
        ("unit/test_sampling_ahead.py",),
    ),
    "parts: new engines get weights while the policy scores": Row(
        "megarl/rollout/collector.py",
        "self.collector.scorer.wait()",
        "pass",
        ("unit/test_scored_ahead.py",),
    ),
    "asynchrony: engines get new weights while they sample": Row(
        "megarl/algorithms/ahead.py",
        "        if not self.held:\n            self.refit.bring",
        "        if True:\n            self.refit.bring",
        ("unit/test_sampling_ahead.py",),
    ),
    "asynchrony: a step late": Row(
        "megarl/algorithms/ahead.py",
        "ahead = step + self._lag",
        "ahead = step + self._lag + (step > 1)",
        ("unit/test_sampling_ahead.py",),
    ),
    "asynchrony: batches of a checkpoint are sampled again": Row(
        "megarl/algorithms/ahead.py",
        "if early not in self._waiting and not",
        "if not",
        ("unit/test_sampling_ahead.py",),
    ),
    "asynchrony: a group gets too old": Row(
        "megarl/algorithms/ready_first.py",
        "if len(found) < missing:",
        "if False:",
        ("unit/test_ready_first.py",),
    ),
    "asynchrony: groups that are under way are lost in a checkpoint": Row(
        "megarl/algorithms/ready_first.py",
        "if each.ordinal not in ready\n",
        "if False\n",
        ("unit/test_ready_first.py",),
    ),
    "asynchrony: what was sampled before a refit is sampled again behind it": Row(
        "megarl/models/generation/shared_stream.py",
        "        tokens = np.concatenate([request.prompt, *(piece.tokens for piece in self.pieces)])",
        "        tokens = request.prompt",
        ("unit/test_ready_first.py",),
    ),
    "asynchrony: a weight that one engine rank has wrong is not seen": Row(
        "megarl/algorithms/served.py",
        "if any(digests.get(name) != ours[name] for digests in theirs)",
        "if theirs[0].get(name) != ours[name]",
        ("unit/test_served.py",),
    ),
    "asynchrony: engines that score otherwise are rounding": Row(
        "megarl/algorithms/served.py", "if self._sum >= _ALARM:", "if False:", ("unit/test_served.py",)
    ),
    "environments: of several rewards the weights do not count": Row(
        "megarl/rollout/single_turn.py",
        "part.weight * (0.0 if",
        "1.0 * (0.0 if",
        ("unit/test_several_rewards.py",),
    ),
    "environments: what cannot be scored is trained on": Row(
        "megarl/rollout/single_turn.py",
        'return bool(decision == "mask")',
        "return False",
        ("unit/test_several_rewards.py",),
    ),
    "engine: the first token counts as valid": Row(
        "megarl/models/engine/normalizers.py",
        'data["token_mask"][:, 1:]',
        'data["token_mask"]',
        ("dist/test_training.py",),
    ),
    "engine: context-parallel parts are not balanced back": Row(
        "megarl/models/engine/context.py",
        "last = 2 * self.size - 1 - self.rank",
        "last = self.size + self.rank",
        ("unit/test_context.py", "dist/test_training.py"),
    ),
    "generation: top-p leaves out the token that reaches it": Row(
        "megarl/models/generation/sampling.py",
        "(before < settings.top_p).sum(dim=-1, keepdim=True).sub_(1)",
        "(before < settings.top_p).sum(dim=-1, keepdim=True).sub_(2)",
        ("unit/test_sampling.py",),
    ),
    "generation: stop strings of one row stop all": Row(
        "megarl/models/generation/stopping.py",
        "any(stop in text for stop in self._strings[row])",
        "any(stop in text for stops in self._strings for stop in stops)",
        ("unit/test_sampling.py", "unit/test_generation_interfaces.py", "dist/test_generation.py"),
    ),
    "megatron: a stage's layers are numbered from one": Row(
        "megarl/models/megatron/hf_state.py",
        "layer.layer_number - 1}",
        "index}",
        ("dist/test_megatron_experts.py", "dist/test_training.py"),
    ),
    "dtensor: a piece is sent from its second element": Row(
        "megarl/models/dtensor/weight_stream.py",
        "space[: len(piece)].copy_(piece)",
        "space[: len(piece)].copy_(piece.roll(1))",
        ("dist/test_dtensor_worker.py",),
    ),
    "checkpoint: damaged bytes are not seen": Row(
        "megarl/checkpoint/manifest.py",
        "found = read_again(lambda: hash_of(root / name), str(root / name))",
        "found = expected",
        ("unit/test_checkpoint_manager.py", "unit/test_checkpoint_faults.py"),
    ),
    "checkpoint: the best is not kept": Row(
        "megarl/checkpoint/manager.py",
        "ranked_steps(metrics, higher_is_better)[:keep_top_k]",
        "ranked_steps(metrics, not higher_is_better)[:keep_top_k]",
        ("unit/test_checkpoint_manager.py",),
    ),
    "weight_sync: a checksum is not compared": Row(
        "megarl/weight_sync/session.py",
        'if payload["checksum"] is not None and',
        'if payload["checksum"] is False and',
        ("unit/test_weight_sync.py",),
    ),
    "weight_sync: a group out of order is taken": Row(
        "megarl/weight_sync/session.py", "or first != self._next:", "or False:", ("unit/test_weight_sync.py",)
    ),
    "observe: extremes are added": Row(
        "megarl/observe/metrics.py",
        'if bare_name.endswith("_min"):',
        'if bare_name.endswith("_minimum"):',
        ("unit/test_observe_metrics.py",),
    ),
    "converters: ranks read one another's rows": Row(
        "converters/mapping/layouts.py",
        "tuple(_clip(spans, start, stop))",
        "tuple(_clip(spans, 0, stop - start))",
        ("unit/test_converters_shards.py",),
    ),
    "converters: configurations are not compared": Row(
        "converters/verify.py",
        "    yield from config_differences(one.model.architecture, other.model.architecture)\n",
        "",
        ("unit/test_convert_command.py", "unit/test_prediction_layers.py", "unit/test_converters_verify.py"),
    ),
    "converters: special tokens are not compared": Row(
        "converters/verify.py",
        "        yield from setting_differences(one.config, other.config)\n",
        "        pass\n",
        ("unit/test_converters_beside.py",),
    ),
    "converters: changed files are exported": Row(
        "converters/checkpoint/artifacts.py",
        "    changes = changed_files(directory, recorded) if recorded else {}",
        "    changes: dict[str, str] = {}",
        ("unit/test_converters_beside.py",),
    ),
    "converters: any class is unpickled": Row(
        "converters/files/restricted.py",
        "found = self._known(module, name)",
        "found = self._known(module, name) or super().find_class(module, name)",
        ("unit/test_converters_hostile.py", "unit/test_checkpoint_manager.py"),
    ),
    "launch: a stopped job is not requeued": Row(
        "launch/slurm_job.sh", "75) go_on_later", "74) go_on_later", ("launch/test_slurm_scripts.py",)
    ),
    "launch: an environment is never made again": Row(
        "launch/environment.sh", "for path in sys.argv[3:]:", "for path in []:", ("launch/test_scripts.py",)
    ),
    "doctor: what is installed loads": Row(
        "megarl/doctor/builds.py",
        'error = load_error("transformer_engine.pytorch")',
        'error = ""',
        ("unit/test_doctor_builds.py",),
    ),
    "doctor: two packages may own a library": Row(
        "megarl/doctor/builds.py",
        "if len(owning) > 1",
        "if len(owning) > 9",
        ("unit/test_doctor_builds.py",),
    ),
    "doctor: any entry point will do": Row(
        "megarl/doctor/builds.py", "    if wanted in found:", "    if found:", ("unit/test_doctor_builds.py",)
    ),
    "doctor: kernels of any kind of GPU will do": Row(
        "megarl/doctor/devices.py", "or built[0] == capability[0]", "or True", ("unit/test_doctor.py",)
    ),
    "doctor: GPUs of one node serve another": Row(
        "megarl/doctor/nodes.py",
        "sum(count >= wanted for count in have.values()) >=",
        "sum(have.values()) >=",
        ("unit/test_doctor_nodes.py",),
    ),
    "doctor: nodes may have different versions": Row(
        "megarl/doctor/nodes.py",
        "        if len(hosts) > 1:",
        "        if len(hosts) > len(facts):",
        ("unit/test_doctor_nodes.py",),
    ),
    "doctor: any sum is right": Row(
        "megarl/doctor/nodes.py",
        "    if wrong:",
        "    if False:",
        ("unit/test_doctor_nodes.py", "system/test_doctor_nodes.py"),
    ),
    "devices: a GPU is used beside which the CPU was chosen": Row(
        "megarl/distributed/device.py",
        'if wanted == "cpu" or not available:',
        "if not available:",
        ("unit/test_device.py",),
    ),
    "devices: the CPU takes over in a job of Slurm": Row(
        "megarl/run/start.py",
        "    if job is None and not present:",
        "    if not present:",
        ("unit/test_device.py",),
    ),
    "devices: products may be added up in 16 bits": Row(
        "megarl/distributed/device.py",
        "allow_bf16_reduced_precision_reduction = products",
        "allow_tf32 = products",
        ("unit/test_arithmetic.py",),
    ),
    "devices: a variable may contradict deterministic": Row(
        "megarl/distributed/device.py",
        "            if found not in values:",
        "            if False:",
        ("unit/test_arithmetic.py",),
    ),
    "run: engines start beside a policy that trains": Row(
        "megarl/models/generation/engines.py",
        "    policy.offload_after_refit()\n",
        "    pass\n",
        ("unit/test_start_engines.py",),
    ),
    "refit: a group is acknowledged before it was copied": Row(
        "megarl/weight_sync/session.py",
        "            self._runtime.synchronize()\n            _require(ipc_buffer, mark)\n",
        "            _require(ipc_buffer, mark)\n",
        ("unit/test_weight_devices.py",),
    ),
    "refit: a slice lies where it lies in the whole weight": Row(
        "megarl/models/megatron/weight_stream.py",
        "(both[0].start - wanted[0].start) * len(wanted[1])",
        "both[0].start * len(wanted[1])",
        ("dist/test_refit_slices.py",),
    ),
    "refit: a rank is believed to have of its neighbour's shard what an engine reads": Row(
        "megarl/models/megatron/weight_stream.py",
        "return found == stop - start",
        "return found > 0",
        ("dist/test_refit_slices.py",),
    ),
    "refit: an expert stays on its rank whoever reads it": Row(
        "megarl/models/megatron/weight_stream.py",
        "elif _is_read(rule, slices):",
        "elif not of_expert:",
        ("dist/test_refit_slices.py",),
    ),
    "refit: a weight of which nothing is read is sent whole": Row(
        "megarl/weight_sync/slices.py",
        "return Slice(0, 0, 0) if whole else None",
        "return None",
        ("unit/test_weight_slices.py",),
    ),
    "refit: what is not there of a weight is taken from what is": Row(
        "megarl/weight_sync/slices.py",
        "needed.start < where.start or needed.stop > where.stop",
        "needed.stop - needed.start > where.length",
        ("unit/test_weight_slices.py",),
    ),
    "megatron: a recomputed layer's norm is taken without its gradient": Row(
        "megarl/models/megatron/specs.py",
        "ready[1].grad_fn is x.grad_fn\n            and torch.is_grad_enabled() == ready[1].requires_grad",
        "True",
        ("unit/test_residual_norm.py",),
    ),
    "megatron: the gradient of a sum goes by way of its norm alone": Row(
        "megarl/models/megatron/residual_norm.py",
        ".mean(-1, keepdim=True)) + of_total",
        ".mean(-1, keepdim=True))",
        ("unit/test_residual_norm.py",),
    ),
    "megatron: a Transformer Engine that fails stays in the way": Row(
        "megarl/models/megatron/transformer_engine.py",
        "        _hide()\n        return Finding(_told(",
        "        return Finding(_told(",
        ("unit/test_transformer_engine.py",),
    ),
    "megatron: Transformer Engine is optional where it is demanded": Row(
        "megarl/models/megatron/transformer_engine.py",
        "    if wanted is True:",
        "    if False:",
        ("unit/test_transformer_engine.py",),
    ),
    "megatron: dense models in bfloat16 take Transformer Engine unasked": Row(
        "megarl/models/megatron/transformer_engine.py",
        'return policy["precision"] == "bfloat16" and not has_experts',
        "return False",
        ("unit/test_transformer_engine.py",),
    ),
    "megatron: the output layer adds by a kernel that is not there": Row(
        "megarl/models/megatron/build.py",
        "if chunk.post_process and not layers._grad_accum_fusion_available:",
        "if False:",
        ("dist/test_transformer_engine.py",),
    ),
    "megatron: float32 logits are rounded": Row(
        "megarl/models/megatron/build.py",
        "product = rows.float() @ weight.float().t()",
        "product = (rows @ weight.t()).float()",
        ("unit/test_output_layer.py",),
    ),
    "megatron: gradients are rotated onwards": Row(
        "megarl/models/megatron/rotary.py",
        "torch.sub if back else torch.add",
        "torch.add",
        ("unit/test_rotary.py",),
    ),
    "megatron: every piece of a state is the first": Row(
        "megarl/models/megatron/state_stream.py",
        "[first - begin : last - begin])",
        "[: last - first])",
        ("dist/test_save_shares.py",),
    ),
    "checkpoints: the first data-parallel rank writes the weights": Row(
        "megarl/models/megatron/sharded_save.py",
        "for group in _groups_of_holders():",
        "for group in ():",
        ("dist/test_save_shares.py",),
    ),
    "checkpoints: ranks of other groups write what the main replica's write": Row(
        "megarl/models/megatron/state_stream.py",
        "if not _is_of_main_group(outline.replica_id):",
        "if False:",
        ("dist/test_save_shares.py",),
    ),
    "megatron: every slice of a state that is loaded goes to the first place": Row(
        "megarl/models/megatron/state_stream.py",
        "[position - begin : behind - begin]",
        "[: behind - position]",
        ("dist/test_memory_counts.py",),
    ),
    "megatron: each rank chooses its own layers": Row(
        "megarl/models/megatron/transformer_engine.py",
        "return on_all == 1, on_any == -1",
        "return works, works",
        ("dist/test_transformer_engine.py",),
    ),
    "policy: the first stages do not know which tokens count": Row(
        "megarl/models/policy/batch_plan.py",
        '"token_mask", "sample_mask", "response',
        '"sample_mask", "response',
        ("unit/test_batch_plan.py",),
    ),
    "attention: a kernel's window is one token wider": Row(
        "megarl/models/engine/attention.py",
        "-1 if window is None else window - 1, 0",
        "-1 if window is None else window, 0",
        ("unit/test_varlen_attention.py",),
    ),
    "launch: a job runs on nodes that failed their check": Row(
        "launch/ray_node.sh",
        "    check_cluster\n    run_driver",
        "    run_driver",
        ("launch/test_slurm_scripts.py",),
    ),
    "launch: a job of Ray is not checked": Row(
        "launch/slurm_job.sh",
        '[[ "${MEGARL_CHECK_NODES:-1}" == 0 ]] ||',
        "true ||",
        ("launch/test_slurm_scripts.py",),
    ),
    "launch: Transformer Engine is compiled for another torch": Row(
        "launch/gpu_environment.sh", "--no-build-isolation \\\n", "\\\n", ("launch/test_gpu_environment.py",)
    ),
    "observe: a repeated step is logged twice": Row(
        "megarl/observe/metrics_file.py",
        'row["step"] > step:',
        'row["step"] > step + 1:',
        ("unit/test_observe_sinks.py", "system/test_resume.py"),
    ),
    "run: a resumed run begins its records anew": Row(
        "megarl/run/run.py",
        "sampler.load_state(start.sampler_state)",
        "pass",
        ("unit/test_drivers.py", "system/test_resume.py"),
    ),
    "cli: every error ends with 1": Row(
        "megarl/cli.py",
        "code = USER_FAULT if found_by_worker or limit is not None else error.exit_code",
        "code = 1",
        ("unit/test_cli.py", "system/test_bad_input.py"),
    ),
    # seen by megarl parity
    "normalizers-local": Row(
        "megarl/models/engine/normalizers.py",
        "groups.sum_over_data(torch.stack([sequences, tokens]))",
        "torch.stack([sequences, tokens])",
        cases=("dp=2 mbs=2 length=6",),
    ),
    "masked-samples-count": Row(
        "megarl/models/engine/normalizers.py",
        'data["sample_mask"].to(torch.float64)',
        'torch.ones_like(data["sample_mask"], dtype=torch.float64)',
        cases=("mbs=4 length=8 masked=some",),
    ),
    "reference-stays": Row(
        "megarl/models/engine/offload_state.py",
        "            _write(backend, present)\n",
        "            pass\n",
        cases=("reference=1 length=9",),
    ),
    "last-micro-batch-dropped": Row(
        "megarl/models/engine/batching.py",
        "return split_rows(self.data, self.micro_batch_size, shapes)",
        "return split_rows(self.data, self.micro_batch_size, shapes)[:-1]",
        cases=("mbs=2 micro=2 length=6 paths=plain",),
    ),
    "pairs-dealt-apart": Row(
        "megarl/distributed/batched_data_dict.py",
        "row_lists = plan_uneven(total, shards) if allow_uneven_shards else plan_even(total, chunk, shards)",
        "row_lists = [list(range(shard, total, shards)) for shard in range(shards)]",
        cases=(
            "loss=rm dp=2 mbs=2 length=9",
            "loss=dpo dp=2 mbs=2 length=9",
        ),
    ),
    "pad-columns-in-softmax": Row(
        "megarl/models/engine/logprobs.py",
        "return min(max(self.size - self.start, 0), columns)",
        "return columns",
        cases=("tp=2 kv=2 ffn=6 length=6",),
    ),
    "entropy-of-own-vocabulary": Row(
        "megarl/models/engine/logprobs.py",
        "total, *(values.sum(dim=0) for values in moved)",
        "total, *statistics[3:]",
        cases=("loss=pg+entropy tp=2 kv=2 ffn=6 mbs=2 length=9",),
    ),
    "own-vocabulary-is-filtered": Row(
        "megarl/models/engine/logprobs.py",
        "smallest_kept(_columns_of_all(largest, shard), sampling)",
        "smallest_kept(largest, sampling)",
        cases=("tp=2 kv=2 ffn=6 length=6 nucleus=0.7",),
    ),
    "filters-only-in-training": Row(
        "megarl/models/engine/step.py",
        "head = LogprobHead(backend.vocabulary, sampling, chunk_size)",
        "head = LogprobHead(backend.vocabulary, replace(sampling, top_k=None, top_p=1.0), chunk_size)",
        cases=("keep=5 nucleus=0.7 mbs=2 length=9",),
    ),
    "filters-only-in-logprobs": Row(
        "megarl/models/engine/step.py",
        "of_language = LogprobHead(backend.vocabulary, sampling,",
        "of_language = LogprobHead(backend.vocabulary, replace(sampling, top_k=None, top_p=1.0),",
        cases=("keep=5 nucleus=0.7 mbs=2 length=9",),
    ),
    "temperature-only-in-logprobs": Row(
        "megarl/models/engine/step.py",
        "of_language = LogprobHead(backend.vocabulary, sampling,",
        "of_language = LogprobHead(backend.vocabulary, replace(sampling, temperature=1.0),",
        cases=("temperature=0.7 mbs=2 length=9",),
    ),
    "extremes-summed": Row(
        "megarl/models/engine/step.py",
        "if is_sum else list(values)",
        "if is_sum else [sum(values)]",
        cases=("loss=pg mbs=2 micro=2 length=8",),
    ),
    "likeliest-at-another-temperature": Row(
        "megarl/models/engine/step.py",
        "TopkHead(LogprobHead(shard, sampling,",
        "TopkHead(LogprobHead(shard, replace(sampling, temperature=1.0),",
        cases=("loss=distill temperature=0.7 mbs=2 length=8",),
    ),
    "likeliest-of-own-vocabulary": Row(
        "megarl/models/engine/topk.py",
        "if shard.ranks == 1 or not candidates.numel():",
        "if True:",
        cases=("loss=distill tp=2 kv=2 ffn=6 vocab=11 mbs=4 length=8",),
    ),
    "teachers-tokens-of-the-next-position": Row(
        "megarl/models/engine/heads.py",
        "model_input.of_tokens(rows)",
        "model_input.of_tokens(rows.roll(-1, dims=1))",
        cases=("loss=distill mbs=2 length=8",),
    ),
    "targets-not-shifted": Row(
        "megarl/models/engine/model_input.py",
        "tokens, targets = ids, ids.roll(-1, dims=1)",
        "tokens, targets = ids, ids",
        cases=("mbs=2 length=9",),
    ),
    "attention-sees-the-future": Row(
        "megarl/models/engine/attention.py",
        "is_causal=True, scale=scale",
        "is_causal=False, scale=scale",
        cases=("mbs=2 length=9 paths=plain",),
    ),
    "window-ignored": Row(
        "megarl/models/engine/attention.py",
        "mask = mask.triu(diagonal=keys - queries - window + 1)",
        "pass",
        cases=("family=mistral window=3 mbs=2 length=9 paths=plain",),
    ),
    "context-parts-in-rank-order": Row(
        "megarl/models/engine/context.py",
        "torch.cat([_index(starts, rank, size, None) for rank in range(size)]).argsort()",
        "torch.arange(starts[-1])",
        cases=("cp=2 mbs=2 length=9",),
    ),
    "gradient-times-context": Row(
        "megarl/models/engine/context.py",
        "return gradient.index_select(0, index), None",
        "return gradient.index_select(0, index) * 2, None",
        cases=("cp=2 mbs=2 length=9",),
    ),
    "key-value-gradients-local": Row(
        "megarl/models/engine/context.py",
        "dist.reduce_scatter_tensor(part, by_rank, group=ctx.group)",
        "part.copy_(by_rank.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)])",
        cases=("cp=2 comm=all_gather mbs=2 length=9 paths=plain",),
    ),
    "ring-forgets": Row(
        "megarl/models/engine/ring_attention.py",
        (
            "output.mul_((logsumexp - finite).exp()[..., None]).add_(part * (part_sum - finite).exp()[..., "
            "None])"
        ),
        "output.copy_(part)",
        cases=("cp=2 comm=p2p mbs=2 length=9",),
    ),
    "loss-normalised-a-micro-batch": Row(
        "megarl/algorithms/utils.py",
        "factor = global_normalization_factor",
        "factor = weights.sum()",
        cases=(
            "loss=nll mbs=2 micro=2 length=10",
            "loss=pg mbs=2 micro=2 length=10",
            "loss=dpo mbs=2 micro=2 length=10",
            "loss=rm mbs=2 micro=2 length=10",
            "loss=value mbs=2 micro=2 length=10",
            "loss=distill mbs=2 micro=2 length=10",
        ),
    ),
    "entropy-normalised-a-micro-batch": Row(
        "megarl/algorithms/loss_functions.py",
        "self.entropy_coef * mean(entropies)",
        "self.entropy_coef * masked_mean(entropies, mask)",
        cases=("loss=pg+entropy:1 mbs=2 micro=2 length=10",),
    ),
    "entropy-without-gradient": Row(
        "megarl/algorithms/loss_functions.py",
        "self.entropy_coef * mean(entropies)",
        "self.entropy_coef * mean(entropies.detach())",
        cases=("loss=pg+entropy mbs=2 length=9",),
    ),
    "ratio-to-generation": Row(
        "megarl/algorithms/loss_functions.py",
        'visible(data["prev_logprobs"][:, 1:])',
        'visible(data["generation_logprobs"][:, 1:])',
        cases=(
            "loss=pg mbs=4 length=8",
            "loss=pg+cispo mbs=4 length=8",
        ),
    ),
    "ratio-without-gradient": Row(
        "megarl/algorithms/loss_functions.py",
        "log_ratio = self._of_level(current - previous, mask)",
        "log_ratio = self._of_level(current - previous, mask).detach() + 0.0 * current",
        cases=("loss=pg mbs=4 length=8",),
    ),
    "ratio-of-tokens-for-sequences": Row(
        "megarl/algorithms/loss_functions.py",
        "log_ratio = self._of_level(current - previous, mask)",
        "log_ratio = current - previous",
        cases=("loss=pg+seq+gspo mbs=2 micro=2 length=12",),
    ),
    "importance-weights-of-tokens-for-sequences": Row(
        "megarl/algorithms/loss_functions.py",
        "_importance_weight(self._of_level(drawn_apart, mask))",
        "_importance_weight(drawn_apart)",
        cases=("loss=pg+is+seq+gspo mbs=2 micro=2 length=12",),
    ),
    "divergence-with-a-score-function": Row(
        "megarl/algorithms/loss_functions.py",
        "return weight * (estimate + slope * moving), is_clamped",
        "return weight * (estimate + slope * moving) * torch.exp(moving), is_clamped",
        cases=("loss=pg+kl:0.5+k2 dp=2 mbs=3 length=10",),
    ),
    "reference-with-gradient": Row(
        "megarl/algorithms/loss_functions.py",
        'next_token_logprobs - data["reference_policy_logprobs"][:, :-1]',
        (
            'next_token_logprobs.detach() - data["reference_policy_logprobs"][:, :-1] + 0.0 * '
            "next_token_logprobs"
        ),
        cases=(
            "loss=dpo mbs=2 length=9",
            "loss=dpo+ipo mbs=2 length=9",
        ),
    ),
    "score-of-the-chosen-without-gradient": Row(
        "megarl/algorithms/value_losses.py",
        "chosen, rejected = rewards[::2], rewards[1::2]",
        "chosen, rejected = rewards[::2].detach(), rewards[1::2]",
        cases=("loss=rm dp=2 mbs=2 length=9",),
    ),
    "score-of-the-rejected-without-gradient": Row(
        "megarl/algorithms/value_losses.py",
        "chosen, rejected = rewards[::2], rewards[1::2]",
        "chosen, rejected = rewards[::2], rewards[1::2].detach()",
        cases=("loss=rm dp=2 mbs=2 length=9",),
    ),
    "values-without-gradient": Row(
        "megarl/algorithms/value_losses.py",
        "visible(values[:, :-1])",
        "visible(values[:, :-1].detach() + 0.0 * values[:, :-1])",
        cases=("loss=value dp=2 mbs=2 length=8",),
    ),
    "old-values-with-gradient": Row(
        "megarl/algorithms/value_losses.py",
        "near = previous + moved",
        "near = previous + (current - current.detach()) + moved",
        cases=("loss=value+clip dp=2 mbs=3 length=10",),
    ),
    "value-loss-over-masked-tokens": Row(
        "megarl/algorithms/value_losses.py",
        'mask = data["token_mask"][:, 1:].to(values.dtype)',
        "mask = torch.ones_like(values[:, 1:])",
        cases=("loss=value dp=2 mbs=2 length=8",),
    ),
    "teachers-columns-shifted": Row(
        "megarl/algorithms/distillation_loss.py",
        "data[TOPK_LOGITS][:, :-1]",
        "data[TOPK_LOGITS][:, 1:]",
        cases=("loss=distill dp=2 mbs=2 length=8",),
    ),
    "weights-of-the-divergence-detached": Row(
        "megarl/algorithms/distillation_loss.py",
        "one.exp() * (one - other)",
        "one.exp().detach() * (one - other)",
        cases=("loss=distill dp=2 mbs=2 length=8",),
    ),
    "rest-of-the-divergence-detached": Row(
        "megarl/algorithms/distillation_loss.py",
        "_log_of_rest(total, least)",
        "_log_of_rest(total.detach(), least)",
        cases=("loss=distill+mixed:0.8+topk:5 dp=2 mbs=2 vocab=11 length=8",),
    ),
    "probability-of-the-teachers-tokens-detached": Row(
        "megarl/algorithms/distillation_loss.py",
        "return logarithms - total",
        "return logarithms - total.detach()",
        cases=("loss=distill+renorm dp=2 mbs=2 length=8",),
    ),
    "whitened-by-part": Row(
        "megarl/algorithms/advantages.py",
        "mean = kept.sum() / count",
        "mean = kept[::2].sum() / counts[::2].sum().clamp(min=1)",
        cases=("loss=pg advantages=gae+white dp=2 mbs=3 length=10",),
    ),
    "answers-of-all-prompts-compared": Row(
        "megarl/algorithms/advantages.py",
        "return torch.unique(prompts[begins], dim=0, return_inverse=True)[1][begins.cumsum(0) - 1]",
        "return torch.zeros_like(begins, dtype=torch.int64)",
        cases=("loss=pg advantages=grpo dp=2 mbs=3 length=10",),
    ),
    "rewards-summed-before-they-are-compared": Row(
        "megarl/algorithms/advantages.py",
        "for name, rewards in parts.items():",
        'for name, rewards in {"": sum(parts.values())}.items():',
        cases=("loss=pg+is advantages=gdpo+plain dp=2 mbs=3 length=10",),
    ),
    "ended-is-cut-off": Row(
        "megarl/algorithms/ppo.py",
        ' & samples["truncated"].bool()',
        "",
        cases=("loss=value advantages=gae+bootstrap dp=2 mbs=3 length=10",),
    ),
    "cut-off-is-ended": Row(
        "megarl/algorithms/ppo.py",
        ".where(bootstrapped, 0.0)",
        ".where(bootstrapped & False, 0.0)",
        cases=("loss=value advantages=gae+bootstrap dp=2 mbs=3 length=10",),
    ),
    "teacher-and-policy-exchanged": Row(
        "megarl/algorithms/distillation.py",
        '(teacher_logprobs - batch["prev_logprobs"])',
        '(batch["prev_logprobs"] - teacher_logprobs)',
        cases=("loss=pg+seq advantages=teacher mbs=3 micro=2 length=10",),
    ),
    "sequence-parallel-gradients-local": Row(
        "megarl/models/megatron/specs.py",
        "self.weight.sequence_parallel = config.sequence_parallel",
        "self.weight.sequence_parallel = False",
        cases=("backend=megatron tp=2 kv=2 ffn=6 sp=1 length=6",),
    ),
    "score-gradient-of-one-run": Row(
        "megarl/models/megatron/build.py",
        "self.weight.sequence_parallel = config.sequence_parallel",
        "self.weight.sequence_parallel = False",
        cases=("backend=megatron tp=2 kv=2 ffn=6 sp=1 mbs=4 length=8 loss=value",),
    ),
    "tied-gradient-of-one-stage": Row(
        "megarl/models/megatron/schedule.py",
        "    finalize_model_grads(model, None, **options)",
        "    from megarl.patched import patched\n\n"
        '    own = __import__("sys").modules["megatron.core.distributed.finalize_model_grads"]\n'
        '    with patched((own, "_allreduce_word_embedding_grads", lambda *given, **named: None)):\n'
        "        finalize_model_grads(model, None, **options)",
        cases=("backend=megatron pp=2 layers=2 tied=1 mbs=2 length=8",),
    ),
    "expert-gradients-twice": Row(
        "megarl/models/megatron/schedule.py",
        "    finalize_model_grads(model, None, **options)",
        "    finalize_model_grads(model, None, **options)\n"
        "    for buffer in (each for chunk in model for each in chunk.expert_parallel_buffers):\n        "
        "buffer.grad_data.mul_(2)",
        cases=("family=mixtral experts=4 topk=2 kv=2 group=2 ffn=20 mbs=2 length=8",),
    ),
    "decay-on-vectors": Row(
        "megarl/models/megatron/optimizer.py",
        "    if config.fp16:\n",
        '    for group in optimizer.param_groups:\n        group["wd_mult"] = 1.0\n    if config.fp16:\n',
        cases=("backend=megatron mbs=2 length=6",),
    ),
    "interleaved-in-one-batch": Row(
        "megarl/models/megatron/settings.py",
        '"overlap_p2p_comm": True,\n            "batch_p2p_comm": False,',
        '"overlap_p2p_comm": False,\n            "batch_p2p_comm": True,',
        cases=("pp=2 vpp=2 layers=4 mbs=2 micro=3 length=8",),
    ),
    "balancing-forgotten": Row(
        "megarl/models/megatron/moe_router.py",
        "probabilities = MoEAuxLossAutoScaler.apply(probabilities, loss)",
        "pass",
        cases=("family=qwen3_moe head=10 group=2 experts=4 topk=2 expert=7 balance=aux mbs=2 length=8",),
    ),
    "padding-is-routed": Row(
        "megarl/models/megatron/moe_record.py",
        "real = sequences >= 0",
        "real = sequences >= -1",
        cases=("family=mixtral experts=4 topk=2 kv=2 group=2 ffn=20 mbs=4 length=9 masked=some",),
    ),
    "state-crosses-a-packed-border": Row(
        "megarl/models/megatron/gated_delta.py",
        "packed_seq_params.layout.starts",
        "None",
        cases=("family=qwen3_5_text head=12 layers=2 batching=packed room=30 micro=8 length=8",),
    ),
    "state-reset-at-a-shard-border": Row(
        "megarl/models/engine/gated_delta.py",
        "state = run[..., :width] + run[..., width:] @ state",
        "state = torch.zeros_like(state)",
        cases=("family=qwen3_5_text head=12 layers=2 cp=2 mbs=2 length=9",),
    ),
    "convolution-without-its-tail": Row(
        "megarl/models/engine/gated_delta.py",
        "torch.where(before < 0, 0, 1 + tail_starts[sequence] + before)",
        "torch.zeros_like(before)",
        cases=("family=qwen3_5_text head=12 layers=2 cp=2 mbs=2 length=9",),
    ),
    "projection-cut-whole": Row(
        "converters/mapping/layouts.py",
        "for group in range(rule.groups):\n        for rows in rule.group_rows:",
        "for rows in rule.group_rows:\n        for group in range(rule.groups):",
        cases=("family=qwen3_5_text head=12 layers=2 tp=2 kv=2 ffn=6 mbs=2 length=6",),
    ),
    "decay-in-bfloat16": Row(
        "megarl/models/megatron/gated_delta.py",
        "decay = log_decays(decay.flatten(1), self.A_log, self.dt_bias)",
        "decay = log_decays(decay.flatten(1), self.A_log, self.dt_bias).bfloat16()",
        cases=("family=qwen3_5_text head=12 layers=2 mbs=2 length=9",),
    ),
    "zero-centred-norm-without-its-one": Row(
        "megarl/models/megatron/specs.py",
        "1 + self.weight.to(wide)",
        "self.weight.to(wide)",
        cases=("family=qwen3_5_text head=12 layers=2 mbs=2 length=6",),
    ),
    "fsdp1-gradients-not-reduced": Row(
        "megarl/models/fsdp1/sharded.py",
        "dist.reduce_scatter_tensor(shard, whole, group=group)",
        "shard.copy_(whole.chunk(group.size())[group.rank()])",
        cases=("backend=fsdp1 dp=2 mbs=2 length=9",),
    ),
}
