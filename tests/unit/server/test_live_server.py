"""The server as a stranger meets it: names, tokens, methods, paths, and clients that hang or vanish."""

import asyncio
import gc
import http.client
import json
import random
import socket
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import torch
from torch import nn

from layerscope.errors import NotARun, Unsupported
from layerscope.recorder import record
from layerscope.server.live_server import LiveServer
from layerscope.server.runs import Runs, state_of

SECRET = "what lies beside the folder"
TRAVERSALS = [
    *("..", "../secret", "%2e%2e/secret", "%2e%2e%2fsecret", "..%2fsecret", "..%5csecret", "....//secret"),
    *("/etc/passwd", "%2fetc%2fpasswd", "file:///etc/passwd", "%00", "train%00.json", "~root", "train/../../secret"),
    *("%252e%252e%252fsecret", "..;/secret", "\\..\\secret", "train/run.json", "train/rank-00000/journal", "a" * 5000),
    *("0" * 24, "f" * 24, "0" * 23 + "g", "%c0%ae%c0%ae/secret", "..%ef%bc%8fsecret", "link"),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server of a folder with one run; a secret lies beside the folder, and a link to it inside."""
    root = tmp_path_factory.mktemp("root")
    (root / "secret").write_text(SECRET)
    folder = root / "runs"
    folder.mkdir()
    (folder / "link").symlink_to(root / "secret")
    (folder / "outside").symlink_to(root, target_is_directory=True)
    model = nn.Linear(4, 4)
    with record(model, ".", to=folder / "train", keep="both"):
        model(torch.ones(2, 4))
    server = LiveServer(folder)
    server.folder = folder
    thread = threading.Thread(target=server.serve_here)
    thread.start()
    yield server
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def ask(server, path="/", method="GET", body=None, token=True, **headers):
    """Return status, headers and body of a request; `host` and the like are its headers."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    headers = {name.replace("_", "-"): value for name, value in headers.items() if value is not None}
    if token:
        headers.setdefault("cookie", f"layerscope-{server.port}={server.token}")
    connection.request(method, path, body=body, headers=headers)
    answer = connection.getresponse()
    told = answer.status, dict(answer.getheaders()), answer.read().decode("utf-8", "replace")
    connection.close()
    return told


def raw(server, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(data)
        return connection.recv(1 << 16)


def id_of(server) -> str:
    page = ask(server)[2]
    return page.partition('href="/run/')[2][:24]


def test_the_page_is_there_for_whoever_has_the_token(served):
    status, headers, page = ask(served, f"/?token={served.token}", token=False)
    assert (status, "train" in page) == (200, True)
    cookie = f"layerscope-{served.port}={served.token}; Path=/; HttpOnly; SameSite=Strict"
    assert headers["set-cookie"].startswith(cookie)
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert (headers["x-content-type-options"], headers["x-frame-options"]) == ("nosniff", "DENY")
    assert headers["cache-control"] == "no-store"
    assert "server" not in {name.lower() for name in headers}
    assert ask(served)[0] == 200


@pytest.mark.parametrize("path", ["/", "/run/x", "/events", "/compare", "/comparison/x", "/nowhere", "/favicon.ico"])
def test_without_the_token_nothing_is_answered(served, path):
    for wrong in (None, f"layerscope-{served.port}=", f"layerscope-{served.port}=guess", "layerscope-1=x", '"; \x7f='):
        status, headers, page = ask(served, path, token=False, cookie=wrong)
        assert status == 403
        assert "token" in page
        assert "set-cookie" not in headers
        assert "train" not in page


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "127.0.0.1.evil.example:{port}", ""),
        "x@127.0.0.1:{port}",
    ],
)
def test_another_name_is_answered_400_even_with_the_token(served, host):
    assert ask(served, f"/?token={served.token}", host=host.format(port=served.port))[0] == 400


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "localhost:{port}", "LOCALHOST:{port}", "[::1]:{port}"])
def test_this_machines_own_names_are_answered(served, host):
    assert ask(served, host=host.format(port=served.port))[0] == 200


def test_two_names_in_one_request_are_refused(served):
    own = f"127.0.0.1:{served.port}"
    request = f"GET /?token={served.token} HTTP/1.1\r\nHost: {own}\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    assert b" 400 " in raw(served, request.encode()).split(b"\r\n")[0]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"])
def test_it_is_for_looking(served, method):
    assert ask(served, "/", method)[0] == 405
    assert ask(served, f"/run/{id_of(served)}", method)[0] == 405


@pytest.mark.parametrize(
    "origin", [None, "http://evil.example", "null", "http://127.0.0.1", "https://127.0.0.1:{port}"]
)
def test_a_comparison_is_started_from_our_own_pages_alone(served, origin):
    origin = origin and origin.format(port=served.port)
    assert ask(served, "/compare", "POST", body="{}", origin=origin)[0] == 403
    assert ask(served, "/compare", "POST", body="{}", token=False, origin=f"http://127.0.0.1:{served.port}")[0] == 403


@pytest.mark.parametrize(
    "body",
    [
        *("", "x", "{}", "[]", '{"runs": 1}', '{"runs": ["x", "y"]}', '{"runs": []}', "[" * 60_000),
        '{"runs": "' + "a" * 99_999,
    ],
)
def test_a_question_that_is_none_is_answered_400(served, body):
    status, _, text = ask(served, "/compare", "POST", body=body, origin=f"http://127.0.0.1:{served.port}")
    assert status == 400
    assert "choose two runs" in json.loads(text)["error"]


def test_one_run_twice_is_no_question(served):
    body = json.dumps({"runs": [id_of(served)] * 2})
    assert ask(served, "/compare", "POST", body=body, origin=f"http://127.0.0.1:{served.port}")[0] == 400


@pytest.mark.parametrize(
    "where", ["/{}", "/run/{}", "/comparison/{}", "/events/run/{}", "/events/comparison/{}", "/?run={}"]
)
def test_no_path_of_a_client_reaches_the_files(served, where):
    for path in TRAVERSALS:
        target = where.format(path)
        own = f"127.0.0.1:{served.port}"
        cookie = f"layerscope-{served.port}={served.token}"
        request = f"GET {target} HTTP/1.1\r\nHost: {own}\r\nCookie: {cookie}\r\nConnection: close\r\n\r\n"
        answer = raw(served, request.encode("latin-1"))
        status = int(answer.split(b" ", 2)[1])
        assert status in ((200, 400) if where == "/?run={}" else (400, 404)), (target, status)
        assert SECRET.encode() not in answer
        assert b"root:" not in answer


def test_what_a_link_points_at_outside_is_not_listed(served):
    assert [run.name for run in Runs(served.folder).found()] == ["train"]


def test_ids_say_nothing_and_are_of_one_server(served):
    folder = served.folder
    ids = {Runs(folder).found()[0].id for _ in range(3)}
    assert len(ids) == 3
    assert all(len(id) == 24 for id in ids)


def test_a_thousand_random_requests_make_no_error_500(served):
    seeded = random.Random(0)
    known = ["/", "/run/", f"/run/{id_of(served)}", "/comparison/", "/favicon.ico", "/events/run/", "/compare"]
    methods = ["GET", "GET", "GET", "HEAD", "POST", "PUT", "BREW"]
    own = f"127.0.0.1:{served.port}"
    before, grown = _held(), 0
    tracemalloc.start()
    for nth in range(1000):
        if nth == 200:  # by now everything is there that is made once
            grown = _settled(before)
        noise = "".join(chr(seeded.randrange(33, 127)) for _ in range(seeded.randrange(12)))
        path = seeded.choice(known) + (noise if seeded.random() < 0.6 else "")
        lines = [f"{seeded.choice(methods)} {path} HTTP/1.{seeded.randrange(2)}", f"Host: {own}", "Connection: close"]
        if seeded.random() < 0.8:
            lines.append(f"Cookie: layerscope-{served.port}={served.token}")
        if seeded.random() < 0.3:
            lines.append(f"X-{noise.replace(':', '') or 'a'}: {noise}")
        with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
            connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
            status = connection.recv(64).split(b" ")
        assert status[:1] in ([b"HTTP/1.1"], [b"HTTP/1.0"], [b""])
        assert not status[1:2] or int(status[1]) < 500, lines
    grown = _settled(before) - grown
    tracemalloc.stop()
    assert grown < 200_000  # bytes, after 800 requests


def _held() -> tuple[int, int]:
    gc.collect()
    return len([*Path("/proc/self/fd").iterdir()]), threading.active_count()


def _settled(before: tuple[int, int]) -> int:
    """Wait until no more files and threads are held than before, but for the few that a pool of threads may have.

    Returns how many bytes are held, where that is traced.
    """
    for _ in range(200):
        files, threads = _held()
        if files <= before[0] + 3 and threads <= max(before[1], 60):
            return tracemalloc.get_traced_memory()[0]
        threading.Event().wait(0.05)
    pytest.fail(f"files and threads before {before}, after {_held()}")


def test_clients_that_send_half_a_request_or_vanish_keep_nobody_from_the_others(served):
    before = _held()
    hanging = []
    for nth in range(30):
        connection = socket.create_connection(("127.0.0.1", served.port), timeout=10)
        connection.sendall(b"GET / HTTP/1.1\r\nHost: 127" if nth % 2 else b"")
        hanging.append(connection)
    assert ask(served)[0] == 200
    for connection in hanging:
        connection.close()
    for _ in range(30):  # these ask, and do not stay for the answer
        connection = socket.create_connection(("127.0.0.1", served.port), timeout=10)
        cookie = f"layerscope-{served.port}={served.token}"
        connection.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nCookie: {cookie}\r\n\r\n".encode())
        connection.close()
    assert ask(served)[0] == 200
    _settled(before)


def test_fifty_who_follow_one_run_are_all_told_and_leave_nothing_behind(served):
    run = id_of(served)
    before = _held()

    async def follow() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        own, cookie = f"127.0.0.1:{served.port}", f"layerscope-{served.port}={served.token}"
        writer.write(f"GET /events/run/{run} HTTP/1.1\r\nHost: {own}\r\nCookie: {cookie}\r\n\r\n".encode())
        told = b""
        while told.count(b"data: ") < 2:
            piece = await reader.read(4096)
            assert piece, told
            told += piece
            if told.count(b"data: ") == 1:
                first.set()
        writer.close()
        return told

    async def all_of_them() -> list[bytes]:
        followers = [asyncio.create_task(follow()) for _ in range(50)]
        await first.wait()
        await asyncio.sleep(0)
        (served.folder / "train" / "alarms.jsonl").write_text('{"step": 0, "rule": "x"}\n')
        return await asyncio.gather(*followers)

    first = asyncio.Event()
    with ThreadPoolExecutor(1) as other:  # in this one, the tests in a browser may have a loop of theirs
        told = other.submit(lambda: asyncio.run(asyncio.wait_for(all_of_them(), 60))).result()
    assert len(told) == 50
    assert all(b"text/event-stream" in one for one in told)
    _settled(before)


def test_a_run_that_goes_while_it_is_looked_at_is_gone(served, tmp_path):
    import shutil

    folder = served.folder
    shutil.copytree(folder / "train", folder / "short")
    page = ask(served)[2]
    ids = {part[:24] for part in page.split('href="/run/')[1:]}
    shutil.rmtree(folder / "short")
    assert sorted(ask(served, f"/run/{id}")[0] for id in ids) == [200, 404]


def test_a_damaged_run_has_a_page_that_says_so(served):
    folder = served.folder / "broken"
    folder.mkdir()
    (folder / "run.json").write_text("{")
    page = ask(served)[2]
    assert "unreadable" in page
    row = page.partition(">broken<")[0]
    id = row.rpartition("/run/")[2][:24]
    status, _, text = ask(served, f"/run/{id}")
    assert status == 200
    assert "is not a run" in text or "cannot be read" in text
    (folder / "run.json").unlink()
    folder.rmdir()


def test_a_server_that_ends_leaves_neither_a_thread_nor_a_file(tmp_path):
    model = nn.Linear(4, 4)
    with record(model, ".", to=tmp_path / "train", keep="both"):
        model(torch.ones(2, 4))
    threads, files = {*threading.enumerate()}, _held()[0]
    server = LiveServer(tmp_path)
    serving = threading.Thread(target=server.serve_here)
    serving.start()
    run = id_of(server)
    with ThreadPoolExecutor(10) as pool:
        assert {answer[0] for answer in pool.map(lambda _: ask(server, f"/run/{run}"), range(30))} == {200}
    server.should_exit = True
    serving.join(20)
    for thread in {*threading.enumerate()} - threads:
        thread.join(20)
        assert not thread.is_alive(), thread
    assert _held()[0] <= files


def test_no_folder_and_a_port_that_is_taken_are_sentences(served, tmp_path):
    with pytest.raises(NotARun, match="is no folder"):
        LiveServer(tmp_path / "nowhere")
    with pytest.raises(Unsupported, match="--port names another"):
        LiveServer(tmp_path, port=served.port)


def test_a_run_that_ends_is_told_from_one_that_is_being_written(tmp_path):
    model = nn.Linear(4, 4)
    with record(model, ".", to=tmp_path / "run", keep="summary") as rec:
        model(torch.ones(2, 4))
        rec.flush()
        during = state_of(tmp_path / "run")
    assert state_of(tmp_path / "run") != during
