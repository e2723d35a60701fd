"""Files of models from somebody else: to list one runs nothing in it, whatever it is made to do."""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from contextlib import suppress

import pytest
import torch
from torch import nn

from layerscope.cli import main


class Trap:
    """Unpickled, it creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def pickled(mark):
    buffer = io.BytesIO()
    torch.save(Trap(mark), buffer)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The members of an exported program with a size that is an expression."""
    path = tmp_path_factory.mktemp("program") / "model.pt2"
    sizes = ({0: torch.export.Dim("rows", min=2, max=64)},)
    torch.export.save(
        torch.export.export(nn.Sequential(nn.Linear(3, 3)), (torch.ones(4, 3),), dynamic_shapes=sizes), path
    )
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(path, members):
    with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Duplicate name")
        for name, content in members:
            archive.writestr(name, content)


def named(members, end):
    return next(name for name in members if name.endswith(end))


def an_expression_that_is_python(program, mark):
    graph = named(program, "models/model.json")
    text = program[graph].decode()
    start = text.index('"expr_str": "') + len('"expr_str": "')
    evil = f"__import__('pathlib').Path('{mark}').touch()"
    return ({**program, graph: text[:start] + evil + text[text.index('"', start) :]}).items()


def a_pickle_in_a_legacy_archive(program, mark):
    text = json.loads(program[named(program, "models/model.json")])
    plain = io.BytesIO()
    torch.save({}, plain)
    return [
        ("version", f"{text['schema_version']['major']}.{text['schema_version']['minor']}"),
        ("serialized_exported_program.json", json.dumps(text)),
        ("serialized_state_dict.json", pickled(mark)),
        ("serialized_constants.json", plain.getvalue()),
        ("serialized_example_inputs.pt", plain.getvalue()),
    ]


def a_member_that_is_there_twice(program, mark):
    """torch takes the first of the two."""
    config, weight = named(program, "model_weights_config.json"), named(program, "weights/weight_0")
    asked = json.loads(program[config])
    next(iter(asked["config"].values()))["use_pickle"] = True
    return [(config, json.dumps(asked)), *program.items(), (weight, pickled(mark))][::-1]


def a_member_in_upper_case(program, mark):
    """torch does not tell `A` from `a`."""
    inputs = named(program, "sample_inputs/model.pt")
    return [
        (name.replace("model.pt", "model.PT"), pickled(mark) if name == inputs else program[name]) for name in program
    ]


ATTACKS = [
    an_expression_that_is_python,
    a_pickle_in_a_legacy_archive,
    a_member_that_is_there_twice,
    a_member_in_upper_case,
]


def listing(path, capsys):
    with pytest.raises(SystemExit) as left:
        main(["points", str(path)])
    code, told = left.value.code or 0, capsys.readouterr()
    assert code == 0 or (code == 2 and len(told.err.strip().splitlines()) == 1)
    assert "(unexpected" not in told.err
    return code


@pytest.mark.parametrize("attack", ATTACKS)
def test_listing_an_exported_program_runs_nothing_in_it(attack, program, tmp_path, capsys):
    mark = tmp_path / "created"
    zipped(tmp_path / "model.pt2", attack(program, mark))
    for name in ("model.pt2", "model.pt"):
        (tmp_path / name).write_bytes((tmp_path / "model.pt2").read_bytes())
        listing(tmp_path / name, capsys)
        assert not mark.exists()


def test_the_expression_is_a_real_trap(program, tmp_path):
    mark = tmp_path / "created"
    zipped(tmp_path / "model.pt2", an_expression_that_is_python(program, mark))
    with suppress(Exception):
        torch.export.load(tmp_path / "model.pt2")
    assert mark.exists()


class Overwrites(nn.Module):
    """Restored, it maps a file for writing and fills it with zeros."""

    def __init__(self, path: str):
        super().__init__()
        self.path, self.weight = path, torch.ones(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight

    @torch.jit.export
    def __getstate__(self) -> tuple[str, torch.Tensor, bool]:
        return self.path, self.weight, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, torch.Tensor, bool]) -> None:
        self.path, self.weight, self.training = state
        self.weight = torch.from_file(self.path, True, 4, dtype=torch.uint8).zero_()


def test_listing_torchscript_runs_nothing_in_it(tmp_path, capsys):
    precious = tmp_path / "precious"
    torch.jit.save(torch.jit.script(nn.Sequential(Overwrites(str(precious)))), tmp_path / "model.pt")
    precious.write_bytes(b"gold")
    for name in ("model.pt", "MODEL.PT", "model.pt2"):
        (tmp_path / name).write_bytes((tmp_path / "model.pt").read_bytes())
        assert listing(tmp_path / name, capsys) == 0
        assert precious.read_bytes() == b"gold"
    torch.jit.load(tmp_path / "model.pt")
    assert precious.read_bytes() == bytes(4)  # the trap is a real one


def test_a_default_argument_of_torchscript_is_not_evaluated(tmp_path, capsys):
    precious = tmp_path / "precious"
    precious.write_bytes(b"gold")
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    code = next(name for name in members if b"input: Tensor" in members[name])
    evil = f'input: Tensor=torch.zero_(torch.from_file("{precious}", True, 4, dtype=0))'
    zipped(tmp_path / "model.pt", {**members, code: members[code].replace(b"input: Tensor", evil.encode())}.items())
    assert listing(tmp_path / "model.pt", capsys) == 0
    assert precious.read_bytes() == b"gold"
    torch.jit.load(tmp_path / "model.pt")
    assert precious.read_bytes() == bytes(4)  # the trap is a real one


def test_trust_loads_what_a_listing_alone_does_not(tmp_path, capsys):
    frozen = torch.jit.freeze(torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval()))
    torch.jit.save(frozen, tmp_path / "model.pt")
    with pytest.raises(SystemExit):
        main(["points", str(tmp_path / "model.pt"), "type:linear"])
    assert "--trust" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        main(["points", str(tmp_path / "model.pt"), "type:linear", "--trust"])
    assert not left.value.code
    assert "linear" in capsys.readouterr().out


@pytest.mark.parametrize("attack", [a_member_that_is_there_twice, a_member_in_upper_case, a_pickle_in_a_legacy_archive])
def test_pickles_are_refused_where_a_program_is_run_too(attack, program, tmp_path, capsys):
    mark = tmp_path / "created"
    zipped(tmp_path / "model.pt2", attack(program, mark))
    with pytest.raises(SystemExit) as left:
        main(["record", str(tmp_path / "model.pt2"), "0", "-o", str(tmp_path / "run")])
    assert left.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not mark.exists()
