"""The independent reference: a single-process policy on plain transformers and torch's AdamW, with the
interface of ``Policy``.

No Megatron, no sharding, no packing; slow and simple on purpose. Parity tests compare the real backends with
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megarl.config.backend import scores
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.errors import StateError

OPTIMIZER_FILE = "optimizer.safetensors"


class ReferencePolicy:
    """Trains a causal language model, or one that scores, in float32 on the CPU.

    Reads from the ``policy`` section: ``model_name``, batch sizes, ``max_total_sequence_length``,
    ``generation``, and of ``megatron_cfg`` the ``optimizer`` (lr, weight_decay, betas, eps, clip_grad) and
    the ``scheduler`` (warm-up).
    """

    data_parallel_size = 1

    def __init__(
        self,
        config: Mapping[str, Any],
        tokenizer: Any,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
    ) -> None:
        self.cfg = config
        self.tokenizer = tokenizer
        self.model = self._load(weights_path or config["model_name"])
        self.reference = self._load(config["model_name"])
        self._settings = config["megatron_cfg"]["optimizer"]
        decayed = [
            parameter
            for name, parameter in self.model.named_parameters()
            if parameter.ndim > 1 and not name.endswith("bias")
        ]
        plain = [
            parameter
            for name, parameter in self.model.named_parameters()
            if parameter.ndim <= 1 or name.endswith("bias")
        ]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": self._settings["weight_decay"]},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=self._settings["lr"],
            betas=(self._settings["adam_beta1"], self._settings["adam_beta2"]),
            eps=self._settings["adam_eps"],
        )
        self.trained_steps = 0
        self.train_calls = 0
        self.profiled: list[tuple[str, Any]] = []
        self.generations: list[tuple[int, bool, Any, list[int]]] = []
        self._prepared = ""
        if optimizer_path is not None:
            self._load_optimizer(Path(optimizer_path))

    def _load(self, path: str) -> Any:
        options: dict[str, Any] = {"dtype": torch.float32}
        if not scores(self.cfg):
            return AutoModelForCausalLM.from_pretrained(path, **options).eval()
        torch.manual_seed(3)  # of a new score layer
        return AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, **options).eval()

    # -- states
    # --------------------------------------------------------------------------------------------------------

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        self._prepared = "training"

    def prepare_for_lp_inference(self, *args: Any, **kwargs: Any) -> None:
        self._prepared = "logprobs"

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        self._prepared = "generation"
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        self._prepared = ""
        return True

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        self._prepared = ""

    def offload_after_refit(self) -> None:
        self._prepared = "offloaded"

    def memory_figures(self) -> dict[str, float]:
        return {"memory_gib": 0.5, "peak_memory_gib": 0.75}

    def peak_flops(self) -> list[float]:
        return [1e10]

    def start_gpu_profiling(self) -> None:
        self.profiled.append(("start", self.trained_steps))

    def stop_gpu_profiling(self) -> None:
        self.profiled.append(("stop", self.trained_steps))

    def start_torch_profiling(self, ranks: Any) -> None:
        self.profiled.append(("torch", list(ranks)))

    def stop_torch_profiling(self, stem: Path) -> list[str]:
        self.profiled.append(("written", stem.name))
        return [f"{stem}_rank0.json"]

    def shutdown(self) -> bool:
        self._prepared = "shut down"
        return True

    def _require(self, state: str) -> None:
        if self._prepared != state:
            raise StateError(
                f"prepared for {self._prepared or 'nothing'}, needed {state}. Fix: call the matching "
                "prepare method first"
            )

    # -- log-probabilities
    # --------------------------------------------------------------------------------------------------------

    def get_logprobs(self, data: BatchedDataDict[Any], *, skip_masked: bool = False) -> BatchedDataDict[Any]:
        self._require("logprobs")
        return BatchedDataDict({"logprobs": self._padded_logprobs(self.model, data)})

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None, *, skip_masked: bool = False
    ) -> BatchedDataDict[Any]:
        self._require("logprobs")
        return BatchedDataDict({"reference_logprobs": self._padded_logprobs(self.reference, data)})

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @torch.no_grad()
    def get_topk_logits(
        self,
        data: BatchedDataDict[Any],
        k: int,
        micro_batch_size: int | None = None,
        *,
        skip_masked: bool = False,
        vocabulary_size: int | None = None,
    ) -> BatchedDataDict[Any]:
        self._require("logprobs")
        best = self._distributions(self.model, data)[..., :vocabulary_size].log_softmax(-1).topk(k)
        follows = torch.arange(1, data["input_ids"].shape[1]) < data["input_lengths"].unsqueeze(1)
        if skip_masked:
            follows = follows & (data["token_mask"] * data["sample_mask"].unsqueeze(1))[:, 1:].bool()

        def of_positions(values: Tensor) -> Tensor:
            return torch.nn.functional.pad(torch.where(follows.unsqueeze(-1), values, 0), (0, 0, 0, 1))

        tops = {"topk_logits": of_positions(best.values), "topk_indices": of_positions(best.indices)}
        return BatchedDataDict({**tops, "logprobs": self._padded_logprobs(self.model, data)})

    @torch.no_grad()
    def _padded_logprobs(self, model: torch.nn.Module, data: BatchedDataDict[Any]) -> Tensor:
        logprobs = torch.nn.functional.pad(self._next_token_logprobs(model, data), (1, 0))
        inside = torch.arange(logprobs.shape[1]) < data["input_lengths"].unsqueeze(1)
        return torch.where(inside, logprobs, 0.0)

    @torch.no_grad()
    def get_values(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        self._require("logprobs")
        return BatchedDataDict({"values": self._values(data)})

    def score(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        values = self.get_values(data)["values"]
        return BatchedDataDict(
            {"scores": values.gather(1, data["input_lengths"].long()[:, None] - 1).squeeze(1)}
        )

    def _values(self, data: Mapping[str, Any]) -> Tensor:
        """[B, S]; padding is 0."""
        inside = torch.arange(data["input_ids"].shape[1]) < data["input_lengths"].unsqueeze(1)
        hidden = self.model.model(input_ids=data["input_ids"], attention_mask=inside.long()).last_hidden_state
        return self.model.score(hidden).squeeze(-1) * inside

    def _read_by(self, loss_fn: Any, data: Mapping[str, Any]) -> dict[str, Tensor]:
        """What a loss is called with: values, or log-probabilities and perhaps entropies."""
        if scores(self.cfg):
            return {"values": self._values(data)}
        distributions = self._distributions(self.model, data)
        read = {
            "next_token_logprobs": distributions.gather(-1, data["input_ids"][:, 1:].unsqueeze(-1)).squeeze(
                -1
            )
        }
        if getattr(loss_fn, "needs_entropies", False):
            read["next_token_entropies"] = -(distributions.exp() * distributions).sum(-1)
        if getattr(loss_fn, "scored_tokens", None) is not None:
            read["scored_logprobs"] = distributions.gather(-1, data[loss_fn.scored_tokens][:, :-1])
        return read

    def _next_token_logprobs(self, model: torch.nn.Module, data: Mapping[str, Any]) -> Tensor:
        """[B, S-1]."""
        return self._distributions(model, data).gather(-1, data["input_ids"][:, 1:].unsqueeze(-1)).squeeze(-1)

    def _distributions(self, model: torch.nn.Module, data: Mapping[str, Any]) -> Tensor:
        """[B, S-1, V] logarithms of what the next tokens are drawn from."""
        input_ids = data["input_ids"]
        attention_mask = (torch.arange(input_ids.shape[1]) < data["input_lengths"].unsqueeze(1)).long()
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits.float()
        temperature = (self.cfg.get("generation") or {}).get("temperature", 1.0)
        return torch.log_softmax(logits[:, :-1] / temperature, dim=-1)

    # -- training
    # --------------------------------------------------------------------------------------------------------

    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: Any,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        self._require("training")
        gbs = gbs or self.cfg["train_global_batch_size"]
        mbs = mbs or self.cfg["train_micro_batch_size"]
        count = data.size // gbs
        assert count * gbs == data.size and gbs % mbs == 0
        losses, norms, metrics = [], [], {}
        for batch in _rows_in_pieces(data, gbs):
            learning_rate = self._learning_rate()
            with torch.set_grad_enabled(not eval_mode):
                losses.append(self._forward_backward(batch, loss_fn, mbs, count, metrics, learning_rate))
            if not eval_mode:
                norms.append(self._apply_gradients(learning_rate))
        self.train_calls += not eval_mode
        grad_norm, positions = None if eval_mode else torch.tensor(norms), data["input_ids"].numel()
        return {
            "loss": torch.tensor(losses),
            "grad_norm": grad_norm,
            "all_mb_metrics": metrics,
            "positions": positions,
        }

    def _forward_backward(
        self,
        batch: dict[str, Any],
        loss_fn: Any,
        mbs: int,
        count: int,
        metrics: dict[str, list[float]],
        learning_rate: float,
    ) -> float:
        """Loss of one global batch; its gradient is left on the model."""
        valid_seqs = batch["sample_mask"].sum()
        if "response_tokens" in batch:
            counts = (batch["token_mask"][:, 1:] * batch["sample_mask"].unsqueeze(1)).sum(dim=1)
            valid_seqs = (counts / batch["response_tokens"].clamp(min=1)).sum()
        valid_toks = (batch["token_mask"][:, 1:] * batch["sample_mask"].unsqueeze(1)).sum()
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for piece in _rows_in_pieces(batch, mbs):
            loss, found = loss_fn(piece, valid_seqs, valid_toks, **self._read_by(loss_fn, piece))
            if loss.requires_grad:
                loss.backward()
            total += float(loss.detach())
            for name, value in found.items():
                metrics.setdefault(name, []).append(
                    float(value) / (1 if name.endswith(("_min", "_max")) else count)
                )
            for name, value in (
                ("lr", learning_rate),
                ("global_valid_seqs", valid_seqs),
                ("global_valid_toks", valid_toks),
            ):
                metrics.setdefault(name, []).append(float(value))
        return total

    def _apply_gradients(self, learning_rate: float) -> float:
        limit = self._settings.get("clip_grad") or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.trained_steps += 1
        return norm

    def _learning_rate(self) -> float:
        """Linear warm-up over ``lr_warmup_iters`` calls of ``train``, then constant."""
        scheduler = self.cfg["megatron_cfg"].get("scheduler") or {}
        warm_up, first = scheduler.get("lr_warmup_iters", 0), scheduler.get("lr_warmup_init", 0.0)
        if warm_up and self.train_calls <= warm_up:
            return first + (self._settings["lr"] - first) * self.train_calls / warm_up
        return self._settings["lr"]

    # -- generation
    # --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(
        self, data: BatchedDataDict[Any], greedy: bool = False, sampling: Mapping[str, Any] | None = None
    ) -> BatchedDataDict[Any]:
        """One row at a time, the whole sequence again for every token; of ``sampling`` the temperature alone
        counts."""
        self._require("generation")
        self.generations.append(
            (data.size, greedy, sampling, data.get("sampling_seeds", torch.empty(0)).tolist())
        )
        settings = {**self.cfg["generation"], **(sampling or {})}
        stops = set(settings.get("stop_token_ids") or [self.tokenizer.eos_token_id])
        rows, logprob_rows, new_lengths = [], [], []
        for row in range(data.size):
            tokens = data["input_ids"][row, : data["input_lengths"][row]].tolist()
            room = self.cfg["max_total_sequence_length"] - len(tokens)
            generator = torch.Generator()
            if "sampling_seeds" in data:
                generator.manual_seed(int(data["sampling_seeds"][row]))
            logprobs = [0.0] * len(tokens)
            for _ in range(min(settings["max_new_tokens"], room)):
                logits = self.model(input_ids=torch.tensor([tokens])).logits[0, -1].float() / settings.get(
                    "temperature", 1.0
                )
                distribution = torch.log_softmax(logits, dim=-1)
                token = int(
                    distribution.argmax()
                    if greedy
                    else torch.multinomial(distribution.exp(), 1, generator=generator)
                )
                tokens.append(token)
                logprobs.append(float(distribution[token]))
                if token in stops:
                    break
            new_lengths.append(len(tokens) - int(data["input_lengths"][row]))
            rows.append(tokens)
            logprob_rows.append(logprobs)
        longest = max(map(len, rows))
        pad = self.tokenizer.pad_token_id
        return BatchedDataDict(
            {
                "output_ids": torch.tensor([row + [pad] * (longest - len(row)) for row in rows]),
                "logprobs": torch.tensor([row + [0.0] * (longest - len(row)) for row in logprob_rows]),
                "generation_lengths": torch.tensor(new_lengths),
                "unpadded_sequence_lengths": torch.tensor([len(row) for row in rows]),
            }
        )

    # -- files
    # --------------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, weights_path: str, optimizer_path: str | None = None, tokenizer_path: str | None = None
    ) -> None:
        self.model.save_pretrained(weights_path)
        if optimizer_path is not None:
            Path(optimizer_path).mkdir(parents=True, exist_ok=True)
            state = {
                "trained_steps": torch.tensor(self.trained_steps),
                "train_calls": torch.tensor(self.train_calls),
            }
            for index, values in self.optimizer.state_dict()["state"].items():
                state |= {f"{index}.{name}": value.clone() for name, value in values.items()}
            save_file(state, Path(optimizer_path) / OPTIMIZER_FILE)
        if tokenizer_path is not None:
            self.tokenizer.save_pretrained(tokenizer_path)

    def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        loaded = self._load(weights_path)
        self.model.load_state_dict(loaded.state_dict())
        if optimizer_path is not None:
            self._load_optimizer(Path(optimizer_path))

    def _load_optimizer(self, path: Path) -> None:
        saved = load_file(path / OPTIMIZER_FILE)
        self.trained_steps = int(saved.pop("trained_steps"))
        self.train_calls = int(saved.pop("train_calls"))
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in saved.items():
            index, name = key.split(".")
            state.setdefault(int(index), {})[name] = value
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})

    def export_hf(self, path: str) -> None:
        self.model.save_pretrained(path)
        self.tokenizer.save_pretrained(path)


def _rows_in_pieces(data: Mapping[str, Any], rows: int) -> Iterator[dict[str, Any]]:
    total = data["input_ids"].shape[0]
    for start in range(0, total, rows):
        yield {key: value[start : start + rows] for key, value in data.items()}
