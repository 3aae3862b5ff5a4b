"""A toy engine: transformers in the driver's process, which gets the policy's weights by broadcast."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Any, NotRequired

from typing_extensions import TypedDict

from megarl.errors import RefitError
from megarl.key import AT_LEAST_1, Key
from megarl.models.generation.engines import EngineKind
from megarl.models.generation.interfaces import RolloutEngine


class TransformersConfig(TypedDict):
    """The engine's own keys, ``policy.generation.engine_cfg``."""

    threads: NotRequired[Annotated[int, Key("of torch, while it generates.", AT_LEAST_1, default=1)]]


class TransformersEngine(RolloutEngine):
    """One engine of one rank."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        self.generation = config["policy"]["generation"]
        self.longest = config["policy"]["max_total_sequence_length"]
        self.tokenizer = AutoTokenizer.from_pretrained(config["policy"]["tokenizer"]["name"])
        settings = AutoConfig.from_pretrained(config["policy"]["model_name"])
        self.model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval()
        self.executor = ThreadPoolExecutor(max_workers=1)
        self.calls = 0
        self.manifest: Any = None
        self.listener: Any = None
        self._version: int | None = None

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def ranks(self) -> int:
        return 1

    @property
    def connected(self) -> bool:
        return self.listener is not None

    def disconnect(self) -> None:
        self.listener = None

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        from megarl.weight_sync.manifest import Manifest

        self.manifest, self._version = Manifest.from_description(state_dict_info), None

    def init_collective(self, ip: str, port: int, world_size: int) -> list[Any]:
        import torch

        from megarl.weight_sync.broadcast import WeightListener
        from megarl.weight_sync.transfer_group import TransferGroup

        def join() -> None:
            group = TransferGroup(
                ip,
                port,
                world_size,
                1,
                digest=self.manifest.digest,
                device=torch.device("cpu"),
                handshake_s=60.0,
            )
            self.listener = WeightListener(group, self.manifest)

        return [self.executor.submit(join)]

    def update_weights_from_collective(self) -> list[Any]:
        self._version = None
        return [self.executor.submit(lambda: self.listener.receive(self._load))]

    def _load(self, weights: list[tuple[str, Any]]) -> None:
        self.model.load_state_dict({name: tensor.clone() for name, tensor in weights}, strict=False)
        self.model.tie_weights()

    def results(self, futures: list[Future[Any]]) -> list[Any]:
        return [future.result() for future in futures]

    def loaded(self, versions: list[Any]) -> None:
        [self._version] = versions

    def generate(self, data: Any, greedy: bool = False, *, sampling: Mapping[str, Any] | None = None) -> Any:
        import torch

        from megarl.distributed.batched_data_dict import BatchedDataDict
        from megarl.distributed.token_batches import pad_rows
        from megarl.models.generation.sampling import SamplingSettings
        from megarl.models.generation.stopping import StopRules, stop_strings_of_rows

        if self._version is None:
            raise RefitError("the toy engine has no complete weights: refit it before it generates")
        self.calls += 1
        torch.set_num_threads(self.generation["engine_cfg"]["threads"])
        settings = SamplingSettings.of(self.generation | dict(sampling or {}), greedy=greedy)
        lengths = data["input_lengths"].tolist()
        strings = stop_strings_of_rows(
            self.generation["stop_strings"], data.get("stop_strings"), len(lengths)
        )
        bounds = (
            data["max_new_tokens"].tolist() if "max_new_tokens" in data else [self.longest] * len(lengths)
        )
        rows, scores, truncated = [], [], []
        for row, length in enumerate(lengths):
            ids = data["input_ids"][row, :length].tolist()
            most = min(bounds[row], self.generation["max_new_tokens"], self.longest - length)
            stops = StopRules(self.generation["stop_token_ids"], [strings[row]], self.tokenizer)
            seed = int(data["sampling_seeds"][row]) if "sampling_seeds" in data else hash((self.calls, row))
            logprobs, ended = self._continue(ids, most, seed, settings, stops)
            rows.append(ids)
            scores.append([0.0] * length + logprobs)
            truncated.append(not ended)
        output_ids, ends = pad_rows(rows, self.generation["pad_token_id"])
        padded = [row + [0.0] * (output_ids.shape[1] - len(row)) for row in scores]
        return BatchedDataDict(
            {
                "output_ids": output_ids,
                "unpadded_sequence_lengths": ends,
                "generation_lengths": ends - data["input_lengths"],
                "logprobs": torch.tensor(padded),
                "truncated": torch.tensor(truncated),
            }
        )

    def _continue(
        self, ids: list[int], most: int, seed: int, settings: Any, stops: Any
    ) -> tuple[list[float], bool]:
        """Append at most so many tokens to a row: their log-probabilities, and whether the last one stops
        it."""
        import numpy as np
        import torch

        from megarl.models.generation.sampling import choose_tokens, uniform_numbers

        length, logprobs = len(ids), list[float]()
        for uniform in uniform_numbers([seed], most)[0]:
            with torch.no_grad():
                logits = self.model(torch.tensor([ids])).logits[:, -1]
            token, logprob = choose_tokens(logits, uniform[None], settings)
            ids.append(int(token))
            logprobs.append(float(logprob))
            if stops.finished(np.zeros(1, np.int64), token.numpy(), np.array([ids[length:]]))[0]:
                return logprobs, True
        return logprobs, False

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def shutdown(self) -> bool:
        self.executor.shutdown()
        return True


KIND = EngineKind(
    "transformers", start=lambda cluster, config: TransformersEngine(config), section=TransformersConfig
)
