"""A live view of runs: one page on loopback, made of the report's components.

The server is the standard library's: a few requests a minute from one browser need no framework, and nothing else has
to be installed. It only reads: it knows GET and HEAD, serves two addresses, and opens no file that a request names.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from fedfa.errors import RunError
from fedfa.experiment.recorded_runs import Problem, RecordedRun, changes_of, read_run, run_directories
from fedfa.report.html.data_split import Splits
from fedfa.report.html.grouping import chapters_of
from fedfa.report.html.page import Page
from fedfa.report.html.palette import styles

SHOWN_AT_FIRST = 12
"""With more runs than this, only those of the directory that changed last are chosen at first."""
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'"
)
_HEADERS = {
    "Content-Security-Policy": f"{_POLICY}; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_SCRIPT = """
(function () {
  "use strict";
  var form = document.getElementById("chooser"), seen = document.documentElement.dataset.state;
  form.addEventListener("change", function () { form.submit(); });
  form.addEventListener("click", function (event) {
    if (!event.target.dataset.all) return;
    var all = event.target.dataset.all === "yes";
    [].forEach.call(form.querySelectorAll("[type=checkbox]"), function (box) { box.checked = all; });
    form.submit();
  });
  function look() {
    fetch("state", { cache: "no-store" }).then(function (answer) { return answer.json(); }).then(function (now) {
      document.documentElement.removeAttribute("data-lost");
      if (now.state !== seen) location.reload();
    }).catch(function () { document.documentElement.setAttribute("data-lost", ""); });
  }
  setInterval(look, 2000);
})();
"""


class Runs:
    """The runs below some directories; a run is read again only when its files have changed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._read: dict[Path, tuple[str, RecordedRun | Problem]] = {}
        self._lock = threading.Lock()

    def state(self) -> str:
        """Changes whenever a record does."""
        marks = [f"{directory} {changes_of(directory)}" for directory, _ in self._directories()]
        return hashlib.blake2b("\n".join(marks).encode(), digest_size=12).hexdigest()

    def read(self) -> tuple[list[RecordedRun], list[Problem]]:
        """All runs, and what cannot be read."""
        with self._lock:
            found = [self._one(directory, group) for directory, group in self._directories()]
        problems = [one for one in found if isinstance(one, Problem)]
        problems += [Problem(path, "does not exist yet") for path in self._paths if not path.is_dir()]
        return [one for one in found if isinstance(one, RecordedRun)], problems

    def _directories(self) -> list[tuple[Path, str]]:
        found: dict[Path, tuple[Path, str]] = {}
        for path in self._paths:
            for directory in run_directories(path):
                found.setdefault(directory.resolve(), (directory, "" if directory == path else str(directory.parent)))
        return list(found.values())

    def _one(self, directory: Path, group: str) -> RecordedRun | Problem:
        mark = changes_of(directory)
        if (known := self._read.get(directory)) is not None and known[0] == mark:
            return known[1]
        try:
            found: RecordedRun | Problem = read_run(directory, group)
        except (RunError, OSError) as error:  # perhaps it is being written this moment
            found = Problem(directory, str(error))
        self._read[directory] = (mark, found)
        return found


class Dashboard(ThreadingHTTPServer):
    """Serves the page until it is shut down.

    Args:
        paths: Run directories, or directories that hold some; they need not exist yet.
        port: On loopback; 0 for any that is free.

    Raises:
        RunError: The port is in use.
    """

    daemon_threads = True

    def __init__(self, paths: Sequence[Path], port: int) -> None:
        self.runs = Runs(paths)
        self._splits = Splits()
        self._building = threading.Lock()
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise RunError(f"port {port} cannot be used ({error.strerror}); choose another with --port") from None

    @property
    def address(self) -> str:
        """Where a browser finds it."""
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def page(self, wanted: Sequence[str]) -> str:
        """The page about the wanted runs; about those that changed last if none are named."""
        state = self.runs.state()
        runs, problems = self.runs.read()
        chosen = [run for run in runs if str(run.path) in wanted] if wanted else first_choice(runs)
        chapters = chapters_of(chosen)
        method_styles = styles(method.name for chapter in chapters_of(runs) for method in chapter.methods)
        with self._building:  # figures of many runs take a moment; two at a time would take twice as long
            return Page(
                chapters, method_styles, problems, self._splits, policy=_POLICY,
                chooser=chooser(runs, chosen), script=_SCRIPT, state=state,
            ).html  # fmt: skip


def first_choice(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """All runs if they are few, else those beside the one that changed last."""
    if len(runs) <= SHOWN_AT_FIRST:
        return list(runs)
    group = max(runs, key=lambda run: run.changed).group
    return [run for run in runs if run.group == group]


def chooser(runs: Sequence[RecordedRun], chosen: Sequence[RecordedRun]) -> str:
    """A form with a box for each run, with its state and accuracy."""
    shown = {run.path for run in chosen}
    groups: dict[str, list[str]] = {}
    for run in runs:
        accuracy = run.results.get("final_accuracy")
        result = f"{100 * accuracy:.2f} %" if isinstance(accuracy, int | float) else "–"
        state = "finished" if run.finished else f"round {run.done} of {run.rounds}"
        box = f'<input type="checkbox" name="run" value="{escape(str(run.path))}"{" checked" * (run.path in shown)}>'
        bar = f'<progress max="{max(run.rounds, 1)}" value="{run.done}" aria-hidden="true"></progress>'
        groups.setdefault(run.group or "given on the command line", []).append(
            f"<label>{box}<b>{escape(run.path.name)}</b>{'' if run.finished else bar}<span>{state}</span>"
            f"<span>{result}</span></label>"
        )
    inner = "".join(
        f"<fieldset><legend>{escape(name)}</legend>{''.join(boxes)}</fieldset>" for name, boxes in groups.items()
    )
    return (
        '<form id="chooser" class="box" method="get"><input type="hidden" name="run" value=""><h4>Runs</h4>'
        f'<div class="boxes">{inner or "<p>None yet.</p>"}</div><p><button>Show</button> '
        '<button type="button" data-all="yes">All</button> <button type="button" data-all="no">None</button> '
        '<span class="lost quiet">The dashboard has ended; this page is not updated any more.</span></p></form>'
    )


class _Handler(BaseHTTPRequestHandler):
    server: Dashboard
    server_version = "fedfa"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer with the page or the state."""
        if not self._is_for_this_server():
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "ask for 127.0.0.1 or localhost")
            return
        address = urlsplit(self.path)
        if address.path == "/":
            wanted = parse_qs(address.query, keep_blank_values=True).get("run", [])
            self._answer(HTTPStatus.OK, "text/html", self.server.page(wanted))
        elif address.path == "/state":
            self._answer(HTTPStatus.OK, "application/json", json.dumps({"state": self.server.runs.state()}))
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is only one page: /")

    def do_HEAD(self) -> None:
        """Answer with the headers alone."""
        self.do_GET()

    def _is_for_this_server(self) -> bool:
        """Refuse other names: a foreign page could otherwise read this one through a name of its own."""
        port = self.server.server_address[1]
        return self.headers.get("Host", "") in (f"127.0.0.1:{port}", f"localhost:{port}")

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode("utf-8")
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent: the page asks for the state every two seconds."""
