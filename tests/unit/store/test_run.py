"""reader.py: finding records by name and moment; the same on disk and in memory."""

from __future__ import annotations

import pytest
import torch

from layerscope.errors import Ambiguous, LayerscopeError, NoSuchPoint
from layerscope.points import Moment, Point
from layerscope.stats import summarize
from layerscope.store import Blob, Dropped, Manifest, MemoryRun, Missing, Writer, open_run

HOSTILE = ["../../x", "/etc/passwd", "</script>", "a\nb", "ä" * 300, "a:b", "x[0]", "\ud800", "op:x", "."]


class Recorded:
    """Write the same records to disk or into memory."""

    def __init__(self, kind: str, path) -> None:
        self.kind, self.path = kind, path

    def __call__(self, records, *, manifest=None, summaries=False, missing=()):
        manifest = manifest or Manifest()
        if self.kind == "memory":
            run = MemoryRun(manifest)
            for point, moment, tensor in records:
                run.add(point, moment, tensor=tensor, summary=summarize(tensor) if summaries else None)
            run.close(missing=missing)
            return run
        writer = Writer(self.path, manifest)
        for point, moment, tensor in records:
            blob = tensor is not None and Blob(
                str(tensor.dtype)[6:],
                tuple(tensor.shape),
                tensor.nbytes,
                lambda t=tensor: t.contiguous().view(-1).view(torch.uint8).numpy(),
            )
            writer.write(point, moment, blob=blob or None, summary=summarize(tensor) if summaries else None)
        writer.close(missing=missing)
        return open_run(self.path)


@pytest.fixture(params=["disk", "memory"])
def recorded(request, tmp_path):
    return Recorded(request.param, tmp_path / "run")


def value(n: float) -> torch.Tensor:
    return torch.full((2,), float(n))


def test_a_bare_name_is_the_output(recorded):
    run = recorded([(Point("a", "input"), Moment(), value(1)), (Point("a"), Moment(), value(2))])
    assert run.tensor("a").tolist() == [2, 2]
    assert run.tensor("a:output").tolist() == [2, 2]
    assert run.tensor("a:input").tolist() == [1, 1]
    assert run.tensor(Point("a", "input")).tolist() == [1, 1]


def test_the_whole_model_is_a_dot_and_an_operation_has_its_prefix(recorded):
    run = recorded([(Point(""), Moment(), value(1)), (Point("aten.mm", op=True), Moment(), value(2))])
    assert run.tensor(".").tolist() == [1, 1]
    assert run.tensor("op:aten.mm").tolist() == [2, 2]
    with pytest.raises(NoSuchPoint):
        run.tensor("aten.mm")


def test_a_single_leaf_needs_no_name(recorded):
    run = recorded([(Point("a", leaf=("hidden", 0)), Moment(), value(1))])
    assert run.tensor("a").tolist() == run.tensor("a[hidden]").tolist() == run.tensor("a[hidden][0]").tolist()


def test_several_leaves_are_listed(recorded):
    run = recorded([(Point("a", leaf=(k,)), Moment(), value(1)) for k in (0, 1, "key")])
    with pytest.raises(Ambiguous, match=r"'a' is 3 tensors in .*: a\[0\], a\[1\], a\[key\]; name one"):
        run.tensor("a")
    assert run.tensor("a[key]").tolist() == [1, 1]
    with pytest.raises(LookupError):
        run.tensor("a[2]")


def test_several_moments_are_listed_with_what_would_decide(recorded):
    moments = [Moment(epoch=1, step=s, batch=s, call=c) for s in range(7) for c in range(2)]
    run = recorded([(Point("a"), m, value(m.step * 10 + m.call)) for m in moments])
    with pytest.raises(Ambiguous) as caught:
        run.tensor("a")
    text = str(caught.value)
    assert "'a' was recorded at 14 moments: epoch=1 step=0, epoch=1 step=0 call=1, " in text
    assert text.endswith(" and 4 more; choose one with step=, batch=, call=")
    with pytest.raises(Ambiguous, match=r"at 2 moments: .*; choose one with call=$"):
        run.tensor("a", step=3)
    assert run.tensor("a", step=3, call=1).tolist() == [31, 31]
    assert run.tensor("a", epoch=1, batch=3, call=1).tolist() == [31, 31]


def test_a_moment_nothing_was_recorded_at_says_when_something_was(recorded):
    run = recorded([(Point("a"), Moment(step=2), value(1))])
    with pytest.raises(NoSuchPoint, match=r"'a' was not recorded at step=5 call=1; it was at step=2 batch=0$"):
        run.tensor("a", step=5, call=1)


def test_an_unknown_name_is_answered_with_the_nearest(recorded):
    run = recorded([(Point(f"model.layers.{n}.self_attn"), Moment(), value(1)) for n in range(3)])
    with pytest.raises(
        NoSuchPoint, match=r"no point 'model.layer.1.self_attn' among the 3 of .*: model.layers.1.self_attn"
    ):
        run.tensor("model.layer.1.self_attn")
    with pytest.raises(NoSuchPoint):
        run.records("nothing")
    with pytest.raises(NoSuchPoint):
        run.summary("nothing")


def test_an_empty_run_has_nothing_near(recorded):
    run = recorded([])
    assert (run.points, run.moments, list(run.records()), len(run)) == ([], [], [], 0)
    with pytest.raises(NoSuchPoint, match="among the 0 of"):
        run.tensor("a")


def test_what_is_missing_says_why(recorded):
    run = recorded([(Point("a"), Moment(), value(1))], missing=[Missing("b:output", "never called")])
    with pytest.raises(NoSuchPoint, match=r"\(b:output is missing: never called\)"):
        run.tensor("b")


def test_an_alias_stands_for_its_points(recorded):
    manifest = Manifest(aliases={"attn": ["layers.0.attn:output"], "both": ["x:output", "y:output"], "bad": ["[[["]})
    points = [Point("layers.0.attn", leaf=(0,)), Point("x"), Point("y"), Point("attn")]
    run = recorded([(p, Moment(), value(n)) for n, p in enumerate(points)], manifest=manifest)
    assert run.tensor("attn").tolist() == [0, 0]
    with pytest.raises(Ambiguous, match=r"'both' is 2 tensors in .*: x, y"):
        run.tensor("both")
    assert [str(e.point) for e in run.records("both")] == ["x:output", "y:output"]
    with pytest.raises(NoSuchPoint):
        run.tensor("bad")


def test_the_other_name_of_a_shared_module_finds_it_and_its_children(recorded):
    manifest = Manifest(shared={"lm_head": "embed"})
    run = recorded([(Point("embed"), Moment(), value(1)), (Point("embed.sub"), Moment(), value(2))], manifest=manifest)
    assert run.tensor("lm_head").tolist() == [1, 1]
    assert run.tensor("lm_head.sub:output").tolist() == [2, 2]


def test_a_wrapped_models_name_finds_the_plain_one(recorded):
    run = recorded([(Point("layers.0"), Moment(), value(1))])
    assert run.tensor("module._orig_mod.layers.0").tolist() == [1, 1]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_go_in_and_come_back(recorded, name):
    run = recorded([(Point("other"), Moment(), value(0)), (Point(name), Moment(), value(1))])
    assert run.points == [Point("other"), Point(name)]
    assert run.tensor(Point(name)).tolist() == [1, 1]
    assert run.tensor(str(Point(name))).tolist() == [1, 1]
    if name not in ("op:x", "."):  # these two mean something else when they are written plainly
        assert run.tensor(name).tolist() == [1, 1]


def test_any_text_is_either_found_or_refused_in_one_sentence(recorded):
    run = recorded([(Point("a"), Moment(), value(1))])
    for text in ("", "[", "a[", ":", "a:sideways", "\\", "*", "op:", "a" * 5000):
        with pytest.raises(LayerscopeError):
            run.tensor(text)


def test_the_later_of_two_records_of_one_moment_counts(recorded):
    run = recorded(
        [(Point("a"), Moment(), value(1)), (Point("b"), Moment(), value(2)), (Point("a"), Moment(), value(3))]
    )
    assert run.tensor("a").tolist() == [3, 3]
    assert (run.replaced, len(run)) == (1, 2)
    assert [str(e.point) for e in run.records()] == ["b:output", "a:output"]


def test_records_come_in_the_order_they_were_made(recorded):
    wanted = [(Point(p), Moment(step=s)) for s in range(3) for p in "ba"]
    run = recorded([(p, m, value(1)) for p, m in wanted])
    assert [(e.point, e.moment) for e in run.records()] == wanted
    assert [e.moment.step for e in run.records("a")] == [0, 1, 2]
    assert [e.point.name for e in run.records(step=1)] == ["b", "a"]
    assert list(run.records("a", step=9)) == []
    assert run.points == [Point("b"), Point("a")]
    assert run.moments == [Moment(step=s) for s in range(3)]


def test_an_entry_says_what_was_kept(recorded):
    run = recorded([(Point("a"), Moment(), torch.zeros(2, 3, dtype=torch.bfloat16))], summaries=True)
    [entry] = run.records()
    assert (entry.dtype, entry.shape, entry.nbytes, entry.note) == ("bfloat16", (2, 3), 12, {})
    assert (entry.summary.zeros, entry.summary.shape) == (6, (2, 3))


def test_a_summary_that_was_not_stored_is_computed(recorded):
    run = recorded([(Point("a"), Moment(), torch.tensor([1.0, 2.0, 6.0]))])
    assert next(run.records()).summary is None
    assert (run.summary("a").mean, run.summary("a").max) == (3.0, 6.0)
    assert run.summaries()[0]["mean"] == 3.0


def test_summaries_are_rows(recorded):
    run = recorded([(Point("a", "input", ("k", 0)), Moment(epoch=2, step=1), torch.ones(2)),
                    (Point("b"), Moment(step=1), torch.zeros(3))], summaries=True)  # fmt: skip
    table = run.summaries()
    assert len(table) == 2
    first = {
        k: table[0][k] for k in ("point", "name", "side", "leaf", "epoch", "step", "batch", "call", "rank", "mean")
    }
    assert first == {
        "point": "a:input[k][0]",
        "name": "a",
        "side": "input",
        "leaf": "[k][0]",
        "epoch": 2,
        "step": 1,
        "batch": 0,
        "call": 0,
        "rank": 0,
        "mean": 1.0,
    }
    assert (table[1]["epoch"], table[1]["zeros"]) == (None, 3)


def test_rows_of_a_tensor(recorded):
    x = torch.arange(20).reshape(10, 2)
    run = recorded([(Point("a"), Moment(), x), (Point("scalar"), Moment(), torch.tensor(1.0))])
    for rows in (slice(2, 5), slice(None), slice(-3, None), slice(0, 10, 3), slice(5, 2), slice(8, 99), slice(0, 0)):
        assert torch.equal(run.tensor("a", rows=rows), x[rows])
    with pytest.raises(ValueError, match="backwards"):
        run.tensor("a", rows=slice(None, None, -1))
    with pytest.raises(ValueError, match="has no rows"):
        run.tensor("scalar", rows=slice(1))


def test_a_record_without_a_tensor_says_so(recorded, tmp_path):
    if recorded.kind == "memory":
        run = MemoryRun()
        run.add(Point("a"), Moment(), summary=summarize(torch.ones(2)))
    else:
        writer = Writer(tmp_path / "run", Manifest())
        writer.write(Point("a"), Moment(), summary=summarize(torch.ones(2)))
        writer.close()
        run = open_run(tmp_path / "run")
    with pytest.raises(NoSuchPoint, match="has a summary and no tensor"):
        run.tensor("a")
    assert run.summary("a").mean == 1
    [entry] = run.records()
    assert (entry.dtype, entry.shape, entry.nbytes) == (None, None, 0)


def test_a_complete_run_is_one_that_ended_in_order_with_everything(recorded):
    assert recorded([(Point("a"), Moment(), value(1))]).complete


def test_one_with_something_missing_or_dropped_is_not(tmp_path):
    for kwargs in ({"missing": [Missing("a", "b")]}, {"state": "interrupted"}):
        run = MemoryRun()
        run.close(**kwargs)
        assert not run.complete
    run = MemoryRun()
    run.close()
    run.manifest.completeness.dropped.append(Dropped("a", 1, "b", "c"))
    assert not run.complete
