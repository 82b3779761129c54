"""A worker's life in a coordinator's run: it joins late, leaves, dies, is cut off, and meets another coordinator."""

from __future__ import annotations

import multiprocessing
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count, pairwise
from typing import Any

import pytest
import torch
from torch import nn

from lightning_bytescheduler.coordinator import global_weights
from lightning_bytescheduler.coordinator.service import CoordinatorServer
from lightning_bytescheduler.coordinator.state_store import StateStore
from lightning_bytescheduler.diloco import coordinator_client
from lightning_bytescheduler.diloco.messages import LeaderAppointed
from lightning_bytescheduler.diloco.outer_optimizer import OuterState
from lightning_bytescheduler.diloco.rounds import Rounds
from lightning_bytescheduler.diloco.session import Session
from lightning_bytescheduler.exceptions import CoordinatorError, OptionError, RankFailedError, SchedulerTimeoutError
from lightning_bytescheduler.serving import ServerAccess
from tests.diloco.coordinated_fits import coordinator_options
from tests.diloco.coordinated_workers import Link, ThreadWorker, until
from tests.support.certificates import make_certificate


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("bytescheduler-coord")]


@pytest.fixture
def serve(stack: ExitStack) -> Callable[..., CoordinatorServer]:
    def start(*, port: int = 0, access: ServerAccess | None = None, **given: Any) -> CoordinatorServer:
        return stack.enter_context(CoordinatorServer(coordinator_options(**given), access=access, port=port))

    return start


def port_of(server: CoordinatorServer) -> int:
    return int(server.url.rstrip("/").rsplit(":", 1)[1])


def assert_same(workers: list[ThreadWorker]) -> None:
    for worker in workers[1:]:
        assert all(map(torch.equal, workers[0].weights, worker.weights)), (workers[0].name, worker.name)


class Holds(ThreadWorker):
    """Takes no step from its eighth round on until it may."""

    may_go_on = threading.Event()

    def _step(self, module: nn.Module, generator: torch.Generator, *, counts: bool = True) -> None:
        assert self.version < 7 or self.may_go_on.wait(60.0)
        super()._step(module, generator, counts=counts)


def test_a_late_worker_takes_the_state_and_all_end_with_the_same_weights(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Holds, "may_go_on", threading.Event())
    server = serve(inner_steps=5, outer_steps=12, outer_momentum=0.9)
    first = Holds(server.url, "first", seconds=0.03)
    until(lambda: first.version >= 7, "the eighth round")
    late = ThreadWorker(server.url, "late", seconds=0.03)
    until(lambda: late.version >= 7, "the late one's taking of the state")
    Holds.may_go_on.set()
    assert_same([first.checked(), late.checked()])
    assert first.version == late.version == 12
    assert late.taken < first.taken
    assert late.versions[0] > 7


def test_a_worker_that_leaves_counts_and_the_others_go_on(serve: Any) -> None:
    server = serve(inner_steps=5, outer_steps=10, rounds={"start_workers": 2})
    stays = ThreadWorker(server.url, "stays")
    goes = ThreadWorker(server.url, "goes", steps=12)
    goes.checked()
    assert goes.version < 10
    stays.checked()
    assert stays.version == 10
    # What it had trained in its last round is in the weights: it left with those of the end of that round.
    assert goes.taken == 12
    assert server.status().counters.get("left") == 2


def test_a_worker_that_dies_is_not_waited_for_and_may_come_back(serve: Any) -> None:
    server = serve(inner_steps=5, outer_steps=30, lease=0.6, rounds={"grace": 0.2, "first_step_limit": 1.0})
    stays = ThreadWorker(server.url, "stays")
    dies = ThreadWorker(server.url, "dies")
    until(lambda: dies.version >= 2, "the second round")
    dies.die()
    again = ThreadWorker(server.url, "dies")
    assert_same([stays.checked(), again.checked()])
    assert stays.version == again.version == 30


def test_another_worker_leads_once_the_leader_is_given_up(serve: Any) -> None:
    # On a busy machine, too, the first one is heard of in time for as long as it lives.
    server = serve(inner_steps=5, lease=3.0, rounds={"grace": 0.2, "first_step_limit": 1.0})
    first = ThreadWorker(server.url, "first")
    until(lambda: bool(first.validated), "a validation of the first")
    second = ThreadWorker(server.url, "second")
    until(lambda: second.version > first.version - 3 and bool(second.versions), "rounds of the second")
    assert not second.validated
    first.die()
    until(lambda: len(second.validated) > 1, "validations of the second")
    second.end()
    second.checked()
    assert min(second.validated) > max(first.validated)


class Ponders(ThreadWorker):
    """Its first validation takes until the others are far ahead."""

    ahead = threading.Event()

    def _validate(self, session: Any) -> None:
        session.pause()
        assert self.ahead.wait(60.0)
        session.resume()


def test_the_worker_that_gave_the_first_weights_takes_the_state_when_it_is_far_behind(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was asked for as it joined, to send its weights, was of that moment."""
    monkeypatch.setattr(Ponders, "ahead", threading.Event())
    monkeypatch.setattr(global_weights, "_KEPT_ROUNDS", 2)
    server = stack.enter_context(CoordinatorServer(coordinator_options(inner_steps=5)))
    first = Ponders(server.url, "first")
    until(lambda: first.version >= 1, "the first round")
    other = TrainsOnly(server.url, "other")
    until(lambda: other.version >= first.version + 5, "rounds of the other")
    now = other.version
    Ponders.ahead.set()
    until(lambda: first.version > now, "the first one's return")
    for worker in (first, other):
        worker.end()
        worker.checked()


def test_work_of_rounds_without_a_quorum_is_carried(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rounds, "_least", lambda _: 2)
    server = serve(inner_steps=5)
    alone = ThreadWorker(server.url, "alone")
    until(lambda: alone.version >= 20, "twenty rounds without a quorum")
    held = 2 * 5 * 20  # it leads: its pauses between rounds end none
    assert server.call(lambda: server.service.run.samples) == 0
    known = alone.runtime.session.state.weights
    apart = [(value.detach() - known[name]) for name, value in alone.module.named_parameters()]
    assert torch.cat([part.flatten() for part in apart]).square().mean().sqrt() > 0.05  # five steps come to 0.02
    other = ThreadWorker(server.url, "other", steps=5)
    other.checked()
    until(lambda: server.status().counters.get("rounds", 0) >= 1, "a round with a quorum")
    assert server.call(lambda: server.service.run.samples) >= held
    alone.end()
    alone.checked()


def test_a_leader_that_leads_no_more_when_its_wish_to_end_all_comes_leaves_alone(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others train on, and for them there may be no end."""
    server = serve(inner_steps=5)
    first = ThreadWorker(server.url, "first", seconds=0.01)
    until(lambda: bool(first.validated), "a validation of the first")
    second = ThreadWorker(server.url, "second", seconds=0.01)
    until(lambda: bool(second.versions), "a round of the second")
    run, session = server.service.run, first.runtime.session
    leave, wished = session.leave, threading.Event()

    def ignored(*_: object) -> None:  # as another one leads
        wished.set()
        run._post("first", LeaderAppointed(worker="second"))

    server.call(lambda: setattr(run, "_take_wish", ignored))
    monkeypatch.setattr(session, "leave", lambda **_: leave(quickly=False, for_all=True))
    first.end()
    first.checked()
    assert wished.is_set()
    version = second.version
    until(lambda: second.version > version + 2, "rounds of the second")
    second.end()
    second.checked()


class ValidatesMerged(ThreadWorker):
    """Validates each version of the global weights once, as the leader of a fit does: not when it only has sent."""

    def _validate(self, session: Any) -> None:
        if session.version > max(self.validated, default=0):
            super()._validate(session)


def test_a_validation_beside_an_overlapped_mean_cuts_no_round_short(serve: Any) -> None:
    server = serve(inner_steps=10, overlap_steps=3, outer_steps=6)
    worker = ValidatesMerged(server.url, "one").checked()
    assert len(worker.validated) >= 5
    rounds = server.status().rounds
    assert [one.samples for one in rounds] == [20] * 6
    assert sum(one.samples for one in rounds) <= 2 * worker.taken


class TrainsOnly(ThreadWorker):
    def _validate(self, session: Any) -> None:
        pass


def test_a_round_that_ends_while_its_last_update_is_sent_cuts_no_overlap_short(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that trains may get no time between sending and looking: the weights are not to depend on it."""
    send = Session._send

    def send_and_sleep(session: Session) -> bool:
        travels, sent = send(session), session.unmerged.sent
        assert sent is not None
        session._while_connected(lambda: session._place.ended >= sent.round, "the end of the round", timeout=60.0)
        return travels

    monkeypatch.setattr(Session, "_send", send_and_sleep)
    server = serve(inner_steps=5, equal_steps=True, overlap_steps=2, outer_steps=3)
    assert TrainsOnly(server.url, "one").checked().taken_at == [5, 7, 10, 12, 15, 17]


def test_a_worker_merges_after_so_many_steps(serve: Any) -> None:
    server = serve(inner_steps=10, equal_steps=True, overlap_steps=2, outer_steps=3)
    # Two steps are beside each mean, and part of the next round.
    assert TrainsOnly(server.url, "one").checked().taken_at == [10, 12, 20, 22, 30, 32]


def test_workers_of_unequal_pace_that_overlap_have_the_same_weights(serve: Any) -> None:
    server = serve(samples_per_round=80, overlap_steps=2, outer_steps=8, fragments=2, rounds={"start_workers": 2})
    fast = TrainsOnly(server.url, "fast", seconds=0.002)
    slow = TrainsOnly(server.url, "slow", seconds=0.02)
    assert_same([fast.checked(), slow.checked()])
    assert fast.version == slow.version == 9
    assert fast.taken > slow.taken


def test_a_worker_that_overlaps_goes_on_without_a_coordinator(serve: Any, stack: ExitStack) -> None:
    server = serve(inner_steps=10, overlap_steps=5, outer_steps=12, rounds={"start_workers": 2})
    link = Link(port_of(server))
    stack.callback(link.close)
    cut, stays = TrainsOnly(link.url, "cut", seconds=0.01), TrainsOnly(server.url, "stays", seconds=0.03)
    until(lambda: cut.version >= 2, "the second round")
    link.cut()
    taken = cut.taken
    until(lambda: cut.taken >= taken + 30, "thirty steps without a coordinator")
    link.heal()
    assert_same([cut.checked(), stays.checked()])
    assert cut.version == stays.version == 12


def test_with_tls_a_worker_knows_the_coordinator(serve: Any, tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    own, eve = (make_certificate(tmp_path, name) for name in ("server", "eve"))
    server = serve(inner_steps=5, outer_steps=2, access=ServerAccess(certificate=own.file, key=own.key))
    with pytest.raises(CoordinatorError, match=r"certificate that is not trusted here"):
        ThreadWorker(server.url, "worker", authority=eve.file).checked()
    assert ThreadWorker(server.url, "worker", authority=own.file).checked().version == 2
    assert "certificate" not in caplog.text


def test_training_goes_on_while_the_coordinator_is_away(serve: Any, stack: ExitStack) -> None:
    server = serve(inner_steps=5, outer_steps=10)
    link = Link(port_of(server))
    stack.callback(link.close)
    worker = ThreadWorker(link.url, "worker")
    until(lambda: worker.version >= 2, "the second round")
    link.cut()
    taken = worker.taken
    until(lambda: worker.taken >= taken + 50, "fifty steps without a coordinator")
    version = worker.version
    assert worker.taken > taken + 5
    link.heal()
    worker.checked()
    assert worker.version == 10 > version
    # In that time it did one round: no sample of it was lost.
    assert server.call(lambda: server.service.run.samples) == 2 * worker.taken


def test_a_coordinator_that_is_away_is_said_once_and_that_it_is_back(
    serve: Any, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried, pause = threading.Semaphore(0), coordinator_client._pause

    def paused(tries: int) -> float:
        tried.release()
        return pause(tries)

    server = serve(inner_steps=5)
    link = Link(port_of(server))
    stack.callback(link.close)
    worker = TrainsOnly(link.url, "worker")
    until(lambda: worker.version >= 2, "the second round")
    monkeypatch.setattr(coordinator_client, "_QUIET_S", 0.0)
    monkeypatch.setattr(coordinator_client, "_pause", paused)
    link.cut()
    assert all(tried.acquire(timeout=60.0) for _ in range(4))
    link.heal()
    until(lambda: "is connected" in caplog.text, "the word that it is back")
    worker.end()
    worker.checked()
    away, back = [record.getMessage() for record in caplog.records if record.name == coordinator_client.__name__]
    assert f"No coordinator has answered at {link.url} for" in away
    assert "Training goes on. Updates are sent when it is back." in away
    assert back == f"The coordinator at {link.url} is there: worker is connected."


def cut_at_the_end(link: Link, before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a worker of thirteen steps cut off right before it does something of its session at its end."""
    method, cuts = getattr(Session, before), iter([True])

    def cut(session: Session, *given: Any) -> Any:
        if session.statistics.steps == 13 and next(cuts, False):
            link.cut()
            until(lambda: not session._place.connected, "the end of the connection")
        return method(session, *given)

    monkeypatch.setattr(Session, before, cut)


EndsAlone = Callable[..., tuple[CoordinatorServer, Link, ThreadWorker]]


@pytest.fixture
def ends_alone(
    serve: Any, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> EndsAlone:
    """A worker whose connection is cut at its end, and which waits for it, with 6 of its 26 samples to send."""

    def start(before: str = "_leave") -> tuple[CoordinatorServer, Link, ThreadWorker]:
        server = serve(inner_steps=5, outer_lr=1.0, outer_momentum=0.0)
        link = Link(port_of(server))
        stack.callback(link.close)
        cut_at_the_end(link, before, monkeypatch)
        worker = TrainsOnly(link.url, "worker", steps=13)
        until(lambda: "with 6 samples to send" in caplog.text or not worker.is_alive, "the wait, or the worker's end")
        return server, link, worker

    return start


@pytest.mark.parametrize(("before", "ends_round"), [("_leave", False), ("_send", False), ("_leave", True)])
def test_a_worker_that_ends_while_the_coordinator_is_away_waits_for_it(
    before: str, ends_round: bool, ends_alone: EndsAlone, caplog: pytest.LogCaptureFixture
) -> None:
    server, link, worker = ends_alone(before)
    if ends_round:  # without an update, as its only worker is gone
        until(lambda: server.status().weights_version == 3, "the end of its round")
    link.heal()
    worker.checked()
    assert server.call(lambda: server.service.run.samples) == 2 * 13
    assert all(map(torch.equal, worker.weights, worker.uninterrupted(without=set())))
    assert "in no weights" not in caplog.text


def test_a_worker_that_ends_does_not_wait_for_others_that_a_new_coordinator_waits_for(
    ends_alone: EndsAlone, serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lightning_bytescheduler.diloco.session._BACK_S", 5.0)
    server, link, worker = ends_alone()
    server.close()
    other = serve(inner_steps=5, rounds={"start_workers": 2})
    link.heal(port_of(other))
    worker.checked()
    assert "worker ends, and 6 samples that it has trained on may be in no weights" in caplog.text


@pytest.mark.parametrize("quickly", [False, True])
def test_what_a_worker_could_not_send_at_its_end_is_said(
    quickly: bool, serve: Any, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not quickly:
        monkeypatch.setattr("lightning_bytescheduler.diloco.session._BACK_S", 0.1)
    leave = Session.leave
    monkeypatch.setattr(Session, "leave", lambda session, **_: leave(session, quickly=quickly))
    server = serve(inner_steps=5, outer_lr=1.0, outer_momentum=0.0)
    link = Link(port_of(server))
    stack.callback(link.close)
    cut_at_the_end(link, "_leave", monkeypatch)
    worker = TrainsOnly(link.url, "worker", steps=13).checked()
    said = "worker ends, and 6 samples that it has trained on may be in no weights: the coordinator is away"
    assert said in caplog.text
    assert caplog.text.count("waits for it") == (not quickly)
    assert all(map(torch.equal, worker.weights, worker.uninterrupted(without={10, 11, 12})))


def test_a_worker_that_is_to_end_soon_stops_waiting_for_a_coordinator_that_is_away(
    ends_alone: EndsAlone, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A SIGTERM may come in the wait."""
    monkeypatch.setattr("lightning_bytescheduler.diloco.session._BACK_S", 6000.0)
    hurries, leave = threading.Event(), Session.leave
    monkeypatch.setattr(
        Session, "leave", lambda session, *, quickly: leave(session, quickly=quickly, hurries=hurries.is_set)
    )
    worker = ends_alone()[2]
    hurries.set()
    worker.checked()
    assert "worker ends, and 6 samples that it has trained on may be in no weights" in caplog.text


def test_a_leader_that_waits_for_others_hears_that_another_rank_of_its_worker_is_gone(serve: Any) -> None:
    server = serve(rounds={"start_workers": 2})
    worker = TrainsOnly(server.url, "worker")
    until(lambda: bool(server.status().workers), "the worker")
    worker.board.fault = RankFailedError(1, "no sign of life")
    with pytest.raises(RankFailedError, match="Rank 1 failed: no sign of life"):
        worker.checked()


def test_a_coordinator_that_knows_nothing_gets_the_weights_from_a_worker(serve: Any, stack: ExitStack) -> None:
    server = serve(inner_steps=5)
    link = Link(port_of(server))
    stack.callback(link.close)
    workers = [ThreadWorker(link.url, name) for name in ("one", "two")]
    until(lambda: all(worker.version >= 2 for worker in workers), "the second round")
    link.cut()
    server.close()
    other = serve(inner_steps=5, outer_steps=6)
    link.heal(port_of(other))
    assert_same([worker.checked() for worker in workers])
    assert [worker.version for worker in workers] == [6, 6]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"given": {"inner_steps": 7}}, "inner_steps=7 .* inner_steps=5"),
        ({"given": {"wire_dtype": "bf16"}}, "wire_dtype='bf16'"),
        ({"given": {"overlap_steps": 3}}, "overlap_steps=3 .* overlap_steps=0"),
        ({"width": 6}, "its parameter 0 is"),
    ],
)
def test_a_worker_that_does_not_fit_is_told_what_differs(options: dict[str, Any], says: str, serve: Any) -> None:
    server = serve(inner_steps=5, outer_steps=20)
    first = ThreadWorker(server.url, "first")
    until(lambda: first.version >= 1, "the first round")
    with pytest.raises(CoordinatorError, match=says):
        ThreadWorker(server.url, "other", **options).checked()
    first.end()
    first.checked()


def test_a_wrong_token_is_said_and_never_shown(serve: Any, tmp_path: Any) -> None:
    server = serve(inner_steps=5, outer_steps=1, access=ServerAccess(token="the-right-one"))
    file = tmp_path / "token"
    file.write_text("the-wrong-one")
    file.chmod(0o600)
    worker = ThreadWorker(server.url, "worker", token_file=str(file))
    with pytest.raises(CoordinatorError, match="token") as raised:
        worker.checked()
    assert "the-wrong-one" not in str(raised.value) + repr(worker.runtime._address)
    file.write_text("the-right-one\n")
    assert ThreadWorker(server.url, "worker", token_file=str(file)).checked().version == 1


def test_an_absent_coordinator_is_named_in_time(serve: Any) -> None:
    server = serve()
    server.close()
    with pytest.raises(SchedulerTimeoutError, match=r"No coordinator answered at http://127\.0\.0\.1"):
        ThreadWorker(server.url, "worker", timeout=0.3).checked()


@pytest.mark.parametrize(
    ("url", "options", "named"),
    [
        ("ftp://host", {}, "coordinator"),
        ("http://user:secret@host:1", {}, "coordinator"),
        ("http://127.0.0.1:1", {"authority": "x.pem"}, "coordinator.authority"),
        (None, {"name": "w"}, "one with a url"),
    ],
)
def test_an_address_that_is_none_is_refused(url: Any, options: dict[str, Any], named: str) -> None:
    from lightning_bytescheduler import DiLoCoStrategy

    with pytest.raises(OptionError, match=named) as raised:
        DiLoCoStrategy(coordinator={"url": url, **options})
    assert "secret" not in str(raised.value)


def test_a_coordinator_that_is_started_again_goes_on_where_it_was(stack: ExitStack, tmp_path: Any) -> None:
    def start(**given: Any) -> CoordinatorServer:
        options = coordinator_options(inner_steps=5, outer_steps=30, **given)
        return stack.enter_context(CoordinatorServer(options, store=StateStore(str(tmp_path))))

    server = start()
    link = Link(port_of(server))
    stack.callback(link.close)
    workers = [ThreadWorker(link.url, name, seconds=0.02) for name in ("one", "two")]
    until(lambda: all(worker.version >= 4 for worker in workers), "the fourth round")
    link.cut()
    server.close()
    before = [worker.taken for worker in workers]
    until(lambda: all(worker.taken > taken + 10 for worker, taken in zip(workers, before, strict=True)), "ten steps")
    other = start()
    link.heal(port_of(other))
    assert_same([worker.checked() for worker in workers])
    assert [worker.version for worker in workers] == [30, 30]
    assert all(after > before for worker in workers for before, after in pairwise(worker.versions) if after != before)


def test_a_worker_ahead_of_the_state_of_a_coordinator_takes_that(stack: ExitStack, tmp_path: Any) -> None:
    """A coordinator that ended a round and died before it had kept it: the weights are those of the steps it has."""

    def start(state: Any) -> CoordinatorServer:
        options = coordinator_options(inner_steps=5, outer_steps=12, outer_lr=1.0, outer_momentum=0.0)
        return stack.enter_context(CoordinatorServer(options, store=StateStore(str(state))))

    server = start(tmp_path / "newer")
    link = Link(port_of(server))
    stack.callback(link.close)
    worker = ThreadWorker(link.url, "one", seconds=0.02)
    until(lambda: worker.version >= 2, "the second round")
    link.cut()
    server.close()
    shutil.copytree(tmp_path / "newer", tmp_path / "older")
    server = start(tmp_path / "newer")
    link.heal(port_of(server))
    until(lambda: worker.version >= 5, "the fifth round")
    link.cut()
    server.close()
    taken = worker.taken
    until(lambda: worker.taken > taken + 7, "seven steps beside a coordinator")
    other = start(tmp_path / "older")
    link.heal(port_of(other))
    worker.checked()
    given_up = worker.given_up()
    assert given_up
    assert other.status().samples == 2 * (worker.taken - len(given_up))
    assert all(map(torch.equal, worker.weights, worker.uninterrupted(without=given_up)))


def live(url: str) -> None:
    """In a process of its own, until it is killed."""
    ThreadWorker(url, "victim", timeout=20.0).join(60.0)


def test_a_worker_that_is_killed_is_given_up_and_its_name_comes_back(serve: Any) -> None:
    server = serve(inner_steps=5, lease=1.0, rounds={"grace": 0.2, "first_step_limit": 1.0})
    stays = ThreadWorker(server.url, "stays")
    process = multiprocessing.get_context("forkserver").Process(target=live, args=(server.url,), daemon=True)
    process.start()
    until(lambda: any(w.name == "victim" and w.merged for w in server.status().workers), "its first round", 60.0)
    process.kill()  # SIGKILL
    process.join()
    version = stays.version
    until(lambda: stays.version > version + 3, "three rounds without it")
    again = ThreadWorker(server.url, "victim")
    until(lambda: again.version > version + 3, "its return")
    for worker in (again, stays):
        worker.end()
        worker.checked()


class Stops(TrainsOnly):
    """Stops after so many steps until it may go on."""

    def __init__(self, url: str, name: str, *, stops_at: int, **given: Any) -> None:
        self.stops_at = stops_at
        self.may_go_on = threading.Event()
        super().__init__(url, name, **given)

    def _step(self, module: nn.Module, generator: torch.Generator, *, counts: bool = True) -> None:
        assert self.taken != self.stops_at or self.may_go_on.wait(60.0)
        super()._step(module, generator, counts=counts)

    @property
    def place(self) -> Any:
        return self.runtime.session._place


def restarted(
    server: CoordinatorServer, link: Link, start: Callable[[], CoordinatorServer], *workers: Stops
) -> CoordinatorServer:
    """Another coordinator, which the workers have joined while they stand still."""
    link.cut()
    until(lambda: not any(worker.place.connected for worker in workers), "the end of the connections")
    server.close()
    other = start()
    link.heal(port_of(other))
    until(lambda: all(worker.place.connected for worker in workers), "the connections")
    return other


def test_an_update_that_a_coordinator_had_taken_and_lost_as_it_was_restarted_is_sent_again(
    stack: ExitStack, tmp_path: Any
) -> None:
    """Its worker trains on beside the update, and has had the receipt for it."""

    def start() -> CoordinatorServer:
        options = coordinator_options(
            inner_steps=5, equal_steps=True, overlap_steps=3, outer_steps=2, rounds={"start_workers": 2}
        )
        return stack.enter_context(CoordinatorServer(options, store=StateStore(str(tmp_path))))

    server = start()
    link = Link(port_of(server))
    stack.callback(link.close)
    early, late = (Stops(link.url, name, stops_at=stop) for name, stop in (("early", 6), ("late", 3)))

    def has_receipt() -> bool:
        sent = early.runtime.session.unmerged.sent if early.taken == 6 else None
        return sent is not None and sent.upload.answer is not None

    until(has_receipt, "the receipt")
    other = restarted(server, link, start, early, late)
    for worker in (early, late):
        worker.may_go_on.set()
    for worker in (early, late):
        worker.checked()
    assert [(one.round, one.merged, one.samples) for one in other.status().rounds] == [(1, 2, 20), (2, 2, 20)]


def test_an_update_that_a_coordinator_still_has_is_not_added_twice(stack: ExitStack, serve: Any) -> None:
    server = serve(inner_steps=5, equal_steps=True, overlap_steps=3, outer_steps=2, rounds={"start_workers": 2})
    link = Link(port_of(server))
    stack.callback(link.close)
    early, late = Stops(link.url, "early", stops_at=6), Stops(server.url, "late", stops_at=3)
    until(lambda: early.taken == 6, "the sixth step")
    sent = early.runtime.session.unmerged.sent
    assert sent is not None
    until(lambda: sent.upload.answer is not None, "the receipt")
    link.cut()
    until(lambda: not early.place.connected, "the end of the connection")
    link.heal()
    until(lambda: server.status().counters.get("updates_again") == 1, "the update again")
    until(lambda: sent.upload.answer is not None, "its receipt")
    assert sent.upload.answer.verdict == "added", "it is the receipt of the first time"
    for worker in (early, late):
        worker.may_go_on.set()
    for worker in (early, late):
        worker.checked()
    assert [(one.merged, one.samples) for one in server.status().rounds] == [(2, 20), (2, 20)]


def test_a_worker_that_merges_while_a_coordinator_is_started_again_without_that_round_takes_its_state(
    stack: ExitStack, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outer step of a large model takes longer than a restart. What the worker joins is the round that it merges."""

    def start(state: str) -> CoordinatorServer:
        options = coordinator_options(inner_steps=5, equal_steps=True, outer_steps=3, outer_lr=1.0, outer_momentum=0.0)
        return stack.enter_context(CoordinatorServer(options, store=StateStore(str(tmp_path / state))))

    merge, merges, merging, may_merge = OuterState.merge, count(1), threading.Event(), threading.Event()

    def waits(state: OuterState, *given: Any, total: int, **options: Any) -> None:
        if total and next(merges) == 2:
            merging.set()
            assert may_merge.wait(60.0)
        merge(state, *given, total=total, **options)

    monkeypatch.setattr(OuterState, "merge", waits)
    server = start("newer")
    link = Link(port_of(server))
    stack.callback(link.close)
    worker = Stops(link.url, "worker", stops_at=7, timeout=20.0)
    until(lambda: worker.taken == 7 and server.status().saved_round == 1, "the state of the first round")
    shutil.copytree(tmp_path / "newer", tmp_path / "older")
    worker.may_go_on.set()
    assert merging.wait(60.0)
    other = restarted(server, link, lambda: start("older"), worker)
    may_merge.set()
    worker.checked()
    assert (worker.version, worker.taken) == (other.status().weights_version, 20) == (3, 20)
    assert all(map(torch.equal, worker.weights, worker.uninterrupted(without=set(range(5, 10)))))


def test_a_last_round_that_a_coordinator_has_lost_is_trained_again(stack: ExitStack, tmp_path: Any) -> None:
    """It had told its workers that training is over, and had not kept the weights."""

    def start(state: str) -> CoordinatorServer:
        options = coordinator_options(inner_steps=5, equal_steps=True, overlap_steps=3, outer_steps=2)
        return stack.enter_context(CoordinatorServer(options, store=StateStore(str(tmp_path / state))))

    server = start("newer")
    link = Link(port_of(server))
    stack.callback(link.close)
    worker = Stops(link.url, "worker", stops_at=9)
    until(lambda: worker.taken == 9, "the second round")
    until(lambda: server.status().saved_round == 1, "its state")
    shutil.copytree(tmp_path / "newer", tmp_path / "older")
    worker.stops_at = 11
    worker.may_go_on.set()
    worker.may_go_on = threading.Event()
    until(lambda: worker.place.last_round == 2, "the word that training is over")
    other = restarted(server, link, lambda: start("older"), worker)
    assert worker.place.last_round is None
    worker.may_go_on.set()
    worker.checked()
    assert worker.version == other.status().weights_version == 2
    assert other.status().phase == "finished"


def test_a_worker_that_comes_back_after_the_last_round_hears_that_training_is_over(
    stack: ExitStack, tmp_path: Any
) -> None:
    def start() -> CoordinatorServer:
        options = coordinator_options(inner_steps=5, outer_steps=2, rounds={"start_workers": 2, "silent_after": 1.0})
        return stack.enter_context(CoordinatorServer(options, store=StateStore(str(tmp_path))))

    server = start()
    link = Link(port_of(server))
    stack.callback(link.close)
    away, stays = Stops(link.url, "away", stops_at=7), TrainsOnly(server.url, "stays")
    until(lambda: away.taken == 7, "the second round")
    link.cut()
    stays.checked()
    assert server.status().phase == "finished"
    restarted(server, link, start, away)
    away.may_go_on.set()
    assert away.checked().version == 2
    assert_same([away, stays])


def test_what_a_round_ended_without_is_said_with_its_samples(
    serve: Any, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(inner_steps=5, outer_steps=1, rounds={"start_workers": 2, "silent_after": 1.0, "grace": 1.0})
    late, stays = Stops(server.url, "late", stops_at=3), TrainsOnly(server.url, "stays")
    stays.checked()
    late.may_go_on.set()
    late.checked()
    assert "late: round 1 ended without its" in caplog.text
    assert "samples, which came too late or were refused, and are in no weights." in caplog.text
    assert "stays: round" not in caplog.text


def test_a_late_last_update_is_said_with_its_samples(
    serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a SIGTERM, when no mean is waited for."""
    server = serve(inner_steps=5, rounds={"start_workers": 2, "grace": 0.0, "silent_after": 0.1})
    leave, hand_in, ahead = Session.leave, Session._hand_in, threading.Event()
    monkeypatch.setattr(Session, "leave", lambda session, **_: leave(session, quickly=True))

    def late(session: Session) -> None:
        with monkeypatch.context() as patched:
            if session.worker == "late":  # it has sent before it hears that its round is over
                assert ahead.wait(60.0)
                patched.setattr(Session, "_late", False)
            hand_in(session)

    monkeypatch.setattr(Session, "_hand_in", late)
    goes, stays = TrainsOnly(server.url, "late", steps=3), TrainsOnly(server.url, "stays")
    until(lambda: stays.version >= 1, "the end of the round")
    ahead.set()
    goes.checked()
    stays.end()
    stays.checked()
    assert "late ends, and 6 samples that it has trained on may be in no weights" in caplog.text


def test_a_late_update_of_a_round_without_a_quorum_is_carried_and_not_said_to_be_lost(
    serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Rounds, "_least", lambda rounds: 2 if rounds.round == 1 else 1)
    server = serve(inner_steps=5, rounds={"start_workers": 2, "grace": 0.0, "silent_after": 0.1})
    send, is_late, ahead = Session._send, Session._late, threading.Event()
    carried: list[int] = []

    def sends(session: Session) -> bool:
        if session.worker != "late" or session.round > 1:
            return send(session)
        assert ahead.wait(60.0)
        session._unaware = True  # it sends before it hears that its round is over
        sent = send(session)
        session._unaware = False
        return sent

    def merges(session: Session, round: int, mean: Any) -> None:
        merge(session, round, mean)
        if session.worker == "late" and round == 1:
            carried.append(session.state.samples[0])

    merge = Session._merge
    monkeypatch.setattr(Session, "_unaware", False, raising=False)
    monkeypatch.setattr(Session, "_late", property(lambda one: not one._unaware and is_late.fget(one)))
    monkeypatch.setattr(Session, "_send", sends)
    monkeypatch.setattr(Session, "_merge", merges)
    late, stays = TrainsOnly(server.url, "late"), TrainsOnly(server.url, "stays")
    until(lambda: stays.version >= 1, "the end of the round")
    ahead.set()
    until(lambda: bool(carried), "the end of the round for the late one")
    for worker in (late, stays):
        worker.end()
        worker.checked()
    assert server.status().counters["updates_late"] >= 1
    assert carried[0] > 0
    assert "late: round 1 ended without its" not in caplog.text


def test_a_worker_that_leaves_amid_a_pause_sends_nothing_in_vain(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a SIGTERM. The last round has sent one fragment of two, and it has no part in the next one."""
    server = serve(inner_steps=5, fragments=2)
    leave = Session.leave

    def leave_paused(session: Session, **_: Any) -> None:
        session.pause(shows=False)
        leave(session, quickly=True)

    monkeypatch.setattr(Session, "leave", leave_paused)
    TrainsOnly(server.url, "one", steps=5).checked()
    counters = server.status().counters
    assert (counters["updates_added"], counters.get("updates_refused", 0)) == (1, 0)
