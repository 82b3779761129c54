from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable

import pytest

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.tuning.record import TrialEntry, TuningIdentity
from lightning_bytescheduler.tuning.search import TuningOptions
from lightning_bytescheduler.tuning.sizes import PLAIN_DDP, LinkEstimate, SearchSpace, TuningPoint
from tests.tuning.training import CREDITS, IDENTITY, PARAMETERS, SPACE, START, Training, tuning

SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))]
FASTEST = 0.3
OPTIMUM = TuningPoint(credit=1_048_576, partition_size=131_072)


def bowl(optimum: TuningPoint, *, a: float = 0.03, b: float = 0.02, c: float = 0.0, ddp: float = 1.3):
    def seconds(point: TuningPoint) -> float:
        if point.is_plain_ddp:
            return FASTEST * ddp
        x, y = (math.log2(size / best) for size, best in zip(point, optimum, strict=True))
        return FASTEST * (1 + a * x * x + b * y * y + c * x * y)

    return seconds


def random_bowl(seed: int) -> Callable[[TuningPoint], float]:
    random_ = random.Random(1000 + seed)
    optimum = random_.choice(SPACE.points(octaves=0.1))
    a, b, c = (random_.uniform(low, high) for low, high in ((0.01, 0.05), (0.01, 0.05), (-0.01, 0.01)))
    return bowl(optimum, a=a, b=b, c=c)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_noisy_function_is_solved_within_15_trials_and_the_budget(seed: int) -> None:
    seconds = random_bowl(seed)
    training = Training(tuning(), seconds, seed=seed)
    training.run(500)
    lost = sum(training.seconds) - 500 * seconds(START)
    assert lost <= 0.02 * 500 * seconds(START)
    training.run(2500, until_settled=True)
    assert training.tuning.is_settled
    assert seconds(training.tuning.current) <= 1.05 * FASTEST
    assert training.trials <= 15


def test_the_budget_also_holds_where_everything_else_is_far_worse() -> None:
    """The start is the best of all, and a little way off the step takes twice as long."""

    def cliff(point: TuningPoint) -> float:
        return 0.3 if point == START else 0.6

    for seed in range(3):
        training = Training(tuning(), cliff, seed=seed, outliers=0.0).run(500)
        assert sum(training.seconds) - 500 * 0.3 <= 0.02 * 500 * 0.3
        training.run(6000, until_settled=True)
        assert training.tuning.current == START
        assert sum(training.seconds) - len(training.seconds) * 0.3 <= 0.02 * max(500, len(training.seconds)) * 0.3


def test_what_is_said_to_be_lost_is_what_was_lost() -> None:
    seconds = bowl(START, a=0.05, b=0.05)
    training = Training(tuning(), seconds, noise=0.0, outliers=0.0).run(3000, until_settled=True)
    lost = sum(training.seconds) - len(training.seconds) * seconds(START)
    assert training.tuning.state_dict()["lost_seconds"] == pytest.approx(lost, rel=0.05, abs=0.05 * FASTEST)
    assert lost > 0


@pytest.mark.parametrize("ddp", [0.9, 1.0])
def test_plain_ddp_wins_where_nothing_is_gained(ddp: float) -> None:
    training = Training(tuning(), lambda point: 0.3 * ddp if point.is_plain_ddp else 0.3, seed=3, noise=0.005)
    training.run(4000, until_settled=True)
    assert training.tuning.current == PLAIN_DDP
    assert training.point == PLAIN_DDP or training.decisions[-1] == PLAIN_DDP


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("noise", [0.003, 0.03])
def test_plain_ddp_wins_among_equals_whatever_the_noise(seed: int, noise: float) -> None:
    training = Training(tuning(), lambda point: 0.3, seed=seed, noise=noise)
    training.run(4000, until_settled=True)
    assert training.tuning.current == PLAIN_DDP


@pytest.mark.parametrize(("ddp", "wins"), [(1.0, True), (1.005, True), (1.02, False)])
def test_the_best_and_plain_ddp_are_measured_again_in_turns_and_a_tie_is_plain_ddps(ddp: float, wins: bool) -> None:
    one = SearchSpace(credits=(START.credit,) * 2, partitions=(START.partition_size,) * 2)
    seen: list[bool] = []

    def seconds(point: TuningPoint) -> float:
        seen.append(point.is_plain_ddp)
        return 0.3 * ddp * (1 + 0.0001 * len(seen)) if point.is_plain_ddp else 0.3 * (1 + 0.0001 * len(seen))

    training = Training(tuning(one), seconds, noise=0.0, outliers=0.0).run(1000, until_settled=True)
    assert training.tuning.is_settled
    assert training.tuning.current == (PLAIN_DDP if wins else START), "a steady drift cancels"
    turns = [(way, len(list(steps))) for way, steps in itertools.groupby(seen)]
    # The start and plain DDP, each once; then back and forth, with two turns of one in a row.
    assert [way for way, _ in turns] == [False, True] * 4 + [False]
    lengths = [length for _, length in turns[3:-1]]
    assert max(lengths) - min(lengths) <= 2


def test_plain_ddp_has_one_trial() -> None:
    training = Training(tuning(), lambda point: 0.9 if point.is_plain_ddp else 0.3, seed=3, noise=0.005)
    training.run(1000, until_settled=True)
    assert [entry.outcome for entry in training.tuning.entries if entry.kind == "ddp"] == ["abandoned"]


def test_plain_ddp_is_not_tried_where_it_is_not_wanted() -> None:
    options = TuningOptions(plain_ddp=False)
    training = Training(tuning(options=options), lambda point: 0.2 if point.is_plain_ddp else 0.3)
    training.run(3000, until_settled=True)
    assert not training.tuning.current.is_plain_ddp
    assert PLAIN_DDP not in training.decisions


def test_only_the_credit_moves_where_partitions_are_not_tuned() -> None:
    seconds = bowl(TuningPoint(credit=2_000_896, partition_size=97_280), a=0.05)
    training = Training(tuning(CREDITS), seconds, seed=1).run(3000, until_settled=True)
    assert {e.point.partition_size for e in training.tuning.entries if e.point.credit} == {START.partition_size}
    assert seconds(training.tuning.current) <= 1.03 * FASTEST


def test_a_space_of_one_point() -> None:
    one = TuningPoint(credit=1024, partition_size=1024)
    training = Training(tuning(SearchSpace.for_model(100, one), one), lambda point: 0.3 if point == one else 0.5)
    training.run(1000, until_settled=True)
    assert training.tuning.current == one


def test_validations_move_no_step_time_and_the_first_steps_after_a_change_are_not_measured() -> None:
    seconds = bowl(OPTIMUM)
    tuner = tuning()
    point, fresh = tuner.current, 0
    for step in range(3000):
        if step >= tuner.in_force_from and point != tuner.current:
            point, fresh = tuner.current, 1
        else:
            fresh = max(fresh - 1, 0)
        slow = step < 10 or step % 10 == 7 or fresh
        took = seconds(point) * (1.2 if slow else 1.0)
        tuner.step_took(step, took)
        if tuner.is_settled:
            break
    assert tuner.is_settled
    for entry in tuner.entries:
        assert entry.time.seconds == pytest.approx(seconds(entry.point), rel=1e-6), entry


def test_decisions_lead_by_two_steps() -> None:
    seconds = bowl(OPTIMUM)
    training = Training(tuning(), seconds, outliers=0.0, noise=0.001)
    while not training.decisions:
        training.run(1)
    assert training.tuning.in_force_from == training.step - 1 + 2
    training.run(3000, until_settled=True)
    for entry in training.tuning.entries:
        assert entry.time.seconds == pytest.approx(seconds(entry.point), rel=0.01)
    assert seconds(training.tuning.current) <= 1.03 * FASTEST


# Drift.


def settled(**given) -> tuple[Training, list[float]]:
    slower = [1.0]
    shape = bowl(OPTIMUM)
    training = Training(tuning(**given), lambda point: slower[0] * shape(point))
    training.run(3000, until_settled=True)
    training.run(600)
    assert training.tuning.is_settled
    return training, slower


@pytest.mark.parametrize("factor", [1.5, 0.7])
def test_it_searches_again_when_the_step_time_has_changed_for_good(factor: float) -> None:
    training, slower = settled()
    slower[0] = factor
    training.run(100)
    assert "drift" in {entry.kind for entry in training.tuning.entries}
    assert not training.tuning.is_settled
    training.run(3000, until_settled=True)
    assert training.tuning.entries[-1].kind == "chosen"
    assert training.tuning.entries[-1].search == 1


@pytest.mark.parametrize("blip", [1, 10, 35])
def test_a_blip_is_no_drift(blip: int) -> None:
    training, slower = settled()
    decisions = len(training.decisions)
    for _ in range(4):
        slower[0] = 3.0
        training.run(blip)
        slower[0] = 1.0
        training.run(100)
    assert training.tuning.is_settled
    assert len(training.decisions) == decisions


def test_searches_follow_each_other_slowly_on_a_link_that_never_rests() -> None:
    random_ = random.Random(0)
    training, slower = settled()
    start = training.step
    for _ in range(15):
        slower[0] = random_.choice([0.5, 1.0, 2.0])
        training.run(100)
    searches = {entry.search for entry in training.tuning.entries}
    assert len(searches) <= 2 + (training.step - start) // 500


def test_after_a_drift_it_finds_the_new_optimum() -> None:
    shape = [bowl(OPTIMUM)]
    training = Training(tuning(), lambda point: shape[0](point), seed=5).run(1500)
    moved = bowl(TuningPoint(credit=262_144, partition_size=65_536), a=0.05)
    shape[0] = lambda point: 2 * moved(point)
    training.run(4000)
    assert training.tuning.is_settled
    assert shape[0](training.tuning.current) <= 1.05 * 2 * FASTEST


# Resume.


@pytest.mark.parametrize("every", [150, 400])
def test_crashes_cost_what_was_under_way_and_no_more(every: int) -> None:
    """Trials that have ended are not made again, and the choice is as good, also after a drift."""
    slower, shape = [1.0], bowl(OPTIMUM)
    training = Training(tuning(), lambda point: slower[0] * shape(point), seed=11)
    trials: list[TrialEntry] = []
    for step in range(4000):
        slower[0] = 1.0 if step < 2000 else 1.6
        training.run(1)
        if step % every == every - 1:
            trials += [entry for entry in training.tuning.entries if entry.is_trial]
            state = json.loads(json.dumps(training.tuning.state_dict()))
            resumed = tuning()
            assert resumed.load_state_dict(state)
            assert resumed.is_settled == training.tuning.is_settled
            assert resumed.state_dict() == training.tuning.state_dict()
            training.tuning, training.point = resumed, resumed.current
    trials += [entry for entry in training.tuning.entries if entry.is_trial]
    assert {entry.search for entry in trials} == {0, 1}, "a drift was part of it"
    for search in (0, 1):
        points = [entry.point for entry in trials if entry.search == search and entry.kind != "ddp"]
        assert len(points) == len(set(points))
    assert training.tuning.is_settled
    assert shape(training.tuning.current) <= 1.05 * FASTEST


def test_a_resumed_training_starts_tuned_and_its_first_steps_do_not_count() -> None:
    training, _ = settled()
    resumed = tuning()
    assert resumed.load_state_dict(training.tuning.state_dict())
    assert resumed.is_settled
    assert resumed.current == training.tuning.current != START
    for step in range(10):  # numbered anew
        resumed.step_took(step, 9.0)
    for step in range(10, 130):
        resumed.step_took(step, bowl(OPTIMUM)(resumed.current))
    assert resumed.is_settled
    assert resumed.current == training.tuning.current


@pytest.mark.parametrize(
    "other",
    [
        {"parameters": PARAMETERS + 1},
        {"workers": 5},
        {"backend": "nccl"},
        {"bytes_per_parameter": 2},
        {"link": LinkEstimate(alpha=1e-3, beta=5e-8)},
        {"in_shards": True},
        {"partition_size": 97_280},
    ],
    ids=lambda other: next(iter(other)),
)
def test_the_state_of_another_model_or_link_is_not_used(other: dict) -> None:
    link = LinkEstimate(alpha=1e-3, beta=1e-8)
    values = {"parameters": PARAMETERS, "bytes_per_parameter": 4, "workers": 4, "backend": "gloo", "link": link}
    state = Training(tuning(identity=TuningIdentity(**values)), bowl(OPTIMUM)).run(100).tuning.state_dict()
    fresh = tuning(identity=TuningIdentity(**{**values, **other}))
    before = fresh.state_dict()
    assert not fresh.load_state_dict(state)
    assert fresh.state_dict() == before
    probed_again = LinkEstimate(alpha=1.2e-3, beta=0.9e-8)
    assert tuning(identity=TuningIdentity(**{**values, "link": probed_again})).load_state_dict(state)


def damaged(state: dict, path: str, value: object) -> dict:
    copy = json.loads(json.dumps(state))
    *parents, last = path.split(".")
    inner = copy
    for name in parents:
        inner = inner[name]
    inner[last] = value
    return copy


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("version", 99),
        ("identity", None),
        ("current", [3]),
        ("current", [None, None]),
        ("lost_seconds", -1.0),
        ("settled", None),
        ("steps", 1.5),
        ("trials", [{"kind": "?"}]),
        ("space.credits", [4]),
    ],
)
def test_a_state_that_is_none_is_refused_as_a_whole(path: str, value: object) -> None:
    state = Training(tuning(), bowl(OPTIMUM)).run(60).tuning.state_dict()
    fresh = tuning()
    before = fresh.state_dict()
    with pytest.raises(OptionError, match="state"):
        fresh.load_state_dict(damaged(state, path, value))
    assert fresh.state_dict() == before
    for nothing in (None, [1], "text", {"version": 3}):
        with pytest.raises(OptionError, match="state"):
            fresh.load_state_dict(nothing)


# Misuse.


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("trials", 0),
        ("steps_per_trial", 3),
        ("cost_share", math.nan),
    ],
)
def test_options_that_cannot_be(option: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"^{option}="):
        TuningOptions(**{option: value})


def test_a_state_of_no_identity_is_refused() -> None:
    assert IDENTITY.matches(IDENTITY)
    state = tuning().state_dict()
    state["identity"]["backend"] = None
    with pytest.raises(OptionError, match=r"made by state_dict\(\)"):
        tuning().load_state_dict(state)
