"""A worker's files: checkpoints, exports in Hugging Face format, and the files next to the weights of
both."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from converters.checkpoint.artifacts import copy_artifacts, read_config, write_config
from converters.checkpoint.writer import write_hf
from converters.families import FAMILIES
from megarl.data.stop_tokens import generation_config_of
from megarl.data.tokenization import as_published, write_tokenizer
from megarl.errors import (
    CheckpointError,
    NonFiniteError,
    StateError,
)
from megarl.models.engine.adapters import ADAPTER_DIRECTORY, write_peft
from megarl.models.engine.groups import on_first_rank
from megarl.models.engine.nonfinite import on_all_ranks
from megarl.models.engine.precision import dtype_of
from megarl.models.engine.scoring import said_of_scoring
from megarl.models.engine.worker_state import WorkerState
from megarl.weight_sync.manifest import drain

logger = logging.getLogger(__name__)


def write_model_files(
    model: Path, directory: Path, dtype: torch.dtype, hf_config: Any, tokenizer: Any, *, scores: bool
) -> None:
    """Copy the files of the base model next to trained weights, with only the changes that training requires.

    The files must keep their form. For example, transformers 4 would read a config written by transformers 5
    without its ``rope_theta``, and compute different results.

    Args:
        model: directory of the base model; all its files except the weights are copied.
        directory: directory to write into.
        dtype: dtype of the weights.
        hf_config: config of the trained model; used only for a reward or value model.
        tokenizer: tokenizer of the run; None keeps the base model's.
        scores: the trained model is a reward or value model.
    """
    copy_artifacts(model, directory)
    published = read_config(directory)
    changes = said_of_scoring(hf_config) if scores else {}
    family = FAMILIES.get(published.get("model_type", ""))
    # Serving engines select the model class by this entry, so add it if the base model lacks it.
    if not published.get("architectures") and family is not None:
        changes = {"architectures": [family.architecture_class], **changes}
    write_config(directory, dtype, changes)
    generation_config = directory / "generation_config.json"
    if scores:
        # A reward or value model does not generate.
        generation_config.unlink(missing_ok=True)
    if tokenizer is None:
        return
    write_tokenizer(tokenizer, directory, scores=scores)
    settings = None if scores else generation_config_of(tokenizer, str(model))
    if settings is not None:
        generation_config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


class SavingWorker(WorkerState):
    """Worker methods that write and read checkpoints and exports."""

    @functools.cached_property
    def _model_files(self) -> dict[Path, bytes]:
        """Content of the files next to the weights, by path, with the run's tokenizer."""
        model, dtype = self.backend.untouched.directory, dtype_of(self.cfg["precision"], "policy.precision")
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            write_model_files(model, directory, dtype, self.hf_config, self.tokenizer, scores=self.scores)
            files = filter(Path.is_file, directory.rglob("*"))
            return {path.relative_to(directory): path.read_bytes() for path in files}

    def _keep_model_files(self) -> None:
        """Read the base model's files on rank 0 at the start. Until the first save, the directory may be
        deleted or replaced."""
        if dist.get_rank() == 0:
            try:
                self._model_files  # noqa: B018 - it is kept
            # A tokenizer's own code may raise any exception. Only warn, because the run may never save; a
            # save raises the error again.
            except Exception as error:
                logger.warning(
                    "%s: the files next to its weights cannot be read, and so no checkpoint or export can be "
                    "written: %s: %s. Correct them before the first save, which reads them again",
                    self.cfg["model_name"],
                    type(error).__name__,
                    error,
                )

    def save_checkpoint(
        self, weights_path: str, optimizer_path: str | None = None, tokenizer_path: str | None = None
    ) -> None:
        """Write the weights and, with ``optimizer_path``, optimizer state, schedule and random-generator
        states.

        Each path is a directory that is created only when its content is complete. Only rank 0 writes the
        tokenizer.

        Raises:
            CheckpointError: a directory exists already, or cannot be written.
            NonFiniteError: a weight is NaN or infinite.
            StateError: the call is inside ``use_reference_model()``, the parameters are in host memory, an
                earlier load failed, or there is no tokenizer to write.
        """
        self._refuse_reference("save_checkpoint")
        self._require("save_checkpoint", remedy="prepare_for_training")
        if tokenizer_path and self.tokenizer is None:
            raise StateError(
                f"tokenizer_path = {tokenizer_path!r}: this worker was built without a tokenizer; leave the "
                "path out"
            )
        # Check before anything is written. Otherwise NaN in a checkpoint would be noticed only at the next
        # resume.
        self._require_finite_weights(
            f"save_checkpoint({weights_path!r}): nothing was written", NonFiniteError
        )
        optimizer = Path(optimizer_path) if optimizer_path else None
        self.backend.save(Path(weights_path), optimizer, self.write_model_files)
        with on_first_rank() as first:
            if first and tokenizer_path:
                try:
                    as_published(self.tokenizer, scores=self.scores).save_pretrained(tokenizer_path)
                except OSError as error:
                    raise CheckpointError(
                        f"the tokenizer cannot be written to {tokenizer_path}: {error}"
                    ) from error

    def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """Load a checkpoint of ``save_checkpoint``, written with any parallel layout, into the running
        worker.

        If there is no checkpoint, nothing changes. After any other error, the weights may be a mixture of old
        and new ones, and all methods that use them raise StateError until a load succeeds.

        Raises:
            CheckpointError: a directory is missing on the host of some rank, or contains another model or
                weights that are not finite.
            StateError: the call is inside ``use_reference_model()``, or the parameters are in host memory.
        """
        self._refuse_reference("load_checkpoint")
        self.offload_states.require("parameters", "load_checkpoint", "prepare_for_training")
        weights, optimizer = Path(weights_path), Path(optimizer_path) if optimizer_path else None
        # Check before incrementing the version: if there is no checkpoint, nothing changes.
        self._require_loadable(weights, optimizer)
        # Increment the version before the load, because a load that fails may have changed some weights.
        self._weights_version += 1
        self._unfinished_load = " with ".join(map(str, filter(None, (weights, optimizer))))
        self.backend.load(weights, optimizer)
        self._require_finite_weights(
            f"load_checkpoint({str(weights_path)!r}): the checkpoint cannot be used", CheckpointError
        )
        self._unfinished_load = None  # Every rank has reached that collective, so that no load has failed.

    def _require_loadable(self, weights: Path, optimizer: Path | None) -> None:
        """Raise on all ranks if any rank cannot start the load."""
        failure: Exception | None = None
        try:
            self.backend.require_loadable(weights, optimizer)
        except Exception as error:
            failure = error
        if not on_all_ranks(failure is None, self.runtime.device):
            elsewhere = (
                f"load_checkpoint({str(weights)!r}): another rank cannot load it, see its own "
                "error; nothing was changed. "
            )
            raise failure or CheckpointError(f"{elsewhere}Fix: give a path that all hosts see")

    def export_hf(self, path: str) -> None:
        """Write the current weights as a Hugging Face checkpoint: safetensors, and the files of
        ``write_model_files``. The directory is created only when its content is complete.

        Adapters are merged into the weights, and are also written separately in PEFT's format, to the
        subdirectory ``adapter``. A vision tower and a multi-token-prediction layer are copied from the base
        model's directory.

        Raises:
            ConversionError: ``path`` exists already; raised on rank 0.
            CheckpointError: rank 0 could not write; raised on the other ranks.
            NonFiniteError: a weight is NaN or infinite.
        """
        self._require("export_hf")
        self._require_finite_weights(f"export_hf({path!r}): nothing was written", NonFiniteError)
        # Gather the adapters before the weights, because no other collective may run while the stream of
        # weights does.
        beside, untouched = self._writer_beside(), self.backend.untouched
        stream = self.backend.export_hf()
        with on_first_rank() as first:
            try:
                if first:
                    weights = itertools.chain(
                        ((name, tensor.cpu()) for name, tensor in stream), untouched.tensors()
                    )
                    write_hf(weights, Path(path), beside)
            finally:
                # All ranks must run the collectives of the whole stream, even if rank 0 failed.
                drain(stream)

    def _writer_beside(self) -> Callable[[Path, torch.dtype], None]:
        """Gather the adapters on the first rank. Return a function that writes them and the model's files
        into the directory of an export, given the dtype of its weights."""
        found = self.backend.export_adapters()
        factors = () if found is None else found[1]
        gathered = {name: tensor.cpu() for name, tensor in factors if dist.get_rank() == 0}

        def write(directory: Path, dtype: torch.dtype) -> None:
            self.write_model_files(directory, dtype)
            if found is not None:
                write_peft(directory / ADAPTER_DIRECTORY, found[0], gathered)

        return write

    def write_model_files(self, directory: Path, dtype: torch.dtype) -> None:
        """Write the base model's files except its weights, as they were when the worker started, with the
        run's tokenizer. Local."""
        for path, content in self._model_files.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_bytes(content)
        # The stored config names the training dtype, but the weights may be written in another one.
        write_config(directory, dtype)

    @property
    def hf_config(self) -> Any:
        """The Hugging Face config that an export contains."""
        return self.backend.hf_config
