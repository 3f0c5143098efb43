"""The documents against the tree: both READMEs alike, no dead link, no setting that is not one."""

from __future__ import annotations

import re
import subprocess
import typing
from functools import cache
from pathlib import Path, PurePosixPath

import agent.config
import agent.plan
import proxy.config
from deploy.setup import settings_table
from proxy.settings import Section, is_section, members

if typing.TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
# Variables that are no settings of a room: what set-up and `tongguan up` take.
OTHER_VARIABLES = set(agent.plan.VARIABLES)

Finding = tuple[int, str]


@cache
def documents() -> tuple[str, ...]:
    """Return the Markdown files git knows or would take."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard", "*.md"]
    done = subprocess.run(command, check=True, capture_output=True)
    names = sorted(set(done.stdout.decode().split("\0")) - {""})
    return tuple(name for name in names if (ROOT / name).is_file())


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def assert_none(found: list[str]) -> None:
    assert not found, "\n" + "\n".join(found[:40])


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield numbered lines outside fenced code."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, line


def headings(text: str) -> list[tuple[int, str]]:
    rows = (re.match(r"(#{1,6})\s+(.*\S)", line) for _, line in prose(text))
    return [(len(row.group(1)), row.group(2)) for row in rows if row]


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def test_both_readmes_have_the_same_outline_and_commands() -> None:
    english, chinese = (read(name) for name in ("README.md", "README.zh-CN.md"))
    assert [level for level, _ in headings(english)] == [level for level, _ in headings(chinese)]
    for command in ("make up", "make test"):
        assert command in english
        assert command in chinese


def broken_links(path: str, text: str) -> Iterator[Finding]:
    for number, line in prose(text):
        for target in re.findall(r"\]\(([^)\s]+)\)", line):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            file = (ROOT / path).parent / name if name else ROOT / path
            if not file.exists():
                yield number, f"link to {target}: no such file"
            elif anchor and file.suffix == ".md":
                slugs = {slug(title) for _, title in headings(file.read_text(encoding="utf-8"))}
                if anchor not in slugs:
                    yield number, f"link to {target}: no such heading"


def test_every_link_in_a_document_resolves() -> None:
    assert_none(
        [
            f"{path}:{line}: {what}"
            for path in documents()
            for line, what in broken_links(path, read(path))
        ]
    )
    assert list(broken_links("docs/a.md", "[x](no-such-file.md)"))


def setting_names(kind: type[Section], prefix: str = "") -> Iterator[str]:
    for name, hint, _ in members(kind):
        yield f"{prefix}{name}"
        if is_section(hint):
            yield from setting_names(hint, f"{prefix}{name}.")


@cache
def known_settings() -> frozenset[str]:
    sidecar = setting_names(proxy.config.Settings)
    return frozenset(sidecar) | frozenset(setting_names(agent.config.Agent, "agent."))


def unknown_settings(text: str) -> Iterator[Finding]:
    known = known_settings()
    sections = {name.partition(".")[0] for name in known if "." in name}
    variables = {"TONGGUAN_" + name.replace(".", "_").upper() for name in known} | OTHER_VARIABLES
    for number, line in enumerate(text.splitlines(), 1):
        for token in re.findall(r"`([a-z0-9_]+(?:\.[a-z0-9_]+)+)(?: = [^`]*)?`", line):
            module = PurePosixPath("proxy", *token.split("."))
            is_module = any((ROOT / f"{stem}{end}").exists()
                            for stem in (module, token.replace(".", "/"), token)
                            for end in ("", ".py"))  # fmt: skip
            if token.partition(".")[0] in sections and token not in known and not is_module:
                yield number, f"`{token}` is no setting"
        for variable in re.findall(r"\bTONGGUAN_[A-Z0-9_]*[A-Z0-9]\b", line):
            if variable not in variables:
                yield number, f"{variable} is no variable of ours"


def test_every_setting_named_in_a_document_exists() -> None:
    assert_none(
        [
            f"{path}:{line}: {what}"
            for path in documents()
            for line, what in unknown_settings(read(path))
        ]
    )
    assert list(unknown_settings("set `limits.no_such_bytes`"))
    assert list(unknown_settings("export TONGGUAN_LIMITS_NO_SUCH=1"))
    assert not list(unknown_settings("`limits.head_bytes` or TONGGUAN_LIMITS_HEAD_BYTES"))


def test_the_settings_shown_for_a_sidecar_of_ones_own_load() -> None:
    block, rules = re.findall(r"```toml\n(.*?)```", read("docs/sidecar.md"), re.DOTALL)
    assert [rule.qos for rule in proxy.config.load(rules, {}).qos.rules] == ["P2", "P2"]
    settings = proxy.config.load(block, {})
    ports = [getattr(settings.doors, door) for door in ("app", "sealed", "admin")]
    assert ports == ["127.0.0.1:14080", "127.0.0.1:14081", "127.0.0.1:14090"]
    pools = (settings.pools.dedicated, settings.pools.shared, settings.pools.best_effort)
    assert {pool.endpoints for pool in pools} == {("http://127.0.0.1:8000",)}
    assert settings.keys.file
    assert settings.audit.dir


def test_the_table_of_settings_is_what_the_code_declares() -> None:
    assert read("docs/settings.md") == settings_table.page(), (
        "python -m deploy.setup.settings_table > docs/settings.md"
    )


def test_the_table_of_settings_leaves_none_out() -> None:
    found = set(re.findall(r"^\| `([^`]+)` \|", settings_table.page(), re.MULTILINE))
    pools = ("dedicated", "shared", "best_effort")
    found |= {name.replace("<pool>", pool) for name in found for pool in pools}
    sections = {name.rpartition(".")[0] for name in known_settings()} | {"tenants", "qos.rules"}
    assert known_settings() - sections <= found
    assert {"tenants.<name>.max_class", "qos.rules[].model"} <= found
