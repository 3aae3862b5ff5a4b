"""The shape of a run's configuration: one TypedDict a section. The policy's own section is in ``megarl.models.policy``."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from megarl.models.policy import PolicyConfig


class ClippedPGLossConfig(TypedDict):
    """Clipped policy-gradient loss.

    Attributes:
        reference_policy_kl_penalty: weight of the divergence from the reference policy; 0 needs no reference policy.
        ratio_clip_min: the probability ratio is clipped below 1 minus this.
        ratio_clip_max: the probability ratio is clipped above 1 plus this.
        ratio_clip_c: bound of the second clip, for negative advantages; null turns it off.
        use_on_policy_kl_approximation: weigh the divergence by the ratio of current to generation policy.
        use_importance_sampling_correction: weigh each token by the ratio of training to generation policy.
        token_level_loss: mean over tokens; otherwise mean over each sequence, then over sequences.
        disable_ppo_ratio: plain policy gradient, no ratio to previous log-probabilities.
        reference_policy_kl_gradient: `exact` for the gradient of the divergence; `pathwise` leaves out its score-function part.
        log_ratio_clamp_value: the logarithm of the probability ratio is clamped to plus and minus this; null for no clamp.
        kl_input_clamp_value: the difference of log-probabilities in the divergence is clamped alike.
        kl_output_clamp_value: the divergence of a token is clamped to this.
    """

    reference_policy_kl_penalty: float
    ratio_clip_min: float
    ratio_clip_max: float
    ratio_clip_c: float | None
    use_on_policy_kl_approximation: bool
    use_importance_sampling_correction: bool
    token_level_loss: bool
    disable_ppo_ratio: NotRequired[bool]
    reference_policy_kl_gradient: NotRequired[Literal["exact", "pathwise"]]
    log_ratio_clamp_value: NotRequired[float | None]
    kl_input_clamp_value: NotRequired[float | None]
    kl_output_clamp_value: NotRequired[float | None]


class DPOLossConfig(TypedDict):
    """Direct preference optimisation.

    Attributes:
        reference_policy_kl_penalty: the beta of the method.
        preference_loss_weight: weight of the preference loss.
        sft_loss_weight: weight of the likelihood of the chosen answers.
        preference_average_log_probs: mean instead of sum over the tokens in the preference loss.
        sft_average_log_probs: mean instead of sum over the tokens in the likelihood.
    """

    reference_policy_kl_penalty: float
    preference_loss_weight: float
    sft_loss_weight: float
    preference_average_log_probs: bool
    sft_average_log_probs: bool


class GRPOConfig(TypedDict):
    """Group-relative policy optimisation.

    Attributes:
        num_prompts_per_step: prompts a step.
        num_generations_per_prompt: answers a prompt.
        max_num_steps: steps of the run.
        max_num_epochs: passes over the training data after which the run ends even so; null for no such end.
        normalize_rewards: divide advantages by the standard deviation of the group.
        std: `population` divides the squares by the number n of answers, `sample` by n - 1; advantages of the first are
            sqrt(n / (n - 1)) times those of the second, which TRL has: 1.155 times for 4 answers.
        use_leave_one_out_baseline: the baseline of an answer is the mean of the group's other answers.
        val_period: steps between validations; 0 for none.
        val_at_start: validate before the first step.
        val_at_end: validate after the last step.
        max_val_samples: prompts of a validation; null for all.
        val_batch_size: prompts of a validation that are generated together.
        max_rollout_turns: turns of a conversation; 1.
        max_token_mult_prob_error: the run stops before it trains on answers whose ``token_mult_prob_error``, the mean over tokens of
            exp(|log-probability where it was generated - log-probability of the policy|), is larger; 1 is no difference, null never stops.
    """

    num_prompts_per_step: int
    num_generations_per_prompt: int
    max_num_steps: int
    max_num_epochs: NotRequired[int | None]
    normalize_rewards: NotRequired[bool]
    std: NotRequired[Literal["population", "sample"]]
    use_leave_one_out_baseline: NotRequired[bool]
    val_period: NotRequired[int]
    val_at_start: NotRequired[bool]
    val_at_end: NotRequired[bool]
    max_val_samples: NotRequired[int | None]
    val_batch_size: NotRequired[int]
    max_rollout_turns: NotRequired[int]
    max_token_mult_prob_error: NotRequired[float | None]


class SFTConfig(TypedDict):
    """Supervised fine-tuning.

    Attributes:
        max_num_steps: steps of the run.
        max_num_epochs: passes over the training data after which the run ends even so; null for no such end.
        val_period: steps between validations; 0 for none.
        val_batches: global batches of a validation; null for all.
        val_global_batch_size: samples of a global batch of a validation.
        val_micro_batch_size: samples of a forward pass on one data-parallel rank.
        val_at_start: validate before the first step.
        val_at_end: validate after the last step.
    """

    max_num_steps: int
    max_num_epochs: NotRequired[int | None]
    val_period: NotRequired[int]
    val_batches: NotRequired[int | None]
    val_global_batch_size: NotRequired[int]
    val_micro_batch_size: NotRequired[int]
    val_at_start: NotRequired[bool]
    val_at_end: NotRequired[bool]


class DataSource(TypedDict):
    """Where records come from: exactly one of ``path`` and ``name``.

    Attributes:
        path: a file of one JSON object a line.
        name: a data set of the ``datasets`` library, by id or local directory.
        subset: a configuration of that data set.
        split: a split of that data set.
        prompt_key: field of a record that holds the prompt.
        answer_key: field that holds the answer.
        max_samples: only the first so many records; null for all.
    """

    path: NotRequired[str]
    name: NotRequired[str]
    subset: NotRequired[str | None]
    split: NotRequired[str]
    prompt_key: str
    answer_key: str
    max_samples: NotRequired[int | None]


class DataConfig(TypedDict):
    """The data of a run.

    Attributes:
        train: training data.
        validation: validation data; null for none.
        max_input_seq_length: longest prompt (SFT: prompt and answer) in tokens.
        shuffle: a new order every epoch, drawn from the seed.
        system_prompt: put before every prompt as a system message.
        prompt_template: text with ``{prompt}`` in the place of the prompt.
    """

    train: DataSource
    validation: NotRequired[DataSource | None]
    max_input_seq_length: int
    shuffle: NotRequired[bool]
    system_prompt: NotRequired[str | None]
    prompt_template: NotRequired[str | None]


class EnvConfig(TypedDict):
    """The environment that responses meet.

    Attributes:
        environment: `single_turn`: a reward function compares a response with the reference answer; or the import path of a class,
            `path/to/file.py:Name` or `package.module:Name`, see `megarl.rollout.environment`.
        reward: the reward function: `exact_match`, `math_verify`, or an import path, `path/to/file.py:function`; null where the environment
            has its own.
        strip: leave white space at the ends out of the comparison (``exact_match``).
        processes: processes that compute rewards other than ``exact_match``; null for as many as the driver has cores, at most 8.
        timeout_s: seconds that a reward may take.
        on_error: a reward function that raises, returns no finite number or kills its process: `raise` ends the run, `zero` counts as 0,
            `mask` leaves the sample out of training.
        on_timeout: a reward that takes too long: likewise. To mask it is a way to escape judgement.
        options: anything that an environment of your own reads.
    """

    environment: NotRequired[str]
    reward: NotRequired[str | None]
    strip: NotRequired[bool]
    processes: NotRequired[int | None]
    timeout_s: NotRequired[float]
    on_error: NotRequired[Literal["raise", "zero", "mask"]]
    on_timeout: NotRequired[Literal["raise", "zero", "mask"]]
    options: NotRequired[dict[str, Any]]


class CheckpointingConfig(TypedDict):
    """Checkpoints.

    Attributes:
        enabled: write checkpoints.
        checkpoint_dir: where; ``checkpoints`` in the run's directory when absent.
        metric_name: metric that tells good checkpoints from bad; null keeps the newest.
        higher_is_better: whether more of that metric is better.
        save_period: steps between checkpoints.
        keep_top_k: checkpoints to keep, the newest always among them; null keeps all.
        resume: "auto" goes on from the newest valid checkpoint, and refuses where there are some and none is valid; "never" starts over,
            unless a valid one is there, and keeps the rows of ``metrics.jsonl`` beside.
        accept_changes: go on from a checkpoint although data, seed, batch or model are no longer what it was trained with.
        export_hf: write the final weights as a Hugging Face model too.
    """

    enabled: bool
    checkpoint_dir: NotRequired[str]
    metric_name: NotRequired[str | None]
    higher_is_better: NotRequired[bool]
    save_period: NotRequired[int]
    keep_top_k: NotRequired[int | None]
    resume: NotRequired[Literal["auto", "never"]]
    accept_changes: NotRequired[bool]
    export_hf: NotRequired[bool]


class WandbConfig(TypedDict):
    """Weights & Biases.

    Attributes:
        project: the project.
        name: name of the run there; null lets the service choose one.
        entity: team or user; null for the one that is logged in.
        group: group of runs that belong together.
        tags: words to find the run by.
        mode: "offline" keeps the files here until ``wandb sync``.
    """

    project: str
    name: NotRequired[str | None]
    entity: NotRequired[str | None]
    group: NotRequired[str | None]
    tags: NotRequired[list[str] | None]
    mode: NotRequired[Literal["online", "offline"]]


class TensorboardConfig(TypedDict):
    """TensorBoard.

    Attributes:
        log_dir: where; ``tensorboard`` in the logger's directory when absent or null.
    """

    log_dir: NotRequired[str | None]


class LoggerConfig(TypedDict):
    """Where metrics go besides ``metrics.jsonl``, which is always written.

    Attributes:
        log_dir: where TensorBoard and Weights & Biases put their files; ``logs`` in the run's directory when absent.
        wandb_enabled: send metrics to Weights & Biases.
        tensorboard_enabled: write TensorBoard files.
        wandb: settings of Weights & Biases.
        tensorboard: settings of TensorBoard.
    """

    log_dir: NotRequired[str]
    wandb_enabled: NotRequired[bool]
    tensorboard_enabled: NotRequired[bool]
    wandb: NotRequired[WandbConfig | None]
    tensorboard: NotRequired[TensorboardConfig | None]


class ClusterConfig(TypedDict):
    """The machines.

    Attributes:
        gpus_per_node: worker ranks a node, also where the ranks run on a CPU.
        num_nodes: nodes.
        device: what the ranks run on; "auto" takes CUDA where there is one.
        device_memory_gib: memory of a GPU in GiB, which an engine's weights are held against before anything starts.
    """

    gpus_per_node: int
    num_nodes: int
    device: NotRequired[Literal["auto", "cpu", "cuda"]]
    device_memory_gib: NotRequired[float]


class DeadlinesConfig(TypedDict):
    """How long a phase may take, in seconds; a phase that takes longer ends the run with an error.

    Attributes:
        init_s: building all workers.
        step_s: one phase of a step.
        save_s: one checkpoint.
    """

    init_s: NotRequired[float]
    step_s: NotRequired[float]
    save_s: NotRequired[float]


class ProfilerConfig(TypedDict):
    """Profiles of some steps.

    Attributes:
        steps: which, ``[first, stop]``, counted from 1, without ``stop``; null for what ``MEGARL_NSYS_PROFILE_STEP_RANGE``
            (``first:stop``) says, or none.
        nsys_workers: names of workers that run under NVIDIA Nsight Systems, patterns with commas between (``"*policy*,*vllm*"``), which
            record those steps; null for ``MEGARL_NSYS_WORKER_PATTERNS``, or none.
        torch_ranks: ranks of the policy whose steps torch's profiler records, into ``profiles`` of the run's directory.
    """

    steps: NotRequired[list[int] | None]
    nsys_workers: NotRequired[str | None]
    torch_ranks: NotRequired[list[int]]


class RunConfig(TypedDict):
    """A whole run.

    Attributes:
        algorithm: `grpo`, `sft`, or the import path of an algorithm, `path/to/file.py:Name`; its sections must be there.
        seed: every random number of the run is drawn from it.
        run_dir: where everything the run leaves goes; ``runs/<name of the configuration file>`` when absent.
        deadlines: how long a phase may take.
        policy: the model and its backend.
        loss_fn: the loss of GRPO.
        grpo: settings of GRPO.
        sft: settings of SFT.
        data: the data.
        env: the rewards of GRPO.
        checkpointing: checkpoints.
        logger: where metrics go.
        profiler: profiles of some steps.
        cluster: the machines.
    """

    algorithm: str
    seed: int
    run_dir: NotRequired[str]
    deadlines: NotRequired[DeadlinesConfig]
    policy: PolicyConfig
    loss_fn: NotRequired[ClippedPGLossConfig]
    grpo: NotRequired[GRPOConfig]
    sft: NotRequired[SFTConfig]
    data: DataConfig
    env: NotRequired[EnvConfig]
    checkpointing: NotRequired[CheckpointingConfig]
    logger: NotRequired[LoggerConfig]
    profiler: NotRequired[ProfilerConfig]
    cluster: ClusterConfig


Config = dict[str, Any]
"""A configuration as plain containers, the way it comes from YAML."""
