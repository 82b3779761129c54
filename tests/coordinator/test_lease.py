"""One coordinator acts on a state: whoever races, pauses, dies or comes back, and however long files take."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import threading
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_bytescheduler.coordinator.lease import (
    Lease,
    _Process,
    _started,
    _this_process,
    boot_seconds,
    highest_term,
)
from lightning_bytescheduler.coordinator.state_folder import StateFolder
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError

SECONDS = 10.0


class Clock:
    """Seconds that pass when a test says so, at a rate of its own."""

    def __init__(self, world: list[float], rate: float = 1.0) -> None:
        self.world, self.rate = world, rate

    def __call__(self) -> float:
        return 1000.0 + self.world[0] * self.rate


@pytest.fixture(autouse=True)
def another_process_each(monkeypatch):
    """Leases of one process are told apart by nothing else; here each is a machine of its own."""
    monkeypatch.setattr("lightning_bytescheduler.coordinator.lease._this_process", _Process)


@pytest.fixture
def world() -> list[float]:
    return [0.0]


@pytest.fixture(params=["disk", "memory"])
def folder(request, tmp_path) -> StateFolder:
    return StateFolder(str(tmp_path / "state") if request.param == "disk" else f"memory://lease-{tmp_path.name}")


def lease(folder, world, holder="anna", *, rate=1.0, **options) -> Lease:
    return Lease(folder, holder=holder, seconds=SECONDS, clock=Clock(world, rate), **options)


def test_a_standby_takes_over_when_the_lease_has_run_out(folder, world):
    first, second = lease(folder, world), lease(folder, world, "berta", standby=True)
    assert first.try_take()
    assert (first.held, first.term) == (True, 1)
    for _ in range(10):
        assert not second.try_take()
        world[0] += SECONDS / 2
        assert first.renew()
    assert not second.try_take()
    world[0] += SECONDS / 1.25
    assert not first.held  # with time to spare
    assert first.left == 0
    assert not second.try_take()
    world[0] += SECONDS
    assert second.try_take()
    assert (second.held, second.term) == (True, 2)
    assert not first.renew()
    assert not first.try_take()


def test_a_holder_that_was_stopped_and_comes_back_does_nothing(folder, world):
    """As after SIGSTOP: it finds out by its own clock, before it asks anybody."""
    first, second = lease(folder, world), lease(folder, world, "berta", standby=True)
    assert first.try_take()
    assert not second.try_take()
    world[0] += 2 * SECONDS  # stopped
    assert second.try_take()
    assert not first.held
    before = folder.read("term-0000000002.json")
    assert not first.renew()
    first.release()
    assert not first.held
    assert folder.read("term-0000000002.json") == before
    assert second.held
    # It may be a standby again, and get its turn.
    third = lease(folder, world, "anna", standby=True)
    assert not third.try_take()
    world[0] += SECONDS
    assert third.try_take()
    assert third.term == 3


def test_a_renewal_that_takes_longer_than_the_lease_does_not_count(folder, world, monkeypatch):
    first, second = lease(folder, world), lease(folder, world, "berta", standby=True)
    assert first.try_take()
    real = StateFolder.rewrite

    def slow(self, name, content):
        world[0] += SECONDS  # a disk that hangs, and then writes after all
        real(self, name, content)

    monkeypatch.setattr(StateFolder, "rewrite", slow)
    assert not first.renew()
    assert not first.held
    assert not second.try_take()  # it sees a renewal that its holder does not count
    world[0] += SECONDS
    assert second.try_take()


def test_a_lease_that_was_given_up_is_taken_at_once(folder, world):
    first, second = lease(folder, world), lease(folder, world, "berta", standby=True)
    assert first.try_take()
    assert not second.try_take()
    first.release()
    assert not first.held
    assert not first.renew()
    assert second.try_take()
    assert second.term == 2


def test_a_renewal_that_fails_is_tried_again_until_the_lease_ends(folder, world, monkeypatch, caplog):
    first = lease(folder, world)
    assert first.try_take()

    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(StateFolder, "rewrite", fails)
        world[0] += 3
        assert not first.renew()
        assert first.held
    assert "could not be renewed" in caplog.text
    assert first.renew()
    assert first.left == pytest.approx(SECONDS / 1.25)


class OfAClient(Exception):
    """What the client of an object store raises, which is no OSError."""


def test_whatever_a_store_raises_the_lease_is_renewed_next_time_and_a_standby_looks_again(folder, monkeypatch):
    holder = Lease(folder, holder="anna", seconds=1.0)
    assert holder.try_take()
    rewrite, names = StateFolder.rewrite, StateFolder.names
    fails = [OfAClient("timed out"), OfAClient("timed out")]

    def flaky(self, name, content):
        if fails:
            raise fails.pop()
        rewrite(self, name, content)

    monkeypatch.setattr(StateFolder, "rewrite", flaky)
    lost = threading.Event()
    holder.keep(lost.set)
    assert not lost.wait(1.5)  # longer than the lease it began with
    assert holder.held
    assert not fails
    looks = []

    def unreachable(self):
        looks.append(self)
        if len(looks) < 3:
            raise OfAClient("timed out")
        return names(self)

    monkeypatch.setattr(StateFolder, "names", unreachable)
    standby = Lease(folder, holder="berta", seconds=0.1)
    standby._is_standby = True
    holder.release()
    assert standby.wait(threading.Event())
    standby.release()


def test_a_half_written_file_is_no_lease_that_ends(folder, world):
    first, second = lease(folder, world), lease(folder, world, "berta", standby=True)
    assert first.try_take()
    assert not second.try_take()
    folder.rewrite("term-0000000001.json", b'{"term": 1, "released": true')
    world[0] += SECONDS - 1
    assert not second.try_take()
    world[0] += SECONDS
    assert second.try_take()


def test_terms_go_on_above_those_of_saved_states(folder, world):
    folder.publish("state-0000000007-0000000003.json", [b"{}"])
    first = lease(folder, world)
    assert not first.try_take()  # whoever has term 7 may be alive, although its file is gone
    world[0] += SECONDS
    assert first.try_take()
    assert first.term == 8
    assert highest_term(["term-0000000012.json", "other", "state-0000000013-0000000001-ab.safetensors"]) == 13


def test_who_sees_a_term_that_was_created_beside_its_own_does_not_act(folder, world, monkeypatch):
    first = lease(folder, world)
    real = StateFolder.create

    def raced(self, name, content):
        made = real(self, name, content)
        real(self, "term-0000000005.json", b"{}")
        return made

    monkeypatch.setattr(StateFolder, "create", raced)
    assert not first.try_take()
    assert not first.held


def test_a_restart_waits_and_a_second_coordinator_is_told(folder):
    first = Lease(folder, holder="anna", seconds=0.4)
    assert first.wait(threading.Event())
    lost = threading.Event()
    first.keep(lost.set)
    with pytest.raises(OptionError, match=r"anna does.*--standby"):
        Lease(folder, holder="berta", seconds=0.4).wait(threading.Event())
    said: list[str] = []
    standby = Lease(folder, holder="berta", seconds=0.4, standby=True)
    taken = threading.Thread(target=standby.wait, args=(threading.Event(),), kwargs={"said": said.append})
    taken.start()
    time.sleep(0.2)
    assert first.held
    first.release()
    taken.join(30)
    assert standby.held
    assert said == ["anna"]
    assert not lost.is_set()
    standby.release()
    assert not [thread for thread in threading.enumerate() if thread.name == "bytescheduler-lease"]


def test_a_lost_lease_is_said_once(folder, monkeypatch):
    first = Lease(folder, holder="anna", seconds=0.3)
    assert first.wait(threading.Event())
    lost = threading.Event()

    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(StateFolder, "rewrite", fails)
    first.keep(lost.set)
    assert lost.wait(30)
    assert not first.held
    first.release()


def test_a_wait_is_ended(folder, world):
    assert lease(folder, world).try_take()
    stop = threading.Event()
    waiting = Lease(folder, holder="berta", seconds=60.0, standby=True)
    thread = threading.Thread(target=waiting.wait, args=(stop,))
    thread.start()
    stop.set()
    thread.join(30)
    assert not thread.is_alive()
    assert not waiting.held


def test_a_process_of_this_machine_that_is_dead_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.undo()  # this test is about real processes
    if not os.path.exists("/proc/self/ns/pid"):
        pytest.skip("this system does not tell processes apart")
    folder = StateFolder(str(tmp_path))
    first, heir = Lease(folder, holder="child", seconds=600), Lease(folder, holder="heir", seconds=600, standby=True)
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            first._process = msgspec.structs.replace(_this_process(), pid=child.pid, started=_started(child.pid))
            assert first.try_take()
            assert not heir.try_take()
        finally:
            child.kill()
    assert heir.try_take()
    assert heir.term == 2


def test_where_files_are_not_created_exclusively_there_is_no_standby(folder, world, monkeypatch):
    real = StateFolder.create

    def overwrites(self, name, content):
        real(self, name, content)
        return True

    monkeypatch.setattr(StateFolder, "create", overwrites)
    if folder.url.startswith("memory"):
        assert folder.creates_exclusively() is None
        return
    with pytest.raises(UnsupportedError, match=r"s3://.*recent"):
        lease(folder, world, standby=True)
    lease(folder, world)  # one alone
    assert folder.names() == []


def test_files_are_created_by_one_of_many_threads(folder):
    for attempt in range(20):
        start = threading.Barrier(8)
        won: list[int] = []

        def race(number, start=start, won=won, attempt=attempt):
            start.wait(30)
            if folder.create(f"file-{attempt}", b"%d" % number):
                won.append(number)

        threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(won) == 1
        assert folder.read(f"file-{attempt}") == b"%d" % won[0]


class _Taken(BaseException):
    """A contender is to stop at its next turn; no error of a store, which a lease would try again after."""


class _Contender(threading.Thread):
    """A coordinator that takes the lease when it can and renews it, in steps that a test has it take.

    Each operation on files is one step, so that any other contender, and any time, may come between two of them.
    """

    def __init__(self, folder: StateFolder, world: list[float], rate: float, name: str) -> None:
        super().__init__(daemon=True)
        self._go, self._done, self.stopped = threading.Semaphore(0), threading.Semaphore(0), False
        self.lease = Lease(_Stepped(folder, self), holder=name, seconds=SECONDS, clock=Clock(world, rate))
        self.start()

    def turn(self) -> None:
        """Wait for the test, in the contender's thread."""
        self._done.release()
        self._go.acquire()
        if self.stopped:
            raise _Taken

    def step(self) -> None:
        """Let it go on until its next operation."""
        self._go.release()
        assert self._done.acquire(timeout=30)

    def run(self) -> None:
        try:
            self._go.acquire()
            while not self.stopped:
                if self.lease.held:
                    self.lease.renew()
                else:
                    self.lease.try_take()
                self.turn()
        except _Taken:
            pass
        finally:
            self._done.release()


class _Stepped:
    def __init__(self, folder: StateFolder, contender: _Contender) -> None:
        self._folder, self._contender, self.url = folder, contender, folder.url

    def __getattr__(self, name):
        operation = getattr(self._folder, name)

        def stepped(*args):
            self._contender.turn()  # time may pass before it is done,
            result = operation(*args)
            self._contender.turn()  # and after it
            return result

        return stepped


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([0.9, 1.0, 1.1]), min_size=2, max_size=3),
    st.integers(0, 2**32),
    st.sampled_from([0.1, 0.4, 0.9]),
)
def test_two_never_hold_it_whatever_happens_when(rates, seed, pace):
    chance = random.Random(seed)
    world = [0.0]
    folder = StateFolder(f"memory://race-{time.monotonic_ns()}")
    contenders = [_Contender(folder, world, rate, f"c{index}") for index, rate in enumerate(rates)]
    terms: list[int] = []
    try:
        running = contenders[0]
        for _ in range(300):
            if chance.random() < 0.15:  # one is stopped for a while, in the middle of anything
                running = chance.choice(contenders)
            running.step()
            for passed in (0.0, chance.expovariate(1 / pace)):
                world[0] += passed
                holding = [one for one in contenders if one.lease.held]
                assert len(holding) <= 1
                terms += [one.lease.term for one in holding if one.lease.term not in terms]
        assert terms == sorted(terms)
    finally:
        for one in contenders:
            one.stopped = True
            one.step()
            one.join(30)


def test_a_renewal_that_arrives_after_a_standby_looked_does_not_count(folder, world, monkeypatch):
    first, second = lease(folder, world), lease(folder, world, "berta", standby=True)
    assert first.try_take()
    assert not second.try_take()
    world[0] += 7.5
    real = StateFolder.rewrite

    def late(self, name, content):
        world[0] += 3.0
        assert second.try_take()
        real(self, name, content)
        monkeypatch.setattr(StateFolder, "names", lambda self: [name])  # a listing that lags behind

    monkeypatch.setattr(StateFolder, "rewrite", late)
    assert not first.renew()
    assert not first.held


def test_clocks_may_go_at_other_rates(folder, world):
    first, second = lease(folder, world, rate=0.9), lease(folder, world, "berta", rate=1.1, standby=True)
    assert first.try_take()
    assert not second.try_take()
    world[0] += SECONDS / 1.09
    assert second.try_take()
    assert not first.held


def test_a_look_counts_from_when_it_began(folder, world, monkeypatch):
    first, second = lease(folder, world), lease(folder, world, "berta", standby=True)
    assert first.try_take()
    assert not second.try_take()
    world[0] += 5.0
    real = StateFolder.read

    def slow(self, name):
        content = real(self, name)
        assert first.renew()
        world[0] += 6.0
        return content

    monkeypatch.setattr(StateFolder, "read", slow)
    assert not second.try_take()
    assert first.held


def test_the_clock_goes_on():
    before = boot_seconds()
    assert boot_seconds() >= before > 0
