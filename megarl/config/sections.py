"""The shape of a run's configuration: one TypedDict a section. The policy's own section is in
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
    checkpoint_dir: NotRequired[Annotated[str, Key("where; ``checkpoints`` in the run's directory when absent.")]]
    metric_name: NotRequired[
        Annotated[str | None, Key("metric that tells good checkpoints from bad; null keeps the newest.", default=None)]
    ]
    higher_is_better: NotRequired[Annotated[bool, Key("whether more of that metric is better.", default=True)]]
    save_period: NotRequired[Annotated[int, Key("steps between checkpoints.", AT_LEAST_1, default=10)]]
    keep_top_k: NotRequired[
        Annotated[int | None, Key("checkpoints to keep, the newest always among them; null keeps all.", AT_LEAST_1, default=None)]
    ]
    resume: NotRequired[
        Annotated[
            Literal["auto", "never"],
            Key(
                '"auto" goes on from the newest valid checkpoint, and refuses where there are some and none is valid; '
                '"never" starts over, unless a valid one is there, and keeps the rows of ``metrics.jsonl`` beside.',
                default="auto",
            ),
        ]
    ]
    accept_changes: NotRequired[
        Annotated[
            bool,
            Key(
                "go on from a checkpoint although data, seed, batch, model, learning rate or schedule are not those it was trained with. "
                "A changed schedule goes on at the checkpoint's step, counted from the run's beginning; the optimizer's state stays.",
                default=False,
            ),
        ]
    ]
    async_save: NotRequired[
        Annotated[
            bool,
            Key(
                "training goes on when a checkpoint lies in shared memory, what each rank has of it on its own node, from where a process "
                "of each node writes it; the last one, and one for which some node has not the memory, is written as without. The memory "
                "of a rank's tensors is kept from one checkpoint to the next.",
                default=False,
            ),
        ]
    ]
    max_failed_saves: NotRequired[
        Annotated[
            int,
            Key(
                "a checkpoint that cannot be written, for want of space or for an error of the storage, is removed with a warning, and the "
                "run goes on; so many in a row end it, and so does the last one of the run.",
                AT_LEAST_1,
                default=3,
            ),
        ]
    ]
    export_hf: NotRequired[Annotated[bool, Key("write the final weights as a Hugging Face model too.", default=False)]]
    signing_key_file: NotRequired[
        Annotated[
            str | None,
            Key(
                "file with a secret of 32 bytes or more, of mode 0600, by which checkpoints are signed; one without its signature, or with "
                "other bytes, is passed over like a damaged one. Keep it where those who can write to the checkpoints cannot read.",
                default=None,
            ),
        ]
    ]


class WandbConfig(TypedDict):
    """Weights & Biases."""

    project: Annotated[str, Key("the project.")]
    name: NotRequired[Annotated[str | None, Key("name of the run there; null lets the service choose one.")]]
    entity: NotRequired[Annotated[str | None, Key("team or user; null for the one that is logged in.")]]
    group: NotRequired[Annotated[str | None, Key("group of runs that belong together.")]]
    tags: NotRequired[Annotated[list[str] | None, Key("words to find the run by.")]]
    mode: NotRequired[Annotated[Literal["online", "offline"], Key('"offline" keeps the files here until ``wandb sync``.')]]


class MlflowConfig(TypedDict):
    """MLflow."""

    experiment_name: Annotated[str, Key("the experiment; made where the server has none of that name.")]
    run_name: NotRequired[Annotated[str | None, Key("name of the run there; null lets MLflow choose one.")]]
    tracking_uri: NotRequired[
        Annotated[str | None, Key("address of the server, or a local store; null for ``MLFLOW_TRACKING_URI``, else MLflow's own default.")]
    ]


class TrackioConfig(TypedDict):
    """Trackio."""

    project: Annotated[str, Key("the project.")]
    name: NotRequired[Annotated[str | None, Key("name of the run there, to which a random number is added.")]]
    group: NotRequired[Annotated[str | None, Key("group of runs that belong together.")]]
    space_id: NotRequired[Annotated[str | None, Key("Hugging Face Space that shows the runs; null keeps them on this machine.")]]


class TensorboardConfig(TypedDict):
    """TensorBoard."""

    log_dir: NotRequired[Annotated[str | None, Key("where; ``tensorboard`` in the logger's directory when absent or null.")]]


class SamplesConfig(TypedDict):
    """Prompts and answers that a run leaves for people to read, as ``samples/train_step_N.jsonl`` and
    ``samples/validation_step_N.jsonl`` in its directory; of algorithms that generate answers."""

    enabled: NotRequired[Annotated[bool, Key("write them.", default=True)]]
    num_train_samples: NotRequired[
        Annotated[int | None, Key("samples of a training step, the first ones; 0 for none, null for all.", AT_LEAST_0, default=32)]
    ]
    num_validation_samples: NotRequired[
        Annotated[int | None, Key("samples of each set of a validation, likewise.", AT_LEAST_0, default=64)]
    ]
    period: NotRequired[
        Annotated[
            int, Key("every how many training steps; the first one's are always written, and every validation's.", AT_LEAST_1, default=1)
        ]
    ]
    max_characters: NotRequired[
        Annotated[int, Key("of a prompt, an answer or a reference; longer ones lose their middle.", AT_LEAST_1, default=16384)]
    ]
    max_files: NotRequired[
        Annotated[
            int | None,
            Key(
                "files of training steps, and as many of validations; the oldest one and the newest ones stay, null keeps all.",
                Range(low=2),
                default=200,
            ),
        ]
    ]
    token_ids: NotRequired[Annotated[bool, Key("with the token ids of prompt and answer.", default=False)]]
    wandb_table: NotRequired[
        Annotated[
            bool, Key("send them to Weights & Biases too, as the tables ``samples/train`` and ``samples/validation``.", default=False)
        ]
    ]


class LoggerConfig(TypedDict):
    """Sinks of metrics besides ``metrics.jsonl``, which is always written, and the samples that are kept."""

    log_dir: NotRequired[
        Annotated[str, Key("where TensorBoard, Weights & Biases and sinks of your own put their files; the run's directory when absent.")]
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
                "import paths of classes that take every row of metrics too, ``path/to/file.py:Name`` or ``package.module:Name``, see "
                "`megarl.observe.sinks:Sink`."
            ),
        ]
    ]
    samples: NotRequired[Annotated[SamplesConfig, Key("prompts and answers for people to read.", default={})]]


class ClusterConfig(TypedDict):
    """The machines."""

    gpus_per_node: Annotated[int, Key("worker ranks a node, also where the ranks run on a CPU.", AT_LEAST_1)]
    num_nodes: Annotated[int, Key("nodes.", AT_LEAST_1)]
    device: NotRequired[
        Annotated[
            Literal["auto", "cpu", "cuda"],
            Key(
                'what the ranks run on; "auto" takes GPUs where Ray has some, else the CPU; in a job of Slurm, and beside GPUs that '
                "Ray does not have, it refuses to start on the CPU.",
                default="auto",
            ),
        ]
    ]
    device_memory_gib: NotRequired[
        Annotated[
            float | None,
            Key(
                "memory of a GPU in GiB, which the memory plan is held against before anything starts; null where nobody says: then "
                "nothing is refused but an engine whose weights have no room in its share of 80.",
                ABOVE_0,
                default=None,
            ),
        ]
    ]
    memory_check: NotRequired[
        Annotated[
            Literal["refuse", "warn"],
            Key(
                'what is done where weights, gradients and optimizer state of a rank alone are more than `device_memory_gib`: "refuse" '
                'or "warn". Where the rest of the plan has no room either, it is a warning.',
                default="refuse",
            ),
        ]
    ]
    max_restarts: NotRequired[
        Annotated[
            int | None,
            Key(
                "times that a launch builds all workers anew from the newest whole checkpoint, after one or its node was lost or hangs, "
                "before it ends with exit code 4; null for 3 in a job of Slurm, else 0.",
                AT_LEAST_0,
                default=None,
            ),
        ]
    ]
    max_engine_restarts: NotRequired[
        Annotated[
            int,
            Key(
                "times that a launch starts rollout engines anew that were killed or hang, refits them, and samples the step's answers "
                "again by the same seeds, before their loss ends it.",
                AT_LEAST_0,
                default=3,
            ),
        ]
    ]


class DeadlinesConfig(TypedDict):
    """Bounds in seconds for the phases of a run. A phase that takes longer ends the run with exit code 4, and
    with the stacks of the workers. A phase has ``multiple`` times the slowest of its last ten, at least
    ``least_s`` and at most its own key; the first time, of which nothing is measured, it has ``first_s``.
    Workers that are stopped, or that all stand still, are not given so long, see ``least_s``."""

    init_s: NotRequired[
        Annotated[
            float, Key("starting Ray and building all workers; reading a checkpoint has ``load_s`` besides.", ABOVE_0, default=1800.0)
        ]
    ]
    step_s: NotRequired[Annotated[float, Key("training on the batch of a step, and whatever is no other phase.", ABOVE_0, default=3600.0)]]
    logprobs_s: NotRequired[
        Annotated[float, Key("log-probabilities of the batch of a step; ``step_s`` when absent.", ABOVE_0, follows="step_s")]
    ]
    generate_s: NotRequired[Annotated[float, Key("sampling the responses of a step; ``step_s`` when absent.", ABOVE_0, follows="step_s")]]
    save_s: NotRequired[Annotated[float, Key("one checkpoint, or the export.", ABOVE_0, default=1800.0)]]
    load_s: NotRequired[Annotated[float, Key("reading a checkpoint; ``save_s`` when absent.", ABOVE_0, follows="save_s")]]
    refit_s: NotRequired[
        Annotated[float, Key("one part of handing the weights to the engines; ``step_s`` when absent.", ABOVE_0, follows="step_s")]
    ]
    validate_s: NotRequired[Annotated[float, Key("one batch of a validation; ``step_s`` when absent.", ABOVE_0, follows="step_s")]]
    least_s: NotRequired[
        Annotated[
            float,
            Key(
                "what a phase has at least once it was measured, unless its own key is less; and after so long without an answer a phase "
                "is given up, whatever it has left, where the process of a worker is stopped, or where all that do not answer have stood "
                "still for three quarters of it: at one place, without use of the processor, of files and of disks, their children too. "
                "Only a refit, in which they wait for engines, is not given up for standing still. Within it a run ends, with exit code 4, "
                "whose Ray (control process, or raylet of the driver's node) is stopped or silent.",
                ABOVE_0,
                default=300.0,
            ),
        ]
    ]
    first_s: NotRequired[
        Annotated[
            float,
            Key(
                "what the first time of a phase has, in which workers compile and allocate, unless its own key is less; where workers were "
                "built anew, ``multiple`` times the slowest first time before them in the launch instead, as for other times. It is what "
                "finds ranks in a first step that compute for ever, or wait for a GPU, which keeps a processor busy.",
                ABOVE_0,
                default=1800.0,
            ),
        ]
    ]
    multiple: NotRequired[Annotated[float, Key("of the slowest of the last ten of a phase.", AT_LEAST_1, default=3.0)]]


class DebugConfig(TypedDict):
    """Means to find a fault of the program."""

    collectives: NotRequired[
        Annotated[
            bool,
            Key(
                "compare operation, shape, dtype and number of every collective over the ranks of its group before it begins, and name the "
                "ranks that differ; slow. Sends and receives between pipeline stages are no collectives, and are not compared: one that "
                "does not match ends with the error of gloo or NCCL, or with the deadline of its phase, which says who waits.",
                default=False,
            ),
        ]
    ]


class ProfilerConfig(TypedDict):
    """Profiles of some steps."""

    steps: NotRequired[
        Annotated[
            list[int] | None,
            Key(
                "which, ``[first, stop]``, counted from 1, without ``stop``; null for what "
                "``MEGARL_NSYS_PROFILE_STEP_RANGE`` (``first:stop``) says, or none.",
                default=None,
            ),
        ]
    ]
    nsys_workers: NotRequired[
        Annotated[
            str | None,
            Key(
                "names of workers that run under NVIDIA Nsight Systems, patterns with commas between "
                '(``"*policy*,*vllm*"``), which record those steps; null for ``MEGARL_NSYS_WORKER_PATTERNS``, or none.',
                default=None,
            ),
        ]
    ]
    torch_ranks: NotRequired[
        Annotated[
            list[int],
            Key("ranks of the policy whose steps torch's profiler records, into ``profiles`` of the run's directory.", default=[]),
        ]
    ]


class AlgorithmConfig(TypedDict):
    """Keys of an algorithm's own section that a run heeds, as far as the section has them."""

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
            "`grpo`, `ppo`, `sft`, `dpo`, `rm`, `distillation`, or the import path of an algorithm, `path/to/file.py:Name`; its sections "
            "must be there."
        ),
    ]
    seed: Annotated[int, Key("every random number of the run is drawn from it.", Range(low=0, high=2**63 - 1))]
    recipe: NotRequired[
        Annotated[str, Key("name of the recipe or file that the run was started from; megarl train writes it, and a run keeps it.")]
    ]
    run_dir: NotRequired[Annotated[str, Key("where everything the run leaves goes; ``runs/<recipe>`` when absent.")]]
    deadlines: NotRequired[Annotated[DeadlinesConfig, Key("how long a phase may take.")]]
    policy: Annotated[PolicyConfig, Key("the model and its backend.")]
    loss_fn: NotRequired[Annotated[ClippedPGLossConfig, Key("the loss of GRPO, PPO, and of distillation by a policy gradient.")]]
    data: Annotated[DataConfig, Key("the data.")]
    env: NotRequired[Annotated[EnvConfig, Key("the rewards of GRPO and PPO, which distillation only measures.")]]
    checkpointing: NotRequired[Annotated[CheckpointingConfig, Key("checkpoints.")]]
    logger: NotRequired[Annotated[LoggerConfig, Key("where metrics go.")]]
    profiler: NotRequired[Annotated[ProfilerConfig, Key("profiles of some steps.")]]
    debug: NotRequired[Annotated[DebugConfig, Key("means to find a fault of the program.")]]
    cluster: Annotated[ClusterConfig, Key("the machines.")]


Config = dict[str, Any]
"""A configuration as plain containers, the way it comes from YAML."""
