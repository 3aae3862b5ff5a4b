"""Implementation of ``megarl.train``, ``megarl.eval`` and ``megarl.convert``."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from megarl.config.algorithms import algorithm_class
from megarl.config.nested import at
from megarl.config.sections import Config
from megarl.config.validation_sets import instead_in_evaluation
from megarl.errors import ConfigError, Violation
from megarl.import_path import is_import_path
from megarl.library.arguments import (
    Backend,
    Call,
    add_data,
    add_model,
    add_overrides,
    add_rewards,
    add_sizes,
    begin,
    is_of_base,
    require_parameters_in_data,
)
from megarl.library.process import STOPPED, error_of, run_command, show
from megarl.library.run import Run, new_directory
from megarl.watch.configured import CONFIG_FILE

if TYPE_CHECKING:
    from megarl.run.evaluate import EvaluationResult

_CALL, _REWARDS, _DATA, _DRAFT = "call.yaml", "rewards.py", "data", ".call.yaml.tmp.yaml"


def train(
    algorithm: str,
    model: Any = None,
    data: Any = None,
    reward: Any = None,
    *,
    validation: Any = None,
    run_dir: str | os.PathLike[str] | None = None,
    backend: Backend = "megatron",
    progress: bool = True,
    **overrides: Any,
) -> Run:
    """Train a model as ``megarl train`` does, wait for the end, and return the run.

    Args:
        algorithm: ``grpo``, a variant of it (``dapo``, ``gspo``, ``rloo``, ...), ``sft``, ``dpo`` or ``rm``.
            A recipe or the path of a configuration file is accepted too; the other arguments override its
            values.
        model: directory or hub id of a Hugging Face model, or a run whose exported model is the start.
        data: a list of rows (dictionaries with prompt and answer), a ``datasets.Dataset``, a pandas or polars
            table, the path of a file, the name of a data set, or a data source in the configuration's form.
            Rows and tables are saved in the run directory.
        reward: a function that scores responses; its parameter names select its inputs (README, "A custom
            reward"). Also the name of a built-in reward, a list of these, or a dictionary of ``env.rewards``
            sections, which can have weights. Functions run in other processes, so the caller does not see
            changes that they make to global state.
        validation: data for evaluations during training, in the same forms as ``data``.
        run_dir: directory of the run; if it contains a run, the run is resumed. None creates
            ``runs/ALGORITHM-MODEL-N``.
        backend: ``megatron``, ``dtensor`` or ``fsdp1``; ignored for a recipe, which sets its own.
        progress: show the command's output.
        overrides: values of configuration keys. A key is named by its last part (``max_num_steps=20``,
            ``learning_rate=1e-5``), by its section (``policy={"precision": "bfloat16"}``), or in full
            (``**{"policy.generation.top_k": 50}``).

    Raises:
        ConfigError: arguments are invalid; the message lists all faults.
        KeyboardInterrupt: Ctrl-C. The run first finishes its step and writes a checkpoint. Call again with
            the same ``run_dir`` to resume.
        MegarlError: the run failed.
    """
    with _prepared(algorithm, model, data, reward, validation, run_dir, backend, overrides) as (
        call,
        directory,
    ):
        words = ["train", str(directory / _CALL)]
        try:
            code, text = run_command(words, call.given, shows=progress)
        except KeyboardInterrupt as error:
            error.add_note(
                f"the same call with run_dir={str(directory)!r} resumes from the checkpoint; "
                f"megarl.Run({str(directory)!r}) reads the run"
            )
            raise
        if code not in (0, STOPPED):
            raise error_of(code, call.in_arguments(text))
        return Run(directory)


def evaluate(
    model: Any,
    data: Any,
    reward: Any = None,
    *,
    algorithm: str = "grpo",
    adapter: str | os.PathLike[str] | None = None,
    backend: Backend = "megatron",
    progress: bool = True,
    **overrides: Any,
) -> EvaluationResult:
    """Sample and score responses of a model as ``megarl eval`` does, and return the contents of its JSON
    result.

    Args:
        model: directory or hub id of a Hugging Face model, or a run.
        data: prompts with reference answers, in any form that ``train`` accepts.
        reward: scores the responses, in any form that ``train`` accepts.
        algorithm: ``grpo``, or a recipe whose generation settings are used.
        adapter: directory of a LoRA adapter (PEFT) to merge into the model.
        backend: see ``train``.
        progress: show the command's output.
        overrides: see ``train``; ``val_num_generations_per_prompt=8`` samples eight responses per prompt.

    Returns:
        A dictionary with ``metrics`` (names as a run logs them) and ``sets`` (all metrics of each data set).

    Raises:
        ConfigError, KeyboardInterrupt, MegarlError: as in ``train``.
    """
    # The rows are read twice, as training and as validation data, but an iterator can be read only once.
    data = list(data) if isinstance(data, Iterator) else data
    _refuse_keys_of_training(overrides)
    with tempfile.TemporaryDirectory(prefix="megarl-eval-") as place:
        prepared = _prepared(algorithm, model, data, reward, data, Path(place) / "eval", backend, overrides)
        with prepared as (call, directory):
            result = directory / "result.json"
            words = ["eval", str(directory / _CALL), "--json", str(result)]
            words += [] if adapter is None else ["--adapter", os.fspath(adapter)]
            code, text = run_command(words, call.given, shows=progress)
            if code:
                raise error_of(code, call.in_arguments(text))
            return json.loads(result.read_bytes())


def _refuse_keys_of_training(overrides: Mapping[str, object]) -> None:
    """Reject overrides of training-only sampling settings, which an evaluation would ignore."""
    refused = []
    for name in overrides:
        instead = instead_in_evaluation(name)
        if instead is not None:
            bound = "it applies to training steps, and an evaluation does not read it"
            refused.append(Violation(name, overrides[name], bound, f"write {instead}"))
    if refused:
        raise ConfigError(refused)


def convert(
    source: Any, target: str | os.PathLike[str], *, progress: bool = True, **options: Any
) -> dict[str, Any]:
    """Convert a Hugging Face checkpoint to Megatron-Core or back; the source's format decides the direction.

    Args:
        source: a Hugging Face directory or hub id, a Megatron checkpoint, or a run whose exported model is
            converted.
        target: directory to create.
        progress: print one summary line at the end.
        options: options of ``megarl convert import`` or ``export``: ``dtype="bfloat16"``, ``overwrite=True``,
            ``hf_config=DIR``.

    Returns:
        The command's JSON summary: ``target``, ``family``, ``tensors``, ``bytes``, ``seconds``, ...

    Raises:
        ConfigError: an option or the source is invalid.
        KeyboardInterrupt, MegarlError: as in ``train``.
    """
    from converters.opening import MEGATRON, kind_of

    path = Path(os.fspath(getattr(source, "model_dir", source))).expanduser()
    is_megatron = path.exists() and kind_of(path) == MEGATRON
    words = ["convert", "export" if is_megatron else "import", str(path), os.fspath(target), "--json"]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        # A list of numbers is one comma-separated value of an option. Any other list repeats the option.
        if isinstance(value, list | tuple) and value and all(isinstance(each, int) for each in value):
            value = ",".join(map(str, value))
        for each in value if isinstance(value, list | tuple) else [value]:
            if each is True:
                words.append(option)
            elif each is not None and each is not False:
                words += [option, str(each)]
    code, text = run_command(words, {}, shows=False, keeps_all=True)
    # Standard error shares the pipe, so other text may precede or follow the JSON object.
    begins = f"\n{text}".find("\n{")
    if code not in (0, 1) or begins < 0:
        raise error_of(code, text)
    found: dict[str, Any] = json.JSONDecoder().raw_decode(text, begins)[0]
    if progress:
        show(
            f"{found['target']}: {found['family']}, {found['tensors']} tensors, {found['bytes']:,} bytes in "
            f"{found['seconds']} s"
        )
    return found


@contextlib.contextmanager
def _prepared(
    algorithm: str,
    model: Any,
    data: Any,
    reward: Any,
    validation: Any,
    run_dir: str | os.PathLike[str] | None,
    backend: Backend,
    overrides: Mapping[str, object],
) -> Iterator[tuple[Call, Path]]:
    """Write the configuration of a call into its run directory, and yield both. If the call is rejected, the
    directory is restored to its earlier contents."""
    call = begin(algorithm, backend)
    name = "-".join(filter(None, [call.written["recipe"], _name_of_model(model)]))
    if run_dir is not None and Path(run_dir).is_file():
        raise ConfigError([Violation("run_dir", str(run_dir), "it is a file", "give a directory")])
    directory = new_directory(name) if run_dir is None else Path(run_dir)
    made = [place for place in (directory / _DATA, directory, *directory.parents) if not place.exists()]
    made += [directory] if run_dir is None else []
    earlier = {path: path.read_bytes() for path in _files_of_call(directory) if path.is_file()}
    accepted = _identity(directory / CONFIG_FILE)
    is_ready = False
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _write(
            call,
            algorithm,
            {"data": data, "validation": validation},
            model,
            reward,
            directory,
            backend,
            overrides,
        )
        is_ready = True
        yield call, directory
    except BaseException:
        # The command writes ``config.yaml`` once it has accepted the configuration. From then on the files
        # belong to a run and must stay.
        if not is_ready or _identity(directory / CONFIG_FILE) == accepted:
            _restore([*call.made, *_files_of_call(directory)], earlier, made)
        raise


def _files_of_call(directory: Path) -> list[Path]:
    return [directory / name for name in (_CALL, _REWARDS, _DRAFT)]


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the inode and modification time of a file, which change when it is replaced; None if it does not
    exist."""
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns
    return None


def _restore(files: Sequence[Path], earlier: Mapping[Path, bytes], places: Sequence[Path]) -> None:
    """Undo what a rejected call wrote: restore the earlier contents of its files, delete the new ones, and
    remove the directories that it created.

    Args:
        files: files that the call may have written.
        earlier: contents that existed before the call, by file.
        places: directories that the call may have created, innermost first.
    """
    for path in files:
        with contextlib.suppress(OSError):
            if path not in earlier:
                path.unlink()
            elif path.read_bytes() != earlier[path]:
                path.write_bytes(earlier[path])
    for place in places:
        # ``rmdir`` fails if the directory contains other files, which must stay.
        with contextlib.suppress(OSError):
            place.rmdir()


def _write(
    call: Call,
    algorithm: str,
    data: Mapping[str, object],
    model: Any,
    reward: Any,
    directory: Path,
    backend: Backend,
    overrides: Mapping[str, object],
) -> None:
    """Build and check the configuration of a call. Write it with the data and the source of the reward
    functions. Raises ConfigError with all faults of the arguments and the configuration."""
    from megarl.cli import load_and_check
    from megarl.config.load import load_config_with_inheritance
    from megarl.data.columns import Kind

    path = directory / _DRAFT
    call.written["run_dir"] = str(directory)
    _dump(call.written, path)
    inherited = load_config_with_inheritance(path)
    name = str(inherited.get("algorithm", "grpo"))
    kind = algorithm_class(name)
    add_overrides(call, name, inherited, overrides)
    is_base = is_of_base(call)
    if model is not None:
        add_model(call, model)
    elif is_base:
        call.faults.append(
            Violation("model", None, "there is nothing to train", "give a directory or a hub id")
        )
    if reward is not None and not kind.GENERATES:
        call.faults.append(
            Violation("reward", reward, f"{name} samples no responses to reward", "leave it out")
        )
    elif reward is not None:
        add_rewards(call, reward)
    elif is_base and kind.GENERATES and at(call.written, "env.reward") is None and not _rewards_itself(call):
        call.faults.append(
            Violation(
                "reward",
                None,
                "nothing would score the responses",
                "give a function or a name such as 'math'",
            )
        )
    wanted = Kind.PAIRS if kind.PAIRS else Kind.REFERENCES if kind.GENERATES else Kind.ANSWERS
    add_data(call, data, directory / _DATA, wanted, overrides)
    if data["data"] is None and is_base:
        call.faults.append(
            Violation(
                "data",
                None,
                "there is nothing to learn from",
                'give rows such as {"prompt": "2+2=", "answer": "4"}',
            )
        )
    require_parameters_in_data(call)
    if is_base:
        # Use a dummy name if the model was rejected, so that the rest can still be checked.
        call.default("policy.model_name", "absent")
        add_sizes(call, name, _rows_of(data["data"]))
    _dump(call.written, path)
    try:
        load_and_check(str(path), [])
    except ConfigError as error:
        if not error.violations:
            raise
        faulty = {fault.key.partition("[")[0] for fault in call.faults}
        # A rejected argument was not written, so the check reports its key as missing. Drop that second
        # error.
        lacking = {
            "model": "policy.model_name",
            "data": "data.train",
            "validation": "data.validation",
            "reward": "env",
        }
        refused = tuple(key for argument, key in lacking.items() if argument in faulty)
        call.faults += [each for each in error.violations if not each.key.startswith(refused)]
    call.require()
    # Replace the file only now, so that a rejected call leaves the run's earlier ``call.yaml`` unchanged.
    path.replace(directory / _CALL)
    if call.sources:
        text = (
            "# Reward functions of the call that started this run, to be read: the run itself was sent "
            "them as objects.\n\n"
        )
        (directory / _REWARDS).write_text(
            text + "\n\n".join(f"# {key}\n{source}" for key, source in call.sources.items()), encoding="utf-8"
        )


def _rewards_itself(call: Call) -> bool:
    """Return whether the call names a custom environment, which computes the rewards itself."""
    named = at(call.written, "env.environment")
    return isinstance(named, str) and is_import_path(named)


def _rows_of(data: Any) -> int | None:
    return len(data) if hasattr(data, "__len__") and not isinstance(data, str | Mapping) else None


def _name_of_model(model: Any) -> str:
    if isinstance(model, Run):
        return model.directory.name
    return Path(os.fspath(model)).name if isinstance(model, str | os.PathLike) else ""


def _dump(written: Config, path: Path) -> None:
    path.write_text(yaml.safe_dump(written, sort_keys=False, allow_unicode=True), encoding="utf-8")
