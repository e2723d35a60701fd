"""Change somebody's files and texts at random, in a process with little memory, and see that each gives an answer.

    python fuzzing.py TARGET SEEDS FOUND EXAMPLES SEED

An answer is a value, or a LayerscopeError of one line. Anything else ends the process, and the input lies in FOUND.
It prints how many inputs it tried.
"""

from __future__ import annotations

import io
import json
import random
import resource
import shutil
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from layerscope.errors import LayerscopeError

_tried = 0
LONGEST = 2000  # letters of a sentence that anybody reads

numbers = st.sampled_from(
    [b"0", b"-1", b"9" * 30, b"1e400", b"NaN", b"true", b"null", b'""', b"[]", b"{}", b'"as_int"']
)
places = st.floats(0, 1, exclude_max=True)
edits = st.lists(
    st.one_of(
        st.tuples(st.just("put"), places, st.binary(min_size=1, max_size=8)),
        st.tuples(st.just("insert"), places, st.one_of(st.binary(min_size=1, max_size=8), numbers)),
        st.tuples(st.just("cut"), places, st.integers(1, 64)),
        st.tuples(st.just("twice"), places, st.integers(1, 64)),
        st.tuples(st.just("number"), places, numbers),
        st.tuples(st.just("end"), places, st.none()),
    ),
    min_size=1,
    max_size=5,
)


def changed(content: bytes, asked: list[tuple[str, float, object]]) -> bytes:
    """Return the content after each edit."""
    data = bytearray(content)
    for kind, share, what in asked:
        # Of a large file most is room that says nothing.
        told = [at for at, byte in enumerate(data) if byte not in b"\0 "] if len(data) > 1 << 15 else range(len(data))
        at = told[int(share * len(told))] if told else 0
        if kind == "put":
            data[at : at + len(what)] = what
        elif kind == "insert":
            data[at:at] = what
        elif kind == "cut":
            del data[at : at + what]
        elif kind == "twice":
            data[at:at] = data[at : at + what]
        elif kind == "number":
            digits = [n for n in range(at, min(at + 400, len(data))) if 48 <= data[n] <= 57]
            if digits:
                data[digits[0] : digits[0] + 1] = what
        else:
            del data[at:]
    return bytes(data)


# Files --------------------------------------------------------------------------------------------


def in_archive(content: bytes, asked: list[tuple[str, float, object]], which: int) -> bytes:
    """Change a member of an archive rather than the archive: what its checksums would hide."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    told = [n for n, (name, _) in enumerate(members) if name.endswith((".pkl", ".json", ".py", ".npy"))]
    chosen = told[which % len(told)]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for n, (name, data) in enumerate(members):
            archive.writestr(name, changed(data, asked) if n == chosen else data)
    return out.getvalue()


def program(path: Path) -> None:
    from layerscope.cli.points import model_document, selected_document
    from layerscope.report import terminal
    from layerscope.runtimes.model_files import kind_of, listed

    kind_of(path)
    listing = listed(path)
    if listing is not None:
        terminal.render(model_document(listing, path.name, folded=True))
        selected_document(listing, path.name, ["**"])


def dump(path: Path) -> None:
    from layerscope.store import open_run

    run = open_run(path.parent)
    for entry in run.records():
        for piece in entry.pieces(1 << 16):
            len(piece)


def run(path: Path) -> None:
    """A run of our own: looked at as `show` does, read, and recovered."""
    from layerscope.pages.run import page
    from layerscope.report import terminal
    from layerscope.store import open_run, recover

    folder = next(each for each in path.parents if each.name == "run")
    with suppress(LayerscopeError):
        opened = open_run(folder)
        for entry in opened.records():
            with suppress(LayerscopeError):
                entry.tensor()
        terminal.render(page(opened, "run"))
    recover(folder)


def inputs(path: Path) -> None:
    from layerscope.models.inputs import read_inputs

    read_inputs(str(path))


def onnx(path: Path) -> None:
    from layerscope.runtimes import find, opened
    from layerscope.runtimes.listing import Listing

    model = opened(path)
    Listing.of(find(model), model)


def checkpoint(path: Path) -> None:
    from layerscope.models import load_model

    load_model(str(path.parent))


# Texts --------------------------------------------------------------------------------------------

TOKENS = {
    "pattern": [
        *(
            "*",
            "**",
            ".",
            "{0,-1}",
            "[0:4]",
            "[",
            "]",
            "{",
            "}",
            ",",
            "!",
            ":",
            "type:",
            "op:",
            "input",
            "output",
            ":*",
        ),
        *(":io", "a", "layers", "3", "-1", "\\", "/", "\n", "\x00", "(", ")", "grad_input", "9" * 40),
    ],
    "schedule": [
        *("every", "first", "steps", "epochs", "batches", "when", "(", ")", "|", "&", "~", ",", ":", "0", "5", "-1"),
        *("offset=", " ", "9" * 40, "x", "\x00", "(" * 60, "~" * 60),
    ],
    "pairing": [
        *("fuse ", "split ", "->", ",", "**.", "q_proj", "k_proj", "*", "\n", "#", " ", "rename ", "=", "\x00", "{"),
        *("}", "[", "]", ":", "!"),
    ],
}


def pattern(text: str) -> None:
    from layerscope.patterns import Pattern, Place, select

    parsed = Pattern.parse(text)
    assert Pattern.parse(str(parsed)) == parsed
    select(
        text, [Place("", ("M",)), Place("layers", ("ModuleList",)), *(Place(f"layers.{n}", ("A",)) for n in range(4))]
    )


def schedule(text: str) -> None:
    from layerscope.points import Moment
    from layerscope.schedules import Schedule

    parsed = Schedule.parse(text)
    assert Schedule.parse(str(parsed)) == parsed
    parsed(Moment(step=3, batch=1))


def pairing(text: str) -> None:
    from layerscope.compare.align.pairing import parse_rules

    for rule in parse_rules(text):
        assert parse_rules(str(rule)) == (rule,)


FILES: dict[str, Callable[[Path], None]] = {
    "script": program, "export": program, "npz": dump, "pt": dump, "npy": dump, "run": run, "inputs": inputs,
    "onnx": onnx, "checkpoint": checkpoint,
}  # fmt: skip
TEXTS: dict[str, Callable[[str], None]] = {"pattern": pattern, "schedule": schedule, "pairing": pairing}


def assert_answered(run: Callable[[], None]) -> None:
    """Run it; the errors that are an answer are read as a user would."""
    try:
        run()
    except LayerscopeError as error:
        said = str(error)
        assert "\n" not in said, said
        assert len(said) < LONGEST, said


def main(target: str, seeds: Path, found: Path, examples: int, number: int) -> None:
    limit = (8 if target in ("inputs", "onnx", "checkpoint") else 3) << 30  # torch alone maps several GiB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    warnings.simplefilter("ignore")
    options = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    with tempfile.TemporaryDirectory() as scratch:
        if target in TEXTS:
            texts = st.lists(st.sampled_from(TOKENS[target]), max_size=12).map("".join)

            @seeded(number)
            @options
            @given(text=st.one_of(texts, st.text(max_size=30)))
            def fuzz(text: str) -> None:
                kept(found / f"{target}.txt", text.encode("utf-8", "surrogatepass"))
                assert_answered(lambda: TEXTS[target](text))

        else:
            names = sorted(path.relative_to(seeds).as_posix() for path in seeds.rglob("*") if path.is_file())
            contents = {name: (seeds / name).read_bytes() for name in names}
            folder = Path(scratch)

            @seeded(number)
            @options
            @given(asked=edits, name=st.sampled_from(names), inside=st.booleans(), which=st.integers(0, 99))
            def fuzz(asked: list[tuple[str, float, object]], name: str, inside: bool, which: int) -> None:
                for left in folder.iterdir():
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
                for other, content in contents.items():
                    (folder / other).parent.mkdir(parents=True, exist_ok=True)
                    (folder / other).write_bytes(content)
                whole = contents[name]
                zipped = whole.startswith(b"PK") and inside
                content = in_archive(whole, asked, which) if zipped else changed(whole, asked)
                (folder / name).write_bytes(content)
                kept(found / name.replace("/", "+"), content)
                assert_answered(lambda: FILES[target](folder / name))

        fuzz()
    for path in found.iterdir():
        path.unlink()
    sys.stdout.write(json.dumps({"target": target, "inputs": _tried}))


def kept(path: Path, content: bytes) -> None:
    """Have the input there, in case the process does not come back from it."""
    global _tried
    _tried += 1
    path.write_bytes(content)


if __name__ == "__main__":
    random.seed(0)
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
