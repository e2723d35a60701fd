"""Change somebody's files and texts at random, in a process with little memory, and see that each gives an answer.

    python fuzzing.py TARGET SEEDS FOUND COUNT NUMBER

An answer is a value, or a LayerscopeError of one line. Anything else ends the process, and the input lies in FOUND.
It prints how many inputs it tried; the same NUMBER gives the same ones.
"""

from __future__ import annotations

import io
import json
import logging
import os
import random
import resource
import shutil
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from layerscope.errors import LayerscopeError

LONGEST = 2000  # letters of a sentence that anybody reads

NUMBERS = (b"0", b"-1", b"9" * 30, b"1e400", b"NaN", b"true", b"null", b'""', b"[]", b"{}", b'"as_int"')
EDITS = ("put", "insert", "cut", "twice", "number", "end")
Edit = tuple[str, float, bytes, int]


def edits(chance: random.Random) -> list[Edit]:
    """Draw up to five edits, mostly one: what is done, how far into the content, with which bytes, how many."""
    drawn = []
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        what = chance.choice(NUMBERS) if chance.random() < 0.4 else chance.randbytes(chance.randint(1, 8))
        drawn.append((chance.choice(EDITS), chance.random(), what, chance.randint(1, 64)))
    return drawn


def changed(content: bytes, asked: list[Edit]) -> bytes:
    """Return the content after each edit."""
    data = bytearray(content)
    for kind, share, what, many in asked:
        # Of a large file most is room that says nothing.
        told = [at for at, byte in enumerate(data) if byte not in b"\0 "] if len(data) > 1 << 15 else range(len(data))
        at = told[int(share * len(told))] if told else 0
        if kind == "put":
            data[at : at + len(what)] = what
        elif kind == "insert":
            data[at:at] = what
        elif kind == "cut":
            del data[at : at + many]
        elif kind == "twice":
            data[at:at] = data[at : at + many]
        elif kind == "number":
            digits = [n for n in range(at, min(at + 400, len(data))) if 48 <= data[n] <= 57]
            if digits:
                data[digits[0] : digits[0] + 1] = what
        else:
            del data[at:]
    return bytes(data)


# Files --------------------------------------------------------------------------------------------


def in_archive(content: bytes, asked: list[Edit], which: int) -> bytes:
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


RIGHT = {
    "pattern": [
        "model.{norm,layers.{0,-1}}:io",
        "layers.[0:4].attn:input[0][key]",
        "layers[0:2]",
        "!layers.3:grad_input,output",
        "type:*Norm:*",
        "op:aten.softmax:input",
        "**.0",
        "layers.\\*",
    ],
    "schedule": [
        "every(100, offset=3) | first(3)",
        "epochs(1, 5) & batches(0)",
        "~steps(0:10, 50) & (first(2) | ~every(7))",
    ],
    "pairing": [
        "pair lm_head -> logits",
        "rename transformer.h.* -> model.layers.*  # all within",
        "fuse **.q_proj, **.k_proj, **.v_proj -> **.qkv_proj\nflat model.layers.*",
        "split **.gate_up_proj:output -> **.gate_proj:output, **.up_proj:output",
        "ignore **.rotary_emb",
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


def text_of(chance: random.Random, target: str) -> str:
    """Draw a text: a right one with some of its words changed, words in any order, any letters."""
    tokens, share = TOKENS[target], chance.random()
    if share < 0.6:
        text = chance.choice(RIGHT[target])
        for _ in range(chance.choice((1, 1, 2, 4))):
            start, end = sorted(chance.randrange(len(text) + 1) for _ in range(2))
            end = min(end, start + chance.randrange(4))
            text = text[:start] + chance.choice([*tokens, text[start:end] * 2, ""]) + text[end:]
        return text
    if share < 0.9:
        return "".join(chance.choices(tokens, k=chance.randrange(12)))
    return "".join(chr(chance.randrange(chance.choice((0x80, 0x3000, 0x110000)))) for _ in range(chance.randrange(30)))


def main(target: str, seeds: Path, found: Path, count: int, number: int) -> None:
    limit = (8 if target in ("inputs", "onnx", "checkpoint") else 3) << 30  # torch alone maps several GiB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    warnings.simplefilter("ignore")
    logging.disable()
    chance = random.Random(f"{target} {number}")
    with tempfile.TemporaryDirectory() as scratch:
        fuzz = texts(target, found, chance) if target in TEXTS else files(target, seeds, found, chance, Path(scratch))
        for _ in range(count):
            next(fuzz)
        fuzz.close()
    sys.stdout.write(json.dumps({"target": target, "inputs": count}))


def texts(target: str, found: Path, chance: random.Random) -> Iterator[None]:
    """Try a text each time; it is kept meanwhile, in case the process does not come back from it."""
    with (found / f"{target}.txt").open("wb", buffering=0) as file:
        while True:
            text = text_of(chance, target)
            file.truncate(0)
            os.pwrite(file.fileno(), text.encode("utf-8", "surrogatepass"), 0)
            assert_answered(lambda text=text: TEXTS[target](text))
            yield


def files(target: str, seeds: Path, found: Path, chance: random.Random, folder: Path) -> Iterator[None]:
    """Try a changed file among the others each time; it is kept meanwhile."""
    names = sorted(path.relative_to(seeds).as_posix() for path in seeds.rglob("*") if path.is_file())
    contents = {name: (seeds / name).read_bytes() for name in names}
    while True:
        shutil.copytree(seeds, folder, dirs_exist_ok=True)
        name = chance.choice(names)
        whole, asked = contents[name], edits(chance)
        zipped = whole.startswith(b"PK") and chance.random() < 0.5
        content = in_archive(whole, asked, chance.randrange(100)) if zipped else changed(whole, asked)
        kept = found / name.replace("/", "+")
        for path in (folder / name, kept):
            path.write_bytes(content)
        assert_answered(lambda path=folder / name: FILES[target](path))
        yield
        kept.unlink()
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
