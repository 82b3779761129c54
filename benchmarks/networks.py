"""Steps of four networks on links of limited rate (root), and of real models, beside DDP with several bucket sizes.

Hosts are network namespaces, and an emulated accelerator leaves the processor free, see ``emulation.py``. A table for
each network, number of workers and ratio of communication to computation. Without root only loopback is measured.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L

from benchmarks.configuration import Configuration
from benchmarks.contenders import ALONE, DDP_BUCKETS, contender
from benchmarks.delayed_link import DelayedLink
from benchmarks.emulation import EmulatedModel
from benchmarks.models import REAL_MODELS
from benchmarks.rank import Moments, fit
from benchmarks.ranks import Job, MeasurementFailed, Place, by_contender
from benchmarks.record import Record, Results, record
from benchmarks.shaped_link import ShapedLink
from lightning_bytescheduler.predicting.profiles import NETWORKS

_WARM_UP_STEPS = 5
_DDP = ["ddp", *(f"ddp, {size} MB buckets" for size in DDP_BUCKETS)]
_OURS = "bytescheduler, overlapped"
_EMULATED = [ALONE, *_DDP, "ddp, bf16 on the wire", _OURS, "bytescheduler, norm clipping"]
_REAL = [ALONE, *_DDP, _OURS]
_LOOPBACK = ["ddp", "bytescheduler, as ddp", "bytescheduler"]
_ALONE_WITHOUT = ("WORLD_SIZE", "RANK", "NODE_RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class _Steps(Moments):
    """Also counts bytes and seconds between the first step that counts and the last."""

    def __init__(self) -> None:
        super().__init__()
        self.accounts: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, model: L.LightningModule, *_: Any) -> None:
        super().on_train_batch_end()
        if len(self.seen) > 1 + _WARM_UP_STEPS:
            self.accounts.append(_account(trainer))

    def answer(self) -> Job:
        """Seconds of each step, and the figures of an average step."""
        first, last = self.accounts[0], self.accounts[-1]
        steps = max(len(self.accounts) - 1, 1)
        account = {name: (last[name] - first[name]) / steps for name in first}
        return {"seconds": self.steps(1 + _WARM_UP_STEPS), "account": account}


def _account(trainer: L.Trainer) -> dict[str, float]:
    """What this rank has sent, how long it has computed, and what its strategy has counted, so far."""
    found = {"sent": _sent_bytes(), "processor": time.process_time()}
    known = getattr(trainer.strategy, "statistics", None)
    if known is not None:
        seconds = {"gates": known.gate_wait_s, "exposed": known.exposed_s, "communication": known.communication_s}
        found |= {"deferred steps": known.deferred_step_s, **seconds, "gradient bytes": known.bytes_uncompressed}
    return found


def _sent_bytes() -> float:
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "eth0":
            return int(counters.split()[8])
    return 0


def train(job: Job) -> Job:
    """Train one contender on this rank."""
    chosen = contender(job["contender"])
    model: L.LightningModule
    if "emulated" in job:
        asked = Configuration(**job["emulated"])
        kind: dict[str, Any] = {"runs_ahead": asked.runs_ahead, "raw": asked.raw_kernels}
        model = EmulatedModel(asked.profile, statistics=asked.statistics, **kind)
    else:
        model = REAL_MODELS[job["model"]]()
    steps, before = _Steps(), dict(os.environ)
    options: dict[str, Any] = {"max_steps": _WARM_UP_STEPS + job["steps"] + 1, "use_distributed_sampler": False}
    if chosen.name == ALONE:
        options |= {"devices": 1, "num_nodes": 1}
        for name in _ALONE_WITHOUT:
            os.environ.pop(name, None)
    try:
        fit(model, chosen.strategy(), callbacks=[steps], **options, **chosen.trainer)
    finally:
        os.environ.update(before)
    return steps.answer()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--ratios", nargs="*", type=float, default=[0.25, 0.5, 1.0, 2.0, 4.0], metavar="RATIO")
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4], metavar="N")
    parser.add_argument("--megabytes", type=float, default=30.0, help="size of all gradients (default: %(default)g)")
    parser.add_argument("--not-ahead", action="store_true", help="an accelerator that is a sleep in each layer")
    parser.add_argument("--raw-kernels", action="store_true", help="only custom autograd functions get the weights")
    parser.add_argument("--statistics", type=int, default=0, help="batch normalizations of each layer (default: none)")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", default=_EMULATED[1:], help="beside 'alone'")
    parser.add_argument("--mbit", type=float, default=500.0, help="rate of each worker's link (default: %(default)g)")
    far = "round trip of one more link, for the first network, ratio 1, most workers; 0: none (default: %(default)g)"
    parser.add_argument("--round-trip-ms", type=float, default=20.0, metavar="MS", help=far)
    parser.add_argument("--real", nargs="*", choices=REAL_MODELS, default=list(REAL_MODELS), help="real models")
    parser.add_argument("--real-mbit", type=float, default=700.0, help="link of the real models (default: %(default)g)")
    parser.add_argument("--steps", type=int, default=15, help="measured steps a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds over all contenders (default: %(default)s)")


def measure(options: argparse.Namespace) -> Iterator[Results]:
    available, reason = ShapedLink.available()
    if not available and not options.real:
        raise MeasurementFailed(reason)
    turns: dict[str, Any] = {"rounds": options.rounds, "steps": options.steps}
    for asked in _configurations(options) if available else ():
        link: dict[str, Any] = {"mbit": asked.mbit, "round_trip_seconds": asked.round_trip_seconds}
        place = Place(ranks=asked.workers, own_processors=True, **link)
        work: dict[str, Any] = {"emulated": asdict(asked), "title": asked.name}
        found = by_contender(place, train, [ALONE, *options.contenders], **work, **turns)
        yield asked.name, records_of(asdict(asked), found, asked)
    for model in options.real:
        for mbit in (None, options.real_mbit) if available else (None,):
            place = Place(ranks=2, each=2) if mbit is None else Place(ranks=2, mbit=mbit, own_processors=True)
            name = f"{model}, 2 workers, {'loopback' if mbit is None else f'{mbit:g} Mbit/s'}"
            contenders = _LOOPBACK if mbit is None else _REAL
            found = by_contender(place, train, contenders, model=model, title=name, **turns)
            yield name, records_of({"network": model, "workers": 2, "mbit": mbit}, found)


def _configurations(options: argparse.Namespace) -> Iterator[Configuration]:
    common = {"mbit": options.mbit, "megabytes": options.megabytes, "statistics": options.statistics}
    kind = {"runs_ahead": not options.not_ahead, "raw_kernels": options.raw_kernels}
    for network, workers, ratio in itertools.product(options.networks, options.workers, options.ratios):
        yield Configuration(network=network, ratio=ratio, workers=workers, **common, **kind)
    if options.round_trip_ms and DelayedLink.available()[0]:
        seconds = options.round_trip_ms / 1e3
        far = {"network": options.networks[0], "workers": max(options.workers), "round_trip_seconds": seconds}
        yield Configuration(ratio=1.0, **common, **far)


def records_of(setting: Job, found: dict[str, list[list[Job]]], asked: Configuration | None = None) -> list[Record]:
    """A record for each contender; with the bound and what the simulator expects, where an accelerator was emulated."""
    steps = {name: [seconds for ranks in rounds for seconds in ranks[0]["seconds"]] for name, rounds in found.items()}
    medians = {name: statistics.median(seconds) for name, seconds in steps.items()}
    best = min((seconds for name, seconds in medians.items() if name in _DDP), default=None)
    bound = None if asked is None else asked.bounds(medians[ALONE])["any order"]
    expected = {} if asked is None else asked.predictions(medians[ALONE])
    made = []
    for name, seconds in medians.items():
        last = found[name][-1][0]["account"]
        values: dict[str, Any] = {
            "step [ms]": [1e3 * one for one in steps[name]],
            "processor [ms]": 1e3 * last["processor"],
            "sent [MB]": last["sent"] / 1e6,
        }
        ratios = {}
        if bound is not None and not name.endswith("on the wire"):  # fewer bytes
            ratios["/ bound"] = seconds / bound
        if "ddp" in medians:
            ratios["/ ddp"] = seconds / medians["ddp"]
        if best is not None:
            ratios["/ best of ddp"] = seconds / best
        if name in expected:
            ratios["predicted / it"] = expected[name] / seconds
        made.append(record("networks", name, setting, values, ratios, account=last))
    return made
