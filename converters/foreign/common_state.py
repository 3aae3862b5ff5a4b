"""The part of a checkpoint that is no tensor: ``common.pt``, or since Megatron-Core 0.18 an object among the tensors. Runs no code."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO

from converters.errors import ConversionError
from converters.foreign.stand_ins import Arguments, StandIn, stand_in
from converters.regular_file import require_regular
from converters.restricted import DAMAGED, unpickle
from converters.torch_dist.reader import TorchDistCheckpoint
from converters.torch_dist.writer import COMMON_FILE

_OBJECT = "common_state/shard_0_1"
_LARGEST = 2**28


def read_common_state(checkpoint: TorchDistCheckpoint) -> dict[str, Any]:
    """What a trainer saved beside the tensors: plain values as they are, everything else as :class:`StandIn`.

    Returns:
        Empty where nothing was saved.

    Raises:
        ConversionError: it is damaged, or holds what no trainer puts there.
    """
    path = checkpoint.directory / COMMON_FILE
    if path.exists():
        with require_regular(path).open("rb") as file:
            state = _read(file, str(path))
    elif _OBJECT in checkpoint.objects:
        name = f"{_OBJECT} in {checkpoint.directory}"
        state = _read(io.BytesIO(checkpoint.read_object(_OBJECT)), name)
        state = state[0] if isinstance(state, list) and len(state) == 1 else state
    else:
        return {}
    if not isinstance(state, dict):
        raise ConversionError(f"the common state of {checkpoint.directory} is no dictionary", "fetch or write the checkpoint again")
    return state


def arguments_of(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments that Megatron-LM was started with; None where there are none.

    Raises:
        ConversionError: they are something else than arguments.
    """
    arguments = state.get("args")
    if arguments is None:
        return None
    if not isinstance(arguments, Arguments) or not isinstance(arguments.state, dict):
        raise ConversionError(f"args of the common state is a {arguments!r}, not an argparse.Namespace", "pass --hf-config DIRECTORY")
    return {str(name): value for name, value in arguments.state.items()}


def _read(file: BinaryIO, what: str) -> Any:
    """The pickle in an archive of ``torch.save``; tensors in it are left out."""
    try:
        with zipfile.ZipFile(file) as archive:
            (entry,) = (entry for entry in archive.infolist() if entry.filename.partition("/")[2] == "data.pkl")
            if entry.file_size > _LARGEST or entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"a description of {entry.file_size} bytes")
            return unpickle(io.BytesIO(archive.read(entry)), stand_in, what, StandIn)
    except ConversionError:
        raise
    except (zipfile.BadZipFile, OSError, RecursionError, *DAMAGED) as error:
        raise ConversionError(f"{what} cannot be read ({type(error).__name__}: {error})", "fetch or write the checkpoint again") from error
