"""The suite: one class of tests, which a module of tests subclasses for the kinds of engines that it
names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.errors import RefitError
from megarl.models.generation.stream import Completion, Request, RequestStream
from tests.engines.served import LONGEST, Served
from tests.system.vllm_engines import NEW, PROMPTS, dense_model, greedy_answers, rows_of

LENGTHS: list[int] = PROMPTS["input_lengths"].tolist()
SEEDED = BatchedDataDict({**PROMPTS, "sampling_seeds": torch.tensor([11, 2**63 - 1, 5])})


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, local_ray: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Engines of a kind, with weights. Heads are as wide as vLLM's attention on a CPU wants them."""
    directory = tmp_path_factory.mktemp("engines") / "qwen2"
    made = request.param(
        dense_model(directory, intermediate_size=112, num_hidden_layers=4, initializer_range=0.2)
    )
    yield made
    made.close()


def completed(output: BatchedDataDict[Any]) -> list[list[int]]:
    """What was generated behind each prompt."""
    return [row[length:] for row, length in zip(rows_of(output), LENGTHS, strict=True)]


def requests_of(data: BatchedDataDict[Any]) -> dict[int, Request]:
    rows = zip(
        data["input_ids"].numpy(),
        data["input_lengths"].tolist(),
        data["sampling_seeds"].tolist(),
        strict=True,
    )
    return {row: Request(ids[:length], seed) for row, (ids, length, seed) in enumerate(rows)}


def fetched(stream: RequestStream, count: int) -> dict[int, Completion]:
    found: dict[int, Completion] = {}
    while len(found) < count:
        found |= stream.poll()
    return found


class Suite:
    def test_each_refit_is_served_and_nothing_without_one(self, served: Served, tmp_path: Path) -> None:
        """Greedy rows, in their order, are those of plain transformers with the weights that the policy
        exports."""
        if served.refit is not None:
            served.engine.prepare_refit_info(served.policy.prepare_refit_info())
            with pytest.raises(RefitError, match="no complete weights"):
                served.engine.generate(PROMPTS, greedy=True)
            served.refit._informed = False
        answers, versions = [], []
        for step in range(2):
            served.change_weights()
            served.prepare()
            served.policy.export_hf(tmp_path / str(step))
            answers.append(rows_of(served.engine.generate(PROMPTS, greedy=True)))
            assert answers[-1] == greedy_answers(tmp_path / str(step))
            versions.append(served.engine.version if served.refit is not None else step)
        assert answers[0] != answers[1]
        assert versions[1] == versions[0] + 1

    def test_a_row_depends_on_its_seed_alone(self, served: Served) -> None:
        served.prepare()
        rows = rows_of(served.engine.generate(SEEDED))
        turned = BatchedDataDict({key: value.flip(0) for key, value in SEEDED.items()})
        assert rows_of(served.engine.generate(turned)) == rows[::-1]
        others = BatchedDataDict({**SEEDED, "sampling_seeds": SEEDED["sampling_seeds"] - 3})
        assert all(
            one != other for one, other in zip(rows, rows_of(served.engine.generate(others)), strict=True)
        )
        assert rows_of(served.engine.generate(PROMPTS)) != rows_of(served.engine.generate(PROMPTS)), (
            "without seeds, drawn anew"
        )

    def test_log_probabilities_are_those_of_the_policy(self, served: Served) -> None:
        served.prepare()
        output = served.engine.generate(SEEDED)
        ids, ends = output["output_ids"], output["unpadded_sequence_lengths"]
        positions = torch.arange(ids.shape[1])
        mask = (positions >= PROMPTS["input_lengths"][:, None]) & (positions < ends[:, None])
        assert mask.sum(1).tolist() == output["generation_lengths"].tolist() == [NEW] * 3
        served.policy.prepare_for_lp_inference()
        scored = served.policy.get_logprobs(BatchedDataDict({"input_ids": ids, "input_lengths": ends}))[
            "logprobs"
        ]
        torch.testing.assert_close(output["logprobs"][mask], scored[mask], atol=1e-4, rtol=0)
        assert not output["logprobs"][~mask].any()

    def test_stop_strings_and_bounds_are_those_of_each_row(self, served: Served) -> None:
        served.prepare()
        free = completed(served.engine.generate(PROMPTS, greedy=True))
        end = free[0].index(free[0][2]) + 1
        changes = {
            "stop_strings": [[f"w{free[0][2]}"], None, []],
            "max_new_tokens": torch.tensor([NEW, 4, NEW + 1]),
        }
        output = served.engine.generate(BatchedDataDict({**PROMPTS, **changes}), greedy=True)
        assert completed(output) == [free[0][:end], free[1][:4], free[2]]
        assert output["truncated"].tolist() == [False, True, True]
        full = BatchedDataDict(
            {"input_ids": torch.full((2, LONGEST), 5), "input_lengths": torch.tensor([LONGEST, LONGEST - 3])}
        )
        output = served.engine.generate(full, greedy=True)
        assert output["generation_lengths"].tolist() == [0, 3] and output["truncated"].all()

    def test_requests_bring_what_a_batch_brings(self, served: Served) -> None:
        """In whatever pieces they come; what is given up never comes, and the engine takes new weights after
        it."""
        served.prepare()
        batch, expected = served.engine.generate(SEEDED), completed(served.engine.generate(SEEDED))
        asked = requests_of(SEEDED)
        stream = served.engine.requests([], 0, greedy=False, sampling=None)
        assert stream.poll(0.01) == {}
        stream.submit({2: asked[2]})
        found = fetched(stream, 1)
        stream.submit({0: asked[0], 1: asked[1]})
        found |= fetched(stream, 2)
        for row, tokens in enumerate(expected):
            assert found[row].tokens.tolist() == tokens and found[row].truncated
            logprobs = batch["logprobs"][row, LENGTHS[row] : LENGTHS[row] + NEW].numpy()
            np.testing.assert_allclose(found[row].logprobs, logprobs, rtol=0, atol=1e-4)
        stream.submit({0: asked[0]._replace(max_new_tokens=4)})
        [begun] = fetched(stream, 1).values()
        assert begun.tokens.tolist() == expected[0][:4] and begun.truncated
        stream.submit(asked)
        stream.abort(asked)
        assert stream.poll(0.2) == {}
        served.change_weights()
        served.prepare()
        greedy = served.engine.requests([], 0, greedy=True, sampling=None)
        greedy.submit({0: asked[0]})
        assert (
            fetched(greedy, 1)[0].tokens.tolist()
            == completed(served.engine.generate(PROMPTS, greedy=True))[0]
        )

    def test_stop_strings_end_each_turn_of_a_conversation(self, served: Served) -> None:
        """They come and go from turn to turn, and what ends a response stays part of it: the tokens are those
        of a response without stop strings up to the first at which its text contains one, whatever stands in
        the prompt."""
        served.prepare()
        decode = served.policy.tokenizer.decode
        stream = served.engine.requests([], 0, greedy=True, sampling=None)
        prompts = {row: request.prompt for row, request in requests_of(SEEDED).items()}

        def answers(stops: dict[int, list[str]]) -> dict[int, Completion]:
            stream.submit({row: Request(prompts[row], stop_strings=stops.get(row)) for row in prompts})
            return fetched(stream, len(prompts))

        for turn in range(3):
            free = {row: completion.tokens.tolist() for row, completion in answers({}).items()}
            texts = [[decode(free[row][:count]) for count in range(NEW + 1)] for row in sorted(free)]
            # a text over two tokens, the last token alone, and what stands in the prompt or nowhere
            stops = {
                turn % 3: [texts[turn % 3][turn + 2].removeprefix(texts[turn % 3][turn]).strip(), "nowhere"],
                (turn + 1) % 3: [texts[(turn + 1) % 3][NEW][-4:]],
                (turn + 2) % 3: [decode(prompts[(turn + 2) % 3].tolist())],
            }
            found = answers(stops)
            for row, own in stops.items():
                ends = [
                    count
                    for count, text in enumerate(texts[row])
                    if count and any(stop in text for stop in own)
                ]
                assert found[row].tokens.tolist() == free[row][: (ends or [NEW])[0]]
                assert found[row].truncated is not bool(ends)
                prompts[row] = np.concatenate([prompts[row], found[row].tokens, np.array([7 + turn, 9])])
            assert any(not each.truncated and len(each.tokens) < NEW for each in found.values())

    def test_another_distribution_is_that_of_one_call(self, served: Served) -> None:
        """Of validations, which sample otherwise than training does."""
        served.prepare()
        likeliest = rows_of(
            served.engine.generate(SEEDED, sampling={"temperature": 0.7, "top_p": 1.0, "top_k": 1})
        )
        assert (
            likeliest
            == rows_of(served.engine.generate(SEEDED, greedy=True))
            != rows_of(served.engine.generate(SEEDED))
        )

    def test_new_engines_serve_nothing_before_a_refit(self, served: Served) -> None:
        if served.refit is None or not served.restarts:
            pytest.skip("there are no engines that can be started again")
        served.prepare()
        before = rows_of(served.engine.generate(SEEDED))
        served.engine.restart(served.policy if served.refit.colocated else None)
        assert served.engine.is_alive() and served.engine.version is None
        with pytest.raises(RefitError, match="no complete weights"):
            served.engine.generate(SEEDED)
        served.prepare()
        assert rows_of(served.engine.generate(SEEDED)) == before
