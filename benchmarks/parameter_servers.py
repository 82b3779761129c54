"""Parameter servers on spare machines, beside all-reduces (root).

Hosts are network namespaces on links of one rate: some train, the others are servers. An emulated accelerator leaves
the processor free. Where communication takes eight times as long as computing, a step is about as long as its
communication, which is what BytePS's formula is about: ``2n(n-1)/(n^2+kn-2k)`` bytes over bandwidth.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict

from benchmarks.configuration import Configuration
from benchmarks.contenders import ALONE
from benchmarks.networks import train
from benchmarks.ranks import FIRST_PORT, REPOSITORY, Job, Place, ranks_of
from benchmarks.record import Record, Results, record
from lightning_bytescheduler.collectives.push_pull import spare_share

_SERVERS = re.compile(r"bytescheduler.*, (\d+) servers(, by node)?")
_ALL_REDUCE = "bytescheduler, overlapped"


def crossings(workers: int, each: int, servers: int, *, by_node: bool) -> float:
    """How often a byte of gradients leaves a host, on average; for one rank on each, BytePS's formula.

    A host has ``each`` of the ranks; with ``by_node`` these add up gradients first. Servers are spare ones.
    """
    pushers, own = (workers // each, 1) if by_node else (workers, each)
    spare = spare_share(pushers, servers)
    away = (pushers - own) / pushers  # of the ranks: what goes to these from one crosses the link, and back
    return own * (spare + (1 - spare) * 2 * away)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--ranks-per-node", type=int, default=1, help="which share a link (default: 1)")
    parser.add_argument("--servers", type=int, nargs="+", default=[0, 2, 4])
    parser.add_argument("--mbit", type=float, default=300.0, help="rate of each link (default: %(default)s)")
    parser.add_argument("--megabytes", type=float, default=15.0, help="size of all gradients (default: %(default)s)")
    parser.add_argument("--ratios", type=float, nargs="+", default=[2.0, 8.0])
    parser.add_argument("--network", default="uniform")
    parser.add_argument("--steps", type=int, default=8, help="measured, of each contender (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--partition", type=int, help="parameters, with servers (default: the strategy's)")
    parser.add_argument("--credit", type=int, help="parameters, with servers (default: the strategy's)")


def measure(options: argparse.Namespace) -> Iterator[Results]:
    sizes = f", partition {options.partition}, credit {options.credit}" if options.partition and options.credit else ""
    each = options.ranks_per_node
    kinds = ("", ", by node") if each > 1 else ("",)
    served = [f"bytescheduler{sizes}, {k} servers{by_node}" for by_node in kinds for k in options.servers]
    place = Place(ranks=options.workers, each=each, mbit=options.mbit, spare=max(options.servers))
    kind = {"network": options.network, "mbit": options.mbit, "megabytes": options.megabytes}
    for ratio in options.ratios:
        asked = Configuration(ratio=ratio, workers=options.workers, **kind)
        work = {"emulated": asdict(asked), "steps": options.steps}
        turns = [ALONE, _ALL_REDUCE, *served] * options.rounds
        answers = _answers(place, [{**work, "contender": name} for name in turns])
        found: dict[str, list[Job]] = {}
        for name, answer in zip(turns, answers, strict=True):
            found.setdefault(name, []).append(answer)
        yield (
            f"{options.workers} workers, {each} on each host, {options.mbit:g} Mbit/s, ratio {ratio:g}",
            [_record(name, found, asked, place) for name in found],
        )


def _answers(place: Place, jobs: list[Job]) -> list[Job]:
    """Rank 0's answers to all jobs. Each job has its own servers, which wait for it at its rendezvous."""
    with ranks_of(place, train, jobs) as ranks:
        link = ranks.link
        if link is None:
            raise ValueError("Parameter servers are measured on links.")
        for number, job in enumerate(jobs):
            servers = _SERVERS.fullmatch(job["contender"])
            for k in range(int(servers[1]) if servers else 0):
                command = [sys.executable, "-m", "lightning_bytescheduler", "server", "--master-addr", link.address(0)]
                command += ["--master-port", str(FIRST_PORT + number), "--timeout", "600"]
                link.popen(
                    place.hosts + k, command, env=place.environment(0), cwd=REPOSITORY, stdout=subprocess.DEVNULL
                )
        return [answers[0] for answers in ranks.results()]


def _record(name: str, found: dict[str, list[Job]], asked: Configuration, place: Place) -> Record:
    steps = {one: [statistics.median(answer["seconds"]) for answer in rounds] for one, rounds in found.items()}
    servers, n = _SERVERS.fullmatch(name), asked.workers
    # A ring crosses each host's link once.
    times = crossings(n, place.each, int(servers[1]), by_node=bool(servers[2])) if servers else 2 * (n - 1) / n
    travelled = [1e3 * answer["account"].get("communication", 0.0) for answer in found[name]]
    values: dict[str, list[float]] = {
        "step [ms]": [1e3 * seconds for seconds in steps[name]],
        "communication [ms]": travelled if any(travelled) else [],
        "by formula [ms]": [] if name == ALONE else [1e3 * times * asked.megabytes * 1e6 / asked.link.bandwidth],
    }
    faster = statistics.median(steps[_ALL_REDUCE]) / statistics.median(steps[name])
    setting = {**asdict(asked), "each": place.each, "steps": len(found[name][0]["seconds"])}
    return record("parameter_servers", name, setting, values, {"all-reduce's step / this one": faster})
