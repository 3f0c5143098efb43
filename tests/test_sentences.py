"""Each sentence of docs/sidecar.md about the wire has a case that would fail without it.

`blackbox/sentences.toml` maps a quote to the cases. In the sections of `WHOLE` no sentence may lack
one; elsewhere a quote that is listed has to be there.
"""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "tests/blackbox"
WHOLE = ("HTTP/1.1", "Upgraded connections", "Reload", "Start and drain")
TABLE = tomllib.loads((CASES / "sentences.toml").read_text())
ROWS = [(section, row) for section, rows in TABLE.items() for row in rows]


@cache
def sections() -> dict[str, str]:
    parts = re.split(r"(?m)^## (.+)$", (ROOT / "docs/sidecar.md").read_text())
    texts = (" ".join(part.split()) for part in parts[2::2])
    return dict(zip(parts[1::2], texts, strict=True))


@cache
def cases(file: str) -> set[str]:
    tree = ast.parse((CASES / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("section", "row"), ROWS, ids=[row["quote"][:40] for _, row in ROWS])
def test_sentence_is_there_and_so_are_its_cases(section, row):
    assert row["quote"] in sections()[section]
    assert row["tests"]
    for case in row["tests"]:
        file, _, name = case.partition("::")
        assert name in cases(file), case


ENVELOPE = tomllib.loads((ROOT / "tests/envelope_sentences.toml").read_text())
ENVELOPE_ROWS = [(section, row) for section, rows in ENVELOPE.items() for row in rows]


@pytest.mark.parametrize(
    ("section", "row"), ENVELOPE_ROWS, ids=[row["quote"][:40] for _, row in ENVELOPE_ROWS]
)
def test_sentence_of_the_envelope_is_there_and_so_are_its_cases(section, row):
    parts = re.split(r"(?m)^## (.+)$", (ROOT / "docs/envelope.md").read_text())
    texts = {
        name: " ".join(text.split()) for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    assert row["quote"] in texts[section]
    assert row["tests"]
    for case in row["tests"]:
        file, _, name = case.partition("::")
        assert name in cases(f"../{file}"), case


@pytest.mark.parametrize("section", WHOLE)
def test_no_sentence_of_the_section_lacks_a_case(section):
    # A sentence ends with a stop, or a part of it with a colon or semicolon.
    sentences = re.split(r"(?<=\.) (?=[A-Z`0-9])", sections()[section])
    quotes = [row["quote"] for row in TABLE[section]]
    bare = [s for s in sentences if s and not any(q in s or s in q for q in quotes)]
    assert bare == []
