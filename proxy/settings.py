"""How settings are declared, read and checked; which there are is `config`'s.

A `Section` is a class of `setting(...)` fields: default, meaning with its unit, bounds. `build`
fills it from a table and from variables, and collects every mistake. The agent declares its own
settings in the same way. Pure, but for `source`, `file_mark` and `one_line`: they touch a file.
"""

from __future__ import annotations

import os
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ENV_PREFIX = "TONGGUAN_"
FILE_NAME = "tongguan.toml"

NUMBER_MAX = 1e9
ONE_LINE_BYTES_MAX = 4096


class StartError(Exception):
    """The sidecar cannot start; the text says why and what to do."""


class SettingsError(Exception):
    """One or more settings are wrong; `problems` has a line for each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class Setting(msgspec.Struct, frozen=True):
    """What is declared of one setting: default, meaning with its unit, inclusive bounds.

    `lone`: a list that may also be written as one string.
    """

    default: Any
    doc: str
    ge: float | None
    le: float | None
    lone: bool


def setting(
    default: Any,
    doc: str,
    *,
    ge: float | None = None,
    le: float | None = None,
    lone: bool = False,
) -> Any:
    """Declare one setting; see `Setting`."""
    return Setting(default, doc, ge, le, lone)


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
class _Declaring(msgspec.StructMeta):
    """Keeps what is declared of a section's settings, and leaves their defaults to msgspec.

    Not dataclasses: each writes and compiles its methods anew at every start.
    """

    declared: dict[str, Setting]

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> _Declaring:  # noqa: PYI034 - no Self here
        own = {n: value for n, value in namespace.items() if isinstance(value, Setting)}
        defaults = {n: declared.default for n, declared in own.items()}
        made = super().__new__(mcs, name, bases, namespace | defaults, frozen=True, kw_only=True)
        made.declared = {**getattr(made, "declared", {}), **own}
        return made


class Section(msgspec.Struct, metaclass=_Declaring):
    """Settings that belong together: frozen, by keyword alone."""


AnySection = typing.TypeVar("AnySection", bound=Section)


def is_section(hint: Any) -> bool:
    """Say whether a member's type is a section."""
    return isinstance(hint, type) and issubclass(hint, Section)


def members(kind: type[Section]) -> Iterator[tuple[str, Any, Setting | None]]:
    """Yield (name, type, declaration) of all in a section; None: a section, or a table of them."""
    hints = typing.get_type_hints(kind)
    for name in kind.__struct_fields__:
        yield name, hints[name], kind.declared.get(name)


_SERVICE_SUFFIXES = ("_SERVICE_HOST", "_PORT")


def is_service_variable(name: str) -> bool:
    """Say whether Kubernetes made this variable for a Service of our name."""
    if name.endswith(_SERVICE_SUFFIXES) or "_SERVICE_PORT" in name:
        return True
    _, found, rest = name.partition("_PORT_")
    return bool(found) and rest.split("_", 1)[0].isdigit()


def _type_name(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(repr(v) for v in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return "a list of strings"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}[kind]


def _coerce(kind: Any, value: Any, *, text: bool) -> Any:
    """Return `value` as `kind` or raise ValueError. `text`: it came from the environment."""
    origin = typing.get_origin(kind)
    if origin is Literal:
        if value in typing.get_args(kind):
            return value
    elif origin is tuple:
        if text:
            return tuple(part.strip() for part in value.split(",") if part.strip())
        if isinstance(value, list) and all(isinstance(v, str) for v in value):
            return tuple(value)
    elif kind is bool:
        if text and value.lower() in {"true", "false", "1", "0"}:
            return value.lower() in {"true", "1"}
        if isinstance(value, bool):
            return value
    elif kind is str:
        if isinstance(value, str):
            return value
    elif kind in (int, float) and not isinstance(value, bool):
        number = (int, float) if kind is float else int
        if text or isinstance(value, number):
            result = kind(value)
            # Neither nan nor infinity, nor what leaves 64 bits in nanoseconds.
            if kind is int or abs(result) <= NUMBER_MAX:
                return result
    raise ValueError(_type_name(kind))


def _checked(path: str, declared: Setting, kind: Any, value: Any, *, text: bool) -> Any:
    try:
        lone = declared.lone and isinstance(value, str)
        result = _coerce(kind, value, text=text or lone)
    except (ValueError, OverflowError):
        raise ValueError(f"{path}: expected {_type_name(kind)}, got {value!r}") from None
    least, most = declared.ge, declared.le
    if least is not None and result < least:
        raise ValueError(f"{path}: must be at least {least}, got {result}")
    if most is not None and result > most:
        raise ValueError(f"{path}: must be at most {most}, got {result}")
    return result


def build(
    kind: type[AnySection],
    table: Mapping[str, Any],
    env: dict[str, str],
    path: str,
    problems: list[str],
) -> AnySection:
    """Build one section from its table and the variables left in `env` (consumed ones are popped).

    Shared with the agent's settings, which are declared in the same way.
    """
    values: dict[str, Any] = {}
    known, there_are = kind.__struct_fields__, getattr(kind, "there_are", "")
    problems.extend(f"{path}{k}: unknown setting{there_are}" for k in table if k not in known)
    for name, hint, declared in members(kind):
        full = f"{path}{name}"
        raw = table.get(name)
        if is_section(hint):
            if raw is not None and not isinstance(raw, dict):
                problems.append(f"{full}: expected a table")
                raw = None
            values[name] = build(hint, raw or {}, env, f"{full}.", problems)
            continue
        if declared is None:
            tables = _list if typing.get_origin(hint) is tuple else _mapping
            values[name] = tables(hint, raw, full, problems)
            continue
        candidates: list[tuple[Any, bool, str]] = []
        if raw is not None:
            candidates.append((raw, False, full))
        variable = ENV_PREFIX + full.replace(".", "_").upper()
        if variable in env:
            candidates.append((env.pop(variable), True, variable))
        for value, text, label in candidates:
            try:
                values[name] = _checked(label, declared, hint, value, text=text)
            except ValueError as problem:
                problems.append(str(problem))
    return kind(**values)


def _mapping(hint: Any, raw: Any, full: str, problems: list[str]) -> dict[str, Any]:
    row = typing.get_args(hint)[1]
    if raw is None:
        return {}
    if not isinstance(raw, dict) or not all(isinstance(v, dict) for v in raw.values()):
        problems.append(f"{full}: expected a table of tables")
        return {}
    return {name: build(row, sub, {}, f"{full}.{name}.", problems) for name, sub in raw.items()}


def flat(section: Section | dict[str, Any], path: str = "") -> dict[str, Any]:
    """Return every setting by its full name."""
    rows: dict[str, Any] = {}
    table = section if isinstance(section, dict) else msgspec.structs.asdict(section)
    for name, value in table.items():
        if isinstance(value, (Section, dict)):
            rows.update(flat(value, f"{path}{name}."))
        else:
            rows[f"{path}{name}"] = value
    return rows


def _list(hint: Any, raw: Any, full: str, problems: list[str]) -> tuple[Any, ...]:
    row = typing.get_args(hint)[0]
    if raw is None:
        return ()
    if not isinstance(raw, list) or not all(isinstance(v, dict) for v in raw):
        problems.append(f"{full}: expected a list of tables, [[{full}]]")
        return ()
    return tuple(
        build(row, sub, {}, f"{full}[{number}].", problems) for number, sub in enumerate(raw, 1)
    )


def own_variables(environ: Mapping[str, str], skip: tuple[str, ...]) -> dict[str, str]:
    """Return the variables with our prefix, less those of other rooms and of Kubernetes."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(ENV_PREFIX)
        and not name.removeprefix(ENV_PREFIX).startswith(skip)
        and not is_service_variable(name)
    }


def service_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the variables with our prefix that Kubernetes made for a Service, by name."""
    return sorted(n for n in environ if n.startswith(ENV_PREFIX) and is_service_variable(n))


def source(path: str | None) -> tuple[Path | None, str]:
    """Return the settings file that `path` (file or directory) means, and its text."""
    if path is None:
        return None, ""
    file = Path(path)
    if file.is_dir():
        file /= FILE_NAME
    try:
        return file, file.read_text(encoding="utf-8")
    except OSError as problem:
        raise SettingsError([f"{file}: {problem.strerror}"]) from None
    except UnicodeDecodeError:
        raise SettingsError([f"{file}: not UTF-8"]) from None


def file_mark(file: Path | str) -> tuple[int, int, int, int] | None:
    """Return what tells a file from another of its name, or from itself when written again.

    None: it cannot be looked at. A link is what it leads to.
    """
    try:
        status = os.stat(file)  # noqa: PTH116 - looked at several times a second
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def one_line(file: str, name: str) -> bytes:
    """Return the one line that a secret's file holds; empty for no file. Raises SettingsError."""
    if not file:
        return b""
    try:
        content = Path(file).read_bytes().strip()
    except OSError as problem:
        raise SettingsError([f"{name}: {problem}"]) from None
    if not content or b"\n" in content or len(content) > ONE_LINE_BYTES_MAX:
        raise SettingsError([f"{name}: expected one line of at most {ONE_LINE_BYTES_MAX} bytes"])
    return content
