"""What is measured against what, and what is not, with the reason."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layerscope.checks import numbers_of
from layerscope.compare.align.pairing import PairingRule, parse_rules
from layerscope.compare.comparing import compare
from layerscope.compare.comparison_plan import ComparisonPlan, RunRecords
from layerscope.compare.noise_floor import Noise
from layerscope.compare.ordering import follow_choices
from layerscope.compare.record_pair import RecordPair
from layerscope.errors import Damaged, NoSuchPoint
from layerscope.points import Moment, Point
from layerscope.stats import summarize
from layerscope.store import Manifest, MemoryRun, Missing, open_run

X = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(1))


def run(*records, manifest=None, address="memory"):
    """Make a run of (text of a point, tensor) or (text, moment, tensor)."""
    made = MemoryRun(manifest)
    made._source.address = address
    for text, *when, tensor in records:
        made.add(Point.parse(text), when[0] if when else Moment(), tensor=tensor)
    return made


def plan(reference, candidate, rules="", asked=None):
    return ComparisonPlan(RunRecords(reference), RunRecords(candidate), parse_rules(rules), asked)


def measured_of(planned):
    for one in planned.pairs:
        planned.measure(one)
    return planned


def told(planned):
    return [(str(one.point), one.kind, one.because) for one in measured_of(planned).rows() if one.metrics is None]


def test_records_are_by_point_and_in_order():
    records = RunRecords(run(("b", X), ("a", X), ("b", Moment(step=1, batch=1), X)))
    assert [(str(s.point), s.shape, s.count) for s in records.seen] == [
        ("b:output", (1, 6, 8), 2),
        ("a:output", (1, 6, 8), 1),
    ]


def test_jobs_run_in_the_reference_s_order():
    later = Moment(step=1, batch=1)
    one = run(("a", X), ("b", X), ("a", later, X), ("b", later, X))
    other = run(("b", X), ("b", later, X), ("a", later, X), ("a", X))
    assert [(job.key[0].name, job.key[1].step) for job in plan(one, other).pairs] == [
        ("a", 0),
        ("b", 0),
        ("a", 1),
        ("b", 1),
    ]


def test_shapes_that_differ_are_unpaired_with_both_shapes_and_a_counterpart():
    [row] = plan(run(("a", X)), run(("a", X[:, :5]))).rows()
    assert (row.kind, row.because, row.counterpart) == (
        "unpaired",
        "shapes differ, [1, 6, 8] against [1, 5, 8]",
        Point("a"),
    )


def test_axes_that_a_compiler_left_apart_are_taken_together():
    heads = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    program = Manifest(runtime="onnx")
    [one] = plan(run(("a", heads.reshape(2, 3, 20))), run(("a", heads), manifest=program)).pairs
    assert one.measure().bitwise
    for other in (heads.transpose(1, 2).reshape(2, 12, 5), heads.reshape(3, 2, 20)):
        assert not plan(run(("a", heads.reshape(2, 3, 20))), run(("a", other), manifest=program)).pairs
    assert not plan(run(("a", heads.reshape(2, 3, 20))), run(("a", heads))).pairs  # no compiler: told, and not guessed


def test_shapes_of_as_many_values_are_told_how_to_be_declared_flat():
    one, other = run(("a", X)), run(("a", X.reshape(6, 8)))
    [row] = plan(one, other).rows()
    assert row.because.endswith("if they are the same values in the same order, declare `flat a`")
    [job] = plan(one, other, "flat a").pairs
    assert job.measure().bitwise


def test_a_moment_that_one_side_lacks_is_unpaired():
    later = Moment(step=1, batch=1)
    found = plan(run(("a", X), ("a", later, X)), run(("a", X)))
    assert len(found.pairs) == 1
    assert told(found) == [("a:output", "unpaired", "the candidate has no record of it at step=1")]
    mirrored = plan(run(("a", X)), run(("a", X), ("a", later, X)))
    assert told(mirrored) == [("a:output", "unpaired", "the reference has no record of it at step=1")]
    assert not mirrored.told[0].reference_has


def test_moments_paired_in_order_say_so():
    early, late = Moment(step=5, batch=5), Moment(step=9, batch=9)
    [job] = plan(run(("a", early, X)), run(("a", late, X))).pairs
    assert job.method == "exact, moments in order"
    assert (job.key[1], job.candidate.moment) == (early, late)


def test_a_point_that_the_candidate_lost_is_missing_with_its_reason():
    other = run(("a", X))
    other.close(missing=[Missing("b:output", "the hook never fired")])
    assert told(plan(run(("a", X), ("b", X[0])), other)) == [
        ("b:output", "missing", "the candidate lost it: the hook never fired")
    ]
    [(point, kind, _)] = told(plan(run(("a", X), ("b", X[0])), run(("a", X))))
    assert (point, kind) == ("b:output", "unpaired")


def test_what_only_the_candidate_has_comes_last():
    rows = plan(run(("a", X)), run(("extra", X[0]), ("a", X))).rows()
    assert [(row.point.name, row.reference_has) for row in rows] == [("a", True), ("extra", False)]


def test_only_what_was_asked_for_is_left_after_everything_was_paired():
    one, other = run(("a", X), ("b", X), ("c", X)), run(("x", X), ("y", X), ("z", X))
    whole = plan(one, other)
    assert [(str(j.key[0]), str(j.counterpart)) for j in whole.pairs][1] == ("b:output", "y:output")
    [job] = plan(one, other, asked={Point("b")}).pairs
    assert job.counterpart == Point("y")  # alone, `b` would have found three partners
    assert len(plan(one, other, asked={Point("b")}).rows()) == 1


def test_a_fused_projection_is_cut_where_its_parts_are():
    wide = torch.randn(1, 6, 16)
    parts = {"q": wide[..., :8], "k": wide[..., 8:12], "v": wide[..., 12:] * 2}
    one = run(*((f"attn.{name}_proj", part.contiguous()) for name, part in parts.items()))
    other = run(("attn.qkv_proj", wide))
    found = measured_of(plan(one, other, "fuse **.q_proj, **.k_proj, **.v_proj -> **.qkv_proj"))
    array = wide.double().numpy()
    cuts = {"q": array[..., :8], "k": array[..., 8:12], "v": array[..., 12:]}
    for job in found.pairs:
        name = job.key[0].name.removeprefix("attn.")[0]
        r = parts[name].double().numpy()
        assert job.metrics.shape == r.shape
        assert job.metrics.mse == pytest.approx(np.mean((cuts[name] - r) ** 2), rel=1e-9)
    assert [job.metrics.bitwise for job in found.pairs] == [True, True, False]


def test_a_split_projection_is_cut_in_the_reference():
    wide = torch.randn(1, 6, 16)
    one, other = run(("gate_up", wide)), run(("gate", wide[..., :8] + 1), ("up", wide[..., 8:].contiguous()))
    found = measured_of(plan(one, other, "split gate_up -> gate, up"))
    assert [str(job.counterpart) for job in found.pairs] == ["gate:output", "up:output"]
    assert [job.metrics.mse for job in found.pairs] == pytest.approx([1.0, 0.0], rel=1e-6)


def test_the_bytes_of_a_job_are_those_of_both_sides():
    [job] = plan(run(("a", X)), run(("a", X.half()))).pairs
    assert job.nbytes == 48 * 4 + 48 * 2


def test_a_damaged_record_is_missing_with_what_was_said(monkeypatch):
    harmed = run(("a", X), ("b", X))
    whole = harmed._source.pieces

    def pieces(at, items):
        if harmed._source.records().text(at) == "a:output":
            raise Damaged("its checksum is wrong")
        return whole(at, items)

    monkeypatch.setattr(harmed._source, "pieces", pieces)
    rows = measured_of(plan(run(("a", X), ("b", X)), harmed)).rows()
    assert [(row.kind, row.because) for row in rows[:1]] == [("missing", "its checksum is wrong")]
    assert rows[1].metrics is not None


def test_a_pair_without_tensors_is_judged_by_its_statistics():
    kept = MemoryRun()
    kept.add(Point("a"), Moment(), summary=summarize(X))
    [row] = plan(kept, run(("a", X))).rows()
    assert row.kind == "same"


def test_a_damaged_tensor_beside_a_summary_is_missing_and_the_rest_is_planned(monkeypatch):
    kept = MemoryRun()
    kept.add(Point("a"), Moment(), summary=summarize(X))
    kept.add(Point("b"), Moment(), tensor=X)
    other = run(("a", X), ("b", X))

    def refuse(at, rows=None):
        raise Damaged("its bytes are not what was written")

    monkeypatch.setattr(other, "_tensor", refuse)
    found = plan(kept, other)
    [row, _] = found.rows()
    assert (str(row.point), row.kind, row.because) == ("a:output", "missing", "its bytes are not what was written")
    assert [str(job.key[0]) for job in found.pairs] == ["b:output"]


def test_weights_that_differ_are_told_where_they_are_the_exception():
    names = ["a", "b", "c"]
    one = run(*((n, X) for n in names), manifest=Manifest(weights=dict.fromkeys(names, "1")))
    changed = run(*((n, X) for n in names), manifest=Manifest(weights={"a": "1", "b": "2", "c": "1"}))
    assert [row.weights_differ for row in plan(one, changed).rows()] == [False, True, False]
    all_other = run(*((n, X) for n in names), manifest=Manifest(weights=dict.fromkeys(names, "2")))
    assert not any(row.weights_differ for row in plan(one, all_other).rows())


def test_the_coarser_dtype_of_a_pair_is_what_rounds():
    [row] = plan(run(("a", X)), run(("a", X.half()))).rows()
    assert row.dtypes == ("float32", "float16")
    assert plan(run(("a", X)), run(("a", X.half()))).dtypes == {"float32", "float16"}


# Rules ------------------------------------------------------------------------------------------


def test_each_run_gets_the_rules_that_are_meant_for_it():
    left, plain, other = (RunRecords(run((name, X))) for name in ("lm_head", "lm_head", "out.final"))
    rule = PairingRule("pair", "lm_head", "out.final")
    assert [list(ComparisonPlan(left, right, [rule]).alignment.idle) for right in (plain, other)] == [[rule], []]


def test_a_rule_that_is_meant_for_none_raises_and_names_it():
    one = run(("a", X))
    with pytest.raises(NoSuchPoint, match="the rule `pair a -> nowhere` matches nothing"):
        compare(one, one, one, pairing=[PairingRule("pair", "a", "nowhere")])


# Choices ----------------------------------------------------------------------------------------

SCORES = torch.tensor([[0.0, 3.0, 3.001, 4.0], [0.0, 1.0, 3.0, 4.0]])
CHOSEN = torch.tensor([[3, 2], [3, 2]])
TIED = torch.tensor([[3, 1], [3, 2]])
FAR = torch.tensor([[3, 2], [3, 1]])


def routed(chosen, scores=SCORES, **options):
    return run(("gate[0]", scores), ("gate[1]", chosen), **options)


def ties(planned, noise=()):
    [one] = [one for one in measured_of(planned).rows() if one.point.leaf == (1,)]
    return planned.ties(one, noise)


def test_scores_beside_the_choices_tell_near_ties():
    noise = [Noise("n", "float32", {(Point("gate", leaf=(0,)), Moment()): numbers_of(SCORES, SCORES * 1.001)})]
    assert ties(plan(routed(CHOSEN), routed(TIED)), noise).at_near_ties
    assert not ties(plan(routed(CHOSEN), routed(FAR)), noise).at_near_ties


def test_many_moments_of_choices_are_looked_up_and_not_searched_for(monkeypatch):
    moments = [Moment(step=at, batch=at) for at in range(40)]
    one, other = (
        run(*(each for moment in moments for each in (("gate[0]", moment, SCORES), ("gate[1]", moment, chosen))))
        for chosen in (CHOSEN, TIED)
    )
    planned = measured_of(plan(one, other))
    rows = [row for row in planned.rows() if row.point.leaf == (1,)]
    asked, key = [], RecordPair.key.fget
    monkeypatch.setattr(RecordPair, "key", property(lambda job: asked.append(job) or key(job)))
    assert all(planned.ties(row, ()).scored for row in rows)
    assert len(asked) <= len(planned.pairs)


def test_without_noise_the_coarsest_dtype_says_how_near_a_tie_must_be():
    assert not ties(plan(routed(CHOSEN), routed(TIED))).at_near_ties
    assert ties(plan(routed(CHOSEN), routed(TIED, SCORES.bfloat16()))).at_near_ties
    assert not ties(plan(routed(CHOSEN), routed(FAR, SCORES.bfloat16()))).at_near_ties


def test_a_noise_run_without_any_error_leaves_the_scores_their_rounding():
    exact = [Noise("n", "float32", {(Point("gate", leaf=(0,)), Moment()): numbers_of(SCORES, SCORES.clone())})]
    assert ties(plan(routed(CHOSEN), routed(TIED, SCORES.bfloat16())), exact).at_near_ties
    assert not ties(plan(routed(CHOSEN), routed(TIED)), exact).at_near_ties


@pytest.mark.parametrize(
    "others",
    [
        [],
        [("gate[0]", SCORES[:1])],
        [("gate[0]", SCORES[:, :2])],
        [("gate[0]", SCORES.long())],
        [("other[0]", SCORES)],
        [("gate:input[0]", SCORES)],
    ],
    ids=["none", "fewer rows", "no more than are chosen", "whole numbers", "another module", "another side"],
)
def test_what_is_no_score_of_these_choices_is_not_taken_for_one(others):
    found = ties(plan(run(*others, ("gate[1]", CHOSEN)), run(*others, ("gate[1]", TIED))))
    assert not found.scored
    assert found.changed == {0}


def test_scores_that_cannot_be_read_tell_nothing(monkeypatch):
    one = routed(CHOSEN)
    planned = measured_of(plan(one, routed(TIED, SCORES.bfloat16())))
    whole = one._tensor

    def refuse(at, rows=None):
        if one._source.records().text(at) == "gate:output[0]":
            raise Damaged("its bytes are not what was written")
        return whole(at, rows)

    [row] = [row for row in planned.rows() if row.point.leaf == (1,)]
    assert planned.ties(row, ()).at_near_ties
    monkeypatch.setattr(one, "_tensor", refuse)
    assert not planned.ties(row, ()).scored


def test_a_run_on_disk_is_planned_like_one_in_memory(tmp_path, monkeypatch):
    from layerscope.store import Blob, Writer

    writer = Writer(tmp_path / "run", Manifest())
    array = X.numpy()
    writer.write(Point("a"), Moment(), blob=Blob("float32", array.shape, array.nbytes, lambda: array))
    writer.close()
    [job] = plan(open_run(tmp_path / "run"), run(("a", X))).pairs
    assert job.measure().bitwise


# Artefacts ---------------------------------------------------------------------------------------

LISTED = torch.tensor([[3, 1], [0, 3]])
WORTH = torch.tensor([[0.6, 0.4], [0.7, 0.3]])
RAW = torch.tensor([[0.1, 0.6, 0.2, 0.9], [0.8, 0.1, 0.2, 0.5]])
ROUTER = (("gate[0]", RAW), ("gate[1]", WORTH), ("gate[2]", LISTED))


def artefact(*records, runtime="torchscript", taps=("**",)):
    return run(*records, manifest=Manifest(runtime=runtime, taps=list(taps)))


@pytest.mark.parametrize("runtime", ["torchscript", "export", "onnx"])
def test_the_leaves_of_an_artefact_are_paired_by_shape_and_kind(runtime):
    found = plan(run(*ROUTER), artefact(("gate[0]", LISTED.int()), ("gate[1]", WORTH), runtime=runtime))
    assert {(str(job.point), str(job.counterpart), job.method) for job in found.pairs} == {
        ("gate:output[1]", "gate:output[1]", "leaves"),
        ("gate:output[2]", "gate:output[0]", "leaves"),
    }
    assert all(job.measure().equal == job.metrics.count for job in found.pairs)
    [(point, kind, because)] = told(found)
    assert (point, kind) == ("gate:output[0]", "unpaired")
    assert "no leaf of this value holds floats [2, 4]" in because


@pytest.mark.parametrize("runtime", ["eager", "torch.compile", "torchscript, taps compiled in", ""])
def test_leaves_that_have_the_source_s_names_are_paired_by_them(runtime):
    found = plan(run(*ROUTER), artefact(("gate[0]", RAW), ("gate[1]", WORTH * 2), runtime=runtime))
    assert {job.method for job in found.pairs} == {"exact"}
    other = plan(run(*ROUTER), artefact(("gate[0]", LISTED), ("gate[1]", WORTH), runtime=runtime))
    assert ("gate:output[0]", "unpaired", "shapes differ, [2, 4] against [2, 2]") in told(other)


def test_a_module_that_an_artefact_was_asked_for_and_has_nothing_of_is_missing():
    one = artefact(("a", X), ("rotary[0]", X[0]), ("rotary[1]", X[0]), runtime="eager")
    rows = told(plan(one, artefact(("a", X), runtime="onnx")))
    assert [(point, kind) for point, kind, _ in rows] == [
        ("rotary:output[0]", "missing"),
        ("rotary:output[1]", "missing"),
    ]
    assert rows[0][2].startswith("onnx has nothing of this module: compilers fold what does not depend on the inputs")
    unasked = told(plan(one, artefact(("a", X), runtime="onnx", taps=["a"])))
    assert {kind for _, kind, _ in unasked} == {"unpaired"}
    eager = told(plan(one, artefact(("a", X), runtime="eager")))
    assert {kind for _, kind, _ in eager} == {"unpaired"}


def test_scores_are_read_in_the_order_of_choices_that_the_candidate_lists_otherwise():
    found = measured_of(
        plan(run(*ROUTER), run(("gate[0]", RAW), ("gate[1]", WORTH.flip(1)), ("gate[2]", LISTED.flip(1))))
    )
    assert not found.pairs[1].metrics.bitwise
    follow_choices(found.pairs)
    assert found.pairs[1].metrics.bitwise
    said = {str(one.point): one.because for one in found.rows()}
    assert said["gate:output[1]"] == "read in the order of gate:output[2]"
    assert said["gate:output[0]"] == said["gate:output[2]"] == ""


def test_choices_whose_scores_follow_them_are_choices_without_logits_too():
    turned = run(("gate[0]", WORTH.flip(1)), ("gate[1]", LISTED.flip(1)))
    found = measured_of(plan(run(("gate[0]", WORTH), ("gate[1]", LISTED)), turned))
    choice = next(one for one in found.rows() if str(one.point) == "gate:output[1]")
    assert not found.ties(choice, ()).scored
    follow_choices(found.pairs)
    assert found.ties(choice, ()).scored
