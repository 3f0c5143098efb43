import re
from html.parser import HTMLParser

import pytest

from agent.page_routes import FILES, FOLDER, HEADERS

TEXT = {name: (FOLDER / name).read_text(encoding="utf-8") for name, _ in FILES.values()}


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []
        self.feed(TEXT["index.html"])

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def of(self, tag):
        return [attrs for name, attrs in self.found if name == tag]


TAGS = Tags()
REPORTS = {
    "v1/node/summary", "v1/node/plan", "v1/node/topology", "v1/node/heatmap",
    "v1/node/heatmap.svg", "metrics",
}  # fmt: skip


def test_the_policy_allows_the_door_alone():
    policy = dict(part.strip().split(" ", 1) for part in
                  HEADERS["content-security-policy"].split(";"))  # fmt: skip
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert "unsafe" not in HEADERS["content-security-policy"]


def test_nothing_is_inline_and_nothing_is_from_elsewhere():
    assert all("src" in attrs for attrs in TAGS.of("script"))
    assert not TAGS.of("style")
    for tag, attrs in TAGS.found:
        assert not any(name == "style" or name.startswith("on") for name in attrs), tag
        for name in ("src", "href"):
            target = attrs.get(name, "#")
            ours = target in REPORTS or f"/{target}" in FILES
            assert ours or target.startswith("#") or target == "data:,", target
    for text in TEXT.values():
        assert "//" not in re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("word", ["innerHTML", "outerHTML", "insertAdjacent", "eval(", "Function("])
def test_text_never_becomes_markup(word):
    assert word not in TEXT["page.js"]


def test_it_can_be_read_without_eyes_or_mouse():
    assert TAGS.of("html")[0]["lang"] == "en"
    assert all(attrs.get("alt") for attrs in TAGS.of("img"))
    assert all(attrs.get("scope") for attrs in TAGS.of("th"))
    assert len(TAGS.of("caption")) == len(TAGS.of("table"))
    ids = {attrs["id"] for _, attrs in TAGS.found if "id" in attrs}
    for _, attrs in TAGS.found:
        if "aria-labelledby" in attrs:
            assert attrs["aria-labelledby"] in ids
    (state,) = [attrs for attrs in TAGS.of("p") if attrs.get("id") == "state"]
    assert (state["role"], state["aria-live"]) == ("status", "polite")
    assert TAGS.of("a")[0]["href"] == "#main"
    assert len(TAGS.of("h1")) == 1
    assert TAGS.of("noscript")


def test_ids_are_there_that_the_script_asks_for():
    ids = {attrs["id"] for _, attrs in TAGS.found if "id" in attrs}
    assert set(re.findall(r'\bat\("([^"]+)"\)', TEXT["page.js"])) <= ids


def _luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_contrast_is_at_least_that_of_wcag_aa():
    schemes = re.findall(r":root \{([^}]+)\}", TEXT["page.css"])
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", scheme))
        paper = _luminance(colours["paper"])
        for name in ("ink", "quiet", "bad", "link"):
            ink = _luminance(colours[name])
            ratio = (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05)
            assert ratio >= 4.5, (name, ratio)
