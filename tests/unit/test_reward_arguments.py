"""Reward functions as others write them: verl's, TRL's, verifiers', and what is given to each parameter by
its name."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.config.environments import check_reward
from megarl.errors import ConfigError
from megarl.rollout.reward_pool import RewardPool, score_of
from megarl.rollout.rewards import RewardSpec, Task, get_reward

ROWS = Path(__file__).parents[1] / "data" / "rows"
RECORD = {
    "index": 3,
    "answer": "42",
    "level": 5,
    "data_source": "openai/gsm8k",
    "extra_info": {"split": "train"},
}
TASK = Task("it is 42", "42", 4, "What is it?", RECORD)
CHAT = Task("it is 42", "42", 4, "What is it?", RECORD, is_chat=True)

FORMS = {
    "megarl": "def reward(response, answer):\n    return float(answer in response)",
    "by other order": (
        "def reward(answer, response):\n    return float(answer == '42' and response == 'it is 42')"
    ),
    "prompt and record": (
        "def reward(prompt, response, record):\n    return float(prompt == 'What is it?' "
        "and record['level'] == 5)"
    ),
    "keyword only": (
        "def reward(*, ground_truth, completion):\n    return float(ground_truth == '42' and "
        "completion == 'it is 42')"
    ),
    "positional only": (
        "def reward(completion, ground_truth, /):\n    return float(ground_truth == '42' and "
        "completion == 'it is 42')"
    ),
    "verl": (
        "def reward(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert data_source == 'openai/gsm8k' and extra_info == {'split': 'train'}\n"
        "    return {'score': float(ground_truth in solution_str), 'acc': 1.0}"
    ),
    "verl with further settings": (
        "def reward(data_source, solution_str, ground_truth, extra_info=None, sandbox_url=None, **kwargs):\n"
        "    assert sandbox_url is None and kwargs['level'] == 5\n    return float(ground_truth in "
        "solution_str)"
    ),
    "trl": (
        "def reward(completions, **kwargs):\n    assert kwargs['level'] == [5] and kwargs['index'] == [3]\n"
        "    return [float('42' in each) for each in completions]"
    ),
    "verl without names": (
        "def reward(solution_str, **kwargs):\n"
        "    assert sorted(kwargs) == ['answer', 'data_source', 'extra_info', 'ground_truth', 'index', "
        "'level']\n"
        "    assert kwargs['extra_info'] == {'split': 'train'}\n    return float(kwargs['ground_truth'] in "
        "solution_str)"
    ),
    "trl without names": (
        "def reward(completions, **kwargs):\n"
        "    return [float(p == 'What is it?' and a in c) for p, c, a in zip(kwargs['prompts'], "
        "completions, kwargs['answer'])]"
    ),
    "verifiers without names": (
        "def reward(completion, **kwargs):\n"
        "    return float(kwargs['prompt'] == 'What is it?' and kwargs['state']['answer'] == "
        "kwargs['answer'] == '42')"
    ),
    "trl with columns": (
        "def reward(prompts, completions, answer, level, **kwargs):\n"
        "    assert prompts == ['What is it?'] and (answer, level) == (['42'], [5])\n    return [1.0 for "
        "each in completions]"
    ),
    "trl asynchronous": (
        "import asyncio\nasync def reward(completions, ground_truths):\n    await asyncio.sleep(0)\n"
        "    return [float(truth in each) for each, truth in zip(completions, ground_truths)]"
    ),
    "verifiers": (
        "def reward(prompt, completion, answer, state, info, task):\n"
        "    assert state['answer'] == answer == '42' and info['level'] == 5 and task == 'openai/gsm8k'\n"
        "    return float(answer in str(completion))"
    ),
    "a data class": (
        "import dataclasses\n@dataclasses.dataclass\nclass Settings:\n    wanted: str = '42'\n"
        "def reward(response, answer):\n    assert dataclasses.fields(Settings)[0].type is str\n"
        "    return float(Settings().wanted in response)"
    ),
    "a class": (
        "class Reward:\n    def __call__(self, response, answer):\n        return float(answer in "
        "response)\nreward = Reward()"
    ),
    "a partial": (
        "import functools\ndef f(wanted, response, answer):\n    return float(wanted in response)\nreward = "
        "functools.partial(f, '42')"
    ),
}


def path_of(tmp_path: Path, text: str) -> str:
    (tmp_path / "mine.py").write_text(text)
    return f"{tmp_path / 'mine.py'}:reward"


def scored(name: str, task: Task = TASK) -> Any:
    score = score_of(get_reward(RewardSpec(name)), task, RewardSpec(name))
    return score.message or score.value


@pytest.mark.parametrize("form", FORMS)
def test_a_function_of_each_form_works_as_it_is(tmp_path: Path, form: str) -> None:
    name = path_of(tmp_path, FORMS[form])
    check_reward(name, columns=("level", "data_source", "extra_info"))
    assert scored(name) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "def reward(completions, prompts):\n    return [float(c == 'it is 42' and p == 'What is it?') "
        "for c, p in zip(completions, prompts)]",
        "def reward(completions, **kwargs):\n    return [float(c == 'it is 42' and p == 'What is it?') "
        "for c, p in zip(completions, kwargs['prompts'])]",
        "def reward(responses, answers):\n    return [float(r == 'it is 42' and a == 'column') "
        "for r, a in zip(responses, answers)]",
        "def reward(state, **kwargs):\n    return float(kwargs['completion'] == 'it is 42' "
        "and kwargs['prompt'] == 'What is it?')",
        "def reward(completion, **kwargs):\n    return float(completion == 'it is 42' "
        "and kwargs['prompt'] == 'What is it?' and kwargs['state']['answer'] == '42')",
    ],
)
def test_a_column_of_the_data_never_takes_the_place_of_the_response(tmp_path: Path, text: str) -> None:
    names = ("completions", "prompts", "responses", "answers", "completion", "prompt", "state")
    columns = {name: "column" for name in names}
    task = Task("it is 42", "42", 4, "What is it?", {**RECORD, **columns})
    name = path_of(tmp_path, text)
    check_reward(name, columns=names)
    assert scored(name, task) == 1.0


def test_messages_go_to_functions_that_take_those_of_conversations(tmp_path: Path) -> None:
    """TRL and verifiers hand over messages where the data have messages, and texts where they have texts."""
    conversational = (
        "def reward(completions, **kwargs):\n    return [float('42' in each[0]['content']) for "
        "each in completions]"
    )
    rubric = "def reward(completion, answer, state):\n    return float(answer in completion[-1]['content'])"
    plain = "def reward(completion, answer):\n    return float(answer in completion)"
    for place, (text, task) in enumerate(
        [(conversational, CHAT), (rubric, CHAT), (plain, CHAT), (plain, TASK)]
    ):
        (tmp_path / str(place)).mkdir()
        assert scored(path_of(tmp_path / str(place), text), task) == 1.0
    assert "string indices" in scored(path_of(tmp_path, conversational), TASK)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "def reward(text, target):\n    return 1.0",
            r"there is no value for its parameters 'text', 'target'\. Fix: use these names: prompt, ",
        ),
        (
            "def reward(response, answer, tokenizer):\n    return 1.0",
            r"there is no value for its parameter 'tokenizer'",
        ),
        ("def reward(completion, parser):\n    return 1.0", r"its parameter 'parser'"),
        ("def reward(completions, level):\n    return [1.0]", r"its parameter 'level'.*all sources: none"),
        ("def reward():\n    return 1.0", r"it does not take the response"),
        ("def reward(answer):\n    return 1.0", r"it does not take the response"),
        ("def reward(**kwargs):\n    return kwargs['completions']", r"it does not take the response"),
        (
            "def d(f):\n    return lambda *a, **k: f(*a, **k)\n@d\ndef reward(response, answer):\n    "
            "return 1.0",
            r"it does not take the response",
        ),
    ],
)
def test_a_name_that_nothing_is_known_of_is_refused(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        check_reward(path_of(tmp_path, text), columns=())


def test_a_column_that_a_record_lacks_is_an_error_of_its_sample(tmp_path: Path) -> None:
    name = path_of(tmp_path, "def reward(response, difficulty):\n    return 1.0")
    check_reward(name, columns=("difficulty",))
    assert "its parameter 'difficulty' is not a field of the record, which has answer, data_source" in scored(
        name
    )


@pytest.mark.parametrize("value", ["[1.0, 2.0]", "[]", "['x']", "'1.0 2'"])
def test_a_list_of_another_length_is_no_number(tmp_path: Path, value: str) -> None:
    assert "it returned" in scored(path_of(tmp_path, f"def reward(completions):\n    return {value}"))


def test_lists_and_numbers_of_the_data_come_before_what_is_made(tmp_path: Path) -> None:
    name = path_of(
        tmp_path,
        "def reward(solution_strs, extra_infos, ground_truths, index):\n"
        "    return [extra_infos[0]['index'] + (ground_truths == ['42']) + index[0]]",
    )
    assert scored(name, TASK._replace(record={**RECORD, "extra_info": {"index": 7}})) == 7 + 1 + 3


def test_a_default_counts_where_the_record_lacks_the_column(tmp_path: Path) -> None:
    name = path_of(tmp_path, "def reward(response, level=0, tolerance=2):\n    return level + tolerance")
    check_reward(name, columns=())
    assert scored(name) == 5 + 2 and scored(name, TASK._replace(record={})) == 2


def test_verl_s_function_of_the_cases(tmp_path: Path) -> None:
    name = f"{ROWS / 'verl_signature.py'}:compute_score"
    check_reward(name, columns=())
    assert [
        scored(name, Task(text, "4", 1, "2+2?", {"index": 0, "answer": "4"})) for text in ("4", " 4\n", "5")
    ] == [1.0, 1.0, 0.0]


# in processes of the pool


@pytest.fixture
def pools() -> Iterator[list[RewardPool]]:
    made: list[RewardPool] = []
    yield made
    for pool in made:
        pool.close()


def test_a_file_can_import_what_is_beside_it(
    tmp_path: Path, pools: list[RewardPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its own import and at a call, from whatever directory the run was started in."""
    for name in ("reward_with_sibling.py", "helper_of_reward.py"):
        shutil.copy(ROWS / name, tmp_path / name)
    (tmp_path / "early.py").write_text(
        "from helper_of_reward import half\ndef reward(response, answer):\n    return half(response)\n"
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    specs = [RewardSpec(f"{tmp_path / file}:reward") for file in ("reward_with_sibling.py", "early.py")]
    pools.append(RewardPool(specs, 1))
    scores = pools[0].score([(0, Task("a", "b")), (1, Task("a", "b"))])
    assert [score.message or score.value for score in scores] == [0.5, 0.5]


IMPORTS_LATE = "def reward(response, answer):\n    import {0}\n    return {0}.value\n"


def test_a_file_beside_whose_name_another_module_has_is_refused(
    tmp_path: Path, pools: list[RewardPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which has it would be chance: another reward's, of the directory that the run is in, or installed."""
    for place in ("one", "two", "here"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "its_values.py").write_text(f"value = {len(place)}.0\n")
        (tmp_path / place / "mine.py").write_text(IMPORTS_LATE.format("its_values"))
    paths = [f"{tmp_path / place / 'mine.py'}:reward" for place in ("one", "two", "here")]
    monkeypatch.chdir(tmp_path / "here")
    pools.append(RewardPool([RewardSpec(paths[2])], 1))
    assert pools[0].score([(0, Task("a", "b"))])[0].value == 4.0
    with pytest.raises(
        ConfigError, match=r"imports its_values, which is next to it, but Python finds .*here/its_values.py"
    ):
        RewardPool([RewardSpec(paths[0])], 1)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"two/mine.py imports its_values.*one/its_values.py instead; rename the one next to it",
    ):
        RewardPool([RewardSpec(path) for path in paths[:2]], 1)


@pytest.mark.parametrize("name", ["calendar", "numpy", "sys"])
def test_a_file_beside_with_the_name_of_what_is_installed_is_refused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / f"{name}.py").write_text("value = 1.0\n")
    (tmp_path / f"beside_{name}.py").write_text(f"from {name} import value\n")
    with pytest.raises(ConfigError, match=rf"imports {name}, which is next to it, but Python finds"):
        get_reward(
            RewardSpec(
                path_of(
                    tmp_path, f"def reward(response, answer):\n    import beside_{name}\n    return 1.0\n"
                )
            )
        )


def test_the_first_import_does_not_count_against_the_time(tmp_path: Path, pools: list[RewardPool]) -> None:
    """A module that takes longer to import than a response may take; the function itself is still bound."""
    (tmp_path / "heavy.py").write_text(
        "import time\nbegun = time.monotonic()\nwhile time.monotonic() < begun + 3:\n    pass\n"
    )
    name = path_of(
        tmp_path,
        (
            "def reward(response, answer):\n    import heavy\n    while response == 'hangs':\n        "
            "pass\n    "
            "return 1.0\n"
        ),
    )
    pools.append(RewardPool([RewardSpec(name, {}, 0.5)], 1))
    scores = pools[0].score([(0, Task(text, "b")) for text in ("first", "hangs", "third")])
    assert [score.fault or score.value for score in scores] == [1.0, "timeout", 1.0]


@pytest.mark.parametrize(
    "lazy", [False, True], ids=["a part", "a part that a package imports when it is asked for"]
)
def test_the_first_import_of_a_part_does_not_count_either(
    tmp_path: Path, pools: list[RewardPool], lazy: bool
) -> None:
    asked = (
        "import importlib\ndef __getattr__(name):\n    return importlib.import_module('whole.part').value\n"
    )
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "__init__.py").write_text(asked if lazy else "")
    (tmp_path / "whole" / "part.py").write_text(
        "import time\nvalue = 1.0\nbegun = time.monotonic()\nwhile time.monotonic() < begun + 2: ...\n"
    )
    wanted = "from whole import value" if lazy else "from whole import part\n    from whole.part import value"
    name = path_of(tmp_path, f"import whole\ndef reward(response, answer):\n    {wanted}\n    return value\n")
    pools.append(RewardPool([RewardSpec(name, {}, 0.5)], 1))
    [score] = pools[0].score([(0, Task("a", "b"))])
    assert (score.fault, score.value) == (None, 1.0)


def test_a_module_that_is_never_imported_whole_is_not_waited_for(
    tmp_path: Path, pools: list[RewardPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "endless.py").write_text("while True:\n    pass\n")
    name = path_of(tmp_path, "def reward(response, answer):\n    import endless\n    return 1.0\n")
    pools.append(RewardPool([RewardSpec(name, {}, 0.5)], 1))
    monkeypatch.setattr("megarl.rollout.reward_pool.START_SECONDS", 1.0)
    [score] = pools[0].score([(0, Task("a", "b"))])
    assert score.fault == "timeout"


HOSTILE = {
    # a number, whatever its type
    "text": 1.0,
    "boolean": 1.0,
    "np32": 0.25,
    "tensor": 0.25,
    "dict_np": 0.5,
    "neg0": 0.0,
    "prints": 1.0,
    "asyncf": None,
    # none
    "nan": "finite",
    "inf": "finite",
    "none": "a number is wanted",
    "listy": "a number is wanted",
    "dict_noscore": "score is wanted",
    "dict_acc2": "from 0 to 1",
    "raises": "KeyError",
    "exits": "SystemExit",
    "huge": "",
    "big": "finite",
}


def test_functions_of_all_kinds_of_values(pools: list[RewardPool]) -> None:
    names = [name for name in HOSTILE if f"def {name}(" in (ROWS / "rewards_hostile.py").read_text()]
    assert len(names) >= 15
    pools.append(RewardPool([RewardSpec(f"{ROWS / 'rewards_hostile.py'}:{name}") for name in names], 1))
    scores = pools[0].score([(place, Task("a", "b")) for place in range(len(names))])
    for name, score in zip(names, scores, strict=True):
        wanted = HOSTILE[name]
        if isinstance(wanted, str):
            assert score.value is None and wanted in score.message, (name, score)
        elif wanted is not None:
            assert score.value == wanted, (name, score)
        else:
            assert score.value is not None, (name, score)
