"""Schema of a run's configuration, with one TypedDict per section. The policy's section is in
``megarl.config.policy``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from typing_extensions import TypedDict

from megarl.config.data_sources import DataConfig
from megarl.config.environments import EnvConfig
from megarl.config.losses import ClippedPGLossConfig
from megarl.config.policy import PolicyConfig
from megarl.key import ABOVE_0, AT_LEAST_0, AT_LEAST_1, Key, Range


class CheckpointingConfig(TypedDict):
    """Checkpoints."""

    enabled: Annotated[bool, Key("write checkpoints.", default=False)]
    checkpoint_dir: NotRequired[
        Annotated[
            str, Key("directory of the checkpoints; ``checkpoints`` in the run's directory when absent.")
        ]
    ]
    metric_name: NotRequired[
        Annotated[
            str | None,
            Key("metric by which the best checkpoints are kept; null keeps the newest.", default=None),
        ]
    ]
    higher_is_better: NotRequired[
        Annotated[bool, Key("true if a higher value of that metric is better.", default=True)]
    ]
    save_period: NotRequired[Annotated[int, Key("steps between checkpoints.", AT_LEAST_1, default=10)]]
    keep_top_k: NotRequired[
        Annotated[
            int | None,
            Key(
                "number of best checkpoints to keep, besides the newest; null keeps all.",
                AT_LEAST_1,
                default=None,
            ),
        ]
    ]
    resume: NotRequired[
        Annotated[
            Literal["auto", "never"],
            Key(
                "``auto`` continues from the newest valid checkpoint, and refuses to start if there are "
                "checkpoints but none is valid; ``never`` starts over, refuses to do so if a valid "
                "checkpoint exists, and keeps the old rows of ``metrics.jsonl`` in another file.",
                default="auto",
            ),
        ]
    ]
    accept_changes: NotRequired[
        Annotated[
            bool,
            Key(
                "resume from a checkpoint although data, seed, batch, model, learning rate or schedule "
                "differ from those it was trained with. A changed schedule continues at the checkpoint's "
                "step, counted from the run's beginning; the optimizer's state stays.",
                default=False,
            ),
        ]
    ]
    async_save: NotRequired[
        Annotated[
            bool,
            Key(
                "write checkpoints while training goes on: each rank copies its part to shared memory of "
                "its node, and a process per node writes it from there. The last checkpoint, and one for "
                "which a node lacks memory, is written synchronously. The memory is kept from one "
                "checkpoint to the next.",
                default=False,
            ),
        ]
    ]
    max_failed_saves: NotRequired[
        Annotated[
            int,
            Key(
                "maximum number of consecutive checkpoints that cannot be written (no space, a storage "
                "error) before the run ends; until then each is removed with a warning. A last checkpoint"
                " that fails ends the run too.",
                AT_LEAST_1,
                default=3,
            ),
        ]
    ]
    export_hf: NotRequired[
        Annotated[bool, Key("write the final weights as a Hugging Face model too.", default=False)]
    ]
    signing_key_file: NotRequired[
        Annotated[
            str | None,
            Key(
                "file with a secret of 32 bytes or more, of mode 0600, which signs checkpoints; a "
                "checkpoint without its signature, or with other bytes, is skipped like a damaged one. "
                "Keep the file where those who can write the checkpoints cannot read it.",
                default=None,
            ),
        ]
    ]


class WandbConfig(TypedDict):
    """Weights & Biases."""

    project: Annotated[str, Key("the project.")]
    name: NotRequired[
        Annotated[str | None, Key("name of the run in the service; null lets the service choose one.")]
    ]
    entity: NotRequired[Annotated[str | None, Key("team or user; null for the one that is logged in.")]]
    group: NotRequired[Annotated[str | None, Key("group of runs that belong together.")]]
    tags: NotRequired[Annotated[list[str] | None, Key("tags of the run.")]]
    mode: NotRequired[
        Annotated[
            Literal["online", "offline"],
            Key("``offline`` keeps the files on this machine until ``wandb sync``."),
        ]
    ]


class MlflowConfig(TypedDict):
    """MLflow."""

    experiment_name: Annotated[str, Key("the experiment; created if the server has none of that name.")]
    run_name: NotRequired[
        Annotated[str | None, Key("name of the run in MLflow; null lets MLflow choose one.")]
    ]
    tracking_uri: NotRequired[
        Annotated[
            str | None,
            Key(
                "address of the server, or a local store; null for ``MLFLOW_TRACKING_URI``, else MLflow's "
                "own default."
            ),
        ]
    ]


class TrackioConfig(TypedDict):
    """Trackio."""

    project: Annotated[str, Key("the project.")]
    name: NotRequired[Annotated[str | None, Key("name of the run in Trackio; a random number is appended.")]]
    group: NotRequired[Annotated[str | None, Key("group of runs that belong together.")]]
    space_id: NotRequired[
        Annotated[str | None, Key("Hugging Face Space that shows the runs; null keeps them on this machine.")]
    ]


class TensorboardConfig(TypedDict):
    """TensorBoard."""

    log_dir: NotRequired[
        Annotated[
            str | None,
            Key(
                "directory of TensorBoard's files; ``tensorboard`` in the logger's directory when "
                "absent or null."
            ),
        ]
    ]


class SamplesConfig(TypedDict):
    """Prompts and responses that a run writes for people to read, if its algorithm generates responses. They
    are in ``samples/train_step_N.jsonl`` and ``samples/validation_step_N.jsonl`` in the run directory."""

    enabled: NotRequired[Annotated[bool, Key("write them.", default=True)]]
    num_train_samples: NotRequired[
        Annotated[
            int | None,
            Key(
                "samples to keep per training step, the first ones; 0 for none, null for all.",
                AT_LEAST_0,
                default=32,
            ),
        ]
    ]
    num_validation_samples: NotRequired[
        Annotated[
            int | None,
            Key(
                "samples to keep per validation set, the first ones; 0 for none, null for all.",
                AT_LEAST_0,
                default=64,
            ),
        ]
    ]
    period: NotRequired[
        Annotated[
            int,
            Key(
                "training steps between two records of samples; those of the first step and of every "
                "validation are always written.",
                AT_LEAST_1,
                default=1,
            ),
        ]
    ]
    max_characters: NotRequired[
        Annotated[
            int,
            Key(
                "maximum characters of a prompt, a response or a reference; longer texts lose their middle.",
                AT_LEAST_1,
                default=16384,
            ),
        ]
    ]
    max_files: NotRequired[
        Annotated[
            int | None,
            Key(
                "maximum number of files for training steps, and as many for validations; the oldest and "
                "the newest stay, null keeps all.",
                Range(low=2),
                default=200,
            ),
        ]
    ]
    token_ids: NotRequired[
        Annotated[bool, Key("also record the token ids of prompt and response.", default=False)]
    ]
    wandb_table: NotRequired[
        Annotated[
            bool,
            Key(
                "send them to Weights & Biases too, as the tables ``samples/train`` and "
                "``samples/validation``.",
                default=False,
            ),
        ]
    ]


class LoggerConfig(TypedDict):
    """Sinks of metrics besides ``metrics.jsonl``, which is always written, and the stored samples."""

    log_dir: NotRequired[
        Annotated[
            str,
            Key(
                "where TensorBoard, Weights & Biases and sinks of your own put their files; the run's "
                "directory when absent."
            ),
        ]
    ]
    wandb_enabled: NotRequired[Annotated[bool, Key("send metrics to Weights & Biases.", default=False)]]
    tensorboard_enabled: NotRequired[Annotated[bool, Key("write TensorBoard files.", default=False)]]
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
                "import paths of classes that also get every row of metrics, ``path/to/file.py:Name`` or "
                "``package.module:Name``, see ``megarl.observe.sinks:Sink``."
            ),
        ]
    ]
    samples: NotRequired[Annotated[SamplesConfig, Key("prompts and responses to read.", default={})]]


class ClusterConfig(TypedDict):
    """Nodes and devices of the run."""

    gpus_per_node: Annotated[int, Key("worker ranks per node, also if the ranks run on a CPU.", AT_LEAST_1)]
    num_nodes: Annotated[int, Key("number of nodes.", AT_LEAST_1)]
    device: NotRequired[
        Annotated[
            Literal["auto", "cpu", "cuda"],
            Key(
                'device of the ranks: "auto" takes GPUs if Ray has some, else the CPU; in a Slurm job, or'
                " if the machine has GPUs that Ray does not see, it refuses to start on the CPU.",
                default="auto",
            ),
        ]
    ]
    device_memory_gib: NotRequired[
        Annotated[
            float | None,
            Key(
                "memory of a GPU in GiB, compared with the memory plan before anything starts; null if "
                "unknown: then only an engine whose weights exceed its share of 80 GiB is refused.",
                ABOVE_0,
                default=None,
            ),
        ]
    ]
    memory_check: NotRequired[
        Annotated[
            Literal["refuse", "warn"],
            Key(
                "reaction if the weights, gradients and optimizer state of a rank alone exceed "
                '`device_memory_gib`: "refuse" or "warn". If only the rest of the plan exceeds it, there '
                "is a warning.",
                default="refuse",
            ),
        ]
    ]
    max_restarts: NotRequired[
        Annotated[
            int | None,
            Key(
                "maximum number of worker restarts in one launch, each from the newest complete "
                "checkpoint, after a worker or its node is lost or hangs; then the launch ends with exit "
                "code 4. null for 3 in a Slurm job, else 0.",
                AT_LEAST_0,
                default=None,
            ),
        ]
    ]
    max_engine_restarts: NotRequired[
        Annotated[
            int,
            Key(
                "maximum number of rollout engine restarts in one launch, after an engine is killed or "
                "hangs; each restart refits the engines and samples the step's responses again with the "
                "same seeds.",
                AT_LEAST_0,
                default=3,
            ),
        ]
    ]


class DeadlinesConfig(TypedDict):
    """Time limits in seconds for the phases of a run. A phase that exceeds its limit ends the run with exit
    code 4, and the stacks of the workers are printed. The limit is ``multiple`` times the slowest of the
    phase's last ten executions, at least ``least_s`` and at most the phase's own key. Before anything is
    measured, the limit is ``first_s``. Workers that are stopped, or that all make no progress, are detected
    earlier (see ``least_s``)."""

    init_s: NotRequired[
        Annotated[
            float,
            Key(
                "maximum seconds for starting Ray and building all workers; reading a checkpoint has "
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
                "maximum seconds for training on the batch of a step, and for work that belongs to no other "
                "phase.",
                ABOVE_0,
                default=3600.0,
            ),
        ]
    ]
    logprobs_s: NotRequired[
        Annotated[
            float,
            Key(
                "maximum seconds for the log-probabilities of a step's batch; ``step_s`` when absent.",
                ABOVE_0,
                follows="step_s",
            ),
        ]
    ]
    generate_s: NotRequired[
        Annotated[
            float,
            Key(
                "maximum seconds for sampling the responses of a step; ``step_s`` when absent.",
                ABOVE_0,
                follows="step_s",
            ),
        ]
    ]
    save_s: NotRequired[
        Annotated[
            float, Key("maximum seconds for writing a checkpoint or the export.", ABOVE_0, default=1800.0)
        ]
    ]
    load_s: NotRequired[
        Annotated[
            float,
            Key(
                "maximum seconds for reading a checkpoint; ``save_s`` when absent.", ABOVE_0, follows="save_s"
            ),
        ]
    ]
    refit_s: NotRequired[
        Annotated[
            float,
            Key(
                "maximum seconds for one stage of a refit, such as connecting or sending the weights; "
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
                "maximum seconds for one batch of a validation; ``step_s`` when absent.",
                ABOVE_0,
                follows="step_s",
            ),
        ]
    ]
    least_s: NotRequired[
        Annotated[
            float,
            Key(
                "minimum time limit of a phase that has been measured, unless the phase's own key is "
                "smaller. It is also the time without a reply after which hangs are looked for. A phase "
                "ends early if the process of a worker is suspended, or if no silent worker has made "
                "progress for three quarters of this time: neither a new position in the code nor any use "
                "of processor, files or disks, child processes included. Refits are exempt, because "
                "workers wait for engines in them. The run ends with exit code 4 if Ray's control process, "
                "or the raylet of the driver's node, is suspended or silent for 40 s, or for 0.7 of this "
                "time if that is less.",
                ABOVE_0,
                default=300.0,
            ),
        ]
    ]
    first_s: NotRequired[
        Annotated[
            float,
            Key(
                "time limit of a phase's first execution, in which workers compile and allocate, unless "
                "the phase's own key is smaller. Workers that replace others get ``multiple`` times the "
                "slowest first execution of this launch instead. It detects ranks that compute "
                "indefinitely in a first step, or wait for a GPU, which keeps a processor busy.",
                ABOVE_0,
                default=1800.0,
            ),
        ]
    ]
    multiple: NotRequired[
        Annotated[
            float,
            Key(
                "a phase may take this multiple of its slowest time among the last ten.",
                AT_LEAST_1,
                default=3.0,
            ),
        ]
    ]


class DebugConfig(TypedDict):
    """Debugging aids."""

    collectives: NotRequired[
        Annotated[
            bool,
            Key(
                "compare operation, shape, dtype and number of every collective over the ranks of its "
                "group before it begins, and name the ranks that differ; slow. Sends and receives between "
                "pipeline stages are not collectives and are not compared: one that does not match ends "
                "with the error of gloo or NCCL, or with the deadline of its phase, which names who waits.",
                default=False,
            ),
        ]
    ]


class ProfilerConfig(TypedDict):
    """Profiling of selected steps."""

    steps: NotRequired[
        Annotated[
            list[int] | None,
            Key(
                "steps to profile, ``[first, stop]``, counted from 1, ``stop`` excluded; null reads "
                "``first:stop`` from ``MEGARL_NSYS_PROFILE_STEP_RANGE``, and profiles nothing if that is "
                "not set.",
                default=None,
            ),
        ]
    ]
    nsys_workers: NotRequired[
        Annotated[
            str | None,
            Key(
                "names of workers that run under NVIDIA Nsight Systems, which records those steps, as "
                'patterns separated by commas (``"*policy*,*vllm*"``); null for '
                "``MEGARL_NSYS_WORKER_PATTERNS``, or none.",
                default=None,
            ),
        ]
    ]
    torch_ranks: NotRequired[
        Annotated[
            list[int],
            Key(
                "ranks of the policy that torch's profiler records in those steps, into ``profiles`` in "
                "the run's directory.",
                default=[],
            ),
        ]
    ]


class AlgorithmConfig(TypedDict):
    """Keys that a run reads from an algorithm's own section, if the section has them."""

    # These keys have no descriptions here, because each algorithm's own section has them.
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
    """A whole run."""

    algorithm: Annotated[
        str,
        Key(
            "`grpo`, `ppo`, `sft`, `dpo`, `rm`, `distillation`, or the import path of an algorithm, "
            "`path/to/file.py:Name`; its sections "
            "must be there."
        ),
    ]
    seed: Annotated[int, Key("seed of every random number of the run.", Range(low=0, high=2**63 - 1))]
    recipe: NotRequired[
        Annotated[
            str,
            Key(
                "name of the recipe or file that the run was started from; megarl train writes it, and a "
                "run keeps it."
            ),
        ]
    ]
    run_dir: NotRequired[
        Annotated[str, Key("directory of everything that the run writes; ``runs/<recipe>`` when absent.")]
    ]
    deadlines: NotRequired[Annotated[DeadlinesConfig, Key("time limits of the phases.")]]
    policy: Annotated[PolicyConfig, Key("the model and its backend.")]
    loss_fn: NotRequired[
        Annotated[
            ClippedPGLossConfig, Key("the loss of GRPO, PPO, and of distillation by a policy gradient.")
        ]
    ]
    data: Annotated[DataConfig, Key("the data sources, and how their records become prompts.")]
    env: NotRequired[
        Annotated[EnvConfig, Key("the rewards of GRPO and PPO; a distillation only measures them.")]
    ]
    checkpointing: NotRequired[
        Annotated[CheckpointingConfig, Key("when checkpoints are written, and which are kept.")]
    ]
    logger: NotRequired[Annotated[LoggerConfig, Key("sinks of metrics, and samples.")]]
    profiler: NotRequired[Annotated[ProfilerConfig, Key("profiling of selected steps.")]]
    debug: NotRequired[Annotated[DebugConfig, Key("debugging aids.")]]
    cluster: Annotated[ClusterConfig, Key("the number of nodes and ranks, and the device that they use.")]


Config = dict[str, Any]
"""A configuration in plain containers, as read from YAML."""
