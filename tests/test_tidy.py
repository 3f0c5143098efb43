"""What the linters cannot say: the house's own habits, checked over the tree.

A check is a pure function from (path, text) to findings; `RULES` says which files it reads. A
finding is shown as file:line. Each check is also shown a bad snippet (`BAD`), so none can rot into
one that never fails. A single line is excused by a comment `# tidy: <why>`.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SELF = "tests/test_tidy.py"
ROOMS = ("proxy/", "agent/", "kernels/", "ebpf/")
CODE = (".py", ".c", ".h", ".cu", ".sh")
LINE_MAX = 100
FILE_LINES_MAX = 450
BLOB_BYTES_MAX = 512 << 10
# Files that may be longer, each with the reason.
LONG_FILES: dict[str, str] = {}
# Files that may be larger, each with the reason.
LARGE_FILES: dict[str, str] = {}
# The shells' tops: the only places where any error at all is caught (connection, task, command).
# Elsewhere the line's exemption from BLE001 has to say why, after a dash.
SHELLS = {
    "proxy/run.py": "the process",
    "proxy/server.py": "one connection",
    "proxy/admin.py": "one admin connection",
    "proxy/cli.py": "one command",
    "proxy/audit/writer.py": "the writer thread",
    "agent/__main__.py": "the process",
    "agent/admin.py": "the admin thread",
    "agent/lifecycle.py": "the loading thread",
    "agent/api.py": "one request",
    "agent/cli.py": "one command",
    "agent/up.py": "the command",
    "agent/engine/worker.py": "the model thread",
}
# What the agent may take from the sidecar: contracts, and what `tongguan up` is made of.
CONTRACTS = (
    "proxy.__version__", "proxy.ask", "proxy.audit", "proxy.cli", "proxy.client", "proxy.clock",
    "proxy.config", "proxy.errors", "proxy.keys", "proxy.metrics", "proxy.qos.classes",
    "proxy.settings", "proxy.sm4",
)  # fmt: skip
HEAVY = {"torch", "numpy", "httpx", "starlette", "uvicorn", "mitmproxy", "requests", "aiohttp"}
HTTPX_FILES = ("proxy/client.py", "proxy/ask.py")
UNSAFE = {"pickle", "marshal", "shelve", "dill"}
# Hosts a file may name: loopback and reserved names apart, the licence's and the schemas'.
HOSTS = {"www.apache.org", "json-schema.org", "www.w3.org", "keepachangelog.com", "semver.org",
         "opentelemetry.io"}  # fmt: skip
SECRET_NAMES = {
    "secret", "plaintext", "prompt", "prompts", "messages", "content", "body", "payload",
    "password", "authorization", "private", "seed", "token", "tokens", "answer",
}  # fmt: skip
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
SIZES_ONLY = {"len", "type", "bool", "hash_hex"}

Finding = tuple[int, str]
Check = Callable[[str, str], Iterator[Finding]]


# --- checks over text ----------------------------------------------------------------------------


def line_length(_path: str, text: str) -> Iterator[Finding]:
    for number, line in enumerate(text.splitlines(), 1):
        length = len(re.sub(r"\s+# (noqa|type|fmt|tidy): .*", "", line))
        if length > LINE_MAX:
            yield number, f"{length} characters, at most {LINE_MAX}"


def promises(_path: str, text: str) -> Iterator[Finding]:
    sign = re.compile(
        r"\b(TODO|FIXME|XXX|HACK)\b|(?<!except )\bNotImplementedError\b"
        r"|mark\.skip\b(?!\(\s*reason=)|pytest\.skip\(\s*\)|assert True\b"
    )
    for number, line in enumerate(text.splitlines(), 1):
        if found := sign.search(line):
            yield number, f"a promise or a hole: {found.group()}"


def file_length(path: str, text: str) -> Iterator[Finding]:
    lines = text.count("\n")
    if lines > FILE_LINES_MAX and path not in LONG_FILES:
        yield FILE_LINES_MAX, f"{lines} lines, at most {FILE_LINES_MAX}: would two files be better?"


def machine_paths(_path: str, text: str) -> Iterator[Finding]:
    sign = re.compile(r"(?:^|[^A-Za-z0-9_.*{}-])/(?:work|root|home)/|\.\./shared\b")
    for number, line in enumerate(text.splitlines(), 1):
        if found := sign.search(line):
            yield number, f"a path of somebody's machine: {found.group().strip()}"


def foreign_hosts(_path: str, text: str) -> Iterator[Finding]:
    reserved = re.compile(r"(^|\.)(example(\.(com|net|org))?|test|invalid|localhost|local|svc)$")
    for number, line in enumerate(text.splitlines(), 1):
        for host in re.findall(r"https?://([A-Za-z0-9.-]+\.[A-Za-z]{2,})", line):
            if host.lower() not in HOSTS and not reserved.search(host.lower()):
                yield number, f"names the host {host}"


# --- checks over Python's tree -------------------------------------------------------------------


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def excused(text: str, node: ast.AST, sign: str = "# tidy: ") -> bool:
    first, last = getattr(node, "lineno", 1), getattr(node, "end_lineno", 1)
    return any(sign in line for line in text.splitlines()[first - 1 : last])


def prints(_path: str, text: str) -> Iterator[Finding]:
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Call) and dotted(node.func) == "print":
            yield node.lineno, "print: the sidecar logs, commands use click.echo"


def _shown(node: ast.AST) -> Iterator[ast.AST]:
    """Yield names and attributes whose value ends up in text; sizes and types do not."""
    if isinstance(node, ast.Call):
        if dotted(node.func).rsplit(".", 1)[-1] in SIZES_ONLY:
            return
        children: list[ast.AST] = [*node.args, *(word.value for word in node.keywords)]
        if isinstance(node.func, ast.Attribute):
            children.append(node.func.value)
    elif isinstance(node, ast.Name | ast.Attribute):
        yield node
        return
    else:
        children = list(ast.iter_child_nodes(node))
    for child in children:
        yield from _shown(child)


def _texts(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        for part in ast.walk(node.exc):
            if isinstance(part, ast.FormattedValue):
                yield part.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        base = dotted(node.func.value).lower()
        if node.func.attr in LOG_METHODS and "log" in base.rsplit(".", 1)[-1]:
            yield from node.args
            yield from (word.value for word in node.keywords)


def leaked_secrets(path: str, text: str) -> Iterator[Finding]:
    # In the agent a `key` is a name in a model file.
    secrets = SECRET_NAMES if path.startswith("agent/") else SECRET_NAMES | {"key"}
    for node in ast.walk(parsed(text)):
        for value in _texts(node):
            for shown in _shown(value):
                name = dotted(shown).rsplit(".", 1)[-1].lstrip("_").lower()
                if name in secrets and not excused(text, node):
                    line = getattr(shown, "lineno", getattr(node, "lineno", 1))
                    yield line, f"a log line or message shows `{name}`; a hash or a length will do"


def ownerless_tasks(_path: str, text: str) -> Iterator[Finding]:
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            name = dotted(node.value.func)
            base, _, last = name.rpartition(".")
            spawns = last in {"create_task", "ensure_future"}
            if spawns and base.rsplit(".", 1)[-1].lstrip("_") in {"asyncio", "loop", "?", ""}:
                yield node.lineno, f"{name}: a task nobody owns; use a TaskGroup or keep it"


def _runs_at_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = child.args
            for part in (*arguments.defaults, *arguments.kw_defaults, *child.decorator_list):
                if part is not None:
                    yield from ast.walk(part)
        elif isinstance(child, ast.Lambda) or _main_block(child):
            continue
        else:
            yield child
            yield from _runs_at_import(child)


def _main_block(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def environment_at_import(_path: str, text: str) -> Iterator[Finding]:
    for node in _runs_at_import(parsed(text)):
        if isinstance(node, ast.Attribute | ast.Name):
            name = dotted(node)
            if name in {"os.environ", "os.getenv", "os.environb"}:
                yield node.lineno, f"{name} is read when the module is imported"


def broad_except(path: str, text: str) -> Iterator[Finding]:
    for node in ast.walk(parsed(text)):
        if not isinstance(node, ast.ExceptHandler) or path in SHELLS:
            continue
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        broad = any(
            kind is None or dotted(kind) in {"Exception", "BaseException"} for kind in caught
        )
        last = node.body[-1]
        raised_again = isinstance(last, ast.Raise) and last.exc is None
        if broad and not raised_again and not excused(text, node, "# noqa: BLE001 - "):
            yield node.lineno, "catches everything outside the shells' tops, and does not say why"


def _imports(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{name.name}") for name in node.names)


def banned_imports(path: str, text: str) -> Iterator[Finding]:
    for line, module in _imports(text):
        top = module.partition(".")[0]
        if top in UNSAFE:
            yield line, f"{top} runs what it reads"
        client = top == "httpx" and path in HTTPX_FILES
        client |= top == "requests" and path == "proxy/spans/otlp.py"  # only with the extra otel
        if path.startswith("proxy/") and top in HEAVY and not client:
            yield line, f"the sidecar does not carry {top}"
        contract = any(module == name or module.startswith(f"{name}.") for name in CONTRACTS)
        if path.startswith("agent/") and top == "proxy" and not contract:
            yield line, f"the agent takes only contracts from the sidecar, not {module}"
        if path.startswith(("proxy/sm4/", "proxy/keys/", "kernels/sm4/")) and top == "random":
            yield line, "keys and nonces come from the operating system, not from random"


def _tests(text: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(parsed(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name.startswith("test_"):
            yield node


def cannot_fail(_path: str, text: str) -> Iterator[Finding]:
    words = ("raises", "assert", "check", "expect", "verify", "warns", "fail", "until")
    for test in _tests(text):
        # A property over drawn inputs fails by any exception that it does not expect.
        judged = any("given" in ast.unparse(mark) for mark in test.decorator_list)
        for part in ast.walk(test):
            judged |= isinstance(part, ast.Assert | ast.Raise)
            judged |= isinstance(part, ast.keyword) and part.arg == "check"  # a child's exit code
            if isinstance(part, ast.Call):
                judged |= any(word in ast.unparse(part.func).lower() for word in words)
        if not judged:
            yield test.lineno, f"nothing can fail in {test.name}"


def sleeps(_path: str, text: str) -> Iterator[Finding]:
    # A poll of another thread's work is a `while` over its condition; all else waits for nothing.
    loops = [node for node in ast.walk(parsed(text)) if isinstance(node, ast.While)]
    polls = {inner for loop in loops for inner in ast.walk(loop)}
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Call) and dotted(node.func) in {"time.sleep", "asyncio.sleep"}:
            zero = [isinstance(a, ast.Constant) and a.value == 0 for a in node.args]
            if zero != [True] and node not in polls and not excused(text, node):
                yield node.lineno, "a unit test sleeps; hand it a clock"


# --- which files a check reads -------------------------------------------------------------------


def _rooms(path: str) -> bool:
    return path.startswith(ROOMS) and path.endswith(".py")


def _proxy_data_path(path: str) -> bool:
    commands = path.endswith(("cli.py", "proxy/ask.py", "proxy/run.py"))
    return path.startswith("proxy/") and path.endswith(".py") and not commands


def _text(path: str) -> bool:
    return path not in {SELF, "LICENSE"} and not path.startswith("tests/vectors/")


RULES: list[tuple[Check, Callable[[str], bool]]] = [
    (line_length, lambda path: path.endswith(CODE)),
    (promises, lambda path: path.endswith((*CODE, ".toml", "Makefile")) and path != SELF),
    (file_length, lambda path: path.startswith((*ROOMS, "perf/", "deploy/")) and _code(path)),
    (machine_paths, _text),
    (foreign_hosts, _text),
    (prints, _proxy_data_path),
    (leaked_secrets, _rooms),
    (ownerless_tasks, _rooms),
    (environment_at_import, _rooms),
    (broad_except, _rooms),
    (banned_imports, _rooms),
    (cannot_fail, lambda path: path.startswith("tests/") and "/test_" in f"/{path}"),
    (sleeps, lambda path: path.startswith("tests/unit/") and path.endswith(".py")),
]

BAD: list[tuple[Check, str, str]] = [
    (line_length, "proxy/a.py", "x = 1  # " + "long " * 30),
    (promises, "proxy/a.py", "def f():\n    raise NotImplementedError\n"),
    (promises, "tests/test_a.py", "@pytest.mark.skip\ndef test_a(): ...\n"),
    (promises, "tests/test_a.py", "@pytest.mark.skip()\ndef test_a(): ...\n"),
    (file_length, "proxy/a.py", "x = 1\n" * (FILE_LINES_MAX + 1)),
    (machine_paths, "docs/a.md", "see /home/me/tongguan"),
    (foreign_hosts, "docs/a.md", "get it from https://packages.somewhere.io/simple"),
    (prints, "proxy/a.py", "print(1)"),
    (leaked_secrets, "proxy/a.py", "raise ValueError(f'bad {key!r}')"),
    (leaked_secrets, "proxy/a.py", "raise ValueError(f'bad {request.body.decode()}')"),
    (leaked_secrets, "agent/a.py", "_log.info('asked %s', prompt)"),
    (ownerless_tasks, "proxy/a.py", "asyncio.create_task(f())"),
    (ownerless_tasks, "proxy/a.py", "self._loop.create_task(f())"),
    (environment_at_import, "proxy/a.py", "import os\nA = os.environ.get('A')"),
    (environment_at_import, "proxy/a.py", "import os\ndef f(a=os.environ): ..."),
    (broad_except, "proxy/a.py", "try:\n    f()\nexcept Exception:\n    g()\n"),
    (broad_except, "agent/a.py", "try:\n    f()\nexcept:\n    g()\n"),
    (banned_imports, "proxy/a.py", "from torch import nn"),
    (banned_imports, "agent/a.py", "from proxy.server import serve"),
    (banned_imports, "agent/a.py", "from proxy import server"),
    (banned_imports, "agent/a.py", "import pickle"),
    (cannot_fail, "tests/test_a.py", "def test_a():\n    f()\n"),
    (sleeps, "tests/unit/test_a.py", "time.sleep(1)"),
]

GOOD: list[tuple[Check, str, str]] = [
    (
        promises,
        "tests/test_a.py",
        '@pytest.mark.skip(reason="capability: a GPU")\ndef test_a(): ...',
    ),
    (leaked_secrets, "agent/a.py", "raise ModelFileError(f'no {key}')"),
    (leaked_secrets, "proxy/a.py", "raise ValueError(f'{len(key)} bytes, kid {kid}')"),
    (ownerless_tasks, "proxy/a.py", "task_group.create_task(f())"),
    (environment_at_import, "proxy/a.py", "import os\ndef f():\n    return os.environ\n"),
    (broad_except, "proxy/a.py", "try:\n    f()\nexcept BaseException:\n    g()\n    raise\n"),
    (machine_paths, "docs/a.md", "results lie in perf/work/ and in /var/lib"),
    (sleeps, "tests/unit/test_a.py", "await asyncio.sleep(0)"),
    (sleeps, "tests/unit/test_a.py", "while not done():\n    time.sleep(0.01)"),
    (banned_imports, "agent/a.py", "from proxy import __version__, audit"),
]


def _code(path: str) -> bool:
    return path.endswith(CODE)


@cache
def tree() -> tuple[str, ...]:
    """Return the files git knows or would take."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard"]
    done = subprocess.run(command, check=True, capture_output=True)
    names = sorted(set(done.stdout.decode().split("\0")) - {""})
    return tuple(name for name in names if (ROOT / name).is_file())


@cache
def read(path: str) -> str | None:
    """Return a file's text; None for a binary one."""
    try:
        return (ROOT / path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def findings(check: Check, path: str, text: str) -> list[Finding]:
    try:
        return list(check(path, text))
    except SyntaxError as problem:
        return [(problem.lineno or 1, "does not parse")]


def assert_none(found: list[str]) -> None:
    assert not found, "\n" + "\n".join(found[:40])


@pytest.mark.parametrize(("check", "reads"), RULES, ids=[rule[0].__name__ for rule in RULES])
def test_tree_keeps(check: Check, reads: Callable[[str], bool]) -> None:
    assert_none(
        [
            f"{path}:{line}: {what}"
            for path in tree()
            if reads(path) and (text := read(path)) is not None
            for line, what in findings(check, path, text)
        ]
    )


@pytest.mark.parametrize(("check", "path", "text"), BAD)
def test_check_finds(check: Check, path: str, text: str) -> None:
    assert list(check(path, text))


@pytest.mark.parametrize(("check", "path", "text"), GOOD)
def test_check_passes(check: Check, path: str, text: str) -> None:
    assert list(check(path, text)) == []


def test_every_check_is_shown_something_bad() -> None:
    assert {check for check, _ in RULES} == {check for check, _, _ in BAD}


def test_exemptions_name_files_that_exist() -> None:
    stale = [name for name in (*LONG_FILES, *LARGE_FILES) if not (ROOT / name).is_file()]
    assert stale == []


def test_no_large_blobs() -> None:
    assert_none(
        [
            f"{path}:1: {size} bytes, at most {BLOB_BYTES_MAX}"
            for path in tree()
            if (size := (ROOT / path).stat().st_size) > BLOB_BYTES_MAX and path not in LARGE_FILES
        ]
    )
