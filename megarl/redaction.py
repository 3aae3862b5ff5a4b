"""Redaction of secrets in files, logs and messages: values whose names mark them as secrets, credentials in
addresses, and values from the environment."""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "***"

# A name that contains one of these words is always the name of a secret.
_ANYWHERE = ("secret", "password", "passwd", "passphrase", "credential")

_LAST = frozenset({"token", "pat", "pass", "pwd", "auth", "cookie", "apikey", "accesskey"})
# One of these words before ``keys`` makes a name that of a secret; without one, several keys are a list of
# names.
_OF_KEYS = frozenset(
    {
        "api",
        "access",
        "private",
        "signing",
        "encryption",
        "account",
        "master",
        "session",
        "ssh",
        "auth",
        "service",
        "admin",
    }
)

# A shell sets this variable in the environment of every program that it starts. The directory is part of many
# paths, which would be hidden in all messages.
_WORKING_DIRECTORY = "PWD"

# After one of these words, ``token`` means a token of a vocabulary.
_OF_TOKENS = frozenset({"pad", "eos", "bos", "unk", "sep", "cls", "mask", "stop"})

FIELDS = frozenset(
    {"prompt_key", "answer_key", "messages_key", "tools_key", "system_key", "chosen_key", "rejected_key"}
)
"""Configuration keys that name a field of a record. A test compares them with the schema."""

_WORDS = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")
# The possessive quantifiers match a word of any length at once: a word that is tried again from each of its
# letters would take time that grows with the square of its length. A path made from an address has one slash
# instead of two. A password may contain an @, so the last @ ends it.
_CREDENTIALS = re.compile(r"(?<![A-Za-z0-9+.\-])([A-Za-z0-9+.\-]++:/(?:/|(?=[^\s/?#@'\":]+:)))[^\s/?#'\"]+@")
_ARGUMENT = re.compile(
    r"([?&](?=[\w.\-]*+=)[\w.\-]*(?:token|key|secret|password|signature|sig|credential)[\w.\-]*=)[^&#\s'\"]+",
    re.IGNORECASE,
)
_NAMED = re.compile(
    r"(?<![\w.\-])(?:[^\WA-Za-z_]|[.\-])*+(?P<name>[A-Za-z_][\w.\-]*+)(?P<quote>['\"]?)\s*(?P<sign>[=:])\s*",
)
_VALUE = re.compile(r"'[^']*'|\"[^\"]*\"|[^\s,;'\"})\]]+")
_NOTHING = frozenset({"", "None", "null", "true", "false", "True", "False"})
# These words begin a sentence after a colon, also in the system's errors. The list is closed, because a
# password may be any other word.
_BEGINNINGS = frozenset(
    {
        *[
            "a",
            "an",
            "the",
            "no",
            "not",
            "is",
            "are",
            "was",
            "were",
            "it",
            "this",
            "that",
            "there",
            "must",
            "may",
            "cannot",
            "could",
            "only",
            "expected",
            "invalid",
            "missing",
            "unknown",
            "try",
        ],
        *(os.strerror(number).split()[0].lower() for number in errno.errorcode),
    }
)
_ENDED = re.compile(rb"[^\r\n]*[\r\n]|[^\r\n]+")
# A learned value of at least this many characters is hidden wherever it appears. Shorter values are ordinary
# words elsewhere.
_SHORTEST = 8

_learned: set[str] = set()


class FromEnvironment(str):
    """A configuration text that holds the value of an environment variable.

    Attributes:
        written: the text in the configuration file, which is the only form that may be written elsewhere.
    """

    written: str

    def __new__(cls, value: str, written: str = HIDDEN) -> FromEnvironment:
        made = super().__new__(cls, value)
        made.written = written
        return made


def is_secret(name: str) -> bool:
    """Return whether a name marks its value as a secret. The name is that of an environment variable
    (``*_TOKEN``, ``*_KEY``, ...), or a dotted key, any part of which may mark it."""
    return any(map(_names_secret, name.split(".")))


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
    """Return a deep copy of plain containers without secrets.

    Every value below the name of a secret is hidden, whatever its type, except null, true and false. In other
    texts, the secrets that ``redacted_text`` finds are hidden.
    """
    if isinstance(value, Mapping):
        return {
            key: _hidden(entry) if is_secret(str(key)) else redacted(entry) for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return list(map(redacted, value))
    if isinstance(value, FromEnvironment):
        return redacted_text(value.written)
    return redacted_text(value) if isinstance(value, str) else value


def shown(key: str, value: Any) -> str:
    """Return the ``repr`` of a key's value without secrets, for a message."""
    if is_secret(key):
        return repr(_hidden(value))
    if isinstance(value, FromEnvironment):
        return _addresses(repr(value.written))
    if isinstance(value, tuple):
        return repr(tuple(redacted(value)))
    return repr(redacted(value)) if isinstance(value, Mapping | list) else _addresses(repr(value))


def _hidden(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _hidden(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_hidden, value))
    if isinstance(value, FromEnvironment):
        return value.written
    return value if value is None or isinstance(value, bool) or value == "" else HIDDEN


def _addresses(text: str) -> str:
    return _ARGUMENT.sub(rf"\g<1>{HIDDEN}", _CREDENTIALS.sub(rf"\g<1>{HIDDEN}@", text))


def redacted_text(text: str) -> str:
    """Return a message without secrets: credentials in addresses, values after ``NAME=`` and ``name:``, and
    the values that ``learn`` has collected."""
    for value in sorted(_learned, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return _without_assigned(_addresses(text))


def _without_assigned(text: str) -> str:
    """Return a text with values hidden that are assigned to the name of a secret. A value that is assigned to
    another name may contain further assignments."""
    parts, begin, place = list[str](), 0, 0
    while named := _NAMED.search(text, place):
        place = named.end()
        value = _VALUE.match(text, place) if _is_secret_in_text(named["name"]) else None
        if (
            value is not None
            and value[0].strip("'\"") not in _NOTHING
            and not _is_sentence(text, named, value[0])
        ):
            quote = value[0][0] if value[0][0] in "'\"" else ""
            parts += [text[begin:place], quote, HIDDEN, quote]
            begin = place = value.end()
    return "".join([*parts, text[begin:]])


def _is_sentence(text: str, named: re.Match[str], value: str) -> bool:
    """Return whether the word after a colon continues a sentence instead of being a value: ``'/etc/passwd':
    an error``, ``bad password: try again``."""
    word = value.rstrip(".:!?")
    if named["sign"] == "=" or not word.isalpha() or not (word.islower() or word.istitle()):
        return False
    before = text[named.start("name") - 1 : named.start("name")]
    # The end of a path, or of a quoted text that began earlier, is not a key.
    ends_text = before == "/" or bool(named["quote"] and before != named["quote"])
    return ends_text or word.lower() in _BEGINNINGS


def _is_secret_in_text(name: str) -> bool:
    """Return whether a name in a text marks its value as a secret: ``token: 5`` may be part of any sentence,
    but ``hf_token: 5`` is an assignment."""
    is_plain = name.isalpha() and name.islower() and not any(part in name for part in _ANYWHERE)
    return not is_plain and is_secret(name)


def learn(values: Mapping[str, Any]) -> None:
    """Collect the values of all secrets in ``values``, at any depth, to hide them in every text from now on.

    If a secret has several lines, such as a private key, each line is hidden too, because process output is
    redacted line by line.
    """
    for value in _secrets(values, within=False):
        for text in (value, *map(str.strip, value.splitlines())):
            if len(text) >= _SHORTEST:
                _learned.add(text)


def _secrets(value: Any, within: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _secrets(entry, within or is_secret(str(key)))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _secrets(entry, within)
    elif within and value is not None and not isinstance(value, bool):
        yield str(value)


class LineRedactor:
    """Removes secrets from the output of a process, which arrives in pieces of any size, and returns whole
    lines.

    A line ends with a line feed or with a carriage return, as those of progress bars do. A line of more than
    ``longest`` bytes is shown without its end.
    """

    def __init__(self, longest: int = 1 << 20) -> None:
        self._longest, self._left_out = longest, 0
        self._begun = bytearray()

    def take(self, data: bytes) -> str:
        """Return the lines that are complete after ``data``, with their line ends."""
        said = []
        for piece in _ENDED.findall(data):
            self._keep(piece.rstrip(b"\r\n"))
            if piece.endswith((b"\r", b"\n")):
                said.append(self.end() + piece[-1:].decode())
        return "".join(said)

    def end(self) -> str:
        """Return the text after the last line end."""
        text = redacted_text(self._begun.decode(errors="backslashreplace"))
        if self._left_out:
            # Show only half of the text, because what is at the cut could be the beginning of a secret.
            text = (
                f"{text[: len(text) // 2]} [... the rest of a line of "
                f"{len(self._begun) + self._left_out} bytes]"
            )
        self._begun.clear()
        self._left_out = 0
        return text

    def _keep(self, piece: bytes) -> None:
        room = max(self._longest - len(self._begun), 0)
        self._begun += piece[:room]
        self._left_out += len(piece[room:])


def redact_log(environment: Mapping[str, str]) -> None:
    """Set up the log of this process unless it has one: on standard error, from level WARNING, without
    secrets of the environment."""
    learn(environment)
    if not sys.warnoptions:
        # Megatron and torch announce changes to their own developers at every start; python -W shows these
        # warnings.
        warnings.filterwarnings("ignore", category=FutureWarning)
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


class RedactingFormatter(logging.Formatter):
    """A formatter of log lines, including tracebacks, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one record as text without secrets."""
        return redacted_text(super().format(record))
