"""Removal of secrets from files, logs and messages: values whose name marks them as secret, credentials in
URLs, and values taken from environment variables."""

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

# A name that contains one of these words anywhere marks a secret.
_ANYWHERE = ("secret", "password", "passwd", "passphrase", "credential")

# A name whose last word is one of these marks a secret.
_LAST = frozenset({"token", "pat", "pass", "pwd", "auth", "cookie", "apikey", "accesskey"})
# A name that ends in ``keys`` marks secrets only after one of these words; otherwise, keys are usually names
# of fields.
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

# Not a secret, although pwd is in ``_LAST``: shells set this variable to the working directory. Hiding it
# would hide parts of most paths.
_WORKING_DIRECTORY = "PWD"

# After one of these words, ``token`` is a token of the vocabulary, not a secret.
_OF_TOKENS = frozenset({"pad", "eos", "bos", "unk", "sep", "cls", "mask", "stop"})

FIELDS = frozenset(
    {"prompt_key", "answer_key", "messages_key", "tools_key", "system_key", "chosen_key", "rejected_key"}
)
"""Configuration keys that end in ``key`` but hold the name of a record field, not a secret. A test compares
them with the schema."""

_WORDS = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")
# Possessive quantifiers (++) avoid backtracking, whose time would grow with the square of a word's length.
# ``:/`` with one slash occurs where a URL was turned into a path. A password may contain an @, so the last @
# ends it.
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
# Words that begin a sentence after a colon, also in the system's error messages. Any other word may be a
# password.
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
# Minimum length of a value collected by ``learn``. Shorter ones would be hidden inside ordinary words.
_SHORTEST = 8

_learned: set[str] = set()


class FromEnvironment(str):
    """Text of a configuration whose value came from an environment variable.

    Attributes:
        written: the unresolved text (``${oc.env:NAME}``), which is what files and messages show.
    """

    written: str

    def __new__(cls, value: str, written: str = HIDDEN) -> FromEnvironment:
        made = super().__new__(cls, value)
        made.written = written
        return made


def is_secret(name: str) -> bool:
    """Return whether a name marks its value as secret.

    Args:
        name: name of an environment variable (``*_TOKEN``, ``*_KEY``), or a dotted configuration key, of
            which any part may mark the value.
    """
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
    """Return a copy of nested dictionaries and lists in which secrets are replaced by ``HIDDEN``.

    Below a secret name every value is replaced, except null, booleans and empty texts. In all other texts,
    ``redacted_text`` is applied.
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
    """Return the ``repr`` of a configuration value for a message, with secrets hidden."""
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
    """Return a text with secrets hidden: credentials in URLs, values after secret names (``NAME=value``,
    ``name: value``), and all values collected by ``learn``."""
    # Longest first, because one secret may contain another.
    for value in sorted(_learned, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return _without_assigned(_addresses(text))


def _without_assigned(text: str) -> str:
    """Return a text in which values assigned to secret names are hidden. The value of any other name is
    searched as well, because it may contain further assignments."""
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
    """Return whether the word after a colon continues a sentence and is not a value, as in ``'/etc/passwd':
    an error`` and ``bad password: try again``."""
    word = value.rstrip(".:!?")
    if named["sign"] == "=" or not word.isalpha() or not (word.islower() or word.istitle()):
        return False
    before = text[named.start("name") - 1 : named.start("name")]
    # A name at the end of a path, or of a longer quoted text, is not a key.
    ends_text = before == "/" or bool(named["quote"] and before != named["quote"])
    return ends_text or word.lower() in _BEGINNINGS


def _is_secret_in_text(name: str) -> bool:
    """Return whether a name inside a text marks the following value as secret. A plain word such as ``token:
    5`` may be part of a sentence and does not; ``hf_token: 5`` does."""
    is_plain = name.isalpha() and name.islower() and not any(part in name for part in _ANYWHERE)
    return not is_plain and is_secret(name)


def learn(values: Mapping[str, object]) -> None:
    """Collect the values of all secrets in ``values``, at any depth, so that ``redacted_text`` hides them
    from now on.

    Each line of a secret with several lines, such as a private key, is hidden separately too, because process
    output is redacted line by line.
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
    """Redactor of a process's output, which arrives in chunks of any size and is returned in complete lines.

    A line ends with a line feed, or with a carriage return as in progress bars. Lines over ``longest`` bytes
    are truncated.
    """

    def __init__(self, longest: int = 1 << 20) -> None:
        self._longest, self._left_out = longest, 0
        self._begun = bytearray()

    def take(self, data: bytes) -> str:
        """Return the redacted lines that ``data`` completes, with their line ends."""
        said = []
        for piece in _ENDED.findall(data):
            self._keep(piece.rstrip(b"\r\n"))
            if piece.endswith((b"\r", b"\n")):
                said.append(self.end() + piece[-1:].decode())
        return "".join(said)

    def end(self) -> str:
        """Return the redacted incomplete last line, without a line end, and clear it."""
        text = redacted_text(self._begun.decode(errors="backslashreplace"))
        if self._left_out:
            # Show only half of the text, because a secret that was truncated at its end would not be
            # recognised.
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
    """Set up logging in this process, unless it is set up already: to standard error, from level WARNING,
    with the environment's secrets hidden."""
    learn(environment)
    if not sys.warnoptions:
        # FutureWarnings of Megatron and torch are addressed to developers, and appear at every start; python
        # -W shows them.
        warnings.filterwarnings("ignore", category=FutureWarning)
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


class RedactingFormatter(logging.Formatter):
    """Log formatter that hides secrets, also in tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted record with secrets hidden."""
        return redacted_text(super().format(record))
