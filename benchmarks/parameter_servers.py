"""Parameter servers on spare machines, beside all-reduces: ``python -m benchmarks.parameter_servers`` (root).

Hosts are network namespaces on links of one rate: some train, the others are servers. An emulated accelerator leaves
the processor free. Where communication takes eight times as long as computing, a step is about as long as its
communication, which is what BytePS's formula is about: ``2n(n-1)/(n^2+kn-2k)`` bytes over bandwidth.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.configuration import Configuration
from benchmarks.contenders import ALONE
from benchmarks.measure import MeasurementFailed
from benchmarks.shaped_link import ShapedLink, stop_sessions
from lightning_bytescheduler.collectives.push_pull import spare_share

_REPOSITORY = Path(__file__).parents[1]
_FIRST_PORT = 29_600
_SERVERS = re.compile(r"bytescheduler.*, (\d+) servers(, by node)?")


def crossings(workers: int, each: int, servers: int, *, by_node: bool) -> float:
    """How often a byte of gradients leaves a host, on average; for one rank on each, BytePS's formula.

    Args:
        workers: Ranks.
        each: Ranks of a host.
        servers: Spare ones.
        by_node: Whether the ranks of a host add up gradients first.
    """
    pushers, own = (workers // each, 1) if by_node else (workers, each)
    spare = spare_share(pushers, servers)
    away = (pushers - own) / pushers  # of the ranks: what goes to these from one crosses the link, and back
    return own * (spare + (1 - spare) * 2 * away)


def measured_steps(
    link: ShapedLink, configuration: Configuration, contenders: Sequence[str], *, steps: int, rounds: int, each: int = 1
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of a step, and of it those in which gradients travelled on rank 0, of each round by contender.

    Of steps that is the median, of their communication the mean: from the first part that is sent to the last that has
    arrived, without pauses.

    Args:
        link: Hosts for ranks, then for servers.
        configuration: What is trained.
        contenders: How.
        steps: Of each fit, measured.
        rounds: Fits of each contender.
        each: Ranks of a host.

    Raises:
        MeasurementFailed: If a rank fails.
    """
    n = configuration.workers
    work = {"emulated": asdict(configuration), "contenders": [*contenders] * rounds, "steps": steps}
    hosts = n // each
    environment = {"NODES": str(hosts), "WORLD_SIZE": str(n), "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    environment |= {"MASTER_PORT": str(_FIRST_PORT), "RANKS_PER_NODE": str(each)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    children: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(n):
            host, local = divmod(number, each)
            own = {**environment, "RANK": str(number), "LOCAL_RANK": str(local)}
            command = [sys.executable, "-m", "benchmarks.rank", json.dumps(work)]
            out = subprocess.PIPE if number == 0 else subprocess.DEVNULL
            rank = link.popen(host, command, env=own, cwd=_REPOSITORY, stdin=subprocess.PIPE, stdout=out)
            children.append(rank)
        # Each fit has a rendezvous of its own, and its servers wait for it there.
        for number, name in enumerate([*contenders] * rounds):
            servers = _SERVERS.fullmatch(name)
            for k in range(int(servers[1]) if servers else 0):
                command = [sys.executable, "-m", "lightning_bytescheduler", "server", "--master-addr", link.address(0)]
                command += ["--master-port", str(_FIRST_PORT + number), "--timeout", "600"]
                children.append(
                    link.popen(hosts + k, command, env=environment, cwd=_REPOSITORY, stdout=subprocess.DEVNULL)
                )
        output = children[0].stdout
        for line in output or ():
            if line.startswith(b"{"):
                result = json.loads(line)
                travelled = result["account"].get("communication", 0.0)
                found[result["contender"]].append((statistics.median(result["seconds"]), travelled))
        if children[0].wait() or not all(found.values()):
            raise MeasurementFailed(f"Rank 0 ended with {children[0].returncode}.")
    finally:
        stop_sessions(children)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parameter_servers", description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--ranks-per-node", type=int, default=1, help="which share a link (default: 1)")
    parser.add_argument("--servers", type=int, nargs="+", default=[0, 2, 4])
    parser.add_argument("--mbit", type=float, default=300.0, help="of each link (default: %(default)s)")
    parser.add_argument("--megabytes", type=float, default=15.0, help="of gradients (default: %(default)s)")
    parser.add_argument("--ratios", type=float, nargs="+", default=[2.0, 8.0])
    parser.add_argument("--network", default="uniform")
    parser.add_argument("--steps", type=int, default=8, help="measured, of each contender (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--partition", type=int, help="parameters, with servers (default: the strategy's)")
    parser.add_argument("--credit", type=int, help="parameters, with servers (default: the strategy's)")
    parser.add_argument("--congestion-control", help="of TCP, such as reno or bbr (default: the machine's)")
    asked = parser.parse_args(arguments)
    console = Console()
    sizes = f", partition {asked.partition}, credit {asked.credit}" if asked.partition and asked.credit else ""
    contenders, each = [ALONE, "bytescheduler, overlapped"], asked.ranks_per_node
    for by_node in ("", ", by node") if each > 1 else ("",):
        contenders += [f"bytescheduler{sizes}, {k} servers{by_node}" for k in asked.servers]
    base = Configuration(
        network=asked.network, ratio=1.0, workers=asked.workers, mbit=asked.mbit, megabytes=asked.megabytes
    )
    n = asked.workers
    with (
        ShapedLink(
            hosts=n // each + max(asked.servers), mbit=asked.mbit, congestion_control=asked.congestion_control
        ) as link,
        Progress(console=console, transient=True) as progress,
    ):
        for ratio in progress.track(asked.ratios, description="ratios"):
            configuration = replace(base, ratio=ratio)
            found = measured_steps(link, configuration, contenders, steps=asked.steps, rounds=asked.rounds, each=each)
            table = Table(title=f"{n} workers, {each} on each host, {asked.mbit:g} Mbit/s, ratio {ratio:g}")
            for column in ("", "step, ms", "all-reduce's step / this one", "communication, ms", "by formula, ms"):
                table.add_column(column, justify="left" if not column else "right")
            first = statistics.median(step for step, _ in found[contenders[1]])
            for name in contenders:
                step, travelled = (statistics.median(each) for each in zip(*found[name], strict=True))
                servers = _SERVERS.fullmatch(name)
                times = 2 * (n - 1) / n  # a ring crosses each host's link once
                if servers:
                    times = crossings(n, each, int(servers[1]), by_node=bool(servers[2]))
                seconds = times * asked.megabytes * 1e6 / base.link.bandwidth
                formula = "" if name == ALONE else f"{1e3 * seconds:.0f}"
                seen = f"{1e3 * travelled:.0f}" if travelled else ""
                table.add_row(name, f"{1e3 * step:.0f}", f"{first / step:.2f}", seen, formula)
            console.print(table)


if __name__ == "__main__":
    main()
