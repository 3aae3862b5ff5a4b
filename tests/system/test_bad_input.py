"""Bad input to the program itself: exit code 2, one message that names the thing, its value and the remedy, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.cli import main
from megarl.run import run as algorithms_run
from tests.system.whole_runs import Launches, Material, make_material, write_config
from tests.tiers import sampled, slow


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("material"), teach=False)


WITHOUT_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}x"


def broken_lines(directory: Path) -> list[str]:
    path = directory / "broken.jsonl"
    good = json.dumps({"prompt": "Anna writes 1+1=", "answer": "2"})
    path.write_text(f'{good}\n\n{good}\n{{"prompt": "no end\n{good}\n')
    return [f"data.train.path={path}"]


def empty_file(directory: Path) -> list[str]:
    path = directory / "empty.jsonl"
    path.write_text("\n \n")
    return [f"data.train.path={path}"]


def long_prompt(directory: Path) -> list[str]:
    path = directory / "long.jsonl"
    path.write_text(json.dumps({"prompt": "7 " * 200, "answer": "7"}))
    return [f"data.train.path={path}"]


def one_record(directory: Path, text: str) -> list[str]:
    """A data file with one line."""
    path = directory / "odd.jsonl"
    path.write_text(text)
    return [f"data.train.path={path}"]


def pipe(directory: Path) -> list[str]:
    path = directory / "pipe.jsonl"
    os.mkfifo(path)
    return [f"data.train.path={path}"]


def broken_parquet(directory: Path) -> list[str]:
    path = directory / "torn.parquet"
    path.write_bytes(b"PAR1 and no more")
    return [f"data.train.path={path}"]


def unparsed_references(directory: Path) -> list[str]:
    path = directory / "references.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "1+1=", "answer": answer}) for answer in ("2", "\\text{ }", "3", "")))
    return [f"data.train.path={path}"]


def few_records(directory: Path, weight: float | None = None) -> list[str]:
    """Three records; with a weight, as two sources of as many."""
    path = directory / "few.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{each}+1=", "answer": str(each + 1)}) for each in range(3)))
    if weight is None:
        return [f"data.train.path={path}"]
    source = f"{{path: {path}, prompt_key: prompt, answer_key: answer, weight: {weight}}}"
    return [f"data.train=[{source}, {source}]"]


def conversation(directory: Path, *roles: str) -> list[str]:
    """A source of a good conversation and of one with these roles."""
    path = directory / "turns.jsonl"
    rows = [{"turns": [{"role": role, "content": "1+1="} for role in each]} for each in (("user", "assistant"), roles)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return [f"data.train={{path: {path}, messages_key: turns}}", "~data.train.prompt_key", "~data.train.answer_key"]


def without_tokenizer(model: Path, directory: Path) -> list[str]:
    copy = directory / "bare"
    shutil.copytree(model, copy)
    for path in (*copy.glob("tokenizer*"), *copy.glob("special_tokens_map.json")):
        path.unlink()
    return [f"policy.model_name={copy}"]


def changed_model(model: Path, directory: Path, **changes: object) -> list[str]:
    """The model with other entries in its config.json."""
    copy = directory / "changed"
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **changes}))
    return [f"policy.model_name={copy}"]


def lost_tensor(model: Path, directory: Path) -> list[str]:
    copy = directory / "lost"
    shutil.copytree(model, copy)
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, copy / "model.safetensors")
    return [f"policy.model_name={copy}"]


def torn_weights(model: Path, directory: Path) -> list[str]:
    copy = directory / "torn"
    shutil.copytree(model, copy)
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(content[: len(content) // 2])
    return [f"policy.model_name={copy}"]


def small_vocabulary(model: Path, directory: Path) -> list[str]:
    """Weights and config agree with each other, but the tokenizer knows more tokens."""
    overrides = changed_model(model, directory, vocab_size=211)
    path = directory / "changed" / "model.safetensors"
    tensors = load_file(path)
    rows = {"model.embed_tokens.weight", "lm_head.weight"}
    save_file({name: tensor[:211].clone() if name in rows else tensor for name, tensor in tensors.items()}, path)
    return overrides


def loose_head(model: Path, directory: Path) -> list[str]:
    """A tied model with a second, different output layer: only who reads the weights can see that."""
    overrides = changed_model(model, directory, tie_word_embeddings=True)
    path = directory / "changed" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = torch.ones_like(tensors["lm_head.weight"])
    save_file(tensors, path)
    return overrides


@dataclass(frozen=True)
class Case:
    """Overrides, made in a directory from the model, and what the message must say."""

    name: str
    make: Callable[[Path, Path], list[str]]
    says: list[str] = field(default_factory=list)


def fixed(*overrides: str) -> Callable[[Path, Path], list[str]]:
    return lambda model, directory: list(overrides)


FAULTS = [
    Case(
        "misspelt key",
        fixed("policy.megatron_cfg.tensor_modle_parallel_size=2"),
        [r"policy\.megatron_cfg\.tensor_modle_parallel_size = 2", r"tensor_model_parallel_size", "Fix"],
    ),
    Case("ranks", fixed("cluster.gpus_per_node=3"), [r"cluster\.gpus_per_node = 3", "multiple of", "= 2", "Fix"]),
    Case(
        "heads",
        fixed("policy.megatron_cfg.tensor_model_parallel_size=8", "cluster.gpus_per_node=8"),
        [r"tensor_model_parallel_size = 8", "2 attention heads", "2 key-value heads", "Fix"],
    ),
    Case(
        "layers",
        fixed("policy.megatron_cfg.pipeline_model_parallel_size=3", "cluster.gpus_per_node=6"),
        [r"pipeline_model_parallel_size = 3", "2 layers", "Fix"],
    ),
    Case("global batch", fixed("policy.train_global_batch_size=7"), [r"train_global_batch_size = 7", "24 samples", "Fix"]),
    Case("micro-batch", fixed("policy.train_micro_batch_size=3"), [r"train_micro_batch_size = 3", "8 samples", "Fix: write 4"]),
    Case("no model", fixed("policy.model_name=/no/such/model"), [r"policy\.model_name = '/no/such/model'", "does not exist", "Fix"]),
    Case("no data", fixed("data.train.path=/no/such.jsonl"), [r"data\.train\.path = '/no/such\.jsonl': there is no such file", "Fix"]),
    Case("empty data", lambda model, directory: empty_file(directory), [r"empty\.jsonl holds 0 records", "at least 1", "Fix"]),
    Case("broken line", lambda model, directory: broken_lines(directory), [r"broken\.jsonl line 4 is not JSON", "no end", "Fix"]),
    Case(
        "torn parquet",
        lambda model, directory: broken_parquet(directory),
        [r"torn\.parquet cannot be read as parquet", "after 0 rows", "Fix"],
    ),
    Case(
        "roles",
        lambda model, directory: conversation(directory, "user", "user", "assistant"),
        [r"turns\.jsonl line 2: turns\[1\] has the role 'user' after 'user'", "Fix"],
    ),
    Case(
        "no answer",
        lambda model, directory: conversation(directory, "user", "assistant", "user"),
        [r"turns\.jsonl line 2: 'turns' ends with a turn of 'user'", "answer_key", "Fix"],
    ),
    Case(
        "nested key",
        lambda model, directory: [*one_record(directory, '{"prompt": "1", "answer": {"is": "2"}}'), "data.train.answer_key=answer.truth"],
        [r"odd\.jsonl line 1 has no key 'answer\.truth'; 'answer' has \['is'\]", "Fix"],
    ),
    Case(
        "an answer that is an object",
        lambda model, directory: one_record(directory, '{"prompt": "1", "answer": {"is": "2"}}'),
        [r"odd\.jsonl line 1: 'answer' = \{'is': '2'\} is a dict", r"answer\.is", "Fix"],
    ),
    Case(
        "columns with unusual names",
        lambda model, directory: one_record(directory, '{"ask": "1+1=", "say": "2"}'),
        [r"odd\.jsonl: by their usual names, its columns \(ask, say\) hold neither", "Fix: write prompt_key and answer_key"],
    ),
    Case(
        "a missing key",
        lambda model, directory: [
            *one_record(directory, '{"question": "1+1=", "answer": "2"}'),
            "data.train.prompt_key=prompt",
            "data.train.answer_key=answer",
        ],
        [
            r"odd\.jsonl line 1 has no key 'prompt'; it has \['answer', 'question'\]",
            "Fix: add it, or correct the key of",
        ],
    ),
    Case(
        "a record that is a list",
        lambda model, directory: one_record(directory, '["1+1=", "2"]'),
        [r"odd\.jsonl line 1 is a list, expected an object", r"Fix: write \{'prompt': \.\.\., 'answer': \.\.\.\}"],
    ),
    Case(
        "a prompt of another type",
        lambda model, directory: one_record(directory, '{"prompt": null, "answer": "2"}'),
        [r"odd\.jsonl line 1: 'prompt' = None is neither a string nor a list of messages", "Fix"],
    ),
    Case(
        "an answer that is null",
        lambda model, directory: one_record(directory, '{"prompt": "1+1=", "answer": null}'),
        [r"odd\.jsonl line 1: 'answer' is null, expected a string or a number", "Fix"],
    ),
    Case(
        "an answer without text",
        lambda model, directory: one_record(directory, '{"prompt": "1+1=", "answer": " "}'),
        [
            r"1 of 1 reference answers are of no use to env\.reward",
            r"index 0 \(\S*odd\.jsonl line 1\): ' ': it is empty",
            "Fix: correct 'answer'",
        ],
    ),
    Case(
        "a list over many lines",
        lambda model, directory: one_record(directory, "[\n {}\n]"),
        [r"odd\.jsonl line 1 is not JSON", r"Fix: write one JSON object a line; jq -c '\.\[\]' makes lines of one list"],
    ),
    Case(
        "an answer of another type",
        lambda model, directory: one_record(directory, '{"prompt": "1+1=", "answer": true}'),
        [r"odd\.jsonl line 1: 'answer' = True is a bool, expected a string or a number", "Fix"],
    ),
    Case(
        "an answer that is no number",
        lambda model, directory: one_record(directory, '{"prompt": "1+1=", "answer": NaN}'),
        [r"odd\.jsonl line 1: 'answer' = nan is a float", "Fix: write a text or a number"],
    ),
    Case(
        "a turn that the template cannot write",
        lambda model, directory: [
            *conversation(directory, "system", "user", "assistant"),
            f"policy.tokenizer.chat_template={json.dumps(WITHOUT_SYSTEM)}",
        ],
        [r"turns\.jsonl line 2: policy\.tokenizer\.chat_template cannot be applied to turn 1 of 2, of 'system'", "no system here", "Fix"],
    ),
    Case(
        "references that nothing can be parsed from",
        lambda model, directory: [*unparsed_references(directory), "env.reward=math"],
        [r"2 of 4 reference answers are of no use to env\.reward", r"index 1 \(\S*references\.jsonl line 2\): '\\\\text", "Fix"],
    ),
    Case(
        "fewer records than a step takes",
        lambda model, directory: few_records(directory),
        [
            r"data\.train has 3 records \(data file \S*few\.jsonl: 3\), and a step takes grpo\.num_prompts_per_step = 4",
            r"Fix: write grpo\.num_prompts_per_step=3 or less, or give more records; .* repeat: 2",
        ],
    ),
    Case(
        "fewer records than a step takes of all sources",
        lambda model, directory: [*few_records(directory, weight=1.0), "grpo.num_prompts_per_step=8", "policy.train_global_batch_size=16"],
        [r"data\.train has 6 records \(data file \S*few\.jsonl: 3, data file \S*few\.jsonl: 3\)", "or give more records$"],
    ),
    Case(
        "a reward without a weight",
        fixed("~env.reward", "env.rewards={exact_match: {weight: 0}, format: {weight: 0}}"),
        [r"env\.rewards = .*all weights are 0", "Fix"],
    ),
    Case(
        "weight of zero",
        fixed("data.train=[{path: a, prompt_key: p, answer_key: a, weight: 0}, {path: b, prompt_key: p, answer_key: a, weight: 1}]"),
        [r"data\.train\.0\.weight = 0", "more than 0", "Fix"],
    ),
    Case(
        "a value that the template does not read",
        fixed("policy.tokenizer.chat_template_kwargs={enable_thinkin: false}"),
        [r"chat_template_kwargs\.enable_thinkin", "does not read it", "Fix"],
    ),
    Case("long prompt", lambda model, directory: long_prompt(directory), [r"1 of 1 prompts exceed", "24", r"long\.jsonl line 1"]),
    Case(
        "other vocabulary",
        lambda model, directory: changed_model(model, directory, vocab_size=380),
        ["do not fit their config.json", r"model\.embed_tokens\.weight is \[379, 64\], config\.json asks for \[380, 64\]", "Fix"],
    ),
    Case(
        "other width",
        lambda model, directory: changed_model(model, directory, hidden_size=48),
        ["do not fit their config.json", r"asks for \[379, 48\]", "Fix"],
    ),
    Case(
        "more layers",
        lambda model, directory: changed_model(model, directory, num_hidden_layers=4, layer_types=["full_attention"] * 4),
        [r"missing: model\.layers\.2\.", "Fix"],
    ),
    Case(
        "unknown family",
        lambda model, directory: changed_model(model, directory, model_type="nonesuch"),
        ["nonesuch", "Fix"],
    ),
    Case("lost tensor", lost_tensor, [r"missing: model\.norm\.weight", "Fix"]),
    Case("torn weights", torn_weights, [r"model\.safetensors is not a readable safetensors file", "Fix"]),
    Case(
        "nested record",
        lambda model, directory: one_record(directory, '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + ', "answer": "2"}'),
        [r"odd\.jsonl line 1 is not JSON", "nest", "Fix"],
    ),
    Case(
        "half a character in a prompt",
        lambda model, directory: one_record(directory, '{"prompt": "a \\ud800 b", "answer": "2"}'),
        [r"odd\.jsonl line 1", r"\\ud800", "no character", "Fix"],
    ),
    Case(
        "half a character in an answer",
        lambda model, directory: one_record(directory, '{"prompt": "1+1=", "answer": "\\udfff"}'),
        [r"odd\.jsonl line 1", r"\\udfff", "Fix"],
    ),
    Case(
        "half a character in a message",
        lambda model, directory: one_record(directory, '{"prompt": [{"role": "user", "content": "\\ud800"}], "answer": "2"}'),
        [r"odd\.jsonl line 1", r"\\ud800", "Fix"],
    ),
    Case(
        "a pipe as data",
        lambda model, directory: pipe(directory),
        [r"data file \S*pipe\.jsonl is a named pipe, not a file", "Fix"],
    ),
    Case(
        "a line of ten megabytes",
        lambda model, directory: one_record(directory, json.dumps({"prompt": "12+7=" * 2**21, "answer": "2"})),
        [r"1 of 1 prompts exceed data\.max_input_seq_length", r"odd\.jsonl line 1\): more than \d+ tokens", "Fix"],
    ),
    Case("a nested override", fixed("seed=" + "[" * 100_000), [r"override 'seed=\[\[", "nests too deeply", "Fix"]),
    Case("no heads", lambda model, directory: changed_model(model, directory, num_attention_heads=0), ["num_attention_heads = 0", "Fix"]),
    Case(
        "no key-value heads",
        lambda model, directory: changed_model(model, directory, num_key_value_heads=0),
        ["num_key_value_heads = 0", "Fix"],
    ),
    Case("no width", lambda model, directory: changed_model(model, directory, hidden_size=0), ["hidden_size = 0", "Fix"]),
    Case(
        "broken chat template",
        fixed("policy.tokenizer.chat_template='{% for message in messages %}'"),
        ["policy.tokenizer.chat_template", "for", "Fix"],
    ),
    Case(
        "chat template of other messages",
        fixed("policy.tokenizer.chat_template='{{ messages[0].nothing.at_all }}'"),
        ["policy.tokenizer.chat_template", "Fix"],
    ),
    Case(
        "chat template that refuses",
        fixed("""policy.tokenizer.chat_template="{{ raise_exception('no users here') }}\""""),
        ["policy.tokenizer.chat_template", "no users here", "Fix"],
    ),
    Case(
        "chat template that writes nothing",
        fixed("policy.tokenizer.chat_template='{# nothing #}'"),
        [
            r"data file \S+: (\d+) of \1 prompts have no tokens",
            "Fix: give policy.tokenizer.chat_template a template that writes",
        ],
    ),
    Case("no tokenizer", without_tokenizer, [r"policy\.tokenizer\.name = '[^']*bare'", "no tokenizer", "Fix: .*policy.tokenizer.name"]),
    Case("token ids", small_vocabulary, [r"token id \d+", r"\[0, 211\)", "Fix"]),
]


def check_message(output: str, says: list[str]) -> None:
    """One message that says everything, and no traceback."""
    message = output[output.index("megarl: ") :]
    for part in says:
        assert re.search(part, message), f"{part!r} is not in:\n{message}"
    assert "Traceback" not in output, output


def check_nothing_left(run_dir: Path) -> None:
    """At most the resolved configuration, and empty lock files of the run and of its checkpoints."""
    left = {path.relative_to(run_dir).as_posix(): path for path in run_dir.rglob("*")} if run_dir.exists() else {}
    locks = {"run.lock", "checkpoints/run.lock"} & set(left)
    assert set(left) <= {"config.yaml", "checkpoints", *locks}
    assert ("run.lock" in left or not left) and all(left[lock].read_bytes() == b"" for lock in locks)


@sampled(15)
@pytest.mark.parametrize("case", FAULTS, ids=[case.name.replace(" ", "-") for case in FAULTS])
def test_faults_are_found_before_workers_start(
    case: Case, material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(algorithms_run, "start_ray", lambda *arguments: None)
    monkeypatch.setattr(algorithms_run, "start_policy", lambda *arguments: pytest.fail("the workers are about to start"))
    config = write_config(tmp_path / "run.yaml", "grpo", material)
    assert main(["train", str(config), f"run_dir={tmp_path / 'run'}", *case.make(material.model, tmp_path)]) == 2
    check_message(capsys.readouterr().err, case.says)
    check_nothing_left(tmp_path / "run")


@pytest.mark.parametrize(
    "place", ["file/run", "file", "/proc/none/run", "x" * 300], ids=["below a file", "a file", "read-only", "too long"]
)
def test_directories_that_no_run_can_have(
    place: str, material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(algorithms_run, "start_ray", lambda *arguments: None)
    monkeypatch.setattr(algorithms_run, "start_policy", lambda *arguments: pytest.fail("the workers are about to start"))
    (tmp_path / "file").write_text("x")
    config = write_config(tmp_path / "run.yaml", "grpo", material)
    assert main(["train", str(config), f"run_dir={tmp_path / place}"]) == 2
    check_message(capsys.readouterr().err, [re.escape(f"run_dir = {str(tmp_path / place)!r}"), "Fix"])


@slow
@pytest.mark.parametrize("name", ["misspelt key", "broken line", "other vocabulary"])
def test_faults_end_the_program_with_2(name: str, material: Material, launches: Launches, tmp_path: Path) -> None:
    [case] = [case for case in FAULTS if case.name == name]
    config = write_config(tmp_path / "run.yaml", "grpo", material)
    launch = launches.start(config, tmp_path / "run", case.make(material.model, tmp_path))
    assert launch.finish() == 2, launch.output()[-3000:]
    check_message(launch.output(), case.says)
    check_nothing_left(tmp_path / "run")


@slow
def test_fault_found_by_a_worker(material: Material, launches: Launches, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yaml", "grpo", material)
    launch = launches.start(config, tmp_path / "run", loose_head(material.model, tmp_path))
    assert launch.finish() == 2, launch.output()[-3000:]
    output = launch.output()
    message = output[output.index("megarl: ") :]
    assert re.search(r"\[pp0 dp0 cp0 tp0 .*lm_head\.weight differs from model\.embed_tokens\.weight", message, re.DOTALL), message
    assert "Traceback" not in message, message
    assert not list((tmp_path / "run" / "checkpoints").glob("*step_*")) and not (tmp_path / "run" / "hf").exists()
