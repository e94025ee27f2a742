"""A live study in a real browser: what is finished in the store appears without a reload. Nobody else can read it."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metakernelbench.errors import UnknownName
from metakernelbench.experiments.spec import ExperimentSpec
from metakernelbench.report import names
from metakernelbench.report.live import LiveStudy
from metakernelbench.report.serving import Server
from metakernelbench.store.store import Store
from tests.report.support import HOSTILE, TIMES, chromium, study, trajectory

TREATMENT = "p03/tirx/m/0/from-cute"
LAST = ("p03/tirx/m/0/from-cute", "p28/cute/m/0/from-tirx")
"""Attempts that are not finished at first."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = study(text=HOSTILE.replace("\ud800", ""))
    spec = ExperimentSpec(
        name="trial", design=("cross-dsl",), problems=tuple(TIMES), dsls=("cute", "tirx"), models=("m",),
        store=str(tmp_path),
    )  # fmt: skip
    with Store.open(tmp_path / "store", create=True) as opened:
        opened.save_experiment(spec, made.plan)
        for attempt in made.plan.attempts:
            if attempt.key not in LAST:
                opened.save_attempt("trial", attempt, made.records[attempt.key])
        yield opened


@pytest.fixture
def server(store: Store) -> Iterator[Server]:
    with Server(LiveStudy(store, "trial"), port=0) as found:
        serving = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.05})
        serving.start()
        yield found
        found.shutdown()
        serving.join()


def finish(store: Store, key: str) -> None:
    made = study()
    attempt = next(a for a in made.plan.attempts if a.key == key)
    store.save_attempt("trial", attempt, made.records[key])


def begin(store: Store, key: str, steps: dict[str, Any]) -> None:
    folder = store.work_folder("trial", key) / "trial" / "agent"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trajectory.json").write_text(json.dumps(steps), encoding="utf-8")


def test_only_what_has_changed_makes_a_new_version(store):
    live = LiveStudy(store, "trial")
    assert (live.version, live.look()) == (1, False)
    finish(store, TREATMENT)
    assert (live.look(), live.version, live.look()) == (True, 2, False)
    assert TREATMENT in live.study.records


def test_a_running_attempt_is_followed_turn_by_turn(store):
    with store.leases.owner() as owner:
        assert store.leases.claim("trial", TREATMENT, owner)
        live = LiveStudy(store, "trial")
        assert live.study.running[TREATMENT].sentence == "running, 0 turns so far"
        begin(store, TREATMENT, trajectory("so far"))
        assert live.look()
        assert live.study.running[TREATMENT].sentence == "running, 4 turns so far"
        page = live.part(names.part_of(names.attempt(live.study.planned[TREATMENT])))
        assert "running, 4 turns so far" in page and "echo so far" in page
        assert '<td class="figure" data-value="4">4</td>' in live.part(names.problem("p03"))
        store.leases.release(owner)
    assert live.look()
    assert not live.study.running


def test_an_attempt_that_ran_again_is_read_again(store):
    live = LiveStudy(store, "trial")
    made = study()
    attempt = made.plan.attempts[0]
    store.save_attempt("trial", attempt, made.records[attempt.key].model_copy(update={"skill": "another"}))
    assert live.look()
    assert live.study.records[attempt.key].skill == "another"


def test_an_experiment_that_is_not_there_is_refused(store):
    with pytest.raises(UnknownName):
        LiveStudy(store, "trail")


def answer(server: Server, path: str, host: str | None = None, method: str = "GET") -> tuple[int, str, str]:
    """(status, type, text) of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    found = connection.getresponse()
    text = found.read().decode()
    connection.close()
    return found.status, found.getheader("Content-Type", ""), text


def test_every_part_is_served_and_nothing_else(server):
    assert answer(server, "/")[:2] == (200, "text/html; charset=utf-8")
    assert answer(server, "/part/comparisons")[0] == 200
    assert json.loads(answer(server, "/part/search")[2])
    assert answer(server, "/part/nothing")[0] == 404
    assert answer(server, "/part/..%2f..%2fetc%2fpasswd")[0] == 404
    assert answer(server, "/store.sqlite")[0] == 404
    assert answer(server, "/", method="POST")[0] == 501


def test_a_store_that_cannot_be_read_is_told(server, store):
    for artifact in store.folder.glob("artifacts/*/*.gz"):
        artifact.unlink()
    status, _, text = answer(server, "/")
    assert status == 503
    assert "cannot be read" in text


def test_a_name_that_leads_here_from_elsewhere_is_refused(server):
    status, _, text = answer(server, "/", host="evil.example")
    assert status == 403
    assert "trial" not in text


@pytest.fixture(scope="module")
def chrome() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.mark.browser
@pytest.mark.skipif(not Path("/usr/bin/chromium").exists(), reason="needs Chromium")
class TestInABrowser:
    @pytest.fixture
    def tab(self, chrome: Any, server: Server) -> Iterator[Any]:
        session = chrome.new_context()
        found = session.new_page()
        self.complaints: list[str] = []
        found.on("console", lambda message: self.complaints.append(message.text))
        found.on("pageerror", lambda error: self.complaints.append(str(error)))
        found.goto(server.url)
        found.locator("#live", has_text="live").wait_for()
        yield found
        session.close()

    def test_an_attempt_that_finishes_appears_without_a_reload(self, tab, store):
        tab.evaluate("window.same = true")
        progress = tab.locator(".progress")
        assert progress.inner_text() == "22 of 24 attempts are finished."
        finish(store, TREATMENT)
        progress.get_by_text("23 of 24 attempts are finished.").wait_for()
        finish(store, LAST[1])
        progress.wait_for(state="detached")
        assert tab.evaluate("window.same") is True
        assert self.complaints == []

    def test_what_is_open_stays_open_when_the_page_is_replaced(self, tab, store):
        place = names.attempt(next(a for a in study().plan.attempts if a.key == TREATMENT))
        with store.leases.owner() as owner:
            store.leases.claim("trial", TREATMENT, owner)
            begin(store, TREATMENT, trajectory("first"))
            tab.evaluate("anchor => { location.hash = anchor; }", place)
            tab.get_by_text("running, 4 turns so far").wait_for()
            tab.locator("details.turn > summary").first.click()
            longer = trajectory("first")
            longer["steps"] += longer["steps"][1:2]
            begin(store, TREATMENT, longer)
            tab.get_by_text("running, 5 turns so far").wait_for()
            assert tab.locator("details.turn[open]").count() == 1
            store.leases.release(owner)
        finish(store, TREATMENT)
        tab.locator(".badge.passed", has_text="passed").first.wait_for()
        assert self.complaints == []

    def test_a_server_that_ends_is_told(self, tab, server):
        server.shutdown()
        server.server_close()
        tab.locator("#live", has_text="no connection").wait_for()
