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

_REPOSITORY = Path(__file__).parents[1]
_FIRST_PORT = 29_600
_SERVERS = re.compile(r"bytescheduler.*, (\d+) servers")


def measured_steps(
    link: ShapedLink, configuration: Configuration, contenders: Sequence[str], *, steps: int, rounds: int
) -> dict[str, list[float]]:
    """Medians of each round, in seconds, by contender.

    Raises:
        MeasurementFailed: If a rank fails.
    """
    n = configuration.workers
    work = {"emulated": asdict(configuration), "contenders": [*contenders] * rounds, "steps": steps}
    environment = {"NODES": str(n), "WORLD_SIZE": str(n), "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    environment["MASTER_PORT"] = str(_FIRST_PORT)
    found: dict[str, list[float]] = {name: [] for name in contenders}
    children: list[subprocess.Popen[bytes]] = []
    try:
        for host in range(n):
            command = [sys.executable, "-m", "benchmarks.rank", json.dumps(work)]
            out = subprocess.PIPE if host == 0 else subprocess.DEVNULL
            rank = link.popen(host, command, env=environment, cwd=_REPOSITORY, stdin=subprocess.PIPE, stdout=out)
            children.append(rank)
        # Each fit has a rendezvous of its own, and its servers wait for it there.
        for number, name in enumerate([*contenders] * rounds):
            servers = _SERVERS.fullmatch(name)
            for k in range(int(servers[1]) if servers else 0):
                command = [sys.executable, "-m", "lightning_bytescheduler", "server", "--master-addr", link.address(0)]
                command += ["--master-port", str(_FIRST_PORT + number), "--timeout", "600"]
                children.append(link.popen(n + k, command, env=environment, cwd=_REPOSITORY, stdout=subprocess.DEVNULL))
        output = children[0].stdout
        for line in output or ():
            if line.startswith(b"{"):
                result = json.loads(line)
                found[result["contender"]].append(statistics.median(result["seconds"]))
        if children[0].wait() or not all(found.values()):
            raise MeasurementFailed(f"Rank 0 ended with {children[0].returncode}.")
    finally:
        stop_sessions(children)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parameter_servers", description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, nargs="+", default=[0, 2, 4])
    parser.add_argument("--mbit", type=float, default=300.0, help="of each link (default: %(default)s)")
    parser.add_argument("--megabytes", type=float, default=15.0, help="of gradients (default: %(default)s)")
    parser.add_argument("--ratios", type=float, nargs="+", default=[2.0, 8.0])
    parser.add_argument("--network", default="uniform")
    parser.add_argument("--steps", type=int, default=8, help="measured, of each contender (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--partition", type=int, help="parameters, with servers (default: the strategy's)")
    parser.add_argument("--credit", type=int, help="parameters, with servers (default: the strategy's)")
    asked = parser.parse_args(arguments)
    console = Console()
    sizes = f", partition {asked.partition}, credit {asked.credit}" if asked.partition and asked.credit else ""
    contenders = [ALONE, "bytescheduler, overlapped", *(f"bytescheduler{sizes}, {k} servers" for k in asked.servers)]
    base = Configuration(
        network=asked.network, ratio=1.0, workers=asked.workers, mbit=asked.mbit, megabytes=asked.megabytes
    )
    n = asked.workers
    with (
        ShapedLink(hosts=n + max(asked.servers), mbit=asked.mbit) as link,
        Progress(console=console, transient=True) as progress,
    ):
        for ratio in progress.track(asked.ratios, description="ratios"):
            found = measured_steps(link, replace(base, ratio=ratio), contenders, steps=asked.steps, rounds=asked.rounds)
            table = Table(title=f"{n} workers, {asked.mbit:g} Mbit/s, ratio {ratio:g}")
            for column in ("", "step, ms", "all-reduce's step / this one", "communication by formula, ms"):
                table.add_column(column, justify="left" if not column else "right")
            first = statistics.median(found[contenders[1]])
            for name in contenders:
                step, servers = statistics.median(found[name]), _SERVERS.fullmatch(name)
                own = replace(base.link, architecture="ps", servers=int(servers[1])) if servers else base.link
                formula = "" if name == ALONE else f"{1e3 * own.seconds_per_byte * asked.megabytes * 1e6:.0f}"
                table.add_row(name, f"{1e3 * step:.0f}", f"{first / step:.2f}", formula)
            console.print(table)


if __name__ == "__main__":
    main()
