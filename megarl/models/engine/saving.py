"""The files of a worker: checkpoints, exports in Hugging Face format, and what both have next to weights."""

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
    """Write the files of the model that is trained, changed only where the training made another model.

    They keep their form: transformers 4 would read a config that transformers 5 has written without its
    ``rope_theta``, and compute something else.

    Args:
        model: directory of the model, of which all files but the weights are copied.
        directory: directory to write into.
        dtype: dtype of the weights.
        hf_config: config of the trained model; read for one that scores.
        tokenizer: tokenizer of the run; None keeps the model's.
        scores: whether the trained model scores.
    """
    copy_artifacts(model, directory)
    published = read_config(directory)
    changes = said_of_scoring(hf_config) if scores else {}
    family = FAMILIES.get(published.get("model_type", ""))
    # Serving engines choose the class by this entry.
    if not published.get("architectures") and family is not None:
        changes = {"architectures": [family.architecture_class], **changes}
    write_config(directory, dtype, changes)
    generation_config = directory / "generation_config.json"
    if scores:
        # A model that scores generates nothing.
        generation_config.unlink(missing_ok=True)
    if tokenizer is None:
        return
    write_tokenizer(tokenizer, directory, scores=scores)
    settings = None if scores else generation_config_of(tokenizer, str(model))
    if settings is not None:
        generation_config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


class SavingWorker(WorkerState):
    """Methods by which a worker writes and reads checkpoints and exports."""

    @functools.cached_property
    def _model_files(self) -> dict[Path, bytes]:
        """Content of the files of the model but its weights, by path, with the tokenizer of the run."""
        model, dtype = self.backend.untouched.directory, dtype_of(self.cfg["precision"], "policy.precision")
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            write_model_files(model, directory, dtype, self.hf_config, self.tokenizer, scores=self.scores)
            files = filter(Path.is_file, directory.rglob("*"))
            return {path.relative_to(directory): path.read_bytes() for path in files}

    def _keep_model_files(self) -> None:
        """Read the files of the model on rank 0, whose directory may be gone, or hold another, at a save."""
        if dist.get_rank() == 0:
            try:
                self._model_files  # noqa: B018 - it is kept
            # Code of a tokenizer raises anything. A run may need no save, and a save says it again.
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
        """Write the weights, and with ``optimizer_path`` also optimizer state, schedule and random-number
        states.

        Each path is a directory that appears only when complete. Only rank 0 writes the tokenizer.

        Raises:
            CheckpointError: a directory exists already, or cannot be written.
            NonFiniteError: a weight is NaN or infinite.
            StateError: the call is inside ``use_reference_model()``, the parameters are in host memory, a
                load has failed, or there is no tokenizer to write.
        """
        self._refuse_reference("save_checkpoint")
        self._require("save_checkpoint", remedy="prepare_for_training")
        if tokenizer_path and self.tokenizer is None:
            raise StateError(
                f"tokenizer_path = {tokenizer_path!r}: this worker was built without a tokenizer; leave the "
                "path out"
            )
        # Check before anything is written: otherwise NaN in a checkpoint would only be noticed at the next
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
        """Load what ``save_checkpoint`` wrote, from any parallel layout, even on a worker that is in use.

        If there is no checkpoint, nothing changes. After any other error the weights may be a mixture, and
        every use of the weights is refused until a load succeeds.

        Raises:
            CheckpointError: a directory is missing on the host of any rank, or holds another model or weights
                that are not finite.
            StateError: the call is inside ``use_reference_model()``, or the parameters are in host memory.
        """
        self._refuse_reference("load_checkpoint")
        self.offload_states.require("parameters", "load_checkpoint", "prepare_for_training")
        weights, optimizer = Path(weights_path), Path(optimizer_path) if optimizer_path else None
        # Check before the version is incremented: if there is no checkpoint, nothing has changed.
        self._require_loadable(weights, optimizer)
        # Increment the version before the load: a load that ends in an error may have changed weights.
        self._weights_version += 1
        self._unfinished_load = " with ".join(map(str, filter(None, (weights, optimizer))))
        self.backend.load(weights, optimizer)
        self._require_finite_weights(
            f"load_checkpoint({str(weights_path)!r}): the checkpoint cannot be used", CheckpointError
        )
        self._unfinished_load = None  # Every rank has reached that collective, so that no load has failed.

    def _require_loadable(self, weights: Path, optimizer: Path | None) -> None:
        """Raise on all ranks if one of them cannot begin the load."""
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
        """Write the present weights as a Hugging Face checkpoint (safetensors, and the files of
        ``write_model_files``), whose directory appears only when complete.

        Adapters are merged into the weights, and also written alone, in PEFT's format, to the checkpoint's
        subdirectory ``adapter``. A vision tower and a layer for multi-token prediction are copied from the
        model's own directory.

        Raises:
            ConversionError: ``path`` exists already; raised on rank 0.
            CheckpointError: rank 0 could not write; raised on the other ranks.
            NonFiniteError: a weight is NaN or infinite.
        """
        self._require("export_hf")
        self._require_finite_weights(f"export_hf({path!r}): nothing was written", NonFiniteError)
        # Gather the adapters before the weights: a collective must not run in the middle of another stream.
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
                # The other ranks consume the stream for its collectives, even if rank 0 failed.
                drain(stream)

    def _writer_beside(self) -> Callable[[Path, torch.dtype], None]:
        """Return a function that adds to an export's directory, after weights of a dtype, the files of the
        model, and the adapters, which are gathered on the first rank."""
        found = self.backend.export_adapters()
        config, factors = ({}, ()) if found is None else found
        gathered = {name: tensor.cpu() for name, tensor in factors if dist.get_rank() == 0}

        def write(directory: Path, dtype: torch.dtype) -> None:
            self.write_model_files(directory, dtype)
            if found is not None:
                write_peft(directory / ADAPTER_DIRECTORY, config, gathered)

        return write

    def write_model_files(self, directory: Path, dtype: torch.dtype) -> None:
        """Write the files of the model but its weights, as they were when the worker began, with the
        tokenizer of the run. Local."""
        for path, content in self._model_files.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_bytes(content)
        write_config(directory, dtype)

    @property
    def hf_config(self) -> Any:
        """The Hugging Face config that an export contains."""
        return self.backend.hf_config
