"""The page: what it says, what it escapes, what it admits is missing; and how it looks in a real browser."""

import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from eyas.config import RunConfig
from eyas.files import write_json, write_text
from eyas.pipeline import Context
from eyas.report import build
from eyas.report.plots import acceptance, bars, curves, dig


class Text(HTMLParser):
    """The visible text, ids, tags and attributes of a page."""

    def __init__(self, html: str):
        super().__init__()
        self.words: list[str] = []
        self.ids: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.inside: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [v for k, v in attrs if k == "id"]
        if tag in ("script", "style"):
            self.inside.append(tag)

    def handle_endtag(self, tag):
        if self.inside and self.inside[-1] == tag:
            self.inside.pop()

    def handle_data(self, data):
        if not self.inside:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture
def page(run_dir) -> Text:
    return Text(build.render(build.read_run(run_dir)))


def test_the_first_screen_answers_tau_identity_speed_and_what_is_wrong(page):
    start = page.text[: page.text.index("Acceptance Outputs")]
    for answer in ("1.62 τ", "mt_bench 1.31", "120 of 120", "1.27 ×", "39.9 against 31.4 tokens/s", "1 warning"):
        assert answer in start


def test_every_part_of_the_run_is_on_the_page(page):
    for words in (
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "top-1 agreement is 61 %",
        "turn 2 has neither content nor tool_calls",
        "99.14 % of supervised tokens",
        "52 tokens in 24 rounds",
        "17 tensors, logits equal",
        "torch 2.11.0",
        "4f1c2a9e",
        "max_new_tokens: 256",
    ):
        assert words in page.text, words


def test_text_from_data_is_shown_and_never_run(run_dir, page):
    assert "<script>window.broken = 1</script>" in page.text and "<script> alert(1) </script>" in page.text
    html = build.render(build.read_run(run_dir))
    assert "<script>window.broken" not in html and "<script>alert" not in html and "<b>code" not in html
    assert [a for t, a in page.tags if t == "script"] == [{"type": "application/json", "id": "figures"}, {}, {}]


def test_the_page_asks_nothing_of_the_network(page):
    for tag, attributes in page.tags:
        assert not {"src", "srcset", "data"} & attributes.keys(), tag
        assert tag not in ("link", "img", "iframe", "object", "embed")
        assert attributes.get("href", "#").startswith("#")
    policy = next(a["content"] for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy


def test_ids_are_unique_and_tables_have_captions(page):
    assert len(page.ids) == len(set(page.ids))
    tags = [t for t, _ in page.tags]
    assert tags.count("table") == tags.count("caption") > 5


def test_masks_and_accepted_tokens_are_marked_token_by_token(run_dir):
    html = build.render(build.read_run(run_dir))
    assert '<span>assistant</span><span>↵\n</span><span class="on">No</span><span class="on">,</span>' in html
    assert (
        '<span>No</span><span class="on">,</span><span class="on"> never</span><span class="on"> trust</span>'
        in html
    )


@pytest.mark.parametrize(
    ("rounds", "total", "expected"),
    [
        ([], 1, "."),
        ([0, 2, 1], 7, "..++.+."),
        ([3], 4, ".+++"),  # the end of the answer cut the round: no token of the target's own
        ([3], 3, ".++"),
    ],
)
def test_accepted_tokens_follow_the_rounds(rounds, total, expected):
    assert "".join(".+"[on] for on in build.accepted_tokens(rounds, total)) == expected


def test_what_is_not_made_is_said(tmp_path):
    config = RunConfig.parse({"target": {"model": "some/target"}, "run_dir": str(tmp_path / "bare")})
    write_text(tmp_path / "bare" / "run.yaml", config.to_yaml())
    text = Text(build.render(build.read_run(tmp_path / "bare"))).text
    assert "not here: prepare, extract, vocab, train, evaluate, export, preflight" in text
    assert text.count("not measured: evaluate has not run") == 3
    for stage in ("prepare", "train", "evaluate", "export", "preflight"):
        assert f"Stage {stage} has not run in this folder" in text
    assert "No stage has finished." in text


def test_outputs_that_differ_and_failed_checks_are_errors_on_the_first_screen(run_dir):
    path = run_dir / "evaluate" / "result.json"
    result = json.loads(path.read_text())
    result |= {"ok": False, "identical": 38}
    result["sets"]["heldout"] |= {"identical": 38, "different": 1, "ties": 1}
    write_json(path, result)
    page = build.read_run(run_dir)
    assert [p["level"] for p in page["problems"]] == ["error", "warning", "warning"]
    text = Text(build.render(page)).text
    assert "118 of 120" in text and "1 error 2 warnings" in text
    assert "heldout: 1 of 40 outputs part from plain decoding, not by rounding" in text


def test_figures_that_cannot_be_had_are_dashes(run_dir):
    path = run_dir / "evaluate" / "result.json"
    result = json.loads(path.read_text())
    nothing = dict.fromkeys(("tau", "accept_rate_by_position", "speedup", "speculative_tok_s", "baseline_tok_s"))
    empty = result["sets"]["heldout"] | nothing | {"by_category": {}}
    write_json(path, result | empty | {"sets": {"heldout": empty}})
    assert "– τ" in Text(build.render(build.read_run(run_dir))).text


def test_the_stage_writes_one_file_and_counts_what_is_wrong(run_dir, tmp_path):
    config = RunConfig.load(run_dir / "run.yaml")
    out = tmp_path / "out"
    out.mkdir()
    result = build.run(Context(config, run_dir, out))
    assert [p.name for p in out.iterdir()] == ["index.html"]
    assert result["counts"] == {"bytes": (out / "index.html").stat().st_size, "problems": 1, "missing": 0}


def test_curves_take_what_the_rows_have():
    rows = [{"step": 1, "train": {"loss": 3.0}}, {"step": 2, "train": {"loss": 2.0}, "eval": {"acc": [0.5, None]}}]
    figure = curves(
        rows, {"train.loss": "training", "eval.acc.0": "k0", "eval.acc.1": "k1", "eval.acc.2": "k2"}, "y"
    )
    assert figure is not None
    assert [(t["name"], list(t["x"])) for t in figure["data"]] == [("training", [1, 2]), ("k0", [2])]
    assert curves(rows, {"eval.loss": "x"}, "y") is None
    assert dig({"a": [{"b": 1}]}, "a.0.b") == 1 and dig({"a": 1}, "a.b.c") is None


def test_labels_from_data_are_escaped_in_charts():
    assert acceptance({"<i>x</i>": [0.5, None]})["data"][0]["name"] == "&lt;i&gt;x&lt;/i&gt;"
    assert bars({"a&b": 0.0}, "x", 1)["data"][0]["y"] == ["a&amp;b"]


QUIET = ("quic", "background-networking", "component-update", "sync", "gpu")
ARGS = ["--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in QUIET)]


@pytest.fixture(scope="module")
def chromium():
    found = shutil.which("chromium")
    if not found and not os.environ.get("CI"):
        pytest.skip("no chromium here (apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=found, args=ARGS)
        yield browser
        browser.close()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_in_a_browser_it_draws_fits_and_stays_silent(chromium, run_dir, tmp_path, width, scheme):
    path = Path(tmp_path / "index.html")
    path.write_text(build.render(build.read_run(run_dir)))
    tab = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    asked, faults = [], []
    tab.on("request", lambda r: asked.append(r.url))
    tab.on("console", lambda m: faults.append(m.text) if m.type in ("error", "warning") else None)
    tab.on("pageerror", lambda e: faults.append(str(e)))
    tab.goto(path.as_uri())
    tab.wait_for_function("document.querySelectorAll('.plot .main-svg').length >= 8")
    assert asked == [path.as_uri()] and faults == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate("window.broken") is None
    drawn = tab.evaluate(
        "[...document.querySelectorAll('.plot')].map(p => p.querySelectorAll('.main-svg').length > 0)"
    )
    assert all(drawn) and len(drawn) == 8
    inside = """[...document.querySelectorAll('.plot')].every(p => {
        const a = p.getBoundingClientRect(), b = p.querySelector('.main-svg').getBoundingClientRect();
        return b.width <= a.width + 1 && Math.abs(b.height - a.height) <= 1 })"""
    assert tab.evaluate(inside)
    ink, paper = tab.evaluate(
        "['color', 'backgroundColor'].map(k => getComputedStyle(document.body)[k].match(/\\d+/g).slice(0, 3))"
    )
    bright = {"ink": sum(map(int, ink)) / 765, "paper": sum(map(int, paper)) / 765}
    assert (
        bright["ink"] < 0.2 < 0.8 < bright["paper"]
        if scheme == "light"
        else bright["paper"] < 0.2 < 0.8 < bright["ink"]
    )
    label = tab.evaluate("document.querySelector('.plot .xtick text').style.fill")
    assert sum(map(int, re.findall(r"\d+", label))) / 765 == pytest.approx(bright["ink"], abs=0.01)
    bottom = tab.evaluate("document.getElementById('answers').getBoundingClientRect().bottom")
    assert bottom <= 900  # the four answers need no scrolling
    tab.close()
