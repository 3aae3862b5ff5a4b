"""The files of a worker: checkpoints, and exports in Hugging Face format."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from converters.checkpoint.writer import write_hf
from megarl.data.stop_tokens import generation_config_of
from megarl.data.tokenization import as_published
from megarl.errors import (
    CheckpointError,
    NonFiniteError,
    StateError,
)
from megarl.models.engine.adapters import ADAPTER_DIRECTORY, write_peft
from megarl.models.engine.groups import on_first_rank
from megarl.models.engine.nonfinite import on_all_ranks
from megarl.models.engine.worker_state import WorkerState
from megarl.weight_sync.manifest import drain


class SavingWorker(WorkerState):
    """Methods by which a worker writes and reads checkpoints and exports."""

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
        self.backend.save(Path(weights_path), Path(optimizer_path) if optimizer_path else None)
        with on_first_rank() as first:
            if first and tokenizer_path:
                try:
                    as_published(self.tokenizer).save_pretrained(tokenizer_path)
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
        self._unfinished_load = " with ".join(str(path) for path in (weights, optimizer) if path is not None)
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
        """Write the present weights as a Hugging Face checkpoint (safetensors, config, tokenizer), whose
        directory appears only when complete.

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
                    # A model that scores generates nothing, so that it gets no generation config.
                    generates = self.tokenizer is not None and not self.scores
                    settings = (
                        generation_config_of(self.tokenizer, self.cfg["model_name"]) if generates else None
                    )
                    tokenizer = None if self.tokenizer is None else as_published(self.tokenizer)
                    write_hf(weights, Path(path), self.hf_config, tokenizer, settings, beside=beside)
            finally:
                # The other ranks consume the stream for its collectives, even if rank 0 failed.
                drain(stream)

    def _writer_beside(self) -> Callable[[Path], None]:
        """Return a function that adds to an export's directory, after weights, config and tokenizer, the
        adapters, which are gathered on the first rank, and the files of parts of the model that are not
        trained."""
        found = self.backend.export_adapters()
        config, factors = ({}, ()) if found is None else found
        gathered = {name: tensor.cpu() for name, tensor in factors if dist.get_rank() == 0}

        def write(directory: Path) -> None:
            self.backend.untouched.copy_files(directory)
            # A config that names code beside it is of no use without; one of a hub id names its repository.
            names_code = getattr(self.hf_config, "auto_map", None)
            for code in Path(self.cfg["model_name"]).expanduser().glob("*.py") if names_code else ():
                shutil.copyfile(code, directory / code.name)
            if found is not None:
                write_peft(directory / ADAPTER_DIRECTORY, config, gathered)

        return write

    @property
    def hf_config(self) -> Any:
        """The Hugging Face config that an export contains."""
        return self.backend.hf_config
