"""`layerscope demo`: something to see, saved, and never in the way of what is there."""

from layerscope.store import open_run


def test_the_demo_shows_saves_and_says_what_to_do_next(cli, tmp_path):
    answer = cli("demo")
    assert answer.code == 0
    assert "✓ complete: 6 forwards" in answer.out
    assert "model.layers.7" in answer.out
    assert "change from each layer to the next, from model.embed_tokens on" in answer.out
    assert "layerscope show runs/demo 'model.layers.*:grad_output' --step 0" in answer.out
    run = open_run(tmp_path / "runs/demo")
    assert run.complete
    assert {p.side for p in run.points} == {"input", "output", "grad_input", "grad_output"}
    report = (tmp_path / "runs/demo.md").read_text()
    assert "| `model.layers.7` |" in report


def test_a_second_demo_takes_the_next_free_name(cli, tmp_path):
    cli("demo")
    assert cli("demo").code == 0
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["demo", "demo-2", "demo-2.md", "demo.md"]


def test_the_place_can_be_chosen_and_is_not_overwritten(cli, tmp_path):
    assert cli("demo", "-o", "here").code == 0
    assert (tmp_path / "here.md").is_file()
    again = cli("demo", "-o", "here")
    assert again.code == 2
    assert again.err.count("\n") == 1


def test_the_commands_it_proposes_work(cli, tmp_path):
    import shlex

    out = cli("demo").out
    commands = [shlex.split(line.split("layerscope ", 1)[1]) for line in out.splitlines() if "· layerscope" in line]
    assert len(commands) == 2
    for command in commands:
        assert cli(*command).code == 0
