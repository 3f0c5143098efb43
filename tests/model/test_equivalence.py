"""Float32 greedy output equals transformers' on the same dequantised weights, token by token.

tests/vectors/smollm2_greedy.json holds what transformers gave; one test compares with the file,
another derives it again. To write the file: `python tests/model/test_equivalence.py`.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from export_hf import export  # noqa: E402 - found by the line above
from reference_env import UnavailableError, clean_environment, python_of  # noqa: E402

from agent.engine.types import Sampling  # noqa: E402
from tests.unit.agent.engine_kit import collect, collect_all  # noqa: E402

VECTORS = ROOT / "tests" / "vectors" / "smollm2_greedy.json"
CACHE = ROOT / ".tongguan"
MAX_TOKENS = 64


def reference(model_path, folder, prompts):
    """Return transformers' answers; `folder` is scratch space for half a gigabyte."""
    python = python_of(CACHE / "transformers-venv")
    export(model_path, folder / "model")
    requests, answers = folder / "requests.json", folder / "answers.json"
    requests.write_text(json.dumps({"max_tokens": MAX_TOKENS, "prompts": prompts}))
    script = Path(__file__).parent / "reference_tokens.py"
    subprocess.run(
        [python, "-I", script, folder / "model", requests, answers],
        env=clean_environment(),
        cwd=folder,
        check=True,
    )
    return json.loads(answers.read_text())


def expected():
    return json.loads(VECTORS.read_text())["cases"]


def until_end(tokens, ends):
    """Return tokens up to and with the first end token: transformers was told to go on."""
    for index, token in enumerate(tokens):
        if token in ends:
            return tokens[: index + 1]
    return tokens


@pytest.mark.parametrize("case", expected() if VECTORS.exists() else [], ids=lambda c: c["name"])
def test_greedy_tokens_equal_those_of_transformers(engine, case):
    assert engine.tokenizer.apply_chat(case["messages"]) == case["prompt"]
    got = collect(engine, case["prompt"], Sampling(MAX_TOKENS, temperature=0.0))
    assert got.token_ids == until_end(case["tokens"], engine.tokenizer.ends)


def test_all_prompts_at_once_give_the_same_tokens(engine):
    cases = expected()
    sampling = Sampling(MAX_TOKENS, temperature=0.0)
    got = collect_all(engine, [(case["prompt"], sampling) for case in cases])
    assert [g.token_ids for g in got] == [
        until_end(case["tokens"], engine.tokenizer.ends) for case in cases
    ]


def test_the_answer_names_paris(engine):
    case = next(case for case in expected() if case["name"] == "capital")
    got = collect(engine, case["prompt"], Sampling(MAX_TOKENS, temperature=0.0))
    assert "Paris" in got.text
    assert got.finish == "stop"


def test_five_prompts_run_for_all_64_tokens(engine):
    long = [
        case
        for case in expected()
        if len(until_end(case["tokens"], engine.tokenizer.ends)) == MAX_TOKENS
    ]
    assert len(long) >= 5


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_vectors_are_what_transformers_gives(model_path, tmp_path):
    cases = expected()
    try:
        answers = reference(model_path, tmp_path, [case["prompt"] for case in cases])
    except UnavailableError as problem:
        pytest.skip(f"needs pip with a package index: {problem}")
    assert answers["tokens"] == [case["tokens"] for case in cases]


LONG = " ".join(
    f"On day {day} the ship sailed {day * 7 % 23} miles and the cook served {food}."
    for day, food in enumerate(["fish", "rice", "beans", "soup", "bread", "eggs"] * 4, 1)
)
QUESTIONS = {
    "capital": "What is the capital of France?",
    "story": "Write a short story about a dog who learns to fly.",
    "code": "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "chinese": "请用中文介绍一下黄河。",
    "list": "List ten animals of the sea, one per line, with one fact about each.",
    "long": f"{LONG}\n\nTell this voyage again as a letter to a friend, in your own words.",
}


def write_vectors():
    import tempfile

    from agent.engine import tokenizer
    from agent.engine.gguf_file import GgufFile
    from agent.engine.load import default_model

    with GgufFile(default_model()) as file:
        encoder = tokenizer.from_gguf(file)
    messages = {name: [{"role": "user", "content": text}] for name, text in QUESTIONS.items()}
    prompts = [encoder.apply_chat(conversation) for conversation in messages.values()]
    with tempfile.TemporaryDirectory() as folder:
        answers = reference(default_model(), Path(folder), prompts)
    cases = [
        {"name": name, "messages": conversation, "prompt": prompt, "tokens": tokens}
        for (name, conversation), prompt, tokens in zip(
            messages.items(), prompts, answers["tokens"], strict=True
        )
    ]
    document = {"model": default_model().name, "versions": answers["versions"], "cases": cases}
    VECTORS.write_text(json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    write_vectors()
