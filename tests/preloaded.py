"""Processes that begin with torch and layerscope imported: forked from one that has done nothing else.

    with Preloaded() as parent:
        ended = parent.run("import torch; ...", "argument")
        ended.code, ended.out, ended.err

A second of imports is saved each time. The code runs as a process's main program does, and ends as one: exceptions,
signals and exit handlers take the interpreter's own way.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

PARENT = """
import json, os, sys
import torch, layerscope, layerscope.monitor, layerscope.recorder

for line in sys.stdin:
    code, arguments, out, err = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    os._exit(0)
for name, number in ((out, 1), (err, 2)):
    os.dup2(os.open(name, os.O_WRONLY), number)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
sys.argv = ["-c", *arguments]
exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
"""


class Ended(NamedTuple):
    """How a process ended: negative codes are signals."""

    code: int
    out: str
    err: str


class Preloaded:
    """One process that forks others, one at a time."""

    def __enter__(self) -> Preloaded:
        path = os.pathsep.join(map(str, (Path(__file__).parent, *sys.path)))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}  # no thread is lost in a fork
        self._parent = subprocess.Popen(
            [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self._parent.communicate()

    def run(self, code: str, *arguments: object) -> Ended:
        """Run code in a process of its own, and wait for it."""
        with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
            job = json.dumps([code, [*map(str, arguments)], out.name, err.name])
            assert self._parent.stdin is not None
            assert self._parent.stdout is not None
            self._parent.stdin.write(f"{job}\n")
            self._parent.stdin.flush()
            return Ended(int(self._parent.stdout.readline()), out.read(), err.read())
