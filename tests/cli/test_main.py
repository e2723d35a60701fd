"""The door itself: what it imports, how it fails, how it leaves."""

import subprocess
import sys

import pytest

from layerscope.cli import COMMANDS, layerscope
from layerscope.store import open_run


def imported(err: str) -> set[str]:
    """The modules that `-X importtime` names."""
    return {line.rsplit("|", 1)[1].strip() for line in err.splitlines() if line.startswith("import time:")}


def test_help_names_every_command_and_imports_no_torch(fresh):
    answer = fresh("--help", python=("-X", "importtime"))
    assert answer.code == 0
    assert all(f"\n  {name} " in answer.out for name in COMMANDS)
    modules = imported(answer.err)
    assert "click" in modules
    assert not {"torch", "numpy", "rich", "transformers"} & modules


def test_help_imports_little_enough_to_come_at_once(fresh):
    """`python -m benchmarks startup` has the seconds: they are the machine's, and the modules are ours."""
    plain = imported(fresh(python=("-X", "importtime", "-c", "import click")).err)
    ours = imported(fresh("--help", python=("-X", "importtime")).err)
    assert len(ours - plain) < 100


@pytest.mark.parametrize("args", [("show",), ("points",), ("show", "--adjacent")])
def test_a_run_is_looked_at_without_torch_unless_tensors_are_needed(fresh, trained, args):
    answer = fresh(args[0], trained, *args[1:], python=("-X", "importtime"))
    assert answer.code == 0
    # The last of the three is the other side: it reads tensors, and this test would notice torch there.
    assert ("torch" in imported(answer.err)) == ("--adjacent" in args)


def test_the_flags_of_every_command_are_these_and_no_others():
    found = {}
    for name in COMMANDS:
        command = layerscope.get_command(None, name)
        found[name] = sorted(o for p in command.params for o in p.opts if o.startswith("-"))
    assert found == {
        "demo": ["--to", "-o"],
        "points": ["--json", "--trust"],
        "modes": [
            *(
                "--calib_data_num",
                "--calib_file",
                "--calib_seqlen",
                "--evaluate",
                "--html",
                "--inputs",
                "--json",
                "--mode",
                "--modes-file",
            ),
            *("--percentile_alpha", "--plan", "--pretrained_dir", "--prompt", "--seed", "--sensitivity", "--within"),
        ],
        "record": [
            *(
                "--append",
                "--calib_data_num",
                "--calib_file",
                "--calib_seqlen",
                "--components",
                "--inputs",
                "--json",
                "--keep",
                "--layers",
                "--mode",
            ),
            *("--modes-file", "--no-floors", "--observer", "--percentile_alpha", "--precision-faithful"),
            *(
                "--pretrained_dir",
                "--prompt",
                "--seed",
                "--side",
                "--statistics",
                "--stop-after",
                "--to",
                "--when",
                "-o",
            ),
        ],
        "show": [
            *["--adjacent", "--batch", "--call", "--channels", "--epoch", "--html", "--json", "--markdown", "--over"],
            *["--point", "--rank", "--step"],
        ],
        "compare": [
            *(
                "--arithmetic",
                "--bands",
                "--detail",
                "--fail-on",
                "--html",
                "--json",
                "--limit",
                "--markdown",
                "--noise",
            ),
            *("--pairing", "--points", "--save-comparison", "--save_comparison", "--tokens"),
        ],
        "diagnose": ["--backward", "--html", "--inputs", "--json", "--markdown", "--pairing", "--prompt", "--seed"],
        "report": ["--to", "-o"],
        "serve": ["--port"],
        "convert": ["--batch", "--call", "--epoch", "--json", "--mode", "--overwrite", "--rank", "--step", "--to"],
        "recover": ["--json", "--to"],
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(cli, name):
    answer = cli(name, "--help")
    assert answer.code == 0
    assert f"Usage: layerscope {name}" in answer.out


def test_a_misspelt_command_is_answered_with_the_nearest(cli):
    answer = cli("shwo")
    assert answer.code == 2
    assert "Did you mean show?" in answer.err


@pytest.mark.parametrize(
    "args",
    [
        ("show", "nowhere"),
        ("points", "nowhere"),
        ("recover", "nowhere"),
        ("record", "nowhere", "**", "-o", "run"),
        ("show", "bad\x1b[2J\nname"),
    ],
)
def test_wrong_use_is_one_sentence_on_stderr_and_exit_code_2(cli, args):
    answer = cli(*args)
    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.startswith("layerscope: ")
    assert answer.err.count("\n") == 1
    assert "\x1b" not in answer.err
    assert "Traceback" not in answer.err


def test_a_traceback_is_there_for_the_asking(fresh):
    assert "Traceback" not in fresh("show", "nowhere").err
    asked = fresh("show", "nowhere", LAYERSCOPE_TRACEBACK="1")
    assert asked.code != 0
    assert "Traceback" in asked.err
    assert "NotARun" in asked.err


def test_the_version_is_printed(cli):
    assert cli("--version").out.startswith("layerscope 0.")


def test_a_reader_that_leaves_early_is_no_error(trained):
    process = subprocess.Popen(
        [sys.executable, "-m", "layerscope", "show", str(trained)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=30) == 141  # what a shell reports of any program whose reader has gone


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("command", ["record", "show"])
def test_streams_that_are_closed_from_the_start_are_one_clean_exit(command, closed, trained, tmp_path):
    what = {"record": ["tiny-transformer", "**", "-o", str(tmp_path / "run")], "show": [str(trained)]}[command]
    done = subprocess.run(
        [sys.executable, "-c", CLOSED, *map(str, closed), "--", command, *what],
        capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == (141 if 1 in closed else 0)
    assert done.stderr == b""
    assert bool(done.stdout) == (1 not in closed)
    if command == "record":
        assert len(list(open_run(tmp_path / "run").records())) > 50


CLOSED = """
import os, sys
at = sys.argv.index("--")
for number in map(int, sys.argv[1:at]):
    os.close(number)
os.execv(sys.executable, [sys.executable, "-m", "layerscope", *sys.argv[at + 1:]])
"""


def test_a_full_disk_behind_stdout_is_one_sentence(trained):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(
            [sys.executable, "-m", "layerscope", "show", str(trained)],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "layerscope: No space left on device\n"


def test_ctrl_c_is_one_word_and_exit_code_130(tmp_path):
    (tmp_path / "slow.py").write_text("import time\ndef make():\n    print('here', flush=True)\n    time.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "layerscope", "record", "slow.py:make", "**", "-o", "run"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(2)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.strip() == "layerscope: interrupted"


def test_a_terminal_without_unicode_is_served(fresh, trained):
    answer = fresh("show", trained, PYTHONIOENCODING="ascii")
    assert answer.code == 0
    assert answer.out.isascii()
    assert "####" in answer.out
