"""The dashboard as a browser meets it: the real server on loopback, real run directories."""

from __future__ import annotations

import http.client
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedfa.errors import RunError
from fedfa.experiment.recorded_runs import RecordedRun
from fedfa.report.html.dashboard import Dashboard, first_choice
from tests.report.browser import Browser, overflowing


@pytest.fixture
def runs(folders: Path, tmp_path: Path) -> Path:
    """Three runs, one of which is not finished."""
    for name in ("fedavg-s1", "fedfa-s1", "fedfa-s2"):
        shutil.copytree(folders / name, tmp_path / "runs" / name)
    (tmp_path / "runs" / "fedfa-s2" / "summary.json").unlink()
    return tmp_path / "runs"


@pytest.fixture
def server(runs: Path) -> Iterator[Dashboard]:
    """A dashboard on a free port."""
    dashboard = Dashboard([runs], 0)
    thread = threading.Thread(target=dashboard.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield dashboard
    dashboard.shutdown()
    dashboard.server_close()
    thread.join(10)


def ask(server: Dashboard, method: str, path: str, host: str | None = None) -> tuple[int, dict[str, str], str]:
    """One request and its answer."""
    connection = http.client.HTTPConnection("127.0.0.1", int(server.server_address[1]), timeout=30)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, dict(answer.getheaders()), text


def test_it_listens_on_loopback_only_and_knows_two_addresses(server: Dashboard) -> None:
    assert server.server_address[0] == "127.0.0.1"
    status, headers, text = ask(server, "GET", "/")
    assert status == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "Accuracy by round" in text
    assert ask(server, "HEAD", "/")[2] == ""
    for path in ("/../../etc/passwd", "/config.toml", "/runs/fedavg-s1/config.toml"):
        assert ask(server, "GET", path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_it_cannot_be_written_to(server: Dashboard, method: str) -> None:
    assert ask(server, method, "/")[0] == 501


def test_other_host_names_are_refused(server: Dashboard) -> None:
    """Else a page of the world could point its own name here and read everything."""
    assert ask(server, "GET", "/", "evil.example")[0] == 403
    assert ask(server, "GET", "/state", f"localhost:{server.server_address[1]}")[0] == 200


def test_state_changes_with_the_records_and_only_then(server: Dashboard, runs: Path) -> None:
    def state() -> str:
        return str(json.loads(ask(server, "GET", "/state")[2])["state"])

    before = state()
    assert state() == before
    metrics = runs / "fedfa-s2" / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"round": 5')  # a line that is being written
    after = state()
    assert after != before
    assert ask(server, "GET", "/")[0] == 200
    shutil.rmtree(runs / "fedavg-s1")
    assert state() != after


def test_a_request_names_runs_but_opens_no_file(server: Dashboard, runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "fedavg-s1", tmp_path / "secret-s1")
    text = ask(server, "GET", f"/?run={tmp_path / 'secret-s1'}")[2]
    assert "secret" not in text
    assert "No run could be read yet" in text
    chosen = ask(server, "GET", f"/?run={runs / 'fedavg-s1'}")[2]
    assert "fedavg reaches" in chosen


def test_directories_may_appear_later(tmp_path: Path, folders: Path) -> None:
    server = Dashboard([tmp_path / "later"], 0)
    try:
        assert "does not exist yet" in server.page([])
        shutil.copytree(folders / "fedavg-s1", tmp_path / "later" / "fedavg-s1")
        assert "fedavg reaches" in server.page([])
    finally:
        server.server_close()


def test_a_port_in_use_is_named(server: Dashboard, runs: Path) -> None:
    with pytest.raises(RunError, match=r"port \d+ cannot be used .*--port"):
        Dashboard([runs], int(server.server_address[1]))


def test_of_many_runs_those_that_changed_last_are_shown_first() -> None:
    few = [RecordedRun(Path(f"a/{n}"), {}, group="a", changed=n) for n in range(3)]
    assert first_choice(few) == few
    many = [RecordedRun(Path(f"{g}/{n}"), {}, group=g, changed=n) for g in ("a", "b") for n in range(20)]
    many.append(RecordedRun(Path("b/last"), {}, group="b", changed=99))
    assert {run.group for run in first_choice(many)} == {"b"}


@pytest.mark.system
def test_in_a_browser_two_runs_are_chosen_and_a_value_read(browser: Browser, server: Dashboard, runs: Path) -> None:
    browser.window(1400)
    browser.open(server.address)
    boxes = "document.querySelectorAll('#chooser [type=checkbox]:checked').length"
    assert browser.evaluate(boxes) == 3
    browser.click("#chooser label:nth-of-type(3) input")
    browser.wait_for("Page.loadEventFired")
    assert browser.evaluate(boxes) == 2
    browser.evaluate("document.querySelector('#accuracy svg.wide').focus()")
    browser.press("ArrowLeft")
    tip = browser.evaluate("document.getElementById('tip').textContent")
    assert "fedavg" in tip
    assert "%" in tip
    assert browser.complaints() == []
    assert all(address.startswith(server.address) for address in browser.requests())


@pytest.mark.system
@pytest.mark.parametrize("width", [400, 1400])
def test_in_a_browser_the_page_follows_a_run_and_keeps_its_place(
    browser: Browser, server: Dashboard, runs: Path, folders: Path, width: int
) -> None:
    browser.window(width)
    browser.open(server.address)
    assert overflowing(browser) == []
    assert browser.evaluate("document.querySelectorAll('#chooser progress').length") == 1
    browser.evaluate("window.scrollTo(0, 600)")
    time.sleep(0.2)
    shutil.copy(folders / "fedfa-s2" / "summary.json", runs / "fedfa-s2" / "summary.json")
    browser.wait_for("Page.loadEventFired", 20)
    assert browser.evaluate("document.querySelectorAll('#chooser progress').length") == 0
    assert abs(browser.evaluate("window.scrollY") - 600) < 5
    assert browser.complaints() == []
