"""What must not be read by others in files, logs and messages: values under names of secrets, credentials in addresses, and values that
were taken from the environment."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "***"

_ANYWHERE = ("secret", "password", "passwd", "passphrase", "credential")
"""Words that make every name a secret's that holds one of them."""

_LAST = frozenset({"token", "pat", "pass", "pwd", "auth", "cookie", "apikey", "accesskey"})
_OF_KEYS = frozenset(
    {"api", "access", "private", "signing", "encryption", "account", "master", "session", "ssh", "auth", "service", "admin"}
)
"""Words before ``keys`` that make it a secret's: without one, more than one key is a list of names."""

_WORKING_DIRECTORY = "PWD"
"""Of a shell, in the environment of every program that it starts: part of many paths, which would be hidden in all messages."""

_OF_TOKENS = frozenset({"pad", "eos", "bos", "unk", "sep", "cls", "mask", "stop"})
"""Tokens of a vocabulary."""

FIELDS = frozenset({"prompt_key", "answer_key", "messages_key", "tools_key", "chosen_key", "rejected_key"})
"""Keys of the configuration that name a field of a record. A test compares them with the schema."""

_WORDS = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")
_CREDENTIALS = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*://)[^\s/?#@'\"]+@")
_ARGUMENT = re.compile(r"([?&][\w.\-]*(?:token|key|secret|password|signature|sig|credential)[\w.\-]*=)[^&#\s'\"]+", re.IGNORECASE)
_ASSIGNED = re.compile(r"(?P<name>[A-Za-z_][\w.\-]*)(?P<between>['\"]?\s*[=:]\s*)(?P<value>'[^']*'|\"[^\"]*\"|[^\s,;'\"})\]]+)")
_SHORTEST = 8
"""Characters of a value that is hidden wherever it stands: shorter ones are words of their own."""

_learned: set[str] = set()


class FromEnvironment(str):
    """A text of a configuration that holds the value of an environment variable.

    Attributes:
        written: what stands in the configuration file, which alone may be written elsewhere.
    """

    written: str

    def __new__(cls, value: str, written: str = HIDDEN) -> FromEnvironment:
        made = super().__new__(cls, value)
        made.written = written
        return made


def is_secret(name: str) -> bool:
    """Whether what bears this name is a secret: an environment variable (``*_TOKEN``, ``*_KEY``, ...), or a part of a dotted key."""
    return any(_names_secret(part) for part in name.split("."))


def _names_secret(part: str) -> bool:
    if part in FIELDS or part == _WORKING_DIRECTORY:
        return False
    words = [word.lower() for word in _WORDS.split(part) if word]
    if not words:
        return False
    if any(each in part.lower() for each in _ANYWHERE) or (words[-1] == "key" and len(words) > 1):
        return True
    before = words[-2] if len(words) > 1 else ""
    return (words[-1] in _LAST and before not in _OF_TOKENS) or (words[-1] == "keys" and before in _OF_KEYS)


def redacted(value: Any) -> Any:
    """A deep copy of plain containers in which nothing is left that is a secret by its name or the form of an address.

    What stands below such a name is hidden, whatever its type, except null, true and false; of addresses, the user and password and what
    looks like a key among the arguments.
    """
    if isinstance(value, Mapping):
        return {key: _hidden(entry) if is_secret(str(key)) else redacted(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(entry) for entry in value]
    if isinstance(value, FromEnvironment):
        return _addresses(value.written)
    return _addresses(value) if isinstance(value, str) else value


def shown(key: str, value: Any) -> str:
    """How a message shows the value of a key: as ``repr`` does, without secrets."""
    if is_secret(key):
        return repr(_hidden(value))
    if isinstance(value, tuple):
        return repr(tuple(redacted(value)))
    return repr(redacted(value)) if isinstance(value, Mapping | list) else _addresses(repr(value))


def _hidden(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _hidden(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(entry) for entry in value]
    if isinstance(value, FromEnvironment):
        return value.written
    return value if value is None or isinstance(value, bool) or value == "" else HIDDEN


def _addresses(text: str) -> str:
    return _ARGUMENT.sub(rf"\g<1>{HIDDEN}", _CREDENTIALS.sub(rf"\g<1>{HIDDEN}@", text))


def redacted_text(text: str) -> str:
    """A message without secrets: in addresses, behind ``NAME=`` and ``name:``, and those values that ``learn`` was told of."""
    for value in sorted(_learned, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return _ASSIGNED.sub(_assignment, _addresses(text))


def _assignment(found: re.Match[str]) -> str:
    """``token: 5`` may be any sentence; ``hf_token: 5`` is an assignment."""
    name, value = found["name"], found["value"]
    plain = name.isalpha() and name.islower() and not any(part in name for part in _ANYWHERE)
    if plain or not is_secret(name) or value.strip("'\"") in {"", "None", "null", "true", "false", "True", "False"}:
        return found[0]
    quote = value[0] if value[0] in "'\"" else ""
    return f"{name}{found['between']}{quote}{HIDDEN}{quote}"


def learn(values: Mapping[str, Any]) -> None:
    """Hide the values of the secrets among these, at any depth, wherever they stand in a text from now on."""
    for value in _secrets(values, within=False):
        if len(value) >= _SHORTEST:
            _learned.add(value)


def _secrets(value: Any, within: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _secrets(entry, within or is_secret(str(key)))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _secrets(entry, within)
    elif within and value is not None and not isinstance(value, bool):
        yield str(value)


def redact_log(environment: Mapping[str, str]) -> None:
    """Set up the log of this process, on its standard error, unless it has one: from warnings on, and without the secrets of its
    environment."""
    learn(environment)
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


class RedactingFormatter(logging.Formatter):
    """Lines of a log, tracebacks included, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """One record."""
        return redacted_text(super().format(record))
