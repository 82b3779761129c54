"""When a worker merges what travels beside its steps: the session by itself, with a transport that the test moves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_bytescheduler.diloco.coordinator_protocol import run_options
from lightning_bytescheduler.diloco.fragments import TrainedWeights
from lightning_bytescheduler.diloco.messages import FromWorker, RoundEnded, SendAfter, StartRound, TrainingOver
from lightning_bytescheduler.diloco.outer_optimizer import Contribution, Mean, OuterState, Upload
from lightning_bytescheduler.diloco.process_groups import WorkerGroup
from lightning_bytescheduler.diloco.session import Session
from lightning_bytescheduler.exceptions import OptionError, SchedulerTimeoutError, UnsupportedError


class Kept:
    """A way to the others that keeps what it is given; a mean is there once the test has set it."""

    source = None

    def __init__(self) -> None:
        self.posted: list[FromWorker] = []
        self.sent: list[Contribution] = []
        self.means: list[Future[Mean]] = []

    def post(self, *messages: FromWorker) -> None:
        self.posted += messages

    def flush(self, timeout: float) -> bool:
        return True

    def start(self, contribution: Contribution, wanted: Callable[[], bool] = bool) -> Upload:
        self.sent.append(contribution)
        self.means.append(Future())
        return Upload(fragment=contribution.fragment, receipt=self.means[-1])

    def settle(self, upload: Upload, *, total: int) -> None:
        pass

    def fetch_mean(self, round: int, chain: str) -> Future[Any]:
        return next(mean for sent, mean in zip(self.sent, self.means, strict=True) if sent.round == round)


@dataclass
class Sending:
    """A pseudo-gradient on its way."""

    contribution: Contribution
    mean: Future[Mean]


class Worker:
    """The leader of a worker, in its first round."""

    def __init__(
        self,
        number: int = 0,
        *,
        overlap_steps: int = 1,
        fragments: int = 1,
        group: WorkerGroup | None = None,
        begins: bool = True,
        first: int = 1,
    ) -> None:
        self.name = f"worker{number}"
        self.module = model()
        self.transport = Kept()
        weights = trained(self.module, fragments)
        self.session = Session(
            worker=self.name,
            group=WorkerGroup() if group is None else group,
            trained=weights,
            state=OuterState(weights),
            link=self.transport,
            exchange=self.transport,
            overlap_steps=overlap_steps,
            flush=lambda: None,
            timeout=0.02,
        )
        self._random = torch.Generator().manual_seed(number)
        self.session.stand_at(0)
        self.session.receive(StartRound(round=first))
        if begins:
            self.session.begin()

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.count()
            if self.session.is_to_merge():
                self.session.synchronise()

    def count(self) -> None:
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.sub_(0.1 * torch.rand(parameter.shape, generator=self._random))
        self.session.count(samples=2, seconds=0.1)

    def send(self, *, after: int) -> Sending:
        self.step(after)
        self.session.receive(SendAfter(round=self.session.round, steps=0))
        assert self.session.is_due()
        self.session.synchronise()
        return self.last

    @property
    def last(self) -> Sending:
        return Sending(self.transport.sent[-1], self.transport.means[-1])

    @property
    def rounds(self) -> int:
        return self.session.statistics.rounds

    @property
    def weights(self) -> list[Tensor]:
        return [value.clone() for value in self.session.state.weights.values()]


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Linear(4, 3)


def trained(module: nn.Module, fragments: int = 1) -> TrainedWeights:
    return TrainedWeights(module, fragments=fragments, overlaps=True)


def mean_of(sent: Sequence[Sending]) -> Mean:
    total = sum(one.contribution.samples for one in sent)
    weighted = [one.contribution.pseudo_gradient * one.contribution.samples for one in sent]
    return Mean(values=torch.stack(weighted).sum(0) / total, total=total)


def ended(round: int, **halts: bool) -> RoundEnded:
    return RoundEnded(round=round, samples=1, halts=bool(halts), **halts)


def conclude(worker: Worker, sent: Sending, **halts: bool) -> None:
    """All that a worker waits for arrives."""
    sent.mean.set_result(mean_of([sent]))
    worker.session.receive(ended(sent.contribution.round, **halts))
    worker.session.receive(StartRound(round=sent.contribution.round + 1))


def test_a_worker_that_has_loaded_another_checkpoint_than_the_others_is_told() -> None:
    worker = Worker(begins=False, first=5)
    with pytest.raises(UnsupportedError, match="Round 5 begins, and the weights of worker0 are those of round 1: give"):
        worker.session.begin()


def test_after_its_steps_it_waits() -> None:
    worker = Worker(overlap_steps=4)
    worker.send(after=9)
    worker.step(3)
    with pytest.raises(SchedulerTimeoutError, match="the end of round 1"):
        worker.step()


def test_a_worker_merges_after_so_many_steps_which_count_for_the_next_round() -> None:
    worker = Worker(overlap_steps=3)
    conclude(worker, worker.send(after=10))
    worker.step(2)
    assert worker.rounds == 0
    worker.step()
    assert (worker.rounds, worker.session.round) == (1, 2)
    assert worker.session._place.counter.steps == 3


@pytest.mark.parametrize("steps", [-1, 1.5, True, "auto"])
def test_what_is_no_overlap(steps: Any) -> None:
    with pytest.raises(OptionError, match="overlap_steps must be a whole number, 0 or more"):
        run_options(overlap_steps=steps)


def test_where_all_stand_still_no_next_round_is_waited_for() -> None:
    worker = Worker(overlap_steps=2)
    sent = worker.send(after=10)
    worker.step()
    sent.mean.set_result(mean_of([sent]))
    worker.session.receive(ended(1, validate=True))
    worker.step()
    assert (worker.rounds, worker.session.halted) == (1, True)
    assert all(map(torch.equal, worker.weights, worker.module.parameters()))


def test_the_last_round_is_merged_too() -> None:
    worker = Worker()
    sent = worker.send(after=10)
    sent.mean.set_result(mean_of([sent]))
    worker.session.receive(ended(1))
    worker.session.receive(TrainingOver(round=1))
    worker.step()
    assert (worker.rounds, worker.session.over) == (1, True)


def test_what_it_is_told_beside_the_mean_of_the_next_end_holds_when_said_again() -> None:
    worker = Worker()
    sent = worker.send(after=10)
    conclude(worker, sent)
    worker.session.receive(SendAfter(round=2, steps=0))  # of a round that has not begun here
    worker.step()
    assert worker.rounds == 1
    assert not worker.session.is_due()
    worker.session.receive(SendAfter(round=2, steps=0))
    assert worker.session.is_due()


@pytest.mark.parametrize("fragments", [1, 2])
def test_workers_that_merge_at_different_steps_have_the_same_global_weights(fragments: int) -> None:
    """One takes three times as many steps in a round, and beside each mean."""
    fast, slow = Worker(0, fragments=fragments, overlap_steps=9), Worker(1, fragments=fragments, overlap_steps=3)
    for round in range(1, 6):
        sent = [
            fast.send(after=30 - fast.session._place.counter.steps),
            slow.send(after=10 - slow.session._place.counter.steps),
        ]
        assert {one.contribution.round for one in sent} == {round}
        mean = mean_of(sent)
        for worker, exchange in zip((fast, slow), sent, strict=True):
            worker.step(worker.session.overlap_steps - 1)
            assert worker.rounds == round - 1
            exchange.mean.set_result(mean)
            worker.session.receive(ended(round))
            worker.session.receive(StartRound(round=round + 1))
            worker.step()
            assert worker.rounds == round
        assert all(map(torch.equal, fast.weights, slow.weights))
    own = [list(worker.module.parameters()) for worker in (fast, slow)]
    assert not all(map(torch.equal, *own))
    samples = [sum(one.samples for one in worker.transport.sent) for worker in (fast, slow)]
    if fragments == 1:  # each step counts in one round
        assert samples == [2 * 5 * 30, 2 * 5 * 10]


class Pair(WorkerGroup):
    """Two ranks of one worker in two threads."""

    def __init__(self, rank: int, shared: dict[str, Any]) -> None:
        super().__init__()
        self._rank = rank
        self._shared = shared

    @property
    def leads(self) -> bool:
        return self._rank == 0

    def total(self, numbers: Sequence[float]) -> list[float]:
        return [sum(column) for column in zip(*self._exchanged(list(numbers)), strict=True)]

    def tell(self, text: str = "") -> str:
        return str(self._exchanged(text)[0])

    @torch.no_grad()
    def share(self, tensors: Any) -> None:
        tensors = list(tensors)
        leaders, _ = self._exchanged([tensor.detach().clone() for tensor in tensors])
        for tensor, leader in zip(tensors, leaders, strict=True):
            tensor.copy_(leader)

    def _exchanged(self, own: Any) -> list[Any]:
        self._shared["given"][self._rank] = own
        self._shared["barrier"].wait(60.0)
        found = list(self._shared["given"])
        self._shared["barrier"].wait(60.0)
        return found


def test_all_ranks_of_a_worker_merge_after_the_same_step() -> None:
    shared: dict[str, Any] = {"given": [None, None], "barrier": threading.Barrier(2)}
    module, errors = model(), list[BaseException]()
    seen: dict[int, list[int]] = {0: [], 1: []}

    def train(
        session: Session, rank: int, step: Callable[[], None], send: Callable[[], None], arrive: Callable[[], None]
    ) -> None:
        try:
            session.begin()
            for round in (1, 2, 3):
                for _ in range(10):
                    step()
                    assert not session.is_due()
                send()
                arrive()
                for _ in range(3):
                    step()
                    if session.is_to_merge():
                        session.synchronise()
                    seen[rank].append(session.statistics.rounds)
                assert session.statistics.rounds == round
        except BaseException as error:
            errors.append(error)
            shared["barrier"].abort()

    follower = Session(
        worker="worker0", group=Pair(1, shared), trained=trained(module), overlap_steps=3, flush=lambda: None
    )
    other = threading.Thread(
        target=train,
        args=(follower, 1, lambda: follower.count(samples=2, seconds=0.1), follower.synchronise, lambda: None),
        daemon=True,
    )
    other.start()
    leading = Worker(group=Pair(0, shared), begins=False, overlap_steps=3)
    train(leading.session, 0, leading.count, leading.session.synchronise, lambda: conclude(leading, leading.last))
    other.join(60.0)
    assert not errors
    assert seen[0] == seen[1] == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert all(map(torch.equal, leading.module.parameters(), module.parameters()))
