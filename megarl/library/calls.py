"""The functions ``megarl.train``, ``megarl.eval`` and ``megarl.convert``."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megarl.config.algorithms import algorithm_class
from megarl.config.nested import at
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
    """Train a model, as ``megarl train`` does, and return its run.

    Args:
        algorithm: ``grpo``, a variant of it (``dapo``, ``gspo``, ``rloo``, ...), ``sft``, ``dpo`` or ``rm``;
            or a recipe, or the path of a configuration, whose values the other arguments replace.
        model: directory or hub id of a Hugging Face model, or a run, whose exported model is used.
        data: rows (dictionaries with prompt and answer), a ``datasets.Dataset``, a table of pandas or polars,
            the path of a file, the name of a set, or a data source as in a configuration. Rows are written
            into the run's directory.
        reward: a function of a response, whose parameter names select its inputs (README, "A custom reward");
            the name of a built-in reward; a list of these; or a dictionary of sections of ``env.rewards``,
            with weights. Functions run in other processes, so changes that they make outside of themselves
            are not visible here.
        validation: data like ``data``, to evaluate on during training.
        run_dir: directory of a run to start or to resume; None creates ``runs/ALGORITHM-MODEL-N``.
        backend: ``megatron``, ``dtensor`` or ``fsdp1``; a recipe has its own.
        progress: show what the command prints.
        overrides: any key of a configuration by its last part (``max_num_steps=20``, ``learning_rate=1e-5``),
            a section by a dictionary (``policy={"precision": "bfloat16"}``), or a whole key
            (``**{"policy.generation.top_k": 50}``).

    Raises:
        ConfigError: everything that is wrong with the arguments, in one list.
        KeyboardInterrupt: Ctrl-C, after the run has finished its step and written a checkpoint; the same call
            with its ``run_dir`` resumes the run.
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
) -> dict[str, Any]:
    """Sample and score responses of a model, as ``megarl eval`` does, and return the JSON result.

    Args:
        model: directory or hub id of a Hugging Face model, or a run.
        data: prompts with reference answers, in any form that ``train`` accepts.
        reward: as in ``train``.
        algorithm: ``grpo``, or a recipe whose generation settings are used.
        adapter: directory of a LoRA adapter (PEFT) that is merged into the model.
        backend: as in ``train``.
        progress: show what the command prints.
        overrides: as in ``train``; ``val_num_generations_per_prompt=8`` samples eight responses per prompt.

    Returns:
        ``metrics`` by the names that a run logs, and ``sets`` with all figures.

    Raises:
        ConfigError, KeyboardInterrupt, MegarlError: as in ``train``.
    """
    # The rows are read twice, as those of a generator cannot be.
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
            found: dict[str, Any] = json.loads(result.read_bytes())
            return found


def _refuse_keys_of_training(overrides: Mapping[str, Any]) -> None:
    """Refuse sampling settings of training steps, which an evaluation does not read."""
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
    """Convert a Hugging Face checkpoint to Megatron-Core, or a Megatron-Core checkpoint to Hugging Face, and
    return a summary.

    Args:
        source: a Hugging Face directory or hub id, or a Megatron checkpoint; a run stands for the model that
            it has exported.
        target: directory to create.
        progress: show what the command prints besides its result.
        options: options of ``megarl convert import`` or ``export``: ``dtype="bfloat16"``, ``overwrite=True``,
            ``hf_config=DIR``.

    Raises:
        ConfigError: an option or the source cannot be used.
        KeyboardInterrupt, MegarlError: as in ``train``.
    """
    from converters.opening import MEGATRON, kind_of

    path = Path(os.fspath(getattr(source, "model_dir", source))).expanduser()
    is_megatron = path.exists() and kind_of(path) == MEGATRON
    words = ["convert", "export" if is_megatron else "import", str(path), os.fspath(target), "--json"]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        # Several numbers form one value of the command. Each element of any other list gets its own flag.
        if isinstance(value, list | tuple) and value and all(isinstance(each, int) for each in value):
            value = ",".join(map(str, value))
        for each in value if isinstance(value, list | tuple) else [value]:
            if each is True:
                words.append(option)
            elif each is not None and each is not False:
                words += [option, str(each)]
    code, text = run_command(words, {}, shows=False, keeps_all=True)
    # Standard error uses the same pipe, so that its text may come before or after the one JSON object.
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
    overrides: Mapping[str, Any],
) -> Iterator[tuple[Call, Path]]:
    """Write the configuration of a call into the directory of its run, and yield both. A call that is refused
    leaves the directory as it was."""
    call = begin(algorithm, backend)
    name = "-".join(filter(None, [call.written["recipe"], _name_of_model(model)]))
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
        # The command writes its configuration into this directory as soon as it has accepted everything.
        if not is_ready or _identity(directory / CONFIG_FILE) == accepted:
            _restore([*call.made, *_files_of_call(directory)], earlier, made)
        raise


def _files_of_call(directory: Path) -> list[Path]:
    return [directory / name for name in (_CALL, _REWARDS, _DRAFT)]


def _identity(path: Path) -> tuple[int, int] | None:
    """Return a value that changes when a file is replaced; None if there is none."""
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns
    return None


def _restore(files: Sequence[Path], earlier: Mapping[Path, bytes], places: Sequence[Path]) -> None:
    """Undo what a call wrote: bring back the earlier contents of its files, and remove the other ones and
    the directories that it created. Whatever else is there belongs to other programs."""
    for path in files:
        with contextlib.suppress(OSError):
            if path not in earlier:
                path.unlink()
            elif path.read_bytes() != earlier[path]:
                path.write_bytes(earlier[path])
    for place in places:
        # A directory that contains somebody else's files stays.
        with contextlib.suppress(OSError):
            place.rmdir()


def _write(
    call: Call,
    algorithm: str,
    data: Mapping[str, Any],
    model: Any,
    reward: Any,
    directory: Path,
    backend: Backend,
    overrides: Mapping[str, Any],
) -> None:
    """Create the configuration of a call, check it, and write it with the data and the source of its rewards.

    Raises:
        ConfigError: the error lists everything that is wrong.
    """
    from megarl.cli import load_and_check
    from megarl.config.load import load_config_with_inheritance
    from megarl.data.columns import Kind

    path = directory / _DRAFT
    call.written["run_dir"] = str(directory)
    _dump(call.written, path)
    inherited = load_config_with_inheritance(path)
    kind = algorithm_class(str(inherited.get("algorithm", "grpo")))
    name = str(inherited.get("algorithm", "grpo"))
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
        # Fill in a name if the model was refused, so that the rest can be checked.
        call.default("policy.model_name", "absent")
        add_sizes(call, name, _rows_of(data["data"]))
    _dump(call.written, path)
    try:
        load_and_check(str(path), [])
    except ConfigError as error:
        if not error.violations:
            raise
        faulty = {fault.key.partition("[")[0] for fault in call.faults}
        # A refused argument is missing in the configuration, which must not be refused again for that.
        lacking = {
            "model": "policy.model_name",
            "data": "data.train",
            "validation": "data.validation",
            "reward": "env",
        }
        refused = tuple(key for argument, key in lacking.items() if argument in faulty)
        call.faults += [each for each in error.violations if not each.key.startswith(refused)]
    call.require()
    # Move the file only now, so that a refused call does not change an earlier call of the same run.
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
    """Return whether the call names a custom environment, whose steps return rewards."""
    named = at(call.written, "env.environment")
    return isinstance(named, str) and is_import_path(named)


def _rows_of(data: Any) -> int | None:
    return len(data) if hasattr(data, "__len__") and not isinstance(data, str | Mapping) else None


def _name_of_model(model: Any) -> str:
    if isinstance(model, Run):
        return model.directory.name
    return Path(os.fspath(model)).name if isinstance(model, str | os.PathLike) else ""


def _dump(written: Mapping[str, Any], path: Path) -> None:
    path.write_text(yaml.safe_dump(dict(written), sort_keys=False, allow_unicode=True), encoding="utf-8")
