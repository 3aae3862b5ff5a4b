"""Loading of a configuration: YAML files with inheritance, command-line overrides, and interpolation, in
this order."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from omegaconf.resolvers import oc

from converters.files.reading import DEEPEST, special_kind
from megarl import env
from megarl.config.data_sources import PLACE_KEYS, replaced_keys
from megarl.config.guesses import nearest
from megarl.config.nested import at, merge, put
from megarl.config.recipes import inherited, is_recipe
from megarl.config.schema import EXPECTED, IN_PLACE_OF_A_SECTION
from megarl.config.sections import Config
from megarl.errors import ConfigError, Violation
from megarl.redaction import HIDDEN, FromEnvironment, is_secret, learn, redacted_text, shown

_RESOLVER = re.compile(r"\$\{\s*([A-Za-z_][\w.]*)\s*:")
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_ENVIRONMENT = "oc.env"
# Resolvers that are always allowed, because they depend only on their arguments.
_PURE = ("mul",)
_SOURCES = ("data.train", "data.validation")
_SOURCE = re.compile(r"(?P<source>data\.(?:train|validation)(?:\.\d+|\[\d+\])?)(?:\.(?P<key>\w+))?")
# ``redacted_text`` hides only the secret part of a URL or of a text with NAME=VALUE; find such placeholders
# too.
_PART_HIDDEN = re.compile(rf"(?<=[=:/\s'\"]){re.escape(HIDDEN)}(?=[@&/\s,;'\"]|$)")
_ANOTHER = "another value than any variable has"

# Some builds of PyYAML lack the fast C parser.
_EVENTS = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TOO_DEEP = (
    "it nests too deeply to be read. Fix: no configuration needs more than a few levels; remove the brackets"
)


class OverridesError(ConfigError):
    """A command-line override cannot be parsed or applied."""


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    layers: Sequence[str | Path] = (),
    *,
    allow_env: bool = False,
) -> Config:
    """Return the configuration of a YAML file as plain containers, with inheritance, overrides and
    interpolations applied. It is not checked against the schema or the rules.

    Args:
        path: the YAML file.
        overrides: ``key=value`` words of a command line, applied after all files.
        layers: further YAML files, merged over ``path`` in order, each with the files that it inherits from.
        allow_env: allow ``${oc.env:NAME}``. Such values become ``FromEnvironment`` texts, which are never
            written to a file.

    Raises:
        ConfigError: a file is missing, empty or invalid, or inherits from itself; an interpolation cannot be
            resolved or is not allowed; or a value is the placeholder of a hidden secret.
        OverridesError: an override cannot be parsed or applied.
    """
    # OmegaConf refuses to register a resolver twice.
    if not OmegaConf.has_resolver("mul"):
        OmegaConf.register_resolver("mul", operator.mul)
    try:
        # OmegaConf recurses into nested values, so very deep nesting exceeds Python's recursion limit.
        return _resolved(path, overrides, layers, allow_env)
    except RecursionError as error:
        raise ConfigError(f"{path}: {_TOO_DEEP}") from error


def followers_of(
    path: str | Path, overrides: Sequence[str] = (), layers: Sequence[str | Path] = ()
) -> dict[str, list[str]]:
    """Return the keys whose value is a reference ``${other.key}``, listed by the key that they refer to.

    Args:
        path, overrides, layers: as in ``load_config``.
    """
    found: dict[str, list[str]] = {}
    for key, text in _texts(OmegaConf.to_container(_merged(path, overrides, layers), resolve=False)):
        if reference := _REFERENCE.fullmatch(text):
            found.setdefault(reference[1], []).append(key)
    return found


def _merged(path: str | Path, overrides: Sequence[str], layers: Sequence[str | Path]) -> DictConfig:
    stacked: dict[Any, Any] = {}
    for file in (path, *layers):
        stacked = _laid_over(stacked, _load(Path(file), None, ()))
    # Overrides come after all files, so they take precedence.
    return parse_hydra_overrides(cast(DictConfig, OmegaConf.create(stacked)), overrides)


def _resolved(
    path: str | Path, overrides: Sequence[str], layers: Sequence[str | Path], allow_env: bool
) -> Config:
    merged = _merged(path, overrides, layers)
    written = OmegaConf.to_container(merged, resolve=False)
    _refuse_resolvers(written, str(path), allow_env)
    try:
        resolved = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
        if allow_env:
            # OmegaConf does not report which values come from environment variables. Resolve a second time
            # with other variables; the values that differ do.
            resolved = _marked(resolved, _with_another_environment(merged), written)
    except InterpolationResolutionError as error:
        node = re.search(r"node `([\w.]+)` is not a container", str(error))
        if node is not None:
            # The reference is correct, but a plain value has replaced the section to which it refers.
            fault = Violation(node[1], at(written, node[1]), EXPECTED["dict_type"], IN_PLACE_OF_A_SECTION)
            raise ConfigError([fault]) from error
        raise ConfigError(
            f"{path}: {error.full_key} cannot be interpolated: {_first_line(error)}. "
            "Fix: write the whole dotted path of an existing key inside ${...}, or the value itself"
        ) from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_first_line(error)}. Fix: give the key a value") from error
    _refuse_hidden(resolved)
    # From now on, logs and error messages of this process hide these secrets.
    learn(cast(Config, resolved))
    return cast(Config, resolved)


def _refuse_resolvers(written: Any, path: str, allow_env: bool) -> None:
    """Refuse OmegaConf resolvers that read from this machine, because the configuration may come from
    somebody else.

    Raises:
        ConfigError: the configuration uses a resolver that is not allowed.
    """
    for key, value in _texts(written):
        for name in _RESOLVER.findall(value):
            if name == _ENVIRONMENT and not allow_env:
                raise ConfigError(
                    f"{path}: {key} takes a value from the environment, which has secrets that a "
                    "configuration could send elsewhere. "
                    "Fix: write the value itself, or start with --allow-env if you trust the file; the "
                    "value is then not written anywhere"
                )
            if name not in (*_PURE, _ENVIRONMENT):
                raise ConfigError(
                    f"{path}: {key} calls the resolver {name!r}: {', '.join(_PURE)} are allowed, and "
                    f"{_ENVIRONMENT} with --allow-env. "
                    "Fix: write the value itself"
                )


def _refuse_hidden(resolved: Any) -> None:
    """Refuse values that are placeholders of secrets, which megarl writes to ``config.yaml`` in place of
    them.

    Raises:
        ConfigError: there are such values.
    """
    found = []
    for key, value in _texts(resolved):
        if value == HIDDEN or _PART_HIDDEN.search(value):
            fix = f"give the value itself, for example with {key}=..."
            found.append(Violation(key, value, "it was hidden when this file was written", fix))
    if found:
        raise ConfigError(found)


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) for every text in nested dictionaries and lists."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict | list):
        for name, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(entry, f"{key}.{name}" if key else str(name))


def _with_another_environment(merged: DictConfig) -> Any:
    """Return the resolved configuration as it would be if every environment variable had another value."""
    OmegaConf.register_resolver(_ENVIRONMENT, lambda *arguments: _ANOTHER, replace=True)
    try:
        return OmegaConf.to_container(merged, resolve=True)
    finally:
        # OmegaConf's resolvers are global to the process, and the next load needs the real one.
        OmegaConf.register_resolver(_ENVIRONMENT, oc.env, replace=True)


def _marked(value: Any, other: Any, written: Any) -> Any:
    """Return ``value`` with every text that comes from the environment turned into ``FromEnvironment``.

    Args:
        value: configuration resolved with the real environment.
        other: the same resolved with another environment; texts that differ come from the environment.
        written: the unresolved configuration, which may have another structure.
    """
    if isinstance(value, dict) and isinstance(other, dict):
        parts = written if isinstance(written, dict) else {}
        return {key: _marked(entry, other.get(key), parts.get(key)) for key, entry in value.items()}
    if isinstance(value, list) and isinstance(other, list) and len(value) == len(other):
        items = written if isinstance(written, list) and len(written) == len(value) else [None] * len(value)
        return [_marked(*entries) for entries in zip(value, other, items, strict=True)]
    if isinstance(value, str) and value != other:
        return FromEnvironment(value, written if isinstance(written, str) else HIDDEN)
    return value


def load_config_with_inheritance(path: str | Path, base_dir: str | Path | None = None) -> DictConfig:
    """Return a YAML file merged over the files that its ``defaults`` key lists, and over theirs, unresolved.
    Of the files in a list a later one takes precedence, and the file itself takes precedence over all of
    them.

    Args:
        path: the file.
        base_dir: directory to which ``defaults`` of this file are relative; the file's own directory if None.

    Raises:
        ConfigError: a file is missing, empty or invalid, or inherits from itself.
    """
    return cast(
        DictConfig, OmegaConf.create(_load(Path(path), Path(base_dir) if base_dir is not None else None, ()))
    )


def _load(path: Path, base_dir: Path | None, chain: tuple[Path, ...]) -> dict[Any, Any]:
    # Resolve links, so that a circle of inheritance through one is found too.
    path = path.expanduser().resolve()
    if path in chain:
        circle = " -> ".join(map(str, (*chain, path)))
        raise ConfigError(
            f"configuration files inherit from each other in a circle: {circle}. Fix: remove one of the "
            "'defaults'"
        )
    config = _read_yaml(path, chain)
    start = path.parent if base_dir is None else base_dir
    merged: dict[Any, Any] = {}
    for parent in _defaults_of(config, path):
        # OmegaConf's own merge refuses to replace a list by a mapping.
        merged = _laid_over(merged, _load(inherited(parent, start), None, (*chain, path)))
    return _laid_over(merged, cast(dict[Any, Any], OmegaConf.to_container(config, resolve=False)))


def _laid_over(under: Mapping[Any, Any], over: Mapping[Any, Any]) -> dict[Any, Any]:
    """Merge one configuration over another. A data source with another ``path`` or ``name`` does not inherit
    the keys that describe the old data."""
    kept = dict(under)
    # Inherited field keys would describe the fields of the old data.
    for path in _SOURCES:
        inherited_source, written = at(under, path), at(over, path)
        if isinstance(inherited_source, Mapping) and isinstance(written, Mapping):
            replaced = replaced_keys(written)
            kept = put(
                kept, path, {key: value for key, value in inherited_source.items() if key not in replaced}
            )
    return merge(kept, over)


def _defaults_of(config: DictConfig, path: Path) -> list[str]:
    """Remove the ``defaults`` key from a file's configuration, and return the file names in it."""
    if "default" in config:
        raise ConfigError(f"{path}: there is no key default. Fix: write defaults: {config['default']}")
    defaults = config.pop("defaults", None)
    if defaults is None:
        return []
    names = list(defaults) if isinstance(defaults, ListConfig) else [defaults]
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(
                f"{path}: defaults holds {name!r}. Fix: write the name of a YAML file, or a list of such "
                "names"
            )
        if name == "_self_":
            raise ConfigError(
                f"{path}: defaults holds _self_, but a file always takes precedence over its defaults. "
                "Fix: remove _self_"
            )
    return names


def _read_yaml(path: Path, chain: tuple[Path, ...]) -> DictConfig:
    origin = f", named in the defaults of {chain[-1]}" if chain else ""
    if not path.is_file():
        special = special_kind(path)
        kind = (
            "is a directory"
            if path.is_dir()
            else f"is {special}, not a file"
            if special
            else "does not exist"
        )
        fix = "give the path of a YAML file"
        if (path / "config.yaml").is_file():
            fix = f"write {path / 'config.yaml'}"
        elif (path / "config.json").is_file():
            fix = f"name a recipe, and add policy.model_name={path}"
        raise ConfigError(f"configuration file {path} {kind}{origin}. Fix: {fix}")
    try:
        text = path.read_text(encoding="utf-8")
        if not text.strip():
            raise ConfigError(
                f"configuration file {path} is empty{origin}. Fix: write at least one key into it, or leave "
                "it out"
            )
        _refuse_depth(text)
        config = OmegaConf.load(path)
    except yaml.YAMLError as error:
        fix = "indent by spaces, not by tabs" if re.search(r"^\s*\t", text, re.M) else "correct that line"
        problem = getattr(error, "problem", None) or _first_line(error)
        raise ConfigError(f"{path}{_place_of(error)}: not valid YAML: {problem}. Fix: {fix}") from error
    except RecursionError as error:
        raise ConfigError(f"configuration file {path}{origin}: {_TOO_DEEP}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"configuration file {path} cannot be read: {error}. Fix: make it a readable text file in UTF-8"
        ) from error
    if not isinstance(config, DictConfig) or len(config) == 0:
        raise ConfigError(
            f"configuration file {path} holds no keys{origin}. Fix: write lines of the form 'key: value'"
        )
    return config


def _place_of(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")


def parse_hydra_overrides(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return a copy of a configuration with overrides applied in order.

    ``a.b=value`` and ``++a.b=value`` set a key, ``+a.b=value`` adds a key that must be absent, and ``~a.b``
    removes a key that must be present (``~a.b=value`` only if it has that value). Values are YAML. If an
    override gives a data source another ``path`` or ``name``, keys that describe the old data are dropped
    (``replaced_keys``).

    Raises:
        OverridesError: an override cannot be parsed or applied.
    """
    # Keep interpolations unresolved, because an override may change what they refer to.
    changed = cast(DictConfig, OmegaConf.create(OmegaConf.to_container(config, resolve=False)))
    _replace_lists(changed, overrides)
    _refuse_spaces(overrides)
    for override in overrides:
        try:
            _apply(changed, override)
        except RecursionError as error:
            beginning = f"{override[:60]!r}{'...' if len(override) > 60 else ''}"
            raise OverridesError(f"override {beginning} cannot be applied: {_TOO_DEEP}") from error
        except (
            yaml.YAMLError,
            OmegaConfBaseException,
            TypeError,
            ValueError,
            KeyError,
            IndexError,
            AttributeError,
        ) as error:
            own_message = str(error) if isinstance(error, OverridesError) else None
            fix = "write key.of.section=value"
            if isinstance(error, yaml.YAMLError):
                fix = "close its brackets and quotes, and quote the whole word for the shell"
            text = own_message or (
                f"override {override!r} cannot be applied: {_first_line(error)}. Fix: {fix}"
            )
            hidden = _without_secret(text, override)
            # Omit the cause if it would show the secret.
            raise OverridesError(hidden) from (None if own_message or hidden != text else error)
    _drop_replaced(changed, overrides)
    return changed


def _replace_lists(config: DictConfig, overrides: Sequence[str]) -> None:
    """Replace an inherited list of data sources by an empty section if an override sets ``path`` or ``name``
    of a single source."""
    for override in overrides:
        found = _SOURCE.fullmatch(override.lstrip("+").partition("=")[0].strip())
        if found is None or found["source"] not in _SOURCES or found["key"] not in PLACE_KEYS:
            continue
        if isinstance(OmegaConf.select(config, found["source"]), ListConfig):
            OmegaConf.update(config, found["source"], {}, merge=False)


def _drop_replaced(config: DictConfig, overrides: Sequence[str]) -> None:
    """Drop inherited keys of data sources that the overrides make obsolete. Call it after all overrides, so
    that ``~key`` may still remove one of these keys."""
    written: dict[str, dict[str, Any]] = {}
    for override in overrides:
        key, equals, text = override.lstrip("+").partition("=")
        found = _SOURCE.fullmatch(key.strip())
        if found is None or not equals:
            continue
        value = _value_of(text)
        own = {found["key"]: value} if found["key"] else value
        if isinstance(own, dict):
            written.setdefault(found["source"], {}).update(own)
    for path, own in written.items():
        source = OmegaConf.select(config, path)
        for key in replaced_keys(own) if isinstance(source, DictConfig) else ():
            source.pop(key, None)


def _refuse_spaces(overrides: Sequence[str]) -> None:
    """Refuse ``key = value``, which a shell divides into several words."""
    for one, other in pairwise(overrides):
        word = one if other.startswith("=") else other if one.endswith("=") else "="
        # A removal, ~key, has no "=" and may follow an empty value.
        if "=" not in word and not word.startswith("~"):
            raise OverridesError(
                f"override {word!r} has spaces around its '='. Fix: write key.of.section=value without spaces"
            )


def _without_secret(text: str, override: str) -> str:
    """Return a message about an override, with the override's value hidden if its key holds a secret."""
    key, _, value = override.partition("=")
    return redacted_text(text.replace(value, HIDDEN) if value and is_secret(key) else text)


def _apply(config: DictConfig, override: str) -> None:
    sign = next((mark for mark in ("++", "+", "~") if override.startswith(mark)), "")
    key, equals, text = override[len(sign) :].partition("=")
    key = key.strip()
    if not key or key.startswith(".") or key.endswith(".") or ".." in key:
        raise OverridesError(f"override {override!r} names no key. Fix: write key.of.section=value")
    if sign == "~":
        _remove(config, override, key, _value_of(text) if equals else None, bool(equals))
        return
    if not equals:
        fix = f"{override}=<value>, or ~{key} to remove the key"
        if Path(override).is_file() and Path(override).suffix in {".jsonl", ".parquet", ".csv"}:
            fix = f"data.train.path={override}"
        elif key.endswith((".yaml", ".yml")) or Path(override).is_file():
            fix = f"--with {override}"
        elif is_recipe(override):
            fix = f"--with {override} to merge it over CONFIG, or leave it out"
        elif re.fullmatch(r"[\w.]+:[^:]*", override):
            fix = override.replace(":", "=")
        raise OverridesError(f"override {override!r} has no '='. Fix: write {fix}")
    # OmegaConf.update would silently replace a value on the path by an empty section.
    _refuse_path_through_value(config, override, key)
    # Hydra refuses this too; ++ sets a key whether or not it is there.
    if sign == "+" and _is_there(config, key):
        raise OverridesError(
            f"override {override!r} adds a key that is there already. Fix: write {key}={text}"
        )
    value = _value_of(text)
    # OmegaConf cannot merge a section with a list, so replace one by the other.
    merge = isinstance(value, dict) and not OmegaConf.is_list(OmegaConf.select(config, key))
    OmegaConf.update(config, key, value, merge=merge, force_add=True)


def _refuse_depth(text: str) -> None:
    """Check the nesting of YAML before it is parsed, because PyYAML's C parser crashes the process on very
    deep nesting.

    Raises:
        RecursionError: the nesting is too deep.
    """
    depth = 0
    for event in yaml.parse(text, Loader=_EVENTS):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise RecursionError(f"more than {DEEPEST} levels")
    interpolations = 0
    for mark in re.findall(r"\$\{|\}", text):
        interpolations = interpolations + 1 if mark == "${" else max(interpolations - 1, 0)
        if interpolations > DEEPEST:
            raise RecursionError(f"more than {DEEPEST} interpolations in one another")


def _value_of(text: str) -> Any:
    try:
        _refuse_depth(text)
    except yaml.YAMLError:
        # YAML gives these a meaning of its own at the beginning, which no override has.
        if not text.startswith(("*", "@", "%", "`")):
            raise
        return text
    # Use OmegaConf's YAML loader, as for files: PyYAML's own reads 1e-6 as a text.
    return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)["value"]


def _plain(section: DictConfig) -> Config:
    """Return a section as a dictionary, without resolving interpolations."""
    return cast(Config, OmegaConf.to_container(section, resolve=False))


def _parent_and_name(config: DictConfig, key: str) -> tuple[Any, str]:
    parent, _, name = key.rpartition(".")
    return (OmegaConf.select(config, parent) if parent else config), name


def _is_there(config: DictConfig, key: str) -> bool:
    parent, name = _parent_and_name(config, key)
    return isinstance(parent, DictConfig) and name in _plain(parent)


def _refuse_path_through_value(config: DictConfig, override: str, key: str) -> None:
    parts = key.split(".")
    for end in range(1, len(parts)):
        above = ".".join(parts[:end])
        node = OmegaConf.select(config, above)
        if node is not None and not OmegaConf.is_config(node):
            raise OverridesError(
                f"override {override!r}: {above} is the value {shown(above, node)}, not a section. Fix: "
                f"override {above} itself"
            )


def _remove(config: DictConfig, override: str, key: str, value: Any, only_that_value: bool) -> None:
    parent, name = _parent_and_name(config, key)
    if not _is_there(config, key):
        near = nearest(name, map(str, parent)) if isinstance(parent, DictConfig) else None
        other = f", or write ~{key.removesuffix(name)}{near}" if near else ""
        raise OverridesError(
            f"override {override!r} removes a key that is not there. Fix: leave it out{other}"
        )
    present = _plain(parent)[name]
    if only_that_value and present != value:
        raise OverridesError(
            f"override {override!r}: the value of {key} is {shown(key, present)}. Fix: write ~{key}"
        )
    del parent[name]


def with_environment(config: Mapping[str, Any]) -> Config:
    """Return a configuration with ``profiler.steps`` and ``profiler.nsys_workers`` taken from
    ``MEGARL_NSYS_PROFILE_STEP_RANGE`` and ``MEGARL_NSYS_WORKER_PATTERNS`` if they are absent or null.

    Raises:
        ConfigError: ``MEGARL_NSYS_PROFILE_STEP_RANGE`` is not ``first:stop``.
    """
    section = config.get("profiler") or {}
    steps, workers = env.text("MEGARL_NSYS_PROFILE_STEP_RANGE"), env.text("MEGARL_NSYS_WORKER_PATTERNS")
    if not isinstance(section, Mapping) or not (steps or workers):
        return dict(config)
    numbers = [int(part) for part in steps.split(":") if part.isdecimal()] if steps else None
    # Compare with the text, because parts that are not numbers were skipped above.
    if numbers is not None and (len(numbers) != 2 or steps != "{}:{}".format(*numbers)):
        bound = "it must be first:stop, the first step and the step after the last"
        raise ConfigError(
            [
                Violation(
                    "MEGARL_NSYS_PROFILE_STEP_RANGE", steps, bound, "write 3:5 for steps 3 and 4, or unset it"
                )
            ]
        )
    from_environment = {"steps": numbers, "nsys_workers": workers}
    filled = {
        key: value
        for key, value in from_environment.items()
        if value is not None and section.get(key) is None
    }
    return {**config, "profiler": {**section, **filled}}
