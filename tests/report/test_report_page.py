"""The page in a real browser: self-contained, no errors, no overflow, readable in both themes."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedfa.cli.app import app
from fedfa.errors import RunError
from fedfa.report.html.write import Report, Reporter
from tests.experiment.run_toys import forget_digests
from tests.report.browser import Browser, overflowing, scrolling

WIDTHS = (400, 761, 1400)
"""A phone, the narrowest page with wide drawings, a screen."""
A4 = 688
"""Pixels between the margins of an A4 page."""
STILL = "This page does not update itself."
APPEARANCES = [(400, "light"), (761, "light"), (1400, "light"), (400, "dark"), (1400, "dark"), (A4, "paper")]


@pytest.fixture(scope="module")
def report(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The report of four finished runs."""
    return Reporter([folders], tmp_path_factory.mktemp("report") / "page.html", command="fedfa report runs").write()


@pytest.fixture(scope="module")
def many(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of two chapters, with special characters in names, an unfinished and an unreadable run."""
    place = tmp_path_factory.mktemp("many")
    for number in range(9):
        shutil.copytree(folders / "fedavg-s1", place / "one" / f"a-rather-long-name-of-a-method-number-{number}-s1")
    shutil.copytree(folders / "fedfa-s1", place / "two" / "<script>alert(1)</script>&'\"-s1".replace("/", "∕"))
    shutil.copytree(folders / "fedfa-s2", place / "two" / "fedfa-s2")
    (place / "two" / "fedfa-s2" / "summary.json").unlink()
    (place / "two" / "broken").mkdir()
    (place / "two" / "broken" / "metrics.jsonl").write_text("x")
    return Reporter([place / "one", place / "two"], place / "report.html", figures=False).write().page


class _Outside(HTMLParser):
    """Collects whatever a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [
            f"{tag} {k}={v}"
            for k, v in attrs
            if k in ("src", "href", "srcset", "data") and not (v or "").startswith(("#", "data:"))
        ]


def test_page_is_self_contained(report: Report) -> None:
    outside = _Outside()
    text = report.page.read_text()
    outside.feed(text)
    assert outside.found == []
    # Addresses in texts are harmless: a data set may be named by one.
    assert not re.search(r"""url\(|@import|(src|href)\s*=\s*["']?\s*(https?:)?//""", text)


def test_page_has_every_section(report: Report) -> None:
    text = report.page.read_text()
    headings = re.findall(r"<h3>(.*?)</h3>", text)
    assert headings == ["Accuracy", "Differences", "Loss", "Time and bytes", "Data", "Classes", "Diagnostics",
                        "Configuration", "Commands and versions"]  # fmt: skip
    titles = set(re.findall(r"<h4>(.*?)</h4>", text))
    assert {"Accuracy by round", "Accuracy by class at the end", "Drift of the clients&#x27; weights",
            "Cosines between class anchors", "Features in the plane, by class"} <= titles  # fmt: skip
    assert report.problems == ()


def test_page_leaves_out_what_was_not_measured(folders: Path, tmp_path: Path) -> None:
    text = Reporter([folders / "fedavg-ccvr-s1"], tmp_path / "page.html", figures=False).write().page.read_text()
    assert "Diagnostics" not in text
    assert "Domains" not in text
    assert "Accuracy by round" in text


def test_figures_are_written_as_files(report: Report) -> None:
    svg = [file for file in report.figures if file.suffix == ".svg"]
    png = [file for file in report.figures if file.suffix == ".png"]
    assert {file.stem for file in svg} == {file.stem for file in png} >= {"accuracy", "class-accuracy", "drift"}
    for file in svg:
        root = ElementTree.parse(file).getroot()
        assert root.tag.endswith("svg")
        assert "var(" not in file.read_text(), "colours must not need a page"
    assert all(file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 5000 for file in png)


@pytest.mark.system
@pytest.mark.parametrize(("width", "appearance"), APPEARANCES)
def test_page_has_no_errors_requests_or_overflow(
    browser: Browser, report: Report, many: Path, width: int, appearance: str
) -> None:
    for page in (report.page, many):
        browser.window(width, dark=appearance == "dark", paper=appearance == "paper")
        browser.open(page)
        assert browser.complaints() == []
        assert browser.requests() == []
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert overflowing(browser) == []


@pytest.mark.system
def test_page_tables_fit_on_a_screen(browser: Browser, folders: Path, tmp_path: Path) -> None:
    """Processors and runs with names as long as real ones, and several versions."""
    for number in range(6):
        folder = tmp_path / "runs" / f"fedfa-after-each-epoch-s{number}"
        shutil.copytree(folders / "fedfa-s1", folder)
        forget_digests(folder)
        config = folder / "config.toml"
        config.write_text(re.sub(r"(?m)^seed = 1$", f"seed = {number}", config.read_text(), count=1))
        summary = json.loads((folder / "summary.json").read_text())
        summary["commit"] = f"{number // 3}" * 40 + " with changes"
        summary["machine"]["processor"] = "Intel(R) Xeon(R) Platinum 8375C Processor @ 2.90GHz"
        (folder / "summary.json").write_text(json.dumps(summary))
    page = Reporter([tmp_path / "runs"], tmp_path / "page.html", figures=False).write().page
    browser.window(1400)
    browser.open(page)
    assert scrolling(browser) == []
    heights = browser.evaluate(
        "[...document.querySelectorAll('[aria-label=Versions] tbody tr')].map(e => e.getBoundingClientRect().height)"
    )
    assert len(heights) == 4, "two versions, each with a line for its runs"
    assert max(heights) < 60, "at most two lines of letters each"


@pytest.mark.system
def test_browser_checks_detect_overflow_and_errors(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        "<body><p style='width:900px'>wide</p><div class='scroll' style='overflow:auto'><p style='width:800px'>.</p>"
        "</div><script>console.error('oh'); missing()</script></body>"
    )
    browser.window(400)
    browser.open(page)
    assert overflowing(browser)
    assert len(scrolling(browser)) == 1
    assert len(browser.complaints()) == 2
    page.write_text("<body><img src='http://127.0.0.1:9/x.png'></body>")
    browser.open(page)
    assert browser.requests() == ["http://127.0.0.1:9/x.png"]


@pytest.mark.system
@pytest.mark.parametrize("width", WIDTHS)
def test_chart_texts_are_large_enough_and_inside(browser: Browser, report: Report, many: Path, width: int) -> None:
    """At least 8 pixels on the screen wherever, and no word beyond the edge of its drawing."""
    for page in (report.page, many):
        browser.window(width)
        browser.open(page)
        small, outside, seen = browser.evaluate(
            """(() => { let small = [], outside = [], seen = 0;
              for (const svg of document.querySelectorAll('svg.drawing')) {
                const box = svg.getBoundingClientRect(); if (!box.width) continue;
                const scale = box.width / svg.viewBox.baseVal.width;
                for (const text of svg.querySelectorAll('text')) { seen++;
                  if (parseFloat(text.getAttribute('font-size')) * scale < 8) small.push(text.textContent);
                  const r = text.getBoundingClientRect();
                  if (r.left < box.left - 2 || r.right > box.right + 2 || r.bottom > box.bottom + 2)
                    outside.push(text.textContent);
                } }
              return [small, outside, seen]; })()"""
        )
        assert seen > 100
        assert small == []
        assert outside == []


@pytest.mark.system
def test_page_theme_follows_the_system_and_the_button(browser: Browser, report: Report) -> None:
    def ground() -> str:
        return str(browser.evaluate("getComputedStyle(document.body).backgroundColor"))

    browser.window(1400, dark=True)
    browser.open(report.page)
    browser.evaluate("localStorage.clear()")
    browser.open(report.page)
    dark = ground()
    browser.click("#theme")
    assert browser.evaluate("document.getElementById('theme').textContent") == "Colours: light"
    light = ground()
    assert dark != light
    browser.open(report.page)
    assert ground() == light, "the choice is remembered"
    browser.click("#theme")
    assert ground() == dark
    browser.window(1400, dark=True, paper=True)
    assert (
        browser.evaluate("getComputedStyle(document.querySelector('figure')).backgroundColor") == "rgb(255, 255, 255)"
    )
    browser.evaluate("localStorage.clear()")


@pytest.mark.system
def test_pointer_and_keyboard_show_chart_values(browser: Browser, report: Report, folders: Path) -> None:
    browser.window(1400)
    browser.open(report.page)
    box = browser.evaluate(
        """(() => { const svg = document.querySelector('#accuracy svg.wide'), plot = JSON.parse(svg.dataset.plots)[0];
             svg.scrollIntoView({block: 'center'});
             const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
             const share = (2 - plot.x[0]) / (plot.x[1] - plot.x[0]);
             return [box.left + (plot.r[0] + share * plot.r[2]) * scale,
                     box.top + (plot.r[1] + plot.r[3] / 2) * scale]; })()"""
    )
    browser.move(*box)
    words = browser.evaluate("document.getElementById('tip').textContent")
    record = json.loads((folders / "fedavg-s1" / "metrics.jsonl").read_text().splitlines()[1])
    assert words.startswith("round 2")
    assert f"fedavg{100 * record['accuracy']:.2f}".rstrip("0").rstrip(".") in words
    browser.move(5, 5)
    assert browser.evaluate("document.getElementById('tip').hidden")
    browser.evaluate("document.querySelector('#accuracy svg.wide').focus()")
    browser.press("ArrowLeft")
    browser.press("ArrowLeft")
    assert browser.evaluate("document.querySelector('#tip b').textContent") == "round 3"
    browser.press("Escape")
    assert browser.evaluate("document.getElementById('tip').hidden")
    assert browser.complaints() == []


@pytest.mark.system
def test_page_tables_sort(browser: Browser, report: Report) -> None:
    browser.window(1400)
    browser.open(report.page)
    column = """[...document.querySelectorAll('table.sorts')[0].tBodies[0].rows].map(r => +r.cells[3].dataset.v)"""
    browser.click("table.sorts thead th:nth-child(4) button")
    down = browser.evaluate(column)
    assert down == sorted(down, reverse=True)
    browser.click("table.sorts thead th:nth-child(4) button")
    assert browser.evaluate(column) == sorted(down)


@pytest.mark.system
def test_page_without_script_lacks_only_interaction(browser: Browser, report: Report) -> None:
    browser.window(1400, script=False)
    try:
        browser.open(report.page)
        document = browser.ask("DOM.getDocument", depth=0)["root"]["nodeId"]
        charts = browser.ask("DOM.querySelectorAll", nodeId=document, selector="svg.wide")["nodeIds"]
        details = browser.ask("DOM.querySelectorAll", nodeId=document, selector="figure details table")["nodeIds"]
        assert len(charts) > 10
        assert len(details) > 5
        button = browser.ask("DOM.querySelector", nodeId=document, selector="#theme[hidden]")["nodeId"]
        assert button != 0, "a button that does nothing is hidden"
    finally:
        browser.window(1400)


@pytest.mark.system
def test_page_charts_have_descriptions_and_tables_headers(browser: Browser, report: Report) -> None:
    browser.window(1400)
    browser.open(report.page)
    assert browser.evaluate(
        """[...document.querySelectorAll('svg[role=img]')].every(s => s.getAttribute('aria-labelledby').split(' ')
             .every(id => document.getElementById(id).textContent.length > 10))"""
    )
    assert browser.evaluate("[...document.querySelectorAll('table')].every(t => t.querySelector('th[scope=col]'))")
    identities = browser.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(identities) == len(set(identities))


@pytest.mark.system
def test_page_escapes_names(browser: Browser, many: Path) -> None:
    browser.window(1400)
    browser.open(many)
    assert browser.complaints() == []
    assert browser.evaluate("document.querySelectorAll('script').length") == browser.evaluate(
        "document.querySelectorAll('script.values').length + 1"
    )
    assert "alert(1)" in browser.evaluate("document.body.innerText")


def test_page_names_unreadable_and_unfinished_runs(many: Path) -> None:
    text = many.read_text()
    assert "has no config.toml" in text
    assert "11 runs, 1 not finished" in text
    assert "4 of 4 rounds" in text


@pytest.mark.system
# -- while a run continues --------------------------------------------------------------------------------------------
def test_page_reloads_while_watched_and_not_afterwards(browser: Browser, folders: Path, tmp_path: Path) -> None:
    """A growing run: each change is written, scroll position and open tables survive, then reloading stops."""
    going = tmp_path / "runs" / "fedavg-s1"
    shutil.copytree(folders / "fedavg-s1", going)
    summary, lines = (going / "summary.json").read_text(), (going / "metrics.jsonl").read_text().splitlines(True)
    (going / "summary.json").unlink()
    (going / "metrics.jsonl").write_text("".join(lines[:2]))
    reporter = Reporter([tmp_path / "runs"], tmp_path / "page.html", figures=False)
    written: list[int] = []
    watching = threading.Thread(
        target=lambda: reporter.watch(1, lambda done: written.append(done.unfinished), limit=90)
    )
    watching.start()
    try:
        _until(lambda: bool(written))
        assert '<meta http-equiv="refresh" content="1">' in (tmp_path / "page.html").read_text()
        browser.window(1000, 500)
        browser.open(tmp_path / "page.html")
        browser.evaluate("document.getElementById('f0-data').open = true; window.scrollTo(0, 300)")
        (going / "metrics.jsonl").write_text("".join(lines))
        _until(lambda: len(written) > 1)
        browser.wait_for("Page.loadEventFired", 30)  # by itself
        assert browser.evaluate("document.getElementById('f0-data').open")
        assert browser.evaluate("window.scrollY") == pytest.approx(300, abs=2)
        (going / "summary.json").write_text(summary)
    finally:
        watching.join(95)
    assert not watching.is_alive()
    text = (tmp_path / "page.html").read_text()
    assert 'http-equiv="refresh"' not in text
    assert "1 run, finished" in text


def test_interrupted_watch_leaves_a_page_that_does_not_reload(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "fedavg-s1", tmp_path / "fedavg-s1")
    (tmp_path / "fedavg-s1" / "summary.json").unlink()
    reporter = Reporter([tmp_path], tmp_path / "page.html", figures=False)

    def stop(_: Report) -> None:
        assert 'http-equiv="refresh"' in (tmp_path / "page.html").read_text()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reporter.watch(1, stop)
    text = (tmp_path / "page.html").read_text()
    assert 'http-equiv="refresh"' not in text
    assert "1 run, not finished." in text
    assert STILL in text


def test_page_of_unfinished_runs_names_the_watch_command(
    report: Report, many: Path, folders: Path, tmp_path: Path
) -> None:
    """Only a page that does not reload although runs are unfinished names the command."""
    assert STILL not in report.page.read_text(), "all runs are finished"
    text = many.read_text()
    assert 'http-equiv="refresh"' not in text
    assert STILL in text
    shutil.copytree(folders / "fedavg-s1", tmp_path / "fedavg-s1")
    (tmp_path / "fedavg-s1" / "summary.json").unlink()
    command = "fedfa report 'my runs' --every 5"
    page = Reporter([tmp_path], tmp_path / "page.html", figures=False, command=command).write().page
    assert "<code>fedfa report --watch &#x27;my runs&#x27; --every 5</code> keeps it up to date" in page.read_text()
    watched: list[str] = []
    reporter = Reporter([tmp_path], tmp_path / "page.html", figures=False)
    reporter.watch(1, lambda done: watched.append(done.page.read_text()), limit=0)
    assert STILL not in watched[0]
    assert STILL in page.read_text()


def test_report_command_suggests_watch_for_unfinished_runs(folders: Path, tmp_path: Path) -> None:
    arguments = ["report", str(folders / "fedavg-s1"), "--no-figures", "--out", str(tmp_path / "page.html")]
    assert "--watch" not in CliRunner().invoke(app, arguments).output
    shutil.copytree(folders / "fedavg-s1", tmp_path / "fedavg-s1")
    (tmp_path / "fedavg-s1" / "summary.json").unlink()
    arguments[1] = str(tmp_path / "fedavg-s1")
    output = CliRunner().invoke(app, arguments).output
    assert "1 run, 1 not finished" in output
    assert "with --watch, the page follows unfinished runs" in output


def test_page_without_runs_does_not_claim_they_are_finished(tmp_path: Path) -> None:
    reporter = Reporter([tmp_path / "nowhere"], tmp_path / "page.html")
    text = reporter.watch(1, lambda _: None, limit=0).page.read_text()
    assert "No run yet." in text
    assert "finished" not in re.sub(r"<style>.*?</style>|<script>.*?</script>", "", text, flags=re.DOTALL)


def test_page_times_are_dates(many: Path) -> None:
    """A page may be read long after it was written: the last record has a date, not an age."""
    assert re.search(r"4 of 4 rounds, last record \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", many.read_text())


def test_report_without_runs_fails_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no run directory"):
        Reporter([tmp_path], tmp_path / "page.html").write()


def _until(true: object, seconds: float = 60) -> None:
    assert callable(true)
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)
