"""The live page in a real browser: a run that grows, a writer that is killed, runs compared, a rebound name."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from layerscope.monitor import watch
from layerscope.recorder import record
from layerscope.rules import exploding
from layerscope.server.serving import Served
from layerscope.store import recover

SRC = Path(__file__).parents[2] / "src"
NAME = "</script><img src=x onerror=alert(1)>"
# Records three steps, says so, and waits to be killed.
WRITER = """
import sys, torch
from layerscope.recorder import record
model = torch.nn.Linear(4, 4)
with record(model, ".", to=sys.argv[1], keep="summary") as rec:
    for _ in range(3):
        model(torch.ones(2, 4))
    rec.flush()
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def served(tmp_path):
    """A server of an empty folder, and the folder."""
    folder = tmp_path / "runs"
    folder.mkdir()
    server = Served(folder)
    thread = threading.Thread(target=server.serve_here)
    thread.start()
    yield server, folder
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def step(model, times=1):
    for _ in range(times):
        model(torch.ones(2, 4))


def test_a_run_that_is_being_written_grows_on_the_page_and_ends_there(look, served):
    server, folder = served
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with record(model, ["0", "1"], to=folder / "train", keep="summary") as rec:
        step(model, 2)
        rec.flush()
        page = look(server.address)
        assert "token" not in page.url
        page.get_by_role("link", name="train").click()
        page.get_by_text("being written now").wait_for()
        page.locator("figcaption", has_text="rms, outputs").first.wait_for()
        assert "step=1" in page.locator("h2", has_text="statistics at").inner_text()
        page.locator("summary", has_text="in detail").click()
        step(model, 3)
        rec.flush()
        page.locator("h2", has_text="statistics at step=4").wait_for()
        assert page.locator("details", has_text="in detail").first.get_attribute("open") is not None
    page.get_by_text("complete: 5 forwards").wait_for()
    assert page.get_by_text("being written now").count() == 0


def test_an_alarm_appears_while_the_training_goes_on(look, served):
    server, folder = served
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, optimizer, to=folder / "train", rules=[exploding()]) as watching:
        for at in range(12):
            if at == 10:
                watching.flush()
                page = look(server.address)
                page.get_by_role("link", name="train").click()
                page.locator("h2", has_text="layers and steps").wait_for()
                assert page.locator("figure.timeline").count() == 0
                with torch.no_grad():
                    model.weight.fill_(1e9)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        watching.flush()
        page.locator("figure.timeline").wait_for()
    assert watching.alarms
    assert "exploding" in page.locator("figure.timeline").inner_text()


def test_a_killed_writer_is_shown_as_killed_and_a_recovered_run_as_recovered(look, served):
    server, folder = served
    command = [sys.executable, "-c", WRITER, str(folder / "train")]
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        page = look(server.address)
        page.get_by_role("link", name="train").click()
        page.get_by_text("being written now").wait_for()
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        page.get_by_text("its writer is gone").wait_for()
    recover(folder / "train")
    page.get_by_text("recovered after it was cut short").first.wait_for()
    assert page.get_by_text("its writer is gone").count() == 0


def test_runs_are_chosen_and_compared_and_what_was_found_is_kept(look, served):
    server, folder = served
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for name in ("good", "same", "bad"):
        if name == "bad":
            with torch.no_grad():
                model[1].weight *= 2
        with record(model, ["0", "1"], to=folder / name):
            model(torch.ones(2, 4))
    page = look(server.address)
    compare = page.get_by_role("button", name="compare", exact=True)
    assert compare.is_disabled()
    for name in ("good", "same", "bad"):
        page.get_by_label(f"compare {name}", exact=True).check()
    assert "reference: good; against: same, bad" in page.locator(".tools").first.inner_text()
    compare.click()
    page.get_by_text("1 of 2 candidates differ from good").wait_for()
    again = look(server.address)
    again.get_by_role("link", name="good against same, bad").click()
    again.get_by_text("1 of 2 candidates differ from good").wait_for()


def test_what_happened_between_the_page_and_its_stream_is_not_missed(look, served, monkeypatch):
    server, folder = served
    model = nn.Linear(4, 4)
    with record(model, ".", to=folder / "one"):
        step(model)
    page = look("about:blank")

    def late(route):  # the page is on its way to the browser when another run comes
        answer = route.fetch()
        with record(model, ".", to=folder / "two"):
            step(model)
        route.fulfill(response=answer)
        page.unroute("**/?token=*")

    page.route("**/?token=*", late)
    page.goto(server.address)
    page.get_by_role("link", name="two").wait_for()


def test_a_hostile_name_of_a_run_is_text(look, served):
    server, folder = served
    place = folder / NAME.replace("/", "-")
    model = nn.Linear(4, 4)
    with record(model, ".", to=place):
        step(model)
    page = look(server.address)
    assert page.get_by_role("link", name=place.name).is_visible()
    assert page.locator("img").count() == 0


def test_a_name_that_was_rebound_to_this_machine_is_refused_and_so_is_a_missing_token(browser, served):
    server, _ = served
    context = browser.new_context()
    page = context.new_page()
    answer = page.goto(server.address.replace("127.0.0.1", "evil.example"))
    assert answer.status == 400
    # A page of the attacker's name asks as same-origin, with no Origin: all it gets is the refusal.
    stolen = page.evaluate("fetch('/').then(async (answer) => [answer.status, await answer.text()])")
    assert stolen[0] == 400
    assert "layerscope</h1>" not in stolen[1]
    assert page.goto(f"http://127.0.0.1:{server.port}/").status == 403
    assert page.goto(f"http://127.0.0.1:{server.port}/?token=guess").status == 403
    assert page.goto(server.address).status == 200
    assert page.goto(f"http://127.0.0.1:{server.port}/").status == 200  # the browser keeps the token
    # Another site's page cannot start anything, nor read, with the browser's cookies.
    other = context.new_page()
    other.goto("about:blank")
    started = other.evaluate(
        """port => fetch(`http://127.0.0.1:${port}/compare`, {
          method: 'POST', mode: 'no-cors', credentials: 'include', body: '{"runs": []}',
        }).then((answer) => answer.type, () => 'refused')""",
        server.port,
    )
    assert started == "refused"
    context.close()
