"""Measures whether ``bytescheduler`` is slower than ``ddp`` where there is nothing to gain; without root.

Two ranks on loopback, each on a processor of its own, train a model with real compute under ``ddp`` and under
``bytescheduler`` as it is by default, in turns and in both orders (ddp, ours, ours, ddp, ...), in the same processes.
Each pair of neighbours gives one ratio for each window of steps; medians of the ratios are printed, with the smallest
and the largest. A first pair of a few steps, with what a process loads once, does not count.

``--steps 60`` measures a short fit, ``--steps 500`` gives the first 100 steps, the first 500, and steps 200 to 450.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.contenders import contender
from benchmarks.models import REAL_MODELS
from benchmarks.rank import Moments, fit
from benchmarks.ranks import Job, Place, in_turns
from benchmarks.record import Record, Results, record
from lightning_bytescheduler import ByteSchedulerStrategy

_WINDOWS = ((0, 60), (0, 100), (0, 500), (200, 450))
_WARM_UP_STEPS = 20


def train(job: Job) -> Job:
    """Do one fit on this rank; says when each step ended, from the call of ``fit`` on."""
    moments = Moments()
    strategy = contender(job["contender"]).strategy()
    ours = strategy if isinstance(strategy, ByteSchedulerStrategy) else None
    model, start = REAL_MODELS[job["model"]](), time.perf_counter()
    steps: dict[str, Any] = {"max_steps": job["steps"], "use_distributed_sampler": False}
    fit(model, strategy, callbacks=[moments], **steps)
    ended = time.perf_counter() - start
    plan = None if ours is None else ours.plan
    return {
        "contender": job["contender"],
        "moments": [moment - start for moment in moments.seen],
        "ended": ended,
        "overlapped_steps": 0 if ours is None or ours.statistics is None else ours.statistics.overlapped_steps,
        "plan": "" if plan is None else plan.summary(),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=REAL_MODELS, default="100 layers")
    parser.add_argument("--steps", type=int, default=500, help="steps of each fit (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=8, help="fits of each (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--contender", default="bytescheduler", help="what is compared with ddp (default: %(default)s)")


def measure(options: argparse.Namespace) -> Iterator[Results]:
    turns = [(name, _WARM_UP_STEPS) for name in ("ddp", options.contender)]
    turns += [(name, options.steps) for name in order(options.contender, options.pairs)]
    jobs = [{"contender": name, "steps": steps, "model": options.model} for name, steps in turns]
    place = Place(ranks=options.workers, each=options.workers, own_processors=True)
    fits = [answers[0] for answers in in_turns(place, train, jobs, title="fits")]
    setting = {name: getattr(options, name) for name in ("model", "steps", "pairs", "workers", "contender")}
    title = f"{options.contender} / ddp: {options.model}, {options.workers} ranks, {options.pairs} pairs"
    yield title, records_of(fits[2:], setting)


def order(ours: str, pairs: int) -> list[str]:
    """Whose turn it is, without the first pair."""
    return [name for n in range(pairs) for name in (("ddp", ours) if n % 2 == 0 else (ours, "ddp"))]


def windows_of(steps: int) -> list[tuple[int, int]]:
    """Windows of steps that a fit of ``steps`` shows, the whole fit first."""
    return list(dict.fromkeys([(0, steps), *(window for window in _WINDOWS if window[1] <= steps)]))


def ratios(fits: Sequence[Job], window: tuple[int, int]) -> list[float]:
    """Ours over ddp's, of each pair of neighbours."""
    found = []
    for one, other in zip(fits[::2], fits[1::2], strict=True):
        ddp, ours = (one, other) if one["contender"] == "ddp" else (other, one)
        found.append(_seconds_in(ours, window) / _seconds_in(ddp, window))
    return found


def _seconds_in(fit: Job, window: tuple[int, int]) -> float:
    first, last = window
    taken: float = fit["moments"][last] - fit["moments"][first]
    return taken


def records_of(fits: Sequence[Job], setting: Job) -> list[Record]:
    """A record for each window of steps, and for what is around them."""
    both = {
        "ddp": [one for one in fits if one["contender"] == "ddp"],
        "ours": [one for one in fits if one["contender"] != "ddp"],
    }
    rows = []
    for window in windows_of(setting["steps"]):
        first, last = window
        a_step = {
            f"{who} [ms]": [1e3 * _seconds_in(one, window) / (last - first) for one in some]
            for who, some in both.items()
        }
        rows.append((f"a step, {first} to {last}", a_step, {"ours / ddp": ratios(fits, window)}))
    begun = {f"{who} [ms]": [1e3 * one["moments"][0] for one in some] for who, some in both.items()}
    whole = {f"{who} [ms]": [1e3 * one["ended"] for one in some] for who, some in both.items()}
    rows += [("before the first step", begun, {}), ("the whole fit", whole, {})]
    more = {"overlapped_steps": [one["overlapped_steps"] for one in both["ours"]], "plan": both["ours"][-1]["plan"]}
    return [record("never_slower", what, setting, values, over, **more) for what, values, over in rows]
