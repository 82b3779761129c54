"""A training under torchrun's elastic agent, whose processes are killed: ``python -m tests.faults.elastic_kills``.

Several agents on this machine play the machines of a job. They run ``examples.elastic_torchrun``. At random moments a
rank is killed (SIGKILL), or an agent with its rank, as when a machine goes down; and a machine comes back. The agents
re-form the world of what is left, one rank to as many as there are agents.

Afterwards: whether the batches are those of one process, each sample once an epoch; and how far the weights are from
those of the same training without a kill, on one rank.

Agents and ranks are forked from one process that has imported everything, so that a restart takes seconds also where
processors are few.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from benchmarks.ranks import free_port
from examples import elastic_torchrun
from lightning_bytescheduler.ddp.batches import EpochOrder
from tests.support.rank_pool import end_with_parent

__all__ = ["ElasticJob", "expected_batches", "main", "run_with_kills", "weights_of"]

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def _rank(arguments: Sequence[str]) -> None:
    end_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in a new process, and not the agent's
    elastic_torchrun.main(arguments)


def _fork(run: Callable[[], object], log: Path) -> int:
    """Run something in a process; returns its number."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        end_with_parent()
        stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        run()
        code = 0
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _agent(arguments: Sequence[str], nodes: int, port: int, restarts: int) -> None:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=nodes,
        nproc_per_node=1,
        run_id="kills",
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"last_call_timeout": 1, "keep_alive_interval": 1, "is_host": False},
        max_restarts=restarts,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, _rank)(list(arguments))


def _store(port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    while store is not None:  # its threads answer, until this process is killed
        time.sleep(60.0)


class ElasticJob:
    """Agents of one job, and the ranks that they have started.

    Args:
        arguments: Arguments of the example.
        folder: Folder for logs.
        nodes: Most agents that may take part.
        restarts: Restarts of each agent until it gives up.
    """

    def __init__(self, arguments: Sequence[str], folder: Path, nodes: int, restarts: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._arguments, self._folder, self._nodes, self._restarts = arguments, folder, nodes, restarts
        self._port = free_port()
        self._store = _fork(lambda: _store(self._port), folder / "store.log")
        self._agents: dict[int, str] = {}
        self._started = 0

    def start_agent(self) -> None:
        """One machine more."""
        self._started += 1
        log = self._folder / f"agent{self._started}.log"
        self._agents[_fork(lambda: _agent(self._arguments, self._nodes, self._port, self._restarts), log)] = log.name

    @property
    def agents(self) -> list[int]:
        """Those that run; raises ``RuntimeError`` if one has failed."""
        for agent in list(self._agents):
            done, status = os.waitpid(agent, os.WNOHANG)
            if done:
                log = self._agents.pop(agent)
                if status:
                    text = (self._folder / log).read_text(errors="replace")
                    raise RuntimeError(f"An agent ended with status {status}; {log}:\n{text[-6000:]}")
        return list(self._agents)

    def rank_of(self, agent: int) -> int | None:
        """The process that an agent has started, if there is one at present."""
        text = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        return int(text[0]) if text else None

    def kill_rank(self, agent: int) -> bool:
        """Kill the process that an agent has started; returns whether there was one."""
        rank = self.rank_of(agent)
        if rank is not None:
            os.kill(rank, signal.SIGKILL)
        return rank is not None

    def kill_machine(self, agent: int) -> None:
        """Kill an agent and what it has started, at once."""
        rank = self.rank_of(agent)
        for process in (agent, rank):
            if process is not None:
                os.kill(process, signal.SIGKILL)
        os.waitpid(agent, 0)
        del self._agents[agent]

    def close(self) -> None:
        """End whatever still runs."""
        for agent in list(self._agents):
            self.kill_machine(agent)
        os.kill(self._store, signal.SIGKILL)
        os.waitpid(self._store, 0)


def steps_taken(output: Path) -> int:
    """Batches that have begun so far, as the first rank has written down."""
    files = list((output / "record").glob("*.0")) if (output / "record").exists() else []
    return sum(file.read_bytes().count(b"\n") for file in files)


def run_with_kills(
    arguments: Sequence[str],
    folder: Path,
    *,
    kills: int,
    nodes: int,
    seed: int,
    gap: tuple[int, int] = (5, 40),
    machines: float = 0.25,
    timeout: float = 380.0,
) -> dict[str, Any]:
    """Run the example to its end, and kill agents while it runs.

    Args:
        arguments: Arguments of the example, without ``--output``.
        folder: Folder for everything that is written.
        kills: How many; all happen, if the training is long enough.
        nodes: How many machines there are at most, and at first.
        seed: Seed of all random choices.
        gap: Batches from one kill to the next, at least and at most; and up to a second more.
        machines: Share of the kills that hit the machine, not just the rank.
        timeout: Longest run, in seconds.

    Returns:
        What happened.
    """
    output, draw = folder / "output", random.Random(seed)
    job = ElasticJob([*arguments, "--output", str(output)], folder / "logs", nodes, kills + 1)
    started, happened, due = time.monotonic(), {"rank": 0, "machine": 0, "joined": 0}, 0
    waits: list[float] = []
    killed_at = 0.0
    try:
        for _ in range(nodes):
            job.start_agent()
        while job.agents:
            if time.monotonic() - started > timeout:
                raise RuntimeError(f"The training takes longer than {timeout} s; {happened} so far.")
            time.sleep(0.02)
            taken = steps_taken(output)
            if killed_at and taken > due:
                waits.append(time.monotonic() - killed_at)
                killed_at = 0.0
                due = taken + draw.randint(*gap)
            if killed_at or taken < due or happened["rank"] + happened["machine"] >= kills:
                continue
            if not taken:
                due = draw.randint(*gap)
                continue
            time.sleep(draw.random() * 0.2)
            agents = job.agents
            if not agents:
                break
            if len(agents) > 1 and draw.random() < machines:
                job.kill_machine(draw.choice(agents))
                happened["machine"] += 1
            elif job.kill_rank(draw.choice(agents)):
                happened["rank"] += 1
            else:
                continue
            if len(job.agents) < nodes and draw.random() < 0.5:
                job.start_agent()
                happened["joined"] += 1
            killed_at, due = time.monotonic(), steps_taken(output)
    finally:
        job.close()
    sizes: dict[str, int] = {}
    for file in (output / "record").iterdir():
        sizes[file.stem] = sizes.get(file.stem, 0) + 1
    first = [file.read_text().splitlines()[0].split(",") for file in sorted((output / "record").glob("*.0"))]
    return {
        **happened,
        "seconds": round(time.monotonic() - started, 1),
        "starts": len(sizes),
        "first epoch, batch": [f"{epoch}, {batch}" for epoch, batch, _ in first],
        "world sizes": [sizes[start] for start in sorted(sizes, key=int)],
        "seconds from a kill to the next batch": [round(wait, 1) for wait in sorted(waits)],
    }


def expected_batches(samples: int, batch_size: int, epochs: int) -> dict[tuple[int, int], list[int]]:
    """One process's batches, by epoch and number."""
    order, found = EpochOrder(samples, seed=1), {}
    for epoch in range(epochs):
        order.set_epoch(epoch)
        numbers = list(order)
        for batch in range(-(-samples // batch_size)):
            found[epoch, batch] = numbers[batch * batch_size : (batch + 1) * batch_size]
    return found


def weights_of(file: Path) -> dict[str, torch.Tensor]:
    """Of a checkpoint."""
    state: dict[str, torch.Tensor] = torch.load(file, weights_only=True)["state_dict"]
    return state


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and print what came of it; 1 if samples were not taken as they should."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.elastic_kills", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--machines", type=float, default=0.25, help="share of kills that hit a machine")
    parser.add_argument("--strategy", default="bytescheduler", choices=["bytescheduler", "diloco"])
    parser.add_argument("--calm-ranks", type=int, default=1, help="ranks of the training without a kill (default: 1)")
    parser.add_argument("--every", type=int, default=20, help="steps from checkpoint to checkpoint (default: 20)")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8_000)
    asked = parser.parse_args(arguments)
    for name in _NAMES:
        os.environ.pop(name, None)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else the first agent keeps the store, and has to live
    options = ["--strategy", asked.strategy, "--accumulate", asked.accumulate, "--epochs", asked.epochs]
    options += ["--samples", asked.samples, "--loader-workers", asked.loader_workers, "--every", asked.every]
    words = list(map(str, options))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        happened = run_with_kills(
            words, folder / "killed", kills=asked.kills, nodes=asked.nodes, seed=asked.seed, machines=asked.machines
        )
        print(json.dumps(happened, indent=1))
        taken = elastic_torchrun.samples_by_batch(folder / "killed" / "output" / "record")
        if asked.strategy == "diloco":  # each worker draws batches of its own
            logs = (file.read_text(errors="replace") for file in (folder / "killed" / "logs").glob("agent*.log"))
            print(*re.findall(r"^validation loss .*$", "".join(logs), re.MULTILINE))
            return 0
        right = taken == expected_batches(asked.samples, 48, asked.epochs)
        print(f"Each sample once an epoch, in one process's batches: {'yes' if right else 'no'}.")
        run_with_kills([*words, "--pause", "0"], folder / "calm", kills=0, nodes=asked.calm_ranks, seed=0)
        one, other = (weights_of(folder / name / "output" / "final.ckpt") for name in ("killed", "calm"))
        apart = max(float((one[key] - weight).norm() / weight.norm()) for key, weight in other.items())
        print(f"Without a kill, on {asked.calm_ranks} ranks: weights differ by {apart:.2g} of a tensor's norm at most.")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
