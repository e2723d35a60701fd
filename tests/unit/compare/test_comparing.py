"""Comparing runs in memory and on disk, from the call to the verdict."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layerscope.compare.align.pairing import PairingRule
from layerscope.compare.comparing import compare
from layerscope.errors import BadText, Incomparable, NoSuchPoint
from layerscope.points import Moment, Point
from layerscope.stats import summarize
from layerscope.store import Blob, Manifest, MemoryRun, Missing, Writer

X = torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(11))
LATER = Moment(step=1, batch=1)


def rounded(x=X, seed=1, error=2.0**-9):
    return x * (1 + error * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))


def run(*records, address="memory", **manifest):
    made = MemoryRun(Manifest(**manifest))
    made._source.address = address
    for text, *when, tensor in records:
        made.add(Point.parse(text), when[0] if when else Moment(), tensor=tensor)
    return made


def layers(values, name="layers.{}", **options):
    return run(*((name.format(number), value) for number, value in enumerate(values)), **options)


def write(folder, values, name="layers.{}"):
    writer = Writer(folder, Manifest())
    for number, value in enumerate(values):
        array = value.contiguous().numpy()
        blob = Blob(str(array.dtype), array.shape, array.nbytes, lambda array=array: array)
        writer.write(Point(name.format(number)), Moment(), blob=blob)
    writer.close()
    return folder


def kinds(comparison, at=0):
    return [row.kind for row in comparison.candidates[at].rows]


REFERENCE = layers([X, X * 2, X * 3], address="runs/fp32")
HEALTHY = layers([rounded(), rounded(X * 2, 2), rounded(X * 3, 3)], address="runs/bf16")
NOISE = layers([rounded(seed=7), rounded(X * 2, 8), rounded(X * 3, 9)], address="runs/noise")
FAULTY = layers([rounded(), X * 2.5, X * 3.5], address="runs/int8")


# The verdict and what it rests on ---------------------------------------------------------------


def test_a_run_compared_with_itself_is_exactly_zero():
    found = compare(REFERENCE, REFERENCE)
    assert kinds(found) == ["same"] * 3
    assert [row.metrics.max_abs for row in found.rows] == [0.0] * 3
    assert (str(found.verdict), found.candidates[0].basis) == ("same", "equal bits")
    assert found.first_divergence is None


def test_a_fault_is_named_and_without_it_there_is_noise():
    found = compare(REFERENCE, FAULTY, noise=NOISE)
    assert kinds(found) == ["noise", "root", "inherited"]
    assert str(found.first_divergence) == "layers.1"
    assert found.verdict.word == "differs"
    healthy = compare(REFERENCE, HEALTHY, noise=NOISE)
    assert kinds(healthy) == ["noise"] * 3
    assert (healthy.verdict.word, healthy.first_divergence) == ("noise", None)


def test_what_a_noise_run_shows_is_the_basis():
    found = compare(REFERENCE, HEALTHY, noise=[NOISE])
    assert found.candidates[0].basis == "the floor that runs/noise shows; an error may be 2 times it"
    assert found.noise == ("runs/noise",)
    assert {row.floor.source for row in found.rows} == {"runs/noise"}
    assert "an error may be 3 times it" in compare(REFERENCE, HEALTHY, noise=NOISE, limit=3).candidates[0].basis


def test_rows_before_the_noise_run_s_first_point_are_said_to_be_estimated():
    partial = run(("layers.1", rounded(X * 2, 8)), address="runs/noise")
    found = compare(REFERENCE, HEALTHY, noise=partial)
    assert [row.floor.source for row in found.rows] == ["estimate", "runs/noise", "estimate"]
    assert found.candidates[0].basis.endswith("; an estimate for 2 rows")


def test_without_a_noise_run_the_basis_is_an_estimate_of_the_coarsest_dtype():
    halves = layers([X.half(), (X * 2).half(), (X * 3).half()])
    found = compare(REFERENCE, halves)
    assert found.candidates[0].basis.startswith("an estimate of what float16 costs")
    assert "record the reference with floors=True" in found.candidates[0].basis
    assert found.verdict.word == "noise"
    assert found.noise == ()


def test_statistics_alone_are_said_to_be_the_basis():
    kept = [MemoryRun(), MemoryRun()]
    for one, factor in zip(kept, (1, 1.5), strict=True):
        one.add(Point("a"), Moment(), summary=summarize(X))
        one.add(Point("b"), Moment(), summary=summarize(X * factor))
    found = compare(*kept)
    assert kinds(found) == ["same", "root"]
    assert found.candidates[0].basis == "statistics and fingerprints alone"
    assert "1 of 2 rows rest on statistics alone, which cannot tell a permutation" in found.candidates[0].notes
    assert kinds(compare(kept[0], kept[0])) == ["same", "same"]


def test_several_noise_runs_give_the_largest_floor():
    louder = layers([rounded(x, 5, error=0.02) for x in (X, X * 2, X * 3)], address="runs/louder")
    off = layers([rounded(x, 6, error=0.01) for x in (X, X * 2, X * 3)])
    assert compare(REFERENCE, off, noise=NOISE).verdict.word == "differs"
    found = compare(REFERENCE, off, noise=[NOISE, louder])
    assert found.verdict.word == "noise"
    assert {row.floor.source for row in found.rows} == {"runs/louder"}


def test_a_noise_run_with_other_names_is_aligned():
    renamed = layers([rounded(seed=7), rounded(X * 2, 8), rounded(X * 3, 9)], "model.layers.{}", address="runs/noise")
    found = compare(REFERENCE, FAULTY, noise=renamed)
    assert {row.floor.source for row in found.rows} == {"runs/noise"}
    assert found.rows == compare(REFERENCE, FAULTY, noise=NOISE).rows


def test_a_rule_that_only_the_noise_run_needs_is_used_there():
    odd = layers([rounded(seed=7), rounded(X * 2, 8), rounded(X * 3, 9)], "deep.part_{}.out", address="runs/noise")
    rules = [PairingRule("pair", f"layers.{n}", f"deep.part_{n}.out") for n in range(3)]
    found = compare(REFERENCE, FAULTY, noise=odd, pairing=rules)
    assert {row.floor.source for row in found.rows} == {"runs/noise"}
    assert kinds(found) == ["noise", "root", "inherited"]


# Several candidates -----------------------------------------------------------------------------


def test_several_candidates_are_judged_one_by_one():
    found = compare(REFERENCE, HEALTHY, FAULTY, noise=NOISE)
    assert [(one.candidate, one.verdict.word) for one in found] == [("bf16", "noise"), ("int8", "differs")]
    assert found.first_divergence.candidate == "int8"
    assert {row.candidate for row in found["bf16"].rows} == {"bf16"}
    assert (found.reference, found.address) == ("fp32", "runs/fp32")


@pytest.mark.parametrize(
    ("addresses", "names"),
    [
        (["runs/a", "runs/b"], ["a", "b"]),
        (["one/a", "two/a"], ["one/a", "two/a"]),
        (["one/a", "two/a", "two/b"], ["one/a", "two/a", "b"]),
        (["x/one/a", "y/one/a"], ["one/a", "one/a (2)"]),
        (["runs/fp32", "other/fp32"], ["runs/fp32", "other/fp32"]),
        (["memory", "memory", "memory"], ["memory", "memory (2)", "memory (3)"]),
        (["other/fp32/"], ["other/fp32"]),
    ],
)
def test_every_candidate_has_a_name_of_its_own(addresses, names):
    found = compare(REFERENCE, *(layers([X], address=address) for address in addresses))
    assert [one.candidate for one in found] == names
    assert all(found[name].candidate == name for name in names)


def test_one_candidate_that_cannot_be_compared_does_not_cost_the_others():
    other_shape = layers([X[:, :5]], address="runs/short")
    stranger = run(("elsewhere", torch.zeros(3)), address="runs/stranger")
    found = compare(REFERENCE, HEALTHY, other_shape, stranger, noise=NOISE)
    assert [one.verdict.word for one in found] == ["noise", "differs", "differs"]
    assert (
        found["short"].verdict.because == "layers.0 cannot be compared: shapes differ, [1, 16, 32] against [1, 5, 32]"
    )
    assert found["stranger"].verdict.because == "nothing could be compared"


def test_where_nothing_can_be_compared_the_shapes_are_named():
    with pytest.raises(Incomparable) as raised:
        compare(REFERENCE, layers([X[:, :5]], address="runs/short"))
    assert str(raised.value).startswith(
        "nothing of runs/fp32 can be compared with runs/short: shapes differ, [1, 16, 32]"
    )


def test_where_no_point_is_shared_the_first_is_named():
    with pytest.raises(Incomparable, match=r"no point of one is in the other; layers\.0: no point of the candidate"):
        compare(REFERENCE, run(("elsewhere", torch.zeros(3)), address="runs/stranger"))


def test_an_empty_run_cannot_be_compared():
    with pytest.raises(Incomparable, match="nothing of runs/fp32 can be compared with memory"):
        compare(REFERENCE, MemoryRun())
    with pytest.raises(Incomparable, match="one of them holds no record"):
        compare(MemoryRun(), MemoryRun())


def test_a_candidate_and_a_limit_are_asked_for():
    with pytest.raises(TypeError, match="at least one candidate"):
        compare(REFERENCE)
    for limit in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="limit is how many times"):
            compare(REFERENCE, HEALTHY, limit=limit)


# Which points -----------------------------------------------------------------------------------


def test_only_the_points_that_were_asked_for_are_compared():
    found = compare(REFERENCE, FAULTY, noise=NOISE, points="layers.0")
    assert [str(row) for row in found.rows] == ["layers.0"]
    assert found.verdict.word == "noise"
    assert [str(row) for row in compare(REFERENCE, FAULTY, points=["layers.0", "layers.2"]).rows] == [
        "layers.0",
        "layers.2",
    ]


def test_points_are_paired_before_they_are_chosen():
    one, other = layers([X, X * 2, X * 3], "one.{}"), layers([X, X * 2, X * 3], "two.{}")
    found = compare(one, other, points="one.1")
    assert [(str(row.point), str(row.counterpart), row.kind) for row in found.rows] == [
        ("one.1:output", "two.1:output", "same")
    ]


def test_a_point_that_is_not_there_is_an_error():
    with pytest.raises(NoSuchPoint, match=r"layers\.9"):
        compare(REFERENCE, FAULTY, points="layers.9")


def test_points_that_find_no_partner_are_rows_and_a_note():
    one = run(("a", X), ("only_here", X[0]))
    other = run(("a", X), ("b.extra", torch.zeros(3)), ("b.more", torch.zeros(4)))
    found = compare(one, other)
    assert [(row.name, row.kind, row.reference_has) for row in found.rows] == [
        ("a", "same", True),
        ("only_here", "unpaired", True),
        ("b.extra", "unpaired", False),
        ("b.more", "unpaired", False),
    ]
    assert found.candidates[0].notes[-2:] == (
        "1 points of the reference found no partner",
        "2 points of the candidate found no partner",
    )


def test_moments_that_one_run_lacks_are_counted_as_records_and_not_as_points():
    several = run(*(("a", Moment(step=at, batch=at), X) for at in range(3)))
    once = run(("a", X))
    assert compare(several, once).candidates[0].notes[-1] == (
        "2 records of the reference are of moments that the candidate has not"
    )
    assert compare(once, several).candidates[0].notes[-1] == (
        "2 records of the candidate are of moments that the reference has not"
    )
    assert "moments" not in " ".join(compare(several, several).candidates[0].notes)


# Rules ------------------------------------------------------------------------------------------


def test_fused_and_split_projections_are_compared_part_by_part(tmp_path):
    wide = torch.randn(1, 6, 16)
    parts = {"q_proj": wide[..., :8] * 1.5, "k_proj": wide[..., 8:12], "v_proj": wide[..., 12:]}
    split = run(*((f"attn.{name}", part.contiguous()) for name, part in parts.items()))
    fused = run(("attn.qkv_proj", wide))
    (tmp_path / "rules").write_text("# fused there\nfuse **.q_proj, **.k_proj, **.v_proj -> **.qkv_proj\n")
    found = compare(split, fused, pairing=tmp_path / "rules")
    array, cut = wide.double().numpy(), {"q_proj": slice(0, 8), "k_proj": slice(8, 12), "v_proj": slice(12, 16)}
    for row in found.rows:
        name = row.name.removeprefix("attn.")
        r = parts[name].double().numpy()
        assert row.metrics.mae == pytest.approx(np.mean(abs(array[..., cut[name]] - r)), rel=1e-9)
        assert str(row.counterpart) == "attn.qkv_proj:output"
    assert kinds(found) == ["root", "same", "same"]
    back = compare(fused, split, pairing="split **.qkv_proj -> **.q_proj, **.k_proj, **.v_proj")
    assert kinds(back) == ["root", "same", "same"]


def test_the_floor_of_a_split_projection_is_that_of_its_noisiest_part():
    wide = torch.cat([X, X * 2], dim=-1)

    def parts(seed, address):
        halves = rounded(X, seed, error=0.01), rounded(X * 2, seed, error=2.0**-20)
        return run(("gate", halves[0]), ("up", halves[1]), address=address)

    found = compare(
        run(("gate_up", wide)), parts(3, "runs/c"), noise=parts(4, "runs/noise"), pairing="split gate_up -> gate, up"
    )
    assert kinds(found) == ["noise", "noise"]


def test_a_rule_meant_for_one_candidate_leaves_the_others_alone():
    renamed = run(("out.final", X * 3), ("layers.0", X), ("layers.1", X * 2), address="runs/renamed")
    same_names = layers([X, X * 2, X * 3], address="runs/copy")
    found = compare(REFERENCE, same_names, renamed, pairing="pair layers.2 -> out.final")
    assert kinds(found, 0) == kinds(found, 1) == ["same"] * 3
    assert [row.method for row in found["renamed"].rows] == ["exact", "exact", "override"]
    assert {row.method for row in found["copy"].rows} == {"exact"}


def test_a_rule_meant_for_none_is_an_error():
    with pytest.raises(NoSuchPoint, match="the rule `ignore nowhere` matches nothing"):
        compare(REFERENCE, HEALTHY, FAULTY, pairing="ignore nowhere")


def test_a_rule_that_is_none_names_its_line():
    with pytest.raises(BadText, match="line 2"):
        compare(REFERENCE, HEALTHY, pairing="ignore layers.0\nnonsense here")


def test_ignored_points_are_counted():
    found = compare(REFERENCE, FAULTY, pairing="ignore layers.1\nignore layers.2", noise=NOISE)
    assert kinds(found) == ["noise"]
    assert "2 points are ignored by rule" in found.candidates[0].notes


# What cannot be read, what is not there ---------------------------------------------------------


def test_a_damaged_record_is_missing_and_the_others_are_compared(tmp_path):
    one, other = write(tmp_path / "one", [X, X * 2, X * 3]), write(tmp_path / "other", [X, X * 2, X * 3])
    assert compare(one, other).verdict.word == "same"
    [file] = other.rglob("*.safetensors")
    raw = bytearray(file.read_bytes())
    wanted = (X * 2).numpy().tobytes()
    raw[raw.index(wanted) + 100] ^= 0x10
    file.write_bytes(bytes(raw))
    for threads in (1, 2):
        [found] = compare(one, other, threads=threads)
        assert [row.kind for row in found.rows] == ["same", "missing", "same"]
        assert found.unread == (found.rows[1].because,)
        assert "checksum" in found.unread[0]
        assert found.rows[1].metrics is None


def test_a_point_that_the_candidate_lost_is_missing_and_noted():
    other = layers([X, X * 2])
    other.close(missing=[Missing("layers.2:output", "the hook never fired")])
    [found] = compare(REFERENCE, other)
    assert [row.kind for row in found.rows] == ["same", "same", "missing"]
    assert found.rows[2].because == "the candidate lost it: the hook never fired"
    assert "the candidate is incomplete (1 points missing); what is not there was not compared" in found.notes


def test_complete_runs_have_no_notes():
    made = [layers([X]), layers([X])]
    for one in made:
        one.close()
    assert compare(*made).candidates[0].notes == ()


def test_what_a_run_says_of_itself_is_noted():
    made = [layers([X]), layers([X])]
    for one in made:
        one.close()
    made[1].notes.append("two files were left out")
    assert compare(*made).candidates[0].notes == ("the candidate: two files were left out",)


# How it is done ---------------------------------------------------------------------------------


def test_threads_do_not_change_what_is_found():
    found = [compare(REFERENCE, FAULTY, noise=NOISE, threads=threads) for threads in (1, 2, None)]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("threads", [1, 2])
def test_progress_is_told_to_the_end(threads):
    told = []
    compare(REFERENCE, FAULTY, noise=NOISE, threads=threads, progress=lambda *said: told.append(said))
    assert [done for _, done, _ in told] == [1, 2, 3, 4, 5, 6]
    assert {total for *_, total in told} == {6}
    assert {name for name, *_ in told} == {"layers.0", "layers.1", "layers.2"}


def test_large_pairs_take_every_thread_and_give_the_same(monkeypatch):
    from layerscope.compare import comparing

    small = compare(REFERENCE, FAULTY, threads=2)
    monkeypatch.setattr(comparing, "_LARGE", 1)
    assert compare(REFERENCE, FAULTY, threads=2) == small


def test_noise_is_measured_only_where_a_candidate_is():
    told = []
    partial = run(("layers.1", X * 2.5))
    compare(REFERENCE, partial, noise=NOISE, progress=lambda *said: told.append(said))
    assert len(told) == 2


def test_moments_are_compared_one_by_one():
    one = run(("a", X), ("a", LATER, X))
    other = run(("a", X), ("a", LATER, X * 2))
    found = compare(one, other)
    assert [(row.moment, row.kind) for row in found.rows] == [(Moment(), "same"), (LATER, "root")]
    assert found.verdict.because.startswith("a parts first at step=1: ")


def test_addresses_and_open_runs_are_compared_alike(tmp_path):
    one, other = write(tmp_path / "one", [X, X * 2]), write(tmp_path / "other", [X, X * 3])
    found = compare(str(one), other)
    assert (found.reference, found.candidates[0].candidate) == ("one", "other")
    assert kinds(found) == ["same", "root"]
    assert found.layout == "layerscope"


# Routing, end to end ----------------------------------------------------------------------------


def moe(*, scores, chosen, hidden, address="memory"):
    return run(("gate[0]", scores), ("gate[1]", chosen), ("experts", hidden), address=address)


SCORES = torch.randn(16, 8, generator=torch.Generator().manual_seed(21))
SCORES[3, :3] = torch.tensor([5.0, 4.0, 4.0001])
CHOSEN = SCORES.topk(2).indices
ROUTED = CHOSEN.clone()
ROUTED[3, 1] = 1  # 4.0 in place of 4.0001
REROUTED = rounded()
REROUTED[0, 3] = X[0, 3].flip(0)
MOE = moe(scores=SCORES, chosen=CHOSEN, hidden=X)
MOE_NOISE = moe(scores=rounded(SCORES, 4), chosen=CHOSEN, hidden=rounded(seed=7), address="runs/noise")


def test_a_flip_at_a_near_tie_and_what_follows_is_noise():
    candidate = moe(scores=rounded(SCORES, 5), chosen=ROUTED, hidden=REROUTED)
    found = compare(MOE, candidate, noise=MOE_NOISE)
    assert kinds(found) == ["noise"] * 3
    assert "flip at a near-tie" in found.rows[1].because
    assert found.verdict.word == "noise"


def test_a_flip_far_from_a_tie_is_a_root():
    far = CHOSEN.clone()
    far[5, 1] = SCORES[5].argmin()
    candidate = moe(scores=rounded(SCORES, 5), chosen=far, hidden=rounded())
    assert kinds(compare(MOE, candidate, noise=MOE_NOISE)) == ["noise", "root", "noise"]


def test_the_rerouted_token_without_the_flip_is_a_root():
    candidate = moe(scores=rounded(SCORES, 5), chosen=CHOSEN, hidden=REROUTED)
    found = compare(MOE, candidate, noise=MOE_NOISE)
    assert kinds(found) == ["noise", "same", "root"]
    assert found.rows[2].because.startswith("token 3 of 16")


def test_a_zeroed_token_after_a_flip_is_a_root():
    zeroed = REROUTED.clone()
    zeroed[0, 9] = 0
    candidate = moe(scores=rounded(SCORES, 5), chosen=ROUTED, hidden=zeroed)
    assert kinds(compare(MOE, candidate, noise=MOE_NOISE)) == ["noise", "noise", "root"]
