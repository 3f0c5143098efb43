"""The page in a real browser, before a real agent: `make page`.

A headless Chromium renders it, runs its script under its policy and writes the document back.
PAGE_PNG names a file that keeps a picture of it.
"""

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.blackbox import tiny_model
from tests.blackbox.node import AgentProcess

BROWSER = next(
    (found for name in ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
     if (found := shutil.which(name))), None,
)  # fmt: skip
pytestmark = pytest.mark.skipif(
    BROWSER is None,
    reason="capability: a headless Chromium (apt-get install chromium-headless-shell)",
)


def browse(url, *options, timeout_s=90):
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--no-first-run", "--disable-dev-shm-usage", "--enable-logging=stderr",
        "--window-size=1024,1360",
        "--virtual-time-budget=6000", *options, url,
    ]  # fmt: skip
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout_s)


BODY = {"prompt": "the quick brown fox", "max_tokens": 64, "temperature": 0}


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agent")
    model = tiny_model.write(folder / "tiny.gguf")
    process = AgentProcess(
        folder / "log", model=model, socket=folder / "s", kv_tokens=4096, memory_sample_s=0.2,
        memory_window_s=60,
    )  # fmt: skip
    door = httpx.HTTPTransport(uds=str(folder / "s"))
    with process as agent, httpx.Client(transport=door, base_url="http://localhost") as inside:
        agent.ready()
        agent.inside = inside
        for qos in ("P0", "P1", "P1", "P2"):
            asked = inside.post("/v1/completions", json=BODY, headers={"x-qos-class": qos})
            assert asked.status_code == 200
        agent.until(lambda: len(agent.admin.get("/v1/node/heatmap").json()["pools"]) >= 3)
        yield agent


@pytest.fixture(scope="module")
def page(agent):
    return browse(f"{agent.admin_url}/", "--dump-dom")


def text_of(page, name):
    return re.search(rf'id="{name}"[^>]*>(.*?)</(?:p|tbody|dl|div)>', page.stdout, re.DOTALL)[1]


def test_the_script_ran_under_its_policy(page):
    assert text_of(page, "state") == "Ready"
    for sign in ("Refused to", "Content Security Policy", "Uncaught", "Failed to load"):
        assert sign not in page.stderr, page.stderr


def test_engine_classes_and_devices_are_shown(page):
    assert re.search(r"tiny \((int4|float32) on cpu\)", page.stdout)
    rows = re.findall(r'<tr><th scope="row">(P\d)</th><td>(\d+)</td>', text_of(page, "classes"))
    assert rows == [("P0", "1"), ("P1", "2"), ("P2", "1")]
    assert re.search(
        r'<tr><th scope="row">P1</th>(<td>[^<]*</td>){3}<td>[\d.]+ ms</td>', page.stdout
    )
    assert re.search(r'<tr><th scope="row">(node|gpu)0</th>', text_of(page, "devices"))


def test_the_plan_is_shown(page):
    rows = re.findall(
        r'<tr><th scope="row">(\w+)</th><td>(\w+)</td><td>[^<]*</td><td>([^<]*)</td>',
        text_of(page, "plan"),
    )
    assert [row[0] for row in rows] == ["embedding", "qkv", "out", "gate_up", "down", "head"]
    dash = "\N{EN DASH}"
    assert rows[0][2] == dash
    assert {row[2] for row in rows[1:5]} == {f"0{dash}1"}
    assert re.match(
        r"[\d.]+ [KM]iB of weights; keys and values fp\d\d", text_of(page, "plan-words")
    )


def test_the_heat_map_has_words(page):
    alt = re.search(r'id="heat"[^>]*\balt="([^"]+)"', page.stdout)[1]
    assert "process now" in alt
    assert re.search(r"kv tiny now \d+ %", alt)


def test_an_agent_that_does_not_answer_is_said(agent, tmp_path):
    offline = tmp_path / "page"
    offline.mkdir()
    for name in ("", "page.js", "page.css"):
        answer = agent.admin.get(f"/{name}")
        assert answer.status_code == 200
        (offline / (name or "index.html")).write_bytes(answer.content)
    page = browse(f"file://{offline}/index.html", "--dump-dom", "--allow-file-access-from-files")
    assert text_of(page, "state") == "The agent does not answer"


def test_a_picture_of_it(agent, tmp_path):
    where = Path(os.environ.get("PAGE_PNG") or tmp_path / "page.png").resolve()
    long = BODY | {"max_tokens": 900}

    def generate(number):
        headers = {"x-qos-class": f"P{number % 3}"}
        asked = long | {"prompt": f"{number} foxes"}
        return agent.inside.post("/v1/completions", json=asked, headers=headers, timeout=60)

    with ThreadPoolExecutor(6) as busy:
        answers = busy.map(generate, range(6))
        browse(f"{agent.admin_url}/", f"--screenshot={where}")
        assert {answer.status_code for answer in answers} == {200}
    picture = where.read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(picture) > 20_000
