"""What holds for every size, priority, order and interleaving."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.exceptions import SchedulerClosedError, TaskStateError
from lightning_bytescheduler.scheduler import ByteCore, CommTask, SubCommTask, TaskKey, TaskState
from lightning_bytescheduler.scheduler.task import part_size
from tests.scheduler.harness import LinkTransport, ManualTransport, restless_threads, running_core, settle
from tests.support.waiting import WAIT

LOST = ConnectionError("the network is gone")

# ---------------------------------------------------------------------- decisions, one by one, against a model

sizes = st.integers(1, 45)
indices = st.integers(0, 1000)
moves = st.one_of(
    st.tuples(st.just("enqueue"), sizes, st.integers(0, 3)),
    st.tuples(st.just("immediate"), sizes, st.just(0)),
    st.tuples(st.just("ready"), indices, st.just(0)),
    st.tuples(st.just("ready part"), indices, indices),
    st.tuples(st.just("finish"), indices, st.just(0)),
    st.tuples(st.just("finish"), indices, st.just(0)),
    st.tuples(st.just("fail"), indices, st.just(0)),
    st.tuples(st.just("credit"), st.integers(1, 60), st.just(0)),
    st.tuples(st.just("partition"), st.integers(1, 30), st.just(0)),
)


class Model:
    """The published algorithm on sorted lists, beside a core whose transport stands still."""

    def __init__(self, core: ByteCore, transport: ManualTransport) -> None:
        self.core = core
        self.transport = transport
        self.tasks: list[CommTask] = []
        self.expected: list[SubCommTask] = []
        self.in_flight: list[SubCommTask] = []
        self.ended: Counter[str] = Counter()

    def move(self, kind: str, first: int, second: int) -> None:
        """Make one move on both, and compare what they start."""
        if kind in ("enqueue", "immediate"):
            limit = min(self.core._partition_size, self.core.credit)
            task = CommTask(
                f"t{len(self.tasks)}",
                first,
                launch=self.transport,
                priority=second,
                immediate=kind == "immediate",
                on_end=lambda task: self.ended.update([task.name]),
            )
            self.core.enqueue(task)
            assert [sub.size for sub in task.sub_tasks[:-1]] == [part_size(first, limit)] * (len(task.sub_tasks) - 1)
            assert sum(sub.size for sub in task.sub_tasks) == first
            self.tasks.append(task)
            if task.immediate:
                self.expected += task.sub_tasks
                self.in_flight += task.sub_tasks
        elif kind == "credit":
            self.core.credit = first
        elif kind == "partition":
            self.core.partition_size = first
        elif kind == "finish":
            if self.in_flight:
                self.in_flight.pop(first % len(self.in_flight)).notify_finish()
        elif kind == "fail":
            if self.tasks:
                self.tasks[first % len(self.tasks)].fail(LOST)
        elif self.tasks:
            task = self.tasks[first % len(self.tasks)]
            created = [sub for sub in task.sub_tasks if sub.state is TaskState.CREATED]
            if kind == "ready" and len(created) == len(task.sub_tasks):
                task.notify_ready()
            elif created:
                created[second % len(created)].notify_ready()
        self.compare()

    def queue(self) -> list[SubCommTask]:
        """What should wait for credit, in the order in which it should be sent."""
        waiting = [
            (task.priority, position, sub.index, sub)
            for position, task in enumerate(self.tasks)
            for sub in task.sub_tasks
            if sub in self.was_ready and sub not in self.expected and task.error is None
        ]
        return [sub for *_, sub in sorted(waiting)]

    @property
    def was_ready(self) -> set[SubCommTask]:
        return {sub for task in self.tasks for sub in task.sub_tasks if sub.ready_at > 0}

    def compare(self) -> None:
        queue = self.queue()
        while queue and self.credit_taken() < self.core.credit:
            self.in_flight.append(queue[0])
            self.expected.append(queue.pop(0))
        assert self.transport.wait_for(len(self.expected)) == self.expected
        assert self.core.in_flight == self.credit_taken()
        for task in self.tasks:
            decided = task.error is not None or {sub.state for sub in task.sub_tasks} == {TaskState.FINISHED}
            assert task.done() == decided
            assert self.ended[task.name] == int(decided)

    def credit_taken(self) -> int:
        return sum(sub.size for sub in self.in_flight if not sub.parent.immediate)


@given(
    script=st.lists(moves, min_size=5, max_size=60),
    credit=st.integers(1, 60),
    partition_size=st.integers(1, 30),
)
def test_every_decision_is_the_published_algorithms(
    script: list[tuple[str, int, int]], credit: int, partition_size: int
) -> None:
    transport = ManualTransport()
    with running_core(credit=credit, partition_size=partition_size) as core:
        model = Model(core, transport)
        for move in script:
            model.move(*move)
        for position, task in enumerate(model.tasks):  # and now everything else
            for _ in task.sub_tasks:
                model.move("ready part", position, 0)
        while model.in_flight:
            model.move("finish", 0, 0)
        core.drain(WAIT)
        assert core.in_flight == 0
        assert core._in_flight == set()
        assert core._open_tasks == {}
        for task in model.tasks:
            sent = sorted((sub.offset, sub.size) for sub in transport.launched if sub.parent is task)
            if task.error is None:
                assert sent == [(sub.offset, sub.size) for sub in task.sub_tasks]
            assert len(set(sent)) == len(sent)


# ---------------------------------------------------------------------- real threads


class Accounts:
    """Counts, from outside the core, how often each parameter is sent and how much is in flight."""

    def __init__(self, credit: int) -> None:
        self.credit = credit  # the most the core has had so far
        self.sent: dict[str, bytearray] = {}
        self.ends: Counter[str] = Counter()
        self.violations: list[str] = []
        self._lock = threading.Lock()
        self.in_flight = 0

    def launched(self, sub: SubCommTask) -> None:
        with self._lock:
            if self.in_flight >= self.credit:
                self.violations.append(f"{sub!r} sent with {self.in_flight} of {self.credit} in flight")
            self.in_flight += sub.size
            counts = self.sent[sub.parent.name]
            for parameter in range(sub.offset, sub.offset + sub.size):
                counts[parameter] += 1

    def arriving(self, sub: SubCommTask) -> None:
        with self._lock:
            self.in_flight -= sub.size

    def ended(self, task: CommTask) -> None:
        with self._lock:
            self.ends[task.name] += 1

    def transport(self, seed: int, threads: int) -> LinkTransport:
        return LinkTransport(seed, threads=threads, on_launch=self.launched, on_arrival=self.arriving)

    def task(self, name: str, size: int, transport: LinkTransport, priority: int) -> CommTask:
        self.sent[name] = bytearray(size)
        return CommTask(name, size, launch=transport, priority=priority, on_end=self.ended)


@given(
    sizes=st.lists(st.integers(1, 120), min_size=1, max_size=8),
    credits_=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    partitions=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_every_parameter_is_sent_once_within_the_credit(
    sizes: list[int], credits_: list[int], partitions: list[int], threads: int, seed: int
) -> None:
    """Producers, dispatcher, completions and a tuner on threads of their own."""
    chance = random.Random(seed)
    accounts = Accounts(max(credits_))
    with (
        accounts.transport(seed, threads) as transport,
        running_core(credit=credits_[0], partition_size=partitions[0]) as core,
    ):
        tasks = [accounts.task(f"t{n}", size, transport, chance.randrange(3)) for n, size in enumerate(sizes)]
        failures: list[BaseException] = []

        def produce(mine: list[CommTask], rng: random.Random) -> None:
            try:
                for task in mine:
                    core.enqueue(task)
                rng.shuffle(mine)
                for task in mine:
                    if rng.random() < 0.5:
                        task.notify_ready()
                        continue
                    for sub in rng.sample(task.sub_tasks, len(task.sub_tasks)):
                        sub.notify_ready()
                for task in mine:
                    task.wait(WAIT)
            except BaseException as error:
                failures.append(error)

        def tune() -> None:
            for credit in credits_:
                core.credit = credit
            for partition_size in partitions:
                core.partition_size = partition_size

        workers = [
            threading.Thread(target=produce, args=(tasks[::2], random.Random(seed))),
            threading.Thread(target=produce, args=(tasks[1::2], random.Random(seed + 1))),
            threading.Thread(target=tune),
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(2 * WAIT)
            assert not worker.is_alive()
        core.drain(WAIT)
        assert failures == []
        assert accounts.violations == []
        assert all(set(counts) == {1} for counts in accounts.sent.values())
        assert accounts.ends == Counter(accounts.sent.keys())
        assert all(task.state is TaskState.FINISHED for task in tasks)
        assert core.in_flight == accounts.in_flight == 0


def _produce(core: ByteCore, tasks: list[CommTask], outcomes: dict[str, BaseException | None]) -> None:
    """Hand tasks over, whatever state the core is in, and note what their waiters get."""
    for task in tasks:
        try:
            core.enqueue(task)
            task.notify_ready()
        except (SchedulerClosedError, ConnectionError, TaskStateError) as error:
            task.fail(error)
    for task in tasks:
        try:
            task.wait(WAIT)
            outcomes[task.name] = None
        except BaseException as error:
            outcomes[task.name] = error


def _finish_off(ending: str, core: ByteCore, tasks: list[CommTask], chance: random.Random) -> None:
    for _ in range(chance.randrange(20_000)):  # a moment, a different one each time
        pass
    if ending == "abort":
        core.abort(LOST)
    elif ending == "shutdown":
        core.shutdown(timeout=WAIT, drain=chance.random() < 0.5)
    else:
        for task in tasks[::2]:
            task.fail(LOST)


@pytest.mark.parametrize("ending", ["abort", "shutdown", "fail"])
def test_whatever_ends_the_work_every_waiter_wakes_and_all_credit_returns(ending: str) -> None:
    """Ends come at random moments, against producers, dispatcher and completions at full speed."""
    for seed in range(10):
        chance = random.Random(seed)
        accounts = Accounts(chance.randrange(1, 60))
        outcomes: dict[str, BaseException | None] = {}
        with (
            restless_threads(seed),
            accounts.transport(seed, 2) as transport,
            running_core(partition_size=chance.randrange(1, 20), credit=accounts.credit) as core,
        ):
            tasks = [accounts.task(f"t{n}", 40, transport, n % 3) for n in range(12)]
            workers = [threading.Thread(target=_produce, args=(core, tasks[n::3], outcomes)) for n in range(3)]
            workers.append(threading.Thread(target=_finish_off, args=(ending, core, tasks, chance)))
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join(2 * WAIT)
                assert not worker.is_alive()
            if ending == "fail":
                assert core.abort_cause is None
                core.drain(WAIT)
            core.shutdown(timeout=WAIT)
        assert not core._dispatcher.is_alive()
        allowed = SchedulerClosedError if ending == "shutdown" else ConnectionError
        assert all(error is None or isinstance(error, allowed) for error in outcomes.values()), outcomes
        assert [outcomes[task.name] for task in tasks] == [task.error for task in tasks]
        assert accounts.ends == Counter(accounts.sent.keys())
        assert accounts.violations == []
        assert max(max(counts) for counts in accounts.sent.values()) <= 1
        assert core.in_flight == accounts.in_flight == 0
        assert core._in_flight == set()
        assert core._open_tasks == {}


# ---------------------------------------------------------------------- what it is all for


def _slot_of_last_part(name: str, transport: ManualTransport) -> int:
    return max(slot for slot, sub in enumerate(transport.launched, 1) if sub.parent.name == name)


def _train(layers: int, parts: int, sent_per_layer: int, credit_parts: int, *, by_priority: bool) -> ManualTransport:
    """A backward pass over a link that carries ``sent_per_layer`` parts while a layer's gradient is computed."""
    transport = ManualTransport()
    with running_core(partition_size=10, credit=10 * credit_parts) as core:
        queued = arrived = 0
        for layer in reversed(range(layers)):
            task = CommTask(
                f"layer {layer}",
                10 * parts,
                launch=transport,
                priority=layer if by_priority else 0,
                key=TaskKey(0, bucket=layer),
            )
            core.enqueue(task)
            task.notify_ready()
            queued += parts
            for _ in range(sent_per_layer):
                transport.wait_for(min(queued, arrived + credit_parts))
                transport.launched[arrived].notify_finish()  # a link delivers in order
                arrived += 1
            transport.wait_for(min(queued, arrived + credit_parts))
        settle(core, transport)
    return transport


@pytest.mark.parametrize(
    ("layers", "parts", "sent_per_layer", "credit_parts"), [(6, 4, 1, 1), (5, 3, 2, 2), (8, 5, 0, 3)]
)
def test_the_first_layer_overtakes_those_that_were_queued_before(
    layers: int, parts: int, sent_per_layer: int, credit_parts: int
) -> None:
    arguments = (layers, parts, sent_per_layer, credit_parts)
    by_priority, in_turn = _train(*arguments, by_priority=True), _train(*arguments, by_priority=False)
    # When the last gradient to be computed, the first to be needed, is ready, this much has left already.
    gone = sent_per_layer * (layers - 1) + credit_parts
    assert _slot_of_last_part("layer 0", by_priority) == gone + parts
    assert _slot_of_last_part("layer 0", in_turn) == layers * parts
    # Behind it, layers leave in the order in which the next forward pass needs them.
    tail = [sub.priority for sub in by_priority.launched[gone:]]
    assert tail == sorted(tail)
    sent = [Counter(transport.names) for transport in (by_priority, in_turn)]
    assert sent[0] == sent[1]
    assert set(sent[0].values()) == {1}
