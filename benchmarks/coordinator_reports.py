"""What a step report costs the batch scheduler, by the number of workers: ``python -m benchmarks.coordinator_reports``.

Workers of unequal speed train in simulated time; only the scheduler's own time is measured, over whole rounds: starts,
reports, the looks ahead, the decision and the end. A few seconds for each line.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import time
from collections.abc import Callable, Iterator

from lightning_bytescheduler.diloco.batch_scheduler import BatchScheduler
from lightning_bytescheduler.diloco.messages import (
    JoinRounds,
    PseudoGradientArrived,
    RoundStarted,
    SchedulerMessage,
    SendAfter,
    SendingPseudoGradient,
    SendNow,
    StartRound,
    StepReport,
    WorkerMessage,
)
from lightning_bytescheduler.diloco.round_end import FastestSteps, FixedSteps, RoundOptions, RoundTarget, SampleTarget

_STEP_SECONDS = 0.1
_BATCH_SIZE = 8


class _Crowd:
    def __init__(self, workers: int, target: RoundTarget, *, spread: float, jitter: float, seed: int = 0) -> None:
        self._chance = random.Random(seed)
        self._jitter = jitter
        self._seconds = [_STEP_SECONDS * self._chance.uniform(1.0, spread) for _ in range(workers)]
        self._scheduler = BatchScheduler(
            target,
            RoundOptions(start_workers=workers),
            post=lambda name, message: self._told.append((name, message)),
            end=lambda record: None,
        )
        self._told: list[tuple[str, SchedulerMessage]] = []
        self._steps = [0] * workers
        self._last: list[int | None] = [None] * workers
        self._queue: list[tuple[float, int]] = []
        self.costs: list[float] = []  # of each report, and of what it brings about
        self.others = 0.0  # of all other messages

    def play(self, rounds: int) -> None:
        for index in range(len(self._seconds)):
            self._say(JoinRounds(worker=f"w{index}"), 0.0)
        while self._queue and self._scheduler.round <= rounds:
            now, index = heapq.heappop(self._queue)
            self._step(index, now)

    def _step(self, index: int, now: float) -> None:
        name, round = f"w{index}", self._scheduler.round
        self._steps[index] += 1
        steps = self._steps[index]
        samples = steps * _BATCH_SIZE
        seconds = self._step_seconds(index)
        report = StepReport(
            worker=name, round=round, steps=steps, samples=samples, batch_size=_BATCH_SIZE, seconds=seconds
        )
        self.costs.append(self._say(report, now))
        last = self._last[index]
        if last is None or steps < last:
            heapq.heappush(self._queue, (now + self._step_seconds(index), index))
            return
        self.others += self._say(SendingPseudoGradient(worker=name, round=round, steps=steps, samples=samples), now)
        self.others += self._say(PseudoGradientArrived(worker=name, round=round), now)

    def _step_seconds(self, index: int) -> float:
        return self._seconds[index] * (self._chance.lognormvariate(0.0, self._jitter) if self._jitter else 1.0)

    def _say(self, message: WorkerMessage, now: float) -> float:
        began = time.perf_counter()
        self._scheduler.handle(message, now=now)
        _ = self._scheduler.next_tick  # as whoever calls it asks for it each time
        cost = time.perf_counter() - began
        told, self._told = self._told, []
        for name, answer in told:
            index = int(name[1:])
            if isinstance(answer, StartRound):
                self._steps[index], self._last[index] = 0, answer.step_cap
                self._say(RoundStarted(worker=name, round=answer.round), now)
                heapq.heappush(self._queue, (now + self._step_seconds(index), index))
            elif isinstance(answer, SendAfter):
                self._last[index] = answer.steps
            elif isinstance(answer, SendNow):
                self._last[index] = 0
        return cost


def _targets(workers: int, steps: int) -> Iterator[tuple[str, Callable[[], RoundTarget]]]:
    yield "samples", lambda: SampleTarget(workers * steps * _BATCH_SIZE)
    yield "fastest steps", lambda: FastestSteps(steps)
    yield "fixed steps", lambda: FixedSteps(steps)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--steps", type=int, default=50, help="of a worker in a round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print("target         workers  spread  jitter   mean us  median us   p99 us   max ms  other messages us/report")
    for workers in options.workers:
        for name, target in _targets(workers, options.steps):
            for spread, jitter in ((1.0, 0.0), (1.0, 0.1), (3.0, 0.1)):
                crowd = _Crowd(workers, target(), spread=spread, jitter=jitter)
                crowd.play(options.rounds)
                costs = sorted(crowd.costs)
                print(
                    f"{name:<15}{workers:>7}{spread:>8}{jitter:>8}{1e6 * statistics.fmean(costs):>10.1f}"
                    f"{1e6 * statistics.median(costs):>11.1f}{1e6 * costs[int(0.99 * len(costs))]:>9.1f}"
                    f"{1e3 * costs[-1]:>9.1f}{1e6 * crowd.others / len(costs):>12.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
