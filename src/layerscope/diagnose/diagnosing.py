"""Find the module that makes the difference between two models, prove it, and say why.

    finding = diagnose(reference, candidate, inputs)

1. The reference runs once; what each of its modules was given and gave is kept (`replay/capture`).
2. The candidate runs once on those values (`replay/replay`): what a module gets wrong there is its own doing.
3. So does the reference in the candidate's dtypes: what it gets wrong is rounding (`judge/judging`, `rows`).
4. What stands out (`judge/suspects`) is put right in the candidate and wrong in the reference (`judge/proof`), and
   explained (`causes`).

Both models are left as they were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from layerscope.compare.align.pairing import PairingRule, parse_rules
from layerscope.compare.result import Verdict
from layerscope.diagnose.causes.explanation import explain
from layerscope.diagnose.finding import Blame, Final, Finding, Judged, called
from layerscope.diagnose.judge.judging import is_doubtful, name_of
from layerscope.diagnose.judge.measurement import Distance
from layerscope.diagnose.judge.proof import confirm, demoted, look_again, ranked
from layerscope.diagnose.judge.quantised import packed_weights, quantised
from layerscope.diagnose.judge.rows import JudgedRow, code_of, evident, judged_rows
from layerscope.diagnose.judge.suspects import missing_arguments, suspects_of
from layerscope.diagnose.replay.passes import Passes, told
from layerscope.diagnose.replay.replay import Guidance, Guided, Site
from layerscope.diagnose.replay.sides import ModelSide, main_dtype
from layerscope.errors import BadModel, Unsupported
from layerscope.progress import Progress
from layerscope.recorder.provenance import said_of, versions
from layerscope.report.notebook import bar
from layerscope.report.writing import number, some
from layerscope.runtimes.snapshot import restored


def diagnose(
    reference: nn.Module,
    candidate: nn.Module,
    inputs: object,
    *,
    backward: bool = False,
    pairing: str | PathLike[str] | Sequence[PairingRule] = (),
    progress: Progress | None = None,
) -> Finding:
    """Name the module where two models that should agree part, with the cause; `root` is None when they are healthy.

    `inputs` is a dict of keyword arguments, a tuple of positional ones, or one tensor; floating tensors are cast to
    each model's dtype and device. `backward` judges gradients too, from the model's loss or the mean square of its
    first output. `pairing` declares which modules are the same, as for `compare`: text, a file, or rules.
    """
    for model in (reference, candidate):
        if not isinstance(model, nn.Module):
            raise Unsupported(f"diagnose() takes two torch.nn.Modules and their inputs; got a {type(model).__name__}.")
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise Unsupported(
                f"{type(model).__name__} has weights on the meta device, which hold no numbers; load them first."
            )
    parsed = _parsed(pairing)
    with restored(reference, candidate) as restore, bar("diagnosing:") as shown:
        said = progress or shown
        ours = ModelSide.of(reference, inputs, backward=backward)
        theirs = ModelSide.of(candidate, inputs, backward=backward)
        said("running both models", 0, 0)
        passes = Passes.begin(ours, theirs, restore, rules=parsed)
        return replace(_Diagnosis(passes, said).finding(), provenance=_provenance(reference, candidate, inputs))


def _provenance(reference: nn.Module, candidate: nn.Module, inputs: object) -> dict[str, str]:
    """Say what was judged."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    shapes = ("\u00d7".join(map(str, one.shape)) or "one value" for one in tensors)
    dtypes = (str(one.dtype).removeprefix("torch.") for one in tensors)
    return {
        "reference": said_of(reference),
        "candidate": said_of(candidate),
        "inputs": ", ".join(f"{shape} {dtype}" for shape, dtype in zip(shapes, dtypes, strict=True)),
        "seed": str(torch.initial_seed()),
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
    }


def _parsed(rules: str | PathLike[str] | Sequence[PairingRule]) -> Sequence[PairingRule]:
    if isinstance(rules, str) and ("\n" in rules or not Path(rules).is_file()):
        return parse_rules(rules)
    if isinstance(rules, (str, PathLike)):
        return parse_rules(Path(rules).read_text("utf-8"))
    return rules


class _Diagnosis:
    """One diagnosis under way."""

    def __init__(self, passes: Passes, said: Progress) -> None:
        self.passes = passes
        self.guided = self.floor = Guided()
        self.leniency = 1.0
        self.said = said

    def finding(self) -> Finding:
        passes = self.passes
        self.said("running the candidate on the reference's values", 0, 0)
        self.guided = guided = passes.candidate()
        if guided.raised is None and not any(measure.count for measure in guided.measured.values()):
            raise BadModel(
                "there was nothing to compare: no value that passes in both models holds an element; give other inputs."
            )
        rows = self.rows()
        guided = self.guided
        rows = quantised(rows, passes)
        suspects = suspects_of(rows, passes, list(guided.measured))
        final = self.final()
        ours, theirs = _named(passes.ours), _named(passes.theirs)

        def as_named(judged: Judged) -> Judged:
            other = None if judged.counterpart is None else theirs[judged.counterpart]
            return replace(judged, name=ours[judged.name], counterpart=other)

        blames: list[Blame] = []
        if suspects:
            self.said(f"looking into {', '.join(called(s.name) for s in suspects[:3])}", 0, 0)
            look = look_again(suspects, passes, self.floor)
            causes = explain(suspects, passes, guided, look)
            proofs, final = confirm(suspects, passes, final, look)
            for suspect, cause, proof in zip(suspects, causes, proofs, strict=True):
                row = as_named(suspect.row.judged)
                blames.append(Blame(ours[suspect.name], cause, row, *proof))
        blames, explain_nothing = demoted(blames)
        for blame in explain_nothing:
            passes.notes.append(
                f"{called(blame.name)} differs as well ({blame.row.because}), but explains nothing: "
                "in the reference its output changes nothing at the end."
            )
        ranking = ranked(rows, passes) if any(row.judged.kind == "quantised" for row in rows) else ()
        return Finding(
            tuple(blames),
            tuple(as_named(row.judged) for row in rows),
            _verdict(blames, rows, final, "" if blames else self.cost(final)),
            final,
            tuple(passes.notes),
            tuple((ours[name], damage) for name, damage in ranking),
            tuple(replace(one, name=ours[one.name]) for one in packed_weights(rows, passes)),
        )

    def rows(self) -> list[JudgedRow]:
        """Judge every call; one that is wrong for want of an argument is judged as if it had been handed that."""
        passes, guided = self.passes, self.guided
        self.learn_floor()
        judged = self.judged(guided)
        hungry = {row.key for row in judged if row.judged.guilty} & guided.missing.keys()
        supplied = missing_arguments(hungry, guided, passes)
        if supplied:
            self.said("handing on what the candidate's code does not", 0, 0)
            fed = passes.candidate(Guidance(supplied=supplied))
            others = self.judged(fed)
            still = {row.key for row in others if row.judged.guilty and row.key in hungry}
            if fed.raised is None and not still:
                self.guided, judged = fed, others
        rows = [evident(row, passes) for row in judged]
        return self.randomness(rows, self.guided) if passes.drew else rows

    def learn_floor(self) -> None:
        """Run the reference in the candidate's dtypes, where they are others."""
        passes, guided = self.passes, self.guided
        passes.learn(guided)
        if passes.other_dtypes:
            self.said("running the reference in the candidate's dtypes", 0, 0)
            self.floor = passes.floor(Guidance(known=guided.measured))
            if self.floor.raised is not None:
                self.leniency = UNKNOWN
                passes.notes.append(
                    f"the reference does not run in the candidate's dtypes ({told(self.floor.raised)}): from there on "
                    f"the floor is an estimate, and modules are judged {UNKNOWN:.0f} times more leniently."
                )

    def judged(self, guided: Guided) -> list[JudgedRow]:
        """Judge every call, by the floor and, where something differs from that too, by what a nudge does."""
        passes, floor, leniency = self.passes, self.floor, self.leniency
        nudged: dict[Site, Distance] = {}
        doubtful = {
            place
            for place, measure in guided.measured.items()
            if is_doubtful(
                measure,
                floor=floor.measured.get(place),
                code=code_of(place.owner[0], passes),
                leniency=leniency,
            )
        }
        if doubtful:
            self.said("trying what a unit in the last place does", 0, 0)
            every = ROUNDED if passes.other_dtypes else 1
            nudged = passes.floor(Guidance(again=NUDGE, every=every, only=doubtful)).measured
        return judged_rows(passes, guided, floor.measured, nudged, leniency=leniency)

    def randomness(self, rows: list[JudgedRow], guided: Guided) -> list[JudgedRow]:
        """Tell what differs because it is drawn: it differs from itself with another seed."""
        guilty = {row.place for row in rows if row.judged.guilty and row.place is not None}
        if not guilty or self.passes.seed is None:
            return rows
        other = self.passes.candidate(Guidance(only=guilty, seed=self.passes.seed + 1)).measured
        return [
            replace(row, judged=replace(row.judged, kind="random", because="two runs of it differ"))
            if row.place in guilty
            and row.place in other
            and not _same_bits(guided.measured[row.place], other[row.place])
            else row
            for row in rows
        ]

    def final(self) -> Final:
        """Measure the candidate's output, and the reference's in the candidate's dtypes."""
        return Final(self.passes.error, self.passes.final_floor() if self.passes.other_dtypes else 0.0)

    def cost(self, final: Final) -> str:
        """Say how large the final error is, and what of that half precision would cost."""
        if not final.error:
            return ""
        dtype, floor = self.passes.lowered or main_dtype(self.passes.theirs.model), final.floor
        if not floor or dtype is None:
            dtype, floor = torch.bfloat16, self.passes.final_floor(torch.bfloat16)
        said = f"; the final error is {number(final.error)}"
        if not floor or not math.isfinite(floor):
            return said
        share = final.error / floor
        return f"{said}, {f'{share:.2f}' if share > 0.005 else f'{share:.0e}'} of what {name_of(dtype)} costs"


NUDGE = 1
ROUNDED = 8  # one in eight moved by a unit is as far off as all of them rounded; the floor has that already
UNKNOWN = 4.0


def _named(side: ModelSide) -> dict[str, str]:
    """Return the names that `named_modules()` gives, by those without what wrappers add."""
    own = {id(module): name for name, module in side.model.named_modules()}
    return {name: own.get(id(module), name) for name, module in side.modules.by_name.items()}


def _same_bits(a: Distance, b: Distance | None) -> bool:
    return b is not None and (a.digest, a.dtype, a.count) == (b.digest, b.dtype, b.count)


def _verdict(blames: Sequence[Blame], rows: Sequence[JudgedRow], final: Final, cost: str) -> Verdict:
    kinds = {row.judged.kind for row in rows}
    if blames:
        return Verdict("differs", _sentence(blames, final))
    if "quantised" in kinds:
        count = sum(row.judged.kind == "quantised" for row in rows)
        return Verdict("noise", f"{count} modules are quantised alike, and none of them stands out{cost}")
    if kinds <= {"same", "unpaired", "unplayed"} and not final.error:
        return Verdict("same", "every module gives the same values")
    return Verdict("noise", f"every module is within its floor{cost}")


def _sentence(blames: Sequence[Blame], final: Final) -> str:
    first = blames[0]
    clauses = [f"{called(first.name)} makes the difference: {first.row.because}"]
    if first.row.where != "output":
        clauses[0] += f" (at the {first.row.where})"
    if first.cause.kind != "unknown" and first.cause.because not in first.row.because:
        clauses.append(str(first.cause))
    if len(blames) > 1:
        clauses.append(f"to blame as well: {some([called(blame.name) for blame in blames[1:]])}")
    if final.removed is not None:
        where = "there" if len(blames) == 1 else f"at all {len(blames)}"
        clauses.append(f"putting the reference's output {where} removes {final.removed:.0%} of the final error")
    return "; ".join(clauses)
