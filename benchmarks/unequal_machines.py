"""Balanced batches against equal ones, on machines of unequal speed.

Speeds are simulated by sleeping (``examples/unequal.py``); the text, the model's arithmetic and the communication are
real. A step is the median of the second half of a fit. Contenders take turns in the same processes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from benchmarks.picture import Line, Panel
from benchmarks.rank import Moments, fit
from benchmarks.ranks import Job, Place, by_contender
from benchmarks.record import Record, Results, record
from examples.demo.text import Windows, training_and_validation_text
from examples.unequal import LENGTH, Reader
from lightning_bytescheduler import ByteSchedulerStrategy

_CONTENDERS: dict[str, dict[str, Any]] = {
    "ranks": {},
    "samples": {"weighting": "samples"},
    "balanced": {"weighting": "samples", "batch_size": "balanced"},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Machines, and how long they are watched."""

    speeds: tuple[float, ...]
    sample_ms: float = 3.0  # what a sample takes a machine of speed 1
    steps: int = 80
    slows: int | None = None  # step from which the last machine takes three times as long
    contenders: tuple[str, ...] = ("samples", "balanced")

    @property
    def ceiling(self) -> float:
        """How many times faster the best shares are than equal ones, if nothing but samples took time."""
        return sum(self.speeds) / len(self.speeds) / min(self.speeds)


CASES: dict[str, Case] = {
    "1:3": Case(speeds=(1.0, 3.0), sample_ms=10.0, steps=50),
    "1:8, four ranks": Case(speeds=(1.0, 8.0, 8.0, 8.0), sample_ms=48.0, steps=40),
    "alike": Case(speeds=(1.0, 1.0), steps=120, contenders=("ranks", "samples", "balanced")),
    "one slows": Case(speeds=(1.0, 1.0), sample_ms=1.5, steps=140, slows=60, contenders=("balanced",)),
}


class _Watches(Moments):
    """Also notes, by step, the samples of all ranks and how long this rank did not compute."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.shares: list[Sequence[int]] = []
        self.waited: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end()
        strategy = trainer.strategy
        assert isinstance(strategy, ByteSchedulerStrategy)
        plan, equal = strategy.plan, (len(batch[0]),) * len(self.case.speeds)
        self.shares.append(plan.batch_shares if plan is not None and plan.batch_shares else equal)
        # Where a rank waits for another one, Lightning's own collectives are among the places.
        computed = module.seconds[trainer.global_rank] * len(batch[0])
        self.waited.append(self.seen[-1] - self.seen[-2] - computed)
        if trainer.global_step == self.case.slows:
            module.seconds[-1] *= 3.0


def train(job: Job) -> Job:
    """One fit, on this rank."""
    case = Case(**job["case"])
    data = Windows(training_and_validation_text()[0], LENGTH)
    watches = _Watches(case)
    torch.manual_seed(1)
    strategy = ByteSchedulerStrategy(mode="overlapped", tuning=False, **_CONTENDERS[job["contender"]])
    model = Reader([1e-3 * case.sample_ms / speed for speed in case.speeds])
    loader = DataLoader(data, batch_size=32, shuffle=True)
    fit(model, strategy, loader, callbacks=[watches], max_steps=case.steps)
    return {"seconds": watches.steps(), "shares": watches.shares, "waited": watches.waited}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--rounds", type=int, default=1)


def measure(options: argparse.Namespace) -> Iterator[Results]:
    for name in options.only:
        case = CASES[name]
        place = Place(ranks=len(case.speeds), each=len(case.speeds))
        work = {"case": asdict(case), "rounds": options.rounds}
        found = by_contender(place, train, case.contenders, title=name, **work)
        setting = {"case": name, **asdict(case)}
        yield f"{name} (at most {case.ceiling:.2f} times faster)", _records(case, setting, found)


def _records(case: Case, setting: Job, found: dict[str, list[list[Job]]]) -> list[Record]:
    steps = {
        contender: [s for answers in fits for s in answers[0]["seconds"][case.steps // 2 :]]
        for contender, fits in found.items()
    }
    first = statistics.median(steps[case.contenders[0]])
    records = []
    for contender, fits in found.items():
        first_fit = fits[0]
        shares = first_fit[0]["shares"]
        values: dict[str, float] = {"step [ms]": 1e3 * statistics.median(steps[contender])}
        values |= {f"samples of rank {rank}": float(share) for rank, share in enumerate(shares[-1])}
        if case.slows is not None:
            changed = [n for n in range(case.slows, len(shares)) if shares[n] != shares[case.slows - 1]]
            values |= {"other shares after [steps]": float(changed[0] + 1 - case.slows)} if changed else {}
        faster = {f"times faster than {case.contenders[0]}": first / statistics.median(steps[contender])}
        waited = [[1e3 * seconds for seconds in of_rank["waited"]] for of_rank in first_fit]
        seen = {"shares": shares, "waited_ms": waited}
        records.append(record("unequal_machines", contender, setting, values, faster, **seen))
    return records


def panels(records: Sequence[Record]) -> list[list[Panel]]:
    """Shares and waiting over time, of the first balanced fit in which a machine slows."""
    one = next((one for one in records if one.what == "balanced" and one.setting["slows"] is not None), None)
    if one is None:
        return []
    shares, waited, at = one.seen["shares"], one.seen["waited_ms"], one.setting["slows"] + 0.5
    by_rank = {f"rank {rank}": [float(share[rank]) for share in shares] for rank in range(len(waited))}
    style: dict[str, Any] = {"marker": "", "drawstyle": "steps-mid"}
    above = [Line(label=label, points=list(enumerate(some, 1)), style=style) for label, some in by_rank.items()]
    below = [
        Line(label=f"rank {n}", points=list(enumerate(some, 1)), style={"marker": ""}) for n, some in enumerate(waited)
    ]
    return [
        [Panel(lines=above, x="step", y="samples of a batch", at=at)],
        [Panel(lines=below, x="step", y="not computing (ms)", at=at)],
    ]
