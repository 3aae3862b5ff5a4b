"""A toy engine: transformers in the driver's process, which gets the policy's weights by broadcast."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Any, NotRequired

from typing_extensions import TypedDict

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
        from transformers import AutoConfig, AutoModelForCausalLM

        self.generation = config["policy"]["generation"]
        settings = AutoConfig.from_pretrained(config["policy"]["model_name"])
        self.model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval()
        self.executor = ThreadPoolExecutor(max_workers=1)
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

        self.manifest = Manifest.from_description(state_dict_info)

    def init_collective(self, ip: str, port: int, world_size: int) -> list[Any]:
        import torch

        from megarl.weight_sync.broadcast import WeightListener
        from megarl.weight_sync.transfer_group import TransferGroup

        def join() -> None:
            group = TransferGroup(ip, port, world_size, 1, digest=self.manifest.digest, device=torch.device("cpu"), handshake_s=60.0)
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

    def generate(self, data: Any, greedy: bool = False) -> Any:
        import torch

        from megarl.distributed.batched_data_dict import BatchedDataDict
        from megarl.distributed.token_batches import pad_rows

        rows, scores = [], []
        torch.set_num_threads(self.generation["engine_cfg"]["threads"])
        for row, length in enumerate(data["input_lengths"].tolist()):
            ids, logprobs = data["input_ids"][row, :length].tolist(), [0.0] * length
            generator = torch.Generator().manual_seed(int(data["sampling_seeds"][row]) if "sampling_seeds" in data else 0)
            for _ in range(self.generation["max_new_tokens"]):
                with torch.no_grad():
                    logits = self.model(torch.tensor([ids])).logits[0, -1] / self.generation["temperature"]
                probabilities = logits.log_softmax(0)
                token = int(logits.argmax() if greedy else torch.multinomial(probabilities.exp(), 1, generator=generator))
                ids.append(token)
                logprobs.append(float(probabilities[token]))
                if token in self.generation["stop_token_ids"]:
                    break
            rows.append(ids)
            scores.append(logprobs)
        output_ids, lengths = pad_rows(rows, self.generation["pad_token_id"])
        padded = [row + [0.0] * (output_ids.shape[1] - len(row)) for row in scores]
        new = lengths - data["input_lengths"]
        return BatchedDataDict(
            {"output_ids": output_ids, "unpadded_sequence_lengths": lengths, "generation_lengths": new, "logprobs": torch.tensor(padded)}
        )

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def shutdown(self) -> bool:
        self.executor.shutdown()
        return True


KIND = EngineKind("transformers", start=lambda cluster, config: TransformersEngine(config), section=TransformersConfig)
