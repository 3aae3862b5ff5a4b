"""Decoding of ragged prompts by a transformers model: what it costs, and that no row sees its padding, its
neighbours or ended rows."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from megarl.models.engine import decoded_rows, decoding
from megarl.models.engine import graphs as graphs_module
from megarl.models.engine.decoded_rows import DecodedRows
from megarl.models.engine.decoding import Decoder, Forward, decode, ends_of_passes
from megarl.models.engine.graphs import Graphs
from megarl.models.engine.logprobs import VocabularyShard
from megarl.models.huggingface.attention import IMPLEMENTATION
from megarl.models.huggingface.generation import _CachedForward, _keeps_positions_alone, _OwnCacheForward
from tests.models import make_tiny
from tests.recording import TapeCapture
from tests.tiers import sampled

FAMILIES = ["llama", "qwen3", "mistral_window"]
LENGTHS = (3, 12, 12, 5, 1, 12, 9, 3)
NEW, VOCABULARY = 9, 101
# one prompt three times, another twice; the rest are alone
SAME = {2: 1, 5: 1, 7: 0}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("models")
    load = AutoModelForCausalLM.from_pretrained
    paths: dict[str, Path] = {
        family: make_tiny(root / family, family, tied=False, seed=3) for family in FAMILIES
    }
    return {
        family: load(path, dtype=torch.float32, attn_implementation=IMPLEMENTATION).eval()
        for family, path in paths.items()
    }


class Counting(_CachedForward):
    """Keeps the shape of the tokens of every pass."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.passes: list[tuple[int, ...]] = []

    def read(self, tokens: Tensor, lengths: Tensor, prompt_of: Tensor, end: int) -> Tensor:
        self.passes.append(tuple(tokens.shape))
        return super().read(tokens, lengths, prompt_of, end)

    def step(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        self.passes.append((len(tokens), 1))
        return super().step(tokens, lengths)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    drawn = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]
    return [drawn[SAME.get(row, row)] for row in range(len(LENGTHS))]


def decoded(
    model: Any,
    rows: list[list[int]],
    *,
    greedy: bool,
    stop: list[int],
    longest: int = 40,
    graphs: Graphs | None = None,
    own_cache: bool = False,
    **settings: Any,
) -> tuple[Any, Any]:
    """What is decoded, and the shapes of the passes of each batch."""
    batches: list[Counting] = []
    graphs = graphs or Graphs()
    cache = DecodedRows(graphs, torch.device("cpu"))

    def start(count: int, positions: int) -> Forward:
        # what the estimate of memory takes for it
        assert "rows_at_once" not in settings or count * positions <= settings["rows_at_once"] * longest
        if own_cache:
            return _OwnCacheForward(model, VocabularyShard(VOCABULARY))
        cache.reserve(positions, count)
        batches.append(Counting(model, VocabularyShard(VOCABULARY), cache, graphs))
        return batches[-1]

    alone: Any = SimpleNamespace(
        from_last_stage=lambda values: values, object_from_last_stage=lambda value: value, data_rank=0
    )
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for row, prompt in enumerate(rows):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    data = {"input_ids": ids, "input_lengths": lengths, "sampling_seeds": torch.arange(len(rows)) + 5}
    config = {
        "max_new_tokens": NEW,
        "pad_token_id": 0,
        "stop_token_ids": stop,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        **settings,
    }
    decoder = Decoder(
        start, alone, torch.device("cpu"), longest, config.pop("rows_at_once", None), own_cache, graphs
    )
    with torch.no_grad():
        return decode(decoder, data, config, None, greedy=greedy), [batch.passes for batch in batches]


def answers(found: Any, rows: list[list[int]]) -> list[list[int]]:
    totals = found["unpadded_sequence_lengths"].tolist()
    return [
        found["output_ids"][row, len(prompt) : total].tolist()
        for row, (prompt, total) in enumerate(zip(rows, totals, strict=True))
    ]


@torch.no_grad()
def one_by_one(model: Any, prompt: list[int], stop: list[int]) -> tuple[list[int], list[float]]:
    """Greedy, by whole sequences without a cache: tokens and their log-probabilities."""
    ids, values = list(prompt), []
    while len(ids) < len(prompt) + NEW and not (values and ids[-1] in stop):
        logprobs = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        ids.append(int(logprobs.argmax()))
        values.append(float(logprobs.max()))
    return ids[len(prompt) :], values


@sampled(3)
@pytest.mark.parametrize("pass_positions", [1, 3, 512])
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_rows_are_what_each_is_alone(
    models: dict[str, Any], family: str, pass_positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether all prompts are read in one pass, or in several whose caches are put together."""
    monkeypatch.setattr(decoding, "PASS_POSITIONS", pass_positions)
    rows = prompts()
    # a token that one row meets in the middle of its answer
    stop = [one_by_one(models[family], rows[3], [])[0][4]]
    found, [passes] = decoded(models[family], rows, greedy=True, stop=stop)
    of_prompts = {1: [(1, 1), (1, 3), (1, 5), (1, 9), (1, 12)], 3: [(1, 1), (2, 5), (2, 12)]}.get(
        pass_positions, [(5, 12)]
    )
    assert (
        passes[: len(of_prompts)] == of_prompts
        and passes[len(of_prompts)][1] == 1 < passes[len(of_prompts)][0]
    )
    lengths = set()
    for row, prompt in enumerate(rows):
        tokens, values = one_by_one(models[family], prompt, stop)
        assert answers(found, rows)[row] == tokens
        mine = found["logprobs"][row, len(prompt) : len(prompt) + len(tokens)]
        torch.testing.assert_close(mine, torch.tensor(values), atol=1e-5, rtol=0)
        assert found["logprobs"][row].count_nonzero() == len(tokens)
        assert found["truncated"][row].item() is (tokens[-1] not in stop)
        lengths.add(len(tokens))
    assert len(lengths) > 1


def test_one_pass_reads_all_prompts_and_one_more_each_token(models: dict[str, Any]) -> None:
    """Each different prompt once, whatever its length; rows with one prompt go on together."""
    rows = prompts()
    _, [passes] = decoded(models["qwen3"], rows, greedy=False, stop=[])
    assert passes == [(len(rows) - len(SAME), max(LENGTHS)), *[(len(rows), 1)] * (NEW - 1)]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=9).map(sorted),
    pass_positions=st.integers(1, 60),
)
def test_passes_over_prompts_cost_least(lengths: list[int], pass_positions: int) -> None:
    """No other way to cut the prompts has fewer positions, padding and passes counted."""

    def cost(ends: tuple[int, ...]) -> int:
        return sum(
            (end - start) * lengths[end - 1] + pass_positions for start, end in itertools.pairwise([0, *ends])
        )

    inner = range(1, len(lengths))
    ways = [
        (*cuts, len(lengths))
        for count in range(len(lengths))
        for cuts in itertools.combinations(inner, count)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "PASS_POSITIONS", pass_positions)
        found = ends_of_passes(lengths)
    assert cost(tuple(found)) == min(map(cost, ways))
    assert all(lengths[end - 1] != lengths[end] for end in found[:-1])


class FailingCapture(TapeCapture):
    """Cannot record."""

    def record(self, function: Any) -> Any:
        raise RuntimeError("out of memory")


def test_rows_leave_alike_where_a_rank_cannot_record(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of one model go on with the same rows, also in later calls; another rank's recording may have
    worked."""
    monkeypatch.setattr(graphs_module, "_failures", [])
    rows, stop = prompts(), list(range(0, VOCABULARY, 7))
    passes = []
    for graphs in (Graphs(TapeCapture()), Graphs(FailingCapture()), Graphs(few_sizes=True), Graphs()):
        passes.append(decoded(models["qwen3"], rows, greedy=False, stop=stop, graphs=graphs)[1])
    sizes = [[[size for size, _ in batch] for batch in each] for each in passes]
    assert sorted(set(sizes[1][0])) == sorted(set(sizes[2][0])) and sizes[1] == sizes[2]
    assert set(sizes[0][0]) <= set(sizes[1][0])
    assert sizes[3] != sizes[1], "rows would leave otherwise"


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps_give_the_same_answers(
    models: dict[str, Any], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They depend on nothing but tensors that stay where they are, read no number from the device, and have
    no shape that depends on one, while rows leave and batches follow one another."""
    monkeypatch.setattr(decoded_rows, "FEWEST_POSITIONS", 4)
    rows, stop = prompts(), list(range(0, VOCABULARY, 7))
    for greedy in (False, True):
        plain, _ = decoded(models[family], rows, greedy=greedy, stop=stop, rows_at_once=5)
        capture = TapeCapture()
        found, _ = decoded(
            models[family], rows, greedy=greedy, stop=stop, rows_at_once=5, graphs=Graphs(capture)
        )
        assert capture.replayed > capture.recorded > 1
        assert answers(found, rows) == answers(plain, rows)
        torch.testing.assert_close(found["logprobs"], plain["logprobs"], atol=1e-5, rtol=0)


def test_a_model_that_remembers_more_than_positions_keeps_its_own_cache(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads all prompts in one pass."""
    ordinary, other = DynamicCache(), DynamicCache()
    other.layers = [LinearAttentionLayer()]
    assert _keeps_positions_alone(ordinary) and not _keeps_positions_alone(other)
    rows = prompts()
    expected, _ = decoded(models["mistral_window"], rows, greedy=False, stop=[])
    monkeypatch.setattr(decoding, "PASS_POSITIONS", 1)
    found, _ = decoded(models["mistral_window"], rows, greedy=False, stop=[], own_cache=True)
    assert answers(found, rows) == answers(expected, rows)
    torch.testing.assert_close(found["logprobs"], expected["logprobs"], atol=1e-5, rtol=0)


def test_rows_that_ended_leave(models: dict[str, Any]) -> None:
    rows = prompts()
    found, [passes] = decoded(models["qwen3"], rows, greedy=False, stop=list(range(0, VOCABULARY, 3)))
    lengths = found["generation_lengths"].tolist()
    assert len(set(lengths)) > 2
    for place, (count, _) in enumerate(passes[1:], start=1):
        open_rows = sum(length > place for length in lengths)
        assert open_rows <= count and (count - open_rows) < len(rows) / 8 + 1
    assert len(passes) == max(lengths)


def test_no_row_depends_on_who_is_beside(models: dict[str, Any]) -> None:
    """Its tokens are those of its own seed in a batch of all rows, of three, or of one."""
    rows, stop = prompts(), list(range(0, VOCABULARY, 7))
    together = decoded(models["mistral_window"], rows, greedy=False, stop=stop)[0]
    for at_once in (1, 3):
        apart, batches = decoded(
            models["mistral_window"], rows, greedy=False, stop=stop, rows_at_once=at_once
        )
        assert len(batches) == -(-len(rows) // at_once)
        assert answers(apart, rows) == answers(together, rows)
        torch.testing.assert_close(apart["logprobs"], together["logprobs"], atol=1e-5, rtol=0)


def test_prompts_with_no_room_left_get_no_answer(models: dict[str, Any]) -> None:
    """A row ends at its own bound; one that has reached it takes part in no pass."""
    rows = prompts()
    found, [passes] = decoded(models["llama"], rows, greedy=True, stop=[], longest=12)
    assert found["generation_lengths"].tolist() == [min(NEW, 12 - len(prompt)) for prompt in rows]
    assert passes[0] == (4, 9)
    # rows of 18 positions: two in the place of four of 12; the third batch has one row that may have three
    # tokens
    bounded, batches = decoded(models["llama"], rows, greedy=True, stop=[], longest=12, rows_at_once=4)
    assert answers(bounded, rows) == answers(found, rows) and [len(batch) for batch in batches] == [9, 9, 3]
    nothing, batches = decoded(models["llama"], rows[1:3], greedy=True, stop=[], longest=12)
    assert nothing["generation_lengths"].tolist() == [0, 0] and batches == []
