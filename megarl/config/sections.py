"""Schema of a run's configuration, one TypedDict per section. ``megarl.config.policy`` has the ``policy``
section."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from typing_extensions import TypedDict

from megarl.config.data_sources import DataConfig
from megarl.config.environments import EnvConfig
from megarl.config.losses import ClippedPGLossConfig
from megarl.config.policy import PolicyConfig
from megarl.key import ABOVE_0, AT_LEAST_0, AT_LEAST_1, Key, Range


class CheckpointingConfig(TypedDict):
    """Settings of checkpoints."""

    enabled: Annotated[bool, Key("write checkpoints during the run and at its end.", default=False)]
    checkpoint_dir: NotRequired[
        Annotated[
            str,
            Key(
                "directory in which checkpoints are written; ``checkpoints`` in the run directory when "
                "absent."
            ),
        ]
    ]
    metric_name: NotRequired[
        Annotated[
            str | None,
            Key(
                "metric that ranks checkpoints for ``keep_top_k``, such as `validation/accuracy` or "
                "`train/loss`; null ranks the newest first.",
                default=None,
            ),
        ]
    ]
    higher_is_better: NotRequired[
        Annotated[
            bool,
            Key(
                "true if a higher value of ``metric_name`` is better, false if a lower one is.", default=True
            ),
        ]
    ]
    save_period: NotRequired[Annotated[int, Key("steps between checkpoints.", AT_LEAST_1, default=10)]]
    keep_top_k: NotRequired[
        Annotated[
            int | None,
            Key(
                "number of best checkpoints (by `metric_name`) to keep, in addition to the newest one; the "
                "others are deleted. null keeps all.",
                AT_LEAST_1,
                default=None,
            ),
        ]
    ]
    resume: NotRequired[
        Annotated[
            Literal["auto", "never"],
            Key(
                "``auto`` continues from the newest valid checkpoint; if there are checkpoints but none is "
                "valid, the run does not start. ``never`` starts from the beginning, and moves old rows of "
                "``metrics.jsonl`` to another file; if there is a valid checkpoint, the run does not start.",
                default="auto",
            ),
        ]
    ]
    accept_changes: NotRequired[
        Annotated[
            bool,
            Key(
                "resume from a checkpoint even if data, seed, batch size, model, learning rate or schedule "
                "have changed since it was written; false refuses to. A changed schedule continues at the "
                "checkpoint's step, counted from the beginning of the run; the optimizer state is kept.",
                default=False,
            ),
        ]
    ]
    async_save: NotRequired[
        Annotated[
            bool,
            Key(
                "write checkpoints in the background while training continues: each rank copies its shard "
                "to shared memory, and one process per node writes it to disk. The last checkpoint, and one "
                "for which a node lacks memory, is written synchronously. The shared memory stays allocated "
                "between checkpoints.",
                default=False,
            ),
        ]
    ]
    max_failed_saves: NotRequired[
        Annotated[
            int,
            Key(
                "the run ends when this number of consecutive checkpoints cannot be written (full disk, "
                "storage error); before that, a failed checkpoint is deleted with a warning. A failure of "
                "the last checkpoint always ends the run.",
                AT_LEAST_1,
                default=3,
            ),
        ]
    ]
    export_hf: NotRequired[
        Annotated[
            bool,
            Key(
                "at the end of the run, also write the final weights as a Hugging Face model.", default=False
            ),
        ]
    ]
    signing_key_file: NotRequired[
        Annotated[
            str | None,
            Key(
                "file (mode 0600) with a secret of at least 32 bytes, by which checkpoints are signed. A "
                "checkpoint without this signature, or with changed bytes, is skipped like a damaged one. "
                "Whoever can write checkpoints must not be able to read the file. null signs nothing.",
                default=None,
            ),
        ]
    ]


class WandbConfig(TypedDict):
    """Settings of Weights & Biases, passed to ``wandb.init``."""

    project: Annotated[str, Key("project in Weights & Biases to which the run belongs.")]
    name: NotRequired[
        Annotated[str | None, Key("name of the run in Weights & Biases; null lets the service choose one.")]
    ]
    entity: NotRequired[
        Annotated[
            str | None, Key("team or user that owns the project; null for the logged-in user's default.")
        ]
    ]
    group: NotRequired[
        Annotated[str | None, Key("name under which the service groups related runs; null for none.")]
    ]
    tags: NotRequired[Annotated[list[str] | None, Key("list of tags of the run; null for none.")]]
    mode: NotRequired[
        Annotated[
            Literal["online", "offline"],
            Key(
                "``online`` (the service's default) sends rows during the run; ``offline`` keeps them in "
                "files on this machine until ``wandb sync``."
            ),
        ]
    ]


class MlflowConfig(TypedDict):
    """Settings of MLflow."""

    experiment_name: Annotated[
        str,
        Key(
            "MLflow experiment to which the run belongs; created if the server has no experiment of "
            "that name."
        ),
    ]
    run_name: NotRequired[
        Annotated[str | None, Key("name of the run in MLflow; null lets MLflow choose one.")]
    ]
    tracking_uri: NotRequired[
        Annotated[
            str | None,
            Key(
                "address of the tracking server, or path of a local store; null for "
                "``MLFLOW_TRACKING_URI``, or MLflow's own default if that is not set."
            ),
        ]
    ]


class TrackioConfig(TypedDict):
    """Settings of Trackio, passed to ``trackio.init``."""

    project: Annotated[str, Key("project in Trackio to which the run belongs.")]
    name: NotRequired[
        Annotated[
            str | None,
            Key(
                "name of the run in Trackio, to which a random suffix is added; null leaves the suffix alone."
            ),
        ]
    ]
    group: NotRequired[
        Annotated[str | None, Key("name under which Trackio groups related runs; null for none.")]
    ]
    space_id: NotRequired[
        Annotated[
            str | None,
            Key(
                "id of the Hugging Face Space that stores and shows the runs; null keeps them on this "
                "machine."
            ),
        ]
    ]


class TensorboardConfig(TypedDict):
    """Settings of TensorBoard."""

    log_dir: NotRequired[
        Annotated[
            str | None,
            Key(
                "directory of TensorBoard's event files; ``tensorboard`` in the directory "
                "``logger.log_dir`` when absent or null."
            ),
        ]
    ]


class SamplesConfig(TypedDict):
    """Sample files: prompts and responses that a run writes for people to read, if its algorithm generates
    responses. They are ``samples/train_step_N.jsonl`` and ``samples/validation_step_N.jsonl`` in the run
    directory."""

    enabled: NotRequired[Annotated[bool, Key("write sample files.", default=True)]]
    num_train_samples: NotRequired[
        Annotated[
            int | None,
            Key(
                "number of samples written per training step, the first of its batch; 0 writes none, null "
                "all.",
                AT_LEAST_0,
                default=32,
            ),
        ]
    ]
    num_validation_samples: NotRequired[
        Annotated[
            int | None,
            Key(
                "number of samples written per validation set, the first ones; 0 writes none, null all.",
                AT_LEAST_0,
                default=64,
            ),
        ]
    ]
    period: NotRequired[
        Annotated[
            int,
            Key(
                "number of training steps between sample files; the first step and every validation are "
                "always written.",
                AT_LEAST_1,
                default=1,
            ),
        ]
    ]
    max_characters: NotRequired[
        Annotated[
            int,
            Key(
                "maximum number of characters of a prompt, response or reference in the sample files; the "
                "middle of a longer text is left out. Training is not affected.",
                AT_LEAST_1,
                default=16384,
            ),
        ]
    ]
    max_files: NotRequired[
        Annotated[
            int | None,
            Key(
                "maximum number of sample files of training steps, and of sample files of validations; when "
                "there are more, the first file and the newest ones are kept. null keeps all.",
                # The first and the newest file are always kept.
                Range(low=2),
                default=200,
            ),
        ]
    ]
    token_ids: NotRequired[
        Annotated[bool, Key("also write the token ids of prompt and response.", default=False)]
    ]
    wandb_table: NotRequired[
        Annotated[
            bool,
            Key(
                "also send the samples to Weights & Biases, as the tables ``samples/train`` and "
                "``samples/validation``.",
                default=False,
            ),
        ]
    ]


class LoggerConfig(TypedDict):
    """Sample files, and sinks of metrics in addition to ``metrics.jsonl``, which every run writes."""

    log_dir: NotRequired[
        Annotated[
            str,
            Key(
                "directory for the files of TensorBoard, Weights & Biases and custom sinks; the run "
                "directory when absent."
            ),
        ]
    ]
    wandb_enabled: NotRequired[Annotated[bool, Key("send metrics to Weights & Biases.", default=False)]]
    tensorboard_enabled: NotRequired[
        Annotated[bool, Key("write metrics as TensorBoard event files.", default=False)]
    ]
    mlflow_enabled: NotRequired[Annotated[bool, Key("send metrics to MLflow.", default=False)]]
    trackio_enabled: NotRequired[Annotated[bool, Key("send metrics to Trackio.", default=False)]]
    wandb: NotRequired[Annotated[WandbConfig | None, Key("settings of Weights & Biases.")]]
    mlflow: NotRequired[Annotated[MlflowConfig | None, Key("settings of MLflow.")]]
    trackio: NotRequired[Annotated[TrackioConfig | None, Key("settings of Trackio.")]]
    tensorboard: NotRequired[Annotated[TensorboardConfig | None, Key("settings of TensorBoard.")]]
    sinks: NotRequired[
        Annotated[
            list[str],
            Key(
                "import paths of custom classes that receive every row of metrics, ``path/to/file.py:Name`` "
                "or ``package.module:Name``, see ``megarl.observe.sinks:Sink``."
            ),
        ]
    ]
    samples: NotRequired[
        Annotated[
            SamplesConfig,
            Key("sample files: prompts and responses of the run, for people to read.", default={}),
        ]
    ]


class ClusterConfig(TypedDict):
    """Nodes and devices of the run."""

    gpus_per_node: Annotated[
        int,
        Key(
            "number of ranks (worker processes) per node: one per GPU, or the number of CPU processes "
            "if the ranks run on CPUs.",
            AT_LEAST_1,
        ),
    ]
    num_nodes: Annotated[
        int, Key("number of nodes that the run uses, nodes of engines included.", AT_LEAST_1)
    ]
    device: NotRequired[
        Annotated[
            Literal["auto", "cpu", "cuda"],
            Key(
                'device of the ranks: "auto" takes GPUs if Ray has any, else CPUs; it refuses CPUs in a '
                "Slurm job, and on a machine with GPUs that Ray does not see.",
                default="auto",
            ),
        ]
    ]
    device_memory_gib: NotRequired[
        Annotated[
            float | None,
            Key(
                "memory of one GPU in GiB (the MiB of nvidia-smi / 1024), with which the memory plan is "
                "compared before anything starts. null skips the comparison; only an engine whose weights "
                "exceed its share of 80 GiB is then refused.",
                Range(low=0, high=4096, low_open=True),
                default=None,
            ),
        ]
    ]
    memory_check: NotRequired[
        Annotated[
            Literal["refuse", "warn"],
            Key(
                "what happens if the weights, gradients and optimizer state of a rank exceed "
                '`device_memory_gib`: "refuse" does not start the run, "warn" starts it with a warning. If '
                "only the complete plan, with activations, exceeds it, there is a warning in either case.",
                default="refuse",
            ),
        ]
    ]
    max_restarts: NotRequired[
        Annotated[
            int | None,
            Key(
                "maximum number of restarts of workers in one launch. When a worker or its node is lost or "
                "hangs, new workers continue from the newest complete checkpoint; when no restart is left, "
                "the launch ends with exit code 4. null for 3 in a Slurm job, else 0.",
                AT_LEAST_0,
                default=None,
            ),
        ]
    ]
    max_engine_restarts: NotRequired[
        Annotated[
            int,
            Key(
                "maximum number of rollout engine restarts in one launch. When an engine is killed or "
                "hangs, new engines get the weights by a refit, and sample the step's responses again with "
                "the same seeds.",
                AT_LEAST_0,
                default=3,
            ),
        ]
    ]


class DeadlinesConfig(TypedDict):
    """Time limits in seconds for the phases of a run. When a phase exceeds its limit, the stacks of the
    workers are printed, and the run ends with exit code 4. The limit is ``multiple`` times the slowest of the
    phase's last ten executions, but at least ``least_s`` and at most the phase's own key. Before the first
    measurement it is ``first_s``. Suspended workers, and workers that all make no progress, are detected
    earlier (see ``least_s``)."""

    init_s: NotRequired[
        Annotated[
            float,
            Key(
                "time limit in seconds for starting Ray and building all workers; reading a checkpoint has "
                "``load_s`` in addition.",
                ABOVE_0,
                default=1800.0,
            ),
        ]
    ]
    step_s: NotRequired[
        Annotated[
            float,
            Key(
                "time limit in seconds for training on the batch of a step, and for every call of workers "
                "that belongs to no other phase.",
                ABOVE_0,
                default=3600.0,
            ),
        ]
    ]
    logprobs_s: NotRequired[
        Annotated[
            float,
            Key(
                "time limit in seconds for computing the log-probabilities of a step's batch; ``step_s`` "
                "when absent.",
                ABOVE_0,
                follows="step_s",
            ),
        ]
    ]
    generate_s: NotRequired[
        Annotated[
            float,
            Key(
                "time limit in seconds for sampling the responses of a step; ``step_s`` when absent.",
                ABOVE_0,
                follows="step_s",
            ),
        ]
    ]
    save_s: NotRequired[
        Annotated[
            float,
            Key(
                "time limit in seconds for writing a checkpoint or the Hugging Face export.",
                ABOVE_0,
                default=1800.0,
            ),
        ]
    ]
    load_s: NotRequired[
        Annotated[
            float,
            Key(
                "time limit in seconds for reading a checkpoint; ``save_s`` when absent.",
                ABOVE_0,
                follows="save_s",
            ),
        ]
    ]
    refit_s: NotRequired[
        Annotated[
            float,
            Key(
                "time limit in seconds for one stage of a refit, such as connecting or sending the weights; "
                "``step_s`` when absent.",
                ABOVE_0,
                follows="step_s",
            ),
        ]
    ]
    validate_s: NotRequired[
        Annotated[
            float,
            Key(
                "time limit in seconds for one batch of a validation; ``step_s`` when absent.",
                ABOVE_0,
                follows="step_s",
            ),
        ]
    ]
    least_s: NotRequired[
        Annotated[
            float,
            Key(
                "lower bound in seconds of the time limit of a phase that has been measured, unless the "
                "phase's own key is smaller. It also sets when megarl looks for hangs: after this time "
                "without a reply. A phase then ends early if a worker process is suspended, or if no "
                "unresponsive worker makes progress for three quarters of this time (no new position in the "
                "code, and no use of CPU, files or disks, child processes included). Refits are exempt, "
                "because workers wait for engines there. The run ends with exit code 4 if Ray's control "
                "process, or the raylet of the driver's node, is suspended or unresponsive for 40 s, or for "
                "0.7 of this time if that is less.",
                ABOVE_0,
                default=300.0,
            ),
        ]
    ]
    first_s: NotRequired[
        Annotated[
            float,
            Key(
                "time limit in seconds for the first execution of a phase, in which workers compile and "
                "allocate memory; the phase's own limit applies if it is lower. Workers that replace lost "
                "ones have ``multiple`` times the slowest first execution of this launch as their limit. "
                "A rank that hangs with a busy CPU, as in an endless loop or a busy wait for the GPU, ends "
                "the run only at this limit.",
                ABOVE_0,
                default=1800.0,
            ),
        ]
    ]
    multiple: NotRequired[
        Annotated[
            float,
            Key(
                "time limit of a phase, as a multiple of the slowest of its last ten executions.",
                AT_LEAST_1,
                default=3.0,
            ),
        ]
    ]


class DebugConfig(TypedDict):
    """Checks for debugging, which slow a run down."""

    collectives: NotRequired[
        Annotated[
            bool,
            Key(
                "before each collective, compare its operation, shape, dtype and sequence number over the "
                "ranks of its group, and report the ranks that differ; slow. Sends and receives between "
                "pipeline stages are not compared: a mismatch there ends with an error of gloo or NCCL, or "
                "at the deadline of the phase, which reports the waiting ranks.",
                default=False,
            ),
        ]
    ]


class ProfilerConfig(TypedDict):
    """Profiling of selected steps with NVIDIA Nsight Systems or torch's profiler."""

    steps: NotRequired[
        Annotated[
            list[int] | None,
            Key(
                "steps to profile, ``[first, stop]``, counted from 1, without ``stop``; null takes "
                "``first:stop`` from the environment variable ``MEGARL_NSYS_PROFILE_STEP_RANGE``, and "
                "profiles nothing if that is not set.",
                default=None,
            ),
        ]
    ]
    nsys_workers: NotRequired[
        Annotated[
            str | None,
            Key(
                "workers that run under NVIDIA Nsight Systems in those steps: patterns for their names, "
                'separated by commas (``"*policy*,*vllm*"``); null takes the environment variable '
                "``MEGARL_NSYS_WORKER_PATTERNS``, and no workers if that is not set.",
                default=None,
            ),
        ]
    ]
    torch_ranks: NotRequired[
        Annotated[
            list[int],
            Key(
                "ranks of the policy that torch's profiler records in ``steps``; its files are in "
                "``profiles`` in the run directory.",
                default=[],
            ),
        ]
    ]


class AlgorithmConfig(TypedDict):
    """Keys that the run loop reads from the algorithm's own section, if the section has them."""

    # No ``Key`` here, because each algorithm's section describes these keys.
    max_num_steps: int
    max_num_epochs: NotRequired[int | None]
    val_period: NotRequired[int]
    val_at_start: NotRequired[bool]
    val_at_end: NotRequired[bool]
    val_batch_size: NotRequired[int | None]
    max_val_samples: NotRequired[int | None]
    val_num_generations_per_prompt: NotRequired[int]
    max_rollout_turns: NotRequired[int]
    max_rollout_tokens: NotRequired[int | None]


class RunConfig(TypedDict):
    """Configuration of a whole run."""

    algorithm: Annotated[
        str,
        Key(
            "training algorithm: `grpo`, `ppo`, `sft`, `dpo`, `rm`, `distillation`, or the import path "
            "of a custom one, `path/to/file.py:Name`. The sections that it reads must be present."
        ),
    ]
    seed: Annotated[
        int, Key("seed from which all random numbers of the run are derived.", Range(low=0, high=2**63 - 1))
    ]
    recipe: NotRequired[
        Annotated[
            str,
            Key(
                "name of the recipe or file from which the run was started; written by ``megarl train``, "
                "and kept when the run is resumed."
            ),
        ]
    ]
    run_dir: NotRequired[
        Annotated[
            str,
            Key("run directory, which holds everything that the run writes; ``runs/<recipe>`` when absent."),
        ]
    ]
    deadlines: NotRequired[Annotated[DeadlinesConfig, Key("time limits of the phases of a run.")]]
    policy: Annotated[PolicyConfig, Key("the model to train, its batches and its backend.")]
    loss_fn: NotRequired[
        Annotated[
            ClippedPGLossConfig,
            Key("policy-gradient loss of GRPO, PPO, and of distillation with `reverse_kl_advantage`."),
        ]
    ]
    data: Annotated[DataConfig, Key("data sources, and how their records become prompts.")]
    env: NotRequired[
        Annotated[EnvConfig, Key("rewards of GRPO and PPO; in a distillation they are only logged.")]
    ]
    checkpointing: NotRequired[
        Annotated[CheckpointingConfig, Key("when checkpoints are written, and which are kept.")]
    ]
    logger: NotRequired[Annotated[LoggerConfig, Key("sinks of metrics, and sample files.")]]
    profiler: NotRequired[Annotated[ProfilerConfig, Key("profiling of selected steps.")]]
    debug: NotRequired[Annotated[DebugConfig, Key("debugging aids.")]]
    cluster: Annotated[ClusterConfig, Key("number of nodes and ranks, and their device.")]


Config = dict[str, Any]
"""Configuration as plain dictionaries and lists, as read from YAML."""
