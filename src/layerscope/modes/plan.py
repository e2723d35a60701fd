"""Which layers to keep in higher precision, so that a quantised model stays within a budget with the fewest bits.

    found = plan(model, ["int4-weight", "int8-weight"], last_layer_error(model, batches), within=0.05)
    found.best.keep, found.best.error, found.best.bits
    print(found.best.code())                # a mode of one's own, ready to be declared

Modes are tried from the fewest bits on. Layers are kept in the order of their sensitivities, as few as it takes, and
put back where the budget allows it. Errors do not add up, so every step is a run of the mixed model, and the error of a
plan is measured on the model that its code makes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from layerscope.errors import Unsupported
from layerscope.models import Inputs
from layerscope.modes.evaluation import layer_outputs, perplexity
from layerscope.modes.feeding import fitted
from layerscope.modes.layer_taps import stack_of
from layerscope.modes.mixing import Mixture, mixed, stored_bits
from layerscope.modes.mode_runs import plain_forward
from layerscope.modes.registry import Mode, Setting
from layerscope.modes.sensitivity import Measure, Share, relative_l2, sensitivities
from layerscope.progress import Progress


@dataclass(frozen=True, slots=True)
class Plan:
    """A mode with some layers kept as they are in the model; `error` is what the mixed model was measured to make.

    `bare` is the error of the mode with nothing kept, `bits` what the weights take, `runs` how many mixed models were
    run to find it. Where `is_within` is False, the budget is not met, and this is the least error that was reached.
    """

    mode: str
    keep: tuple[str, ...]
    error: float
    is_within: bool
    bare: float
    bits: int
    runs: int
    setting: Setting

    def code(self) -> str:
        """Return Python code that declares the plan as a mode.

        Token ids that it was calibrated on do not stand in it: the maker of the variant gives them.
        """
        kept = ", ".join(self.keep) if len(self.keep) < 4 else f"{len(self.keep)} parts"
        keep = "".join(f"\n            {json.dumps(part)}," for part in self.keep)
        told = self.setting.calibration is not None
        own = self.setting != Setting() and not told
        lines = [
            "import layerscope as ls",
            f"from layerscope.modes import {'Setting, ' * own}mixed",
            "",
            "",
            "@ls.mode(",
            f"    {json.dumps(f'{self.mode}-planned')},",
            f"    about={json.dumps(f'{self.mode}, but for {kept}' if self.keep else f'{self.mode}, as it is')},",
            '    groups=["all", "quant_only"],',
            ")",
            f"def planned_{re.sub(r'[^0-9A-Za-z_]', '_', self.mode)}({'model, setting' if told else 'model'}):",
            *["    # The same --pretrained_dir and --calib_file give the scales that it was measured with."][:told],
            "    return mixed(",
            "        model,",
            f"        {json.dumps(self.mode)},",
            f"        keep=[{keep}{chr(10) + '        ' if keep else ''}],",
            *[f"        setting=Setting(percentile_alpha={self.setting.percentile_alpha!r}),"][:own],
            *["        setting=setting,"][:told],
            "    )",
        ]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Planned:
    """The plans of all modes that were tried, those within the budget first, the fewest bits first.

    `bits` is what the weights of the model itself take; `left_out` are modes that cannot take fewer bits than the
    first plan, or that could not be run, each with the reason.
    """

    plans: tuple[Plan, ...]
    bits: int
    left_out: tuple[tuple[str, str], ...] = ()

    @property
    def best(self) -> Plan:
        """The plan with the fewest bits within the budget; the one with the least error where none is."""
        return self.plans[0]


def plan(
    model: nn.Module,
    modes: Sequence[Mode],
    measure: Measure,
    *,
    within: float,
    setting: Setting | None = None,
    progress: Progress | None = None,
) -> Planned:
    """Find which parts of `model` to keep, for each mode, so that `measure` is at most `within`.

    A mode that takes as many bits with nothing kept as a plan that is within the budget is not tried. Raises the error
    of the last mode where none could be run.
    """
    setting = setting or Setting()
    plans: list[Plan] = []
    left_out: list[tuple[str, str]] = []
    failed: Exception | None = None

    def made(mode: Mode) -> Mixture | None:
        nonlocal failed
        try:
            return Mixture(model, mode, setting)
        except Exception as error:
            failed = error
            left_out.append((mode.name, _told(error)))
            return None

    # Each is made twice, so that two models are in memory at most.
    bare = {mode: mixture.bits() for mode in modes if (mixture := made(mode)) is not None}
    for mode in sorted(bare, key=lambda mode: bare[mode]):
        least = min((found.bits for found in plans if found.is_within), default=None)
        if least is not None and bare[mode] >= least:
            left_out.append((mode.name, "it takes no fewer bits than that, even with nothing kept"))
        elif (mixture := made(mode)) is not None:
            try:
                plans.append(_Search(mixture, measure, within, setting, progress).plan())
            except Exception as error:
                failed = error
                left_out.append((mode.name, _told(error)))
    if not plans:
        raise failed or Unsupported("there is no mode to plan with.")
    return Planned(tuple(sorted(plans, key=_order)), stored_bits(model), tuple(left_out))


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _order(found: Plan) -> tuple[bool, float, float]:
    error = math.inf if math.isnan(found.error) else found.error
    return (not found.is_within, found.bits if found.is_within else error, error)


# What a budget is of ----------------------------------------------------------------------------


def last_layer_error(model: nn.Module, batches: Sequence[Inputs]) -> Measure:
    """Measure the relative L2 error of the last decoder layer's output, over all batches."""
    last = stack_of(model)[-1]

    def outputs(host: nn.Module, dtype: torch.dtype | None) -> list[torch.Tensor]:
        found = []
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for batch in batches:
                with layer_outputs(host, [last]) as seen:
                    plain_forward(host, fitted(batch, host, dtype=dtype))
                found.append(seen[last])
        return found

    wanted = outputs(model, None)
    return lambda host, dtype: relative_l2(outputs(host, dtype), wanted)


def perplexity_increase(model: nn.Module, windows: Sequence[torch.Tensor]) -> Measure:
    """Measure by which share the perplexity is above the model's own: 0.05 is five percent more."""
    own = perplexity(model, windows)
    return lambda host, dtype: perplexity(host, windows, dtype=dtype) / own - 1


# The search -------------------------------------------------------------------------------------


class _Search:
    """One mode: what was tried, and how far off it was."""

    def __init__(
        self, mixture: Mixture, measure: Measure, within: float, setting: Setting, progress: Progress | None
    ) -> None:
        self.mixture, self.measure, self.within, self.setting = mixture, measure, within, setting
        self.progress = progress
        self.tried: dict[frozenset[str], float] = {}

    def plan(self) -> Plan:
        bare = self.error((), "nothing kept")
        keep = frozenset[str]() if bare <= self.within else self.kept(bare)
        ordered = tuple(part for part in self.mixture.parts if part in keep)
        own = mixed(self.mixture.model, self.mixture.mode, keep=ordered, setting=self.setting)
        error = self.measure(own, self.mixture.dtype(ordered))
        return Plan(
            self.mixture.mode.name,
            ordered,
            error,
            error <= self.within,
            bare,
            self.mixture.bits(ordered),
            len(self.tried),
            self.setting,
        )

    def kept(self, bare: float) -> frozenset[str]:
        """Return the parts to keep: the fewest bits that were found within the budget, else the least error."""
        shares = sensitivities(self.mixture, bare, self.error)
        found = [few for order in self.orders(shares) if (few := self.fewest(order)) is not None]
        tried = {kept: error for kept, error in self.tried.items() if self.saves(kept)}
        alone = [kept for kept, error in tried.items() if error <= self.within]
        if not alone and not found:
            return min(tried, key=lambda kept: (_comparable(tried[kept]), len(kept)))
        best = min((*found, *alone), key=self.cost)
        by_harm = sorted(shares, key=lambda share: _comparable(share.alone))
        return self.without_the_needless(best, [share.name for share in by_harm])

    def orders(self, shares: Sequence[Share]) -> list[list[str]]:
        """Rank the parts in two ways, by what returns without one and by what one does alone, for the bits it costs."""
        price = {part: max(self.mixture.bits([part]) - self.mixture.bits(), 1) for part in self.mixture.parts}

        def ranked(worth: dict[str, float]) -> list[str]:
            # Worth that is nothing, or not a number, comes last, whatever it costs.
            return sorted(worth, key=lambda part: (not worth[part] > 0, -worth[part] / price[part]))

        by_return = ranked({share.name: share.returned for share in shares})
        by_harm = ranked({share.name: share.alone**2 for share in shares})
        return [by_return] if by_return == by_harm else [by_return, by_harm]

    def fewest(self, order: Sequence[str]) -> frozenset[str] | None:
        """Return the shortest beginning of the order that is within the budget, where one that saves bits is."""
        low, high = 0, max(count for count in range(len(order)) if self.saves(order[:count]))
        if not self.error(order[:high], f"{high} kept") <= self.within:
            return None
        while high - low > 1:  # `low` parts are too few, `high` are enough
            middle = (low + high) // 2
            enough = self.error(order[:middle], f"{middle} kept") <= self.within
            low, high = (low, middle) if enough else (middle, high)
        return frozenset(order[:high])

    def without_the_needless(self, kept: frozenset[str], order: Sequence[str]) -> frozenset[str]:
        """Put parts back into the mode, the least harmful first, until none can be."""
        for part in order:
            if part in kept and self.error(kept - {part}, f"{part} put back") <= self.within:
                return self.without_the_needless(kept - {part}, order)
        return kept

    def saves(self, kept: Collection[str]) -> bool:
        """Tell whether a layer is left in the mode, and bits are saved where the mode saves any."""
        bare, own = self.mixture.bits(), self.mixture.bits(self.mixture.parts)
        left = any(name not in kept for name in self.mixture.layers)
        return left and (bare >= own or self.mixture.bits(kept) < own)

    def cost(self, kept: frozenset[str]) -> tuple[int, int]:
        return self.mixture.bits(kept), len(kept)

    def error(self, kept: Collection[str], what: str) -> float:
        """Run the mixed model; what was run before is known."""
        key = frozenset(kept)
        if key not in self.tried:
            if self.progress is not None:
                self.progress(f"{self.mixture.mode.name}: {what}", len(self.tried), 0)
            with self.mixture.keeping(key) as host:
                self.tried[key] = self.measure(host, self.mixture.dtype(key))
        return self.tried[key]


def _comparable(error: float) -> float:
    return math.inf if math.isnan(error) else error
