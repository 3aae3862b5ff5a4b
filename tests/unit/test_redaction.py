"""No secret is read in a message, a log, or a file of a run; and what is no secret is not taken from them."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import re
import stat
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megarl import redaction
from megarl.checkpoint.manager import CONFIG_NAME, CheckpointManager
from megarl.cli import main
from megarl.config import OverridesError, load_config, parse_hydra_overrides
from megarl.config.algorithms import run_type
from megarl.config.schema import known_paths
from megarl.errors import ConfigError, Violation
from megarl.observe.launches import read_launches, recorded_launch
from megarl.redaction import (
    FIELDS,
    HIDDEN,
    FromEnvironment,
    LineRedactor,
    RedactingFormatter,
    is_secret,
    learn,
    redacted,
    redacted_text,
    shown,
)
from megarl.run.run import CONFIG_FILE, run
from tests.tiers import sampled
from tests.unit.driver_runs import PolicyMaker, make_config

SECRET = "hunter2-and-more"
SECRET_NAMES = [
    *(
        "HF_TOKEN",
        "WANDB_API_KEY",
        "OPENAI_KEY",
        "DB_PASS",
        "GITHUB_PAT",
        "PGPASSWORD",
        "MY_SECRET_FILE",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PWD",
    ),
    *(
        "api_key",
        "apiKey",
        "judgeApiKey",
        "api-key",
        "api_keys",
        "openai_key",
        "password",
        "token",
        "auth",
        "env.options.client_secret",
    ),
    *("credentials", "SSH_PASSPHRASE", "logger.wandb.api_key", "basic_auth"),
]
PLAIN_NAMES = [
    *(
        "prompt_key",
        "answer_key",
        "data.train.messages_key",
        "extra_keys",
        "max_tokens",
        "num_tokens",
        "pad_token",
        "eos_token",
        "pad_token_id",
    ),
    *(
        "key",
        "keys",
        "monkey",
        "path",
        "PATH",
        "passes",
        "bypass_checks",
        "tokens",
        "author",
        "tokenizer",
        "RAY_AUTH_TOKEN_PATH",
        "PWD",
        "OLDPWD",
        "",
        ".",
    ),
]


@pytest.fixture(autouse=True)
def nothing_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_learned", set())


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_names_of_no_secrets(name: str) -> None:
    assert not is_secret(name)


def test_no_key_of_the_schema_is_taken_for_a_secret() -> None:
    """Whoever adds a key that is named like one either names it otherwise or says that it is none."""
    names = {
        path.rpartition(".")[2] for algorithm in ("grpo", "sft") for path in known_paths(run_type(algorithm))
    }
    assert [name for name in names if is_secret(name)] == []
    assert {name for name in names if name.endswith("_key")} | {"chosen_key", "rejected_key"} == FIELDS


def test_whatever_stands_below_such_a_name_is_hidden() -> None:
    value = {
        "api_key": {"first": SECRET, "more": [SECRET, 5, None, True, ""]},
        "pin_token": 1234,
        "empty_token": "",
        "off_token": False,
    }
    assert redacted(value) == {
        "api_key": {"first": HIDDEN, "more": [HIDDEN, HIDDEN, None, True, ""]},
        "pin_token": HIDDEN,
        "empty_token": "",
        "off_token": False,
    }
    assert value["api_key"] == {"first": SECRET, "more": [SECRET, 5, None, True, ""]}


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("https://user:pass@host/path", "https://***@host/path"),
        ("postgresql+psycopg://u:p%40w@h:5432/d?x=1", "postgresql+psycopg://***@h:5432/d?x=1"),
        ("see https://token@host and http://a:b@c", "see https://***@host and http://***@c"),
        ("https://host/p?token=abc&n=5", "https://host/p?token=***&n=5"),
        ("https://host/p?n=5&X-Amz-Signature=abc#part", "https://host/p?n=5&X-Amz-Signature=***#part"),
        ("https://host:8080/path?tokens_a_s=5@x", "https://host:8080/path?tokens_a_s=***"),
        ("hf://datasets/owner/name@main/file", "hf://datasets/owner/name@main/file"),
        ("https://host/a@b", "https://host/a@b"),
        ("https://me:p@ss@host/path", "https://***@host/path"),
        ("https:/me:pass@host/path", "https:/***@host/path"),
        ("image:/path@tag", "image:/path@tag"),
        ("somebody@example.org", "somebody@example.org"),
        ("s3://bucket/key", "s3://bucket/key"),
    ],
)
def test_credentials_in_addresses(address: str, expected: str) -> None:
    assert redacted({"a": [address]}) == {"a": [expected]}
    assert redacted_text(f"fetching '{address}' failed") == f"fetching '{expected}' failed"
    assert shown("data.train.path", address) == repr(expected)


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN", "api_key", "password"])
@pytest.mark.parametrize(
    "form", ["{}={}", "{}: {}", "{} = '{}'", '"{}": "{}"', "{{'{}': '{}'}}", "{}={}, next"]
)
def test_assignments_in_messages(name: str, form: str) -> None:
    text = redacted_text(form.format(name, SECRET))
    assert SECRET not in text and name in text and HIDDEN in text


@pytest.mark.parametrize(
    "text",
    [
        "data.train.prompt_key = 'question': no such field",
        "token: 5 is outside the vocabulary",
        "pad_token: '<pad>'",
        "policy.max_total_sequence_length = 8: at least 16",
        "logger.wandb.api_key = None",
        "12:30:05 step 4: loss 0.5",
        "cannot read '/etc/passwd': an error of the disk",
        "/etc/passwd: Permission denied",
        "open(/run/secrets/db_password): failed",
        "bad password: try again",
        "the api_key: no such key",
        "'of the user's api_key': unknown",
    ],
)
def test_messages_without_secrets_stay_as_they_are(text: str) -> None:
    assert redacted_text(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "password: swordfish",
        "{'passwd': swordfish}",
        "vault/passwd: hunter2",
        "passwd=an",
        "'x passwd': 'an'",
    ],
)
def test_words_that_may_be_secrets_are_hidden(text: str) -> None:
    assert HIDDEN in redacted_text(text) and not re.search("swordfish|hunter2|an\\b", redacted_text(text))


@given(st.text(max_size=60))
def test_a_text_that_was_redacted_is_not_changed_again(text: str) -> None:
    once = redacted_text(text)
    assert redacted_text(once) == once


def test_learned_values_are_hidden_wherever_they_stand() -> None:
    learn(
        {
            "HOME": "/home/somebody",
            "HF_TOKEN": SECRET,
            "PIN_TOKEN": "1234",
            "nested": [{"api_key": "another-value"}],
        }
    )
    assert (
        redacted_text(f"a{SECRET}b another-value 1234 /home/somebody")
        == f"a{HIDDEN}b {HIDDEN} 1234 /home/somebody"
    )


def test_of_a_secret_of_several_lines_each_is_hidden() -> None:
    learn({"DEPLOY_KEY": "-----BEGIN PRIVATE KEY-----\n  MIIEvQIBADANBg  \nend\n"})
    assert (
        redacted_text("MIIEvQIBADANBg, -----BEGIN PRIVATE KEY----- and the end")
        == f"{HIDDEN}, {HIDDEN} and the end"
    )


@pytest.mark.parametrize(
    "form",
    [
        "env=HF_TOKEN={}",
        "{{'env': 'HF_TOKEN={}'}}",
        "error:HF_TOKEN={}",
        "a=b:c=HF_TOKEN: {}",
        "https://h/pHF_TOKEN={}",
    ],
)
def test_an_assignment_within_what_another_name_gets(form: str) -> None:
    assert redacted_text(form.format(SECRET)) == form.format(HIDDEN)


@pytest.mark.parametrize(
    "name", ["--hf_token", "-5api_key", "éAPI_KEY", "x.y-password", "._token_", "?my_secret"]
)
def test_names_behind_other_characters(name: str) -> None:
    text = redacted_text(f"run {name}={SECRET} now")
    assert SECRET not in text and text.startswith(f"run {name}=") and text.endswith(f"{HIDDEN} now")


@sampled(5)
@pytest.mark.parametrize(
    "piece",
    ["a", "a1", "-.", "9", "_", "é", "x://", "a=", "?a", "?key", "a:", " ", "a ", "'", 'a="', "@", "x+"],
)
def test_a_long_line_takes_no_more_than_its_length(piece: str) -> None:
    """A million characters, as a response or an image in letters may have: what took their square would not
    come back."""
    text = redacted_text(f"{piece * (10**6 // len(piece))} HF_TOKEN={SECRET}")
    assert text.endswith(f" HF_TOKEN={HIDDEN}") and SECRET not in text


def test_an_argument_s_long_name_takes_no_more_than_its_length() -> None:
    name = "?" + "key" * 400_000
    assert redacted_text(name) == name and redacted_text(f"{name}=5") == f"{name}={HIDDEN}"


LINES = st.lists(
    st.sampled_from(
        ["plain", SECRET, "HF_TOKEN=abc", "\u00e9", "", "https://a:b@c/d", "\n", "\r", "\r\n", "\ud800", " "]
    ),
    max_size=12,
)


@given(LINES, st.lists(st.integers(0, 400), max_size=8))
def test_what_a_process_prints_is_the_same_in_whatever_pieces_it_comes(
    parts: list[str], cuts: list[int]
) -> None:
    redaction._learned.add(SECRET)
    data = "".join(parts).encode(errors="surrogatepass")
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    lines = LineRedactor()
    said = "".join(lines.take(data[begin:end]) for begin, end in pairwise(bounds)) + lines.end()
    text = data.decode(errors="backslashreplace")
    assert said == "".join(redacted_text(line) for line in re.split(r"([\r\n])", text))
    assert SECRET not in said and "abc" not in said and "a:b" not in said


@pytest.mark.parametrize("before", [0, 30, 95, 100, 140])
def test_of_a_line_that_is_too_long_no_half_a_secret_is_shown(before: int) -> None:
    learn({"HF_TOKEN": SECRET})
    lines = LineRedactor(longest=100)
    said = lines.take(b"x" * before + SECRET.encode() + b"y" * 200) + lines.take(b"z" * 5 + b"\nshort\n")
    first, rest = said.split("\n", 1)
    assert rest == "short\n" and first.endswith(
        f"[... the rest of a line of {before + len(SECRET) + 205} bytes]"
    )
    assert "hu" not in said and first.startswith("x" * min(before, 50))


def test_the_log_and_its_tracebacks() -> None:
    learn({"HF_TOKEN": SECRET})
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(RedactingFormatter("%(message)s"))
    logger = logging.Logger("of-this-test")
    logger.addHandler(handler)
    try:
        raise ValueError(f"https://me:{SECRET}@host and {SECRET}")
    except ValueError:
        logger.exception("asked with %s", SECRET)
    assert SECRET not in stream.getvalue() and "ValueError: https://***@host and ***" in stream.getvalue()


def test_a_violation_names_the_key_and_not_the_secret() -> None:
    violation = Violation("logger.wandb.api_key", SECRET, "there is no such key", f"remove {SECRET}")
    assert str(violation) == "logger.wandb.api_key = '***': there is no such key. Fix: remove ***"
    assert SECRET not in str(ConfigError([violation]))
    section = Violation("logger.judge", {"api_key": SECRET, "n": 5}, "there is no such key", "remove it")
    assert str(section) == "logger.judge = {'api_key': '***', 'n': 5}: there is no such key. Fix: remove it"
    assert str(Violation("a.b", (1, "x"), "bound", "fix")) == "a.b = (1, 'x'): bound. Fix: fix"


def minimal(directory: Path, **more: Any) -> Path:
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(more))
    return path


@pytest.mark.parametrize(
    "override",
    [
        f"logger.wandb.api_key={SECRET}",
        f"+logger.wandb.api_key={SECRET}",
        f"++logger.wandb.password={SECRET}",
        f"logger.wandb.url=https://me:{SECRET}@host",
        f"logger.wandb.api_key=[{SECRET}",
        f"logger.wandb.api_key.deeper={SECRET}",
        f"~logger.wandb.api_key={SECRET}",
    ],
)
def test_a_command_line_that_is_refused_does_not_show_it(
    override: str, tmp_path: Path, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = minimal(
        tmp_path, algorithm="grpo", logger={"wandb": {"api_key": "of-the-file-itself", "project": "p"}}
    )
    assert main(["train", str(path), override]) == 2
    said = capsys.readouterr()
    for secret in (SECRET, "of-the-file-itself"):
        assert secret not in said.out + said.err + caplog.text
    assert "logger.wandb" in said.err


def test_a_present_secret_is_not_shown_where_another_value_was_to_be_removed() -> None:
    from omegaconf import OmegaConf

    config: Any = OmegaConf.create({"a": {"api_key": SECRET}})
    with pytest.raises(OverridesError) as caught:
        parse_hydra_overrides(config, ["~a.api_key=other-value"])
    assert SECRET not in str(caught.value) and "other-value" not in str(caught.value)


def test_how_a_launch_ended_is_written_without(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), recorded_launch(tmp_path, 0, 5):
        raise RuntimeError(f"https://me:{SECRET}@host: HF_TOKEN={SECRET}")
    [launch] = read_launches(tmp_path)
    assert launch.outcome == "RuntimeError: https://***@host: HF_TOKEN=***"


ENVIRONMENT = (
    "judge: {url: '${oc.env:MEGARL_TEST_VALUE}', twice: '${judge.url} and "
    "${oc.env:MEGARL_TEST_VALUE}', n: 5}\nother: plain\n"
)


def test_a_configuration_reads_no_environment_unless_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGARL_TEST_VALUE", SECRET)
    path = tmp_path / "config.yaml"
    path.write_text(ENVIRONMENT)
    with pytest.raises(
        ConfigError, match=r"judge\.url takes a value from the environment, .* --allow-env"
    ) as caught:
        load_config(path)
    assert SECRET not in str(caught.value)
    for _ in range(2):
        config = load_config(path, allow_env=True)
        assert config["judge"] == {"url": SECRET, "twice": f"{SECRET} and {SECRET}", "n": 5}
    assert [type(config["judge"][key]) for key in ("url", "twice", "n")] == [
        FromEnvironment,
        FromEnvironment,
        int,
    ]
    assert type(config["other"]) is str
    for copied in (config, copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert redacted(copied) == {
            "judge": {
                "url": "${oc.env:MEGARL_TEST_VALUE}",
                "twice": "${judge.url} and ${oc.env:MEGARL_TEST_VALUE}",
                "n": 5,
            },
            "other": "plain",
        }
    with pytest.raises(yaml.YAMLError):
        yaml.safe_dump(config)


@pytest.mark.parametrize(
    "text",
    [
        "a: ${oc.decode:'${b}'}\nb: x\n",
        "a: '${ oc.env : HOME }'\n",
        "a: [{b: 'x ${oc.env:HOME} y'}]\n",
        "a: \\${oc.env:HOME}\n",
        "a: ${oc.select:b}\nb: x\n",
        "a: ${oc.env:${b}}\nb: HOME\n",
        "a: ${mul:2,${oc.env:HOME}}\n",
    ],
)
def test_resolvers_that_look_around_are_refused_in_every_form(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"takes a value from the environment|calls the resolver"):
        load_config(path)


def test_by_an_override_too(tmp_path: Path) -> None:
    path = minimal(tmp_path, a="b")
    with pytest.raises(ConfigError, match="takes a value from the environment"):
        load_config(path, ["a=${oc.env:HOME}"])


@pytest.mark.parametrize("value", [HIDDEN, f"https://{HIDDEN}@host/path"])
def test_a_file_without_its_secrets_is_not_taken_for_whole(value: str, tmp_path: Path) -> None:
    path = minimal(tmp_path, env={"options": {"judge_url": value}})
    with pytest.raises(
        ConfigError, match=r"env\.options\.judge_url = .*it was hidden when this file was written"
    ):
        load_config(path)
    assert (
        load_config(path, ["env.options.judge_url=https://host"])["env"]["options"]["judge_url"]
        == "https://host"
    )


def test_nobody_else_reads_the_configuration_of_a_run(tmp_path: Path, model: str, data: str) -> None:
    config = make_config("sft", tmp_path / "run", model, data)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / f".{CONFIG_FILE}.tmp").write_text("left by a run that was killed")
    config["logger"] = {
        **(config.get("logger") or {}),
        "wandb": {"project": FromEnvironment(SECRET, "${oc.env:PROJECT}")},
    }
    assert run(config, PolicyMaker()) == 0
    files = [
        tmp_path / "run" / CONFIG_FILE,
        *(tmp_path / "run" / "checkpoints").glob(f"step_*/{CONFIG_NAME}"),
    ]
    assert len(files) > 1
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert yaml.safe_load(file.read_text())["logger"]["wandb"]["project"] == "${oc.env:PROJECT}"
    for file in (tmp_path / "run").rglob("*"):
        assert file.is_dir() or SECRET.encode() not in file.read_bytes(), file


def test_a_checkpoint_that_a_program_writes(tmp_path: Path) -> None:
    manager = CheckpointManager({"checkpoint_dir": tmp_path})
    begun = manager.init_tmp_checkpoint(
        1, {"step": 1}, {"env_vars": {"HF_TOKEN": SECRET}, "url": f"https://a:{SECRET}@host"}
    )
    assert yaml.safe_load((begun / CONFIG_NAME).read_text()) == {
        "env_vars": {"HF_TOKEN": HIDDEN},
        "url": "https://***@host",
    }
