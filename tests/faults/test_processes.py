"""Several processes and one run: a reader beside a writer, two writers, a folder that may not be written."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from faults.writing import expected
from layerscope.errors import RunBusy
from layerscope.points import Moment, Point
from layerscope.store import Blob, Manifest, Writer, open_run, recover

SCRIPT = Path(__file__).with_name("writing.py")


@pytest.fixture
def writing(tmp_path):
    """Another process that writes a run, slowly."""
    child = subprocess.Popen(
        [sys.executable, str(SCRIPT), "write", str(tmp_path / "run"), "5", "slow"], stdout=subprocess.PIPE, text=True
    )
    child.stdout.readline()
    yield tmp_path / "run"
    child.kill()
    child.communicate()


def test_a_reader_beside_a_writer_that_seals_all_the_time_sees_a_growing_right_prefix(tmp_path):
    """The writer goes on while the reader looks; how long is counted in looks, and not in seconds."""
    command = [sys.executable, str(SCRIPT), "write", str(tmp_path / "run"), "5", "slow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            child.stdout.readline()
            run = open_run(tmp_path / "run")
            seen, sealed = 0, 0
            while seen < 150:
                acknowledged = int(child.stdout.readline())
                run.refresh()
                entries = list(run.records())
                assert len(entries) >= max(seen, acknowledged)
                for entry in entries[seen:]:
                    n = entry.moment.step
                    tensor = run.tensor(entry.point, step=n)
                    assert tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() == expected(5, n)[4]
                    assert entry.note == {"n": n}
                seen = len(entries)
                assert run.damaged == []
                assert run.state == "recording"
                sealed = len(list((tmp_path / "run").rglob("*.safetensors")))
            assert sealed > 20
        finally:
            child.kill()


def test_a_second_writer_and_recover_are_refused_while_the_first_lives(writing):
    with pytest.raises(RunBusy):
        Writer(writing, Manifest())
    with pytest.raises(RunBusy):
        Writer(writing, Manifest(), append=True)
    with pytest.raises(RunBusy):
        recover(writing)
    other = Writer(writing, Manifest(), rank=1)  # another rank is not in the way
    assert other.close().state == "complete"


def test_of_two_that_start_at_once_one_writes_and_one_is_refused(tmp_path):
    script = textwrap.dedent("""
        import sys
        from layerscope.errors import LayerscopeError
        from layerscope.store import Manifest, Writer
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            writer = Writer(sys.argv[1], Manifest())
        except LayerscopeError as error:
            print(type(error).__name__, flush=True)
        else:
            print("writing", flush=True)
            sys.stdin.readline()
            print(writer.close().state)
    """)
    for n in range(2):
        command = [sys.executable, "-c", script, str(tmp_path / f"run{n}")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        children = [subprocess.Popen(command, **pipes) for _ in range(2)]
        assert [child.stdout.readline() for child in children] == ["ready\n"] * 2
        for child in children:
            child.stdin.write("\n")
        said = {child.stdout.readline().strip(): child for child in children}
        assert sorted(said) in (["RunBusy", "writing"], ["RunExists", "writing"])
        assert said.pop("writing").communicate("\n")[0] == "complete\n"
        said.popitem()[1].communicate()
        assert open_run(tmp_path / f"run{n}").complete


def as_nobody(script: str, *arguments: object) -> str:
    """Run a script as a user who may do nothing here; root ignores permissions."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    prelude = "import os; import layerscope.store, numpy; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
    done = subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture
def public(tmp_path_factory):
    """A folder that everybody may enter."""
    path = tmp_path_factory.mktemp("public")
    for parent in (path, *path.parents):
        if parent.stat().st_uid == os.getuid() and parent.stat().st_mode & 0o5 != 0o5:
            parent.chmod(parent.stat().st_mode | 0o055)
    return path


def test_a_run_may_be_read_without_the_right_to_write(public):
    writer = Writer(public / "run", Manifest())
    writer.write(Point("a"), Moment(), blob=Blob("uint8", (3,), 3, lambda: b"abc"))
    writer.close()
    (public / "run").chmod(0o555)
    script = """
        import sys
        from layerscope.store import open_run
        [entry] = open_run(sys.argv[1]).records()
        print(entry.point, entry.shape)
    """
    assert as_nobody(script, public / "run") == "a:output (3,)"


def test_without_permission_the_beginning_raises_and_names_the_path(public):
    (public / "closed").mkdir(mode=0o755)
    script = """
        import sys
        from layerscope.store import Manifest, Writer
        try:
            Writer(sys.argv[1] + "/run", Manifest())
        except PermissionError as error:
            print(error)
    """
    assert f"{public}/closed/run" in as_nobody(script, public / "closed")


def test_permission_that_is_lost_midway_costs_records_and_not_the_run(public):
    (public / "open").mkdir(mode=0o777)
    (public / "open").chmod(0o777)
    script = """
        import logging, sys
        from layerscope.points import Moment, Point
        from layerscope.store import Blob, Manifest, Writer
        logging.disable()
        writer = Writer(sys.argv[1] + "/run", Manifest(), segment_tensors=2)
        def write(n):
            writer.write(Point("a"), Moment(step=n), blob=Blob("uint8", (3,), 3, lambda: bytes([n] * 3)))
            writer.flush()
        for n in range(3): write(n)
        os.chmod(sys.argv[1] + "/run/rank-00000", 0o555)
        for n in range(3, 6): write(n)
        os.chmod(sys.argv[1] + "/run/rank-00000", 0o755)
        for n in range(6, 9): write(n)
        done = writer.close()
        print(done.records, sum(d.count for d in done.dropped), done.dropped[0].reason)
    """
    words = as_nobody(script, public / "open")
    run = open_run(public / "open/run")
    records, dropped, reason = words.split(" ", 2)
    assert int(records) + int(dropped) == 9
    assert int(dropped) > 0
    assert "Permission denied" in reason
    steps = [e.moment.step for e in run.records()]
    assert len(steps) == int(records)
    assert [run.tensor("a", step=n).tolist() for n in steps] == [[n] * 3 for n in steps]
    assert {0, 1, 2, 8} <= set(steps)
