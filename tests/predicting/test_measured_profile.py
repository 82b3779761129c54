from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.exceptions import UnsupportedError
from lightning_bytescheduler.predicting.predict import (
    BETWEEN_STEPS,
    UNUSED,
    StepTimes,
    make_profile,
    typical,
)
from lightning_bytescheduler.predicting.profiles import ModelProfile


def step(first_use: dict[str, float], gradient: dict[str, float]) -> StepTimes:
    return StepTimes(step=36.0, forward=10.0, backward=20.0, update=4.0, first_use=first_use, gradient=gradient)


def figures(profile: ModelProfile) -> list[tuple[str, int, float, float]]:
    return [(x.name, x.parameter_bytes, x.forward_seconds, x.backward_seconds) for x in profile.layers]


def test_layers_in_the_order_of_first_use() -> None:
    # Registered as b, a; a is used first.
    watched = step({"b.w": 7.0, "a.w": 2.0}, {"b.w": 5.0, "a.w": 18.0})
    profile = make_profile("m", {"b.w": 30, "a.w": 10}, watched)
    assert profile.name == "m"
    assert figures(profile) == [
        (BETWEEN_STEPS, 0, 2.0 + 2.0, 2.0),  # the step's rest, and what comes before a and after its gradient
        ("a", 10, 5.0 + 1.0, 13.0),  # a quarter of the update
        ("b", 30, 3.0 + 3.0, 5.0),
    ]
    assert profile.compute_seconds == watched.step


def test_parameters_of_a_module_are_one_layer_if_nothing_else_is_used_between() -> None:
    watched = step(
        {"a.w": 1.0, "a.b": 1.5, "b.w": 3.0, "a.late": 6.0}, {"a.w": 16.0, "a.b": 15.0, "b.w": 12.0, "a.late": 4.0}
    )
    profile = make_profile("m", {"a.w": 8, "a.b": 2, "b.w": 1, "a.late": 5}, watched)
    assert [entry[:2] for entry in figures(profile)[1:]] == [("a", 10), ("b", 1), ("a", 5)]


def test_a_layer_is_complete_when_its_last_gradient_and_all_later_layers_are() -> None:
    # The gradient of the middle layer comes after the first's, as if its work had been put off.
    watched = step({"a.w": 0.0, "b.w": 2.0, "c.w": 4.0}, {"a.w": 10.0, "b.w": 15.0, "c.w": 5.0})
    profile = make_profile("m", {"a.w": 1, "b.w": 1, "c.w": 1}, watched)
    assert [seconds for *_, seconds in figures(profile)] == [5.0, 0.0, 10.0, 5.0]


def test_what_is_read_unseen_is_used_where_its_gradient_says() -> None:
    watched = step({"seen.w": 4.0}, {"compiled.w": 16.0, "seen.w": 9.0})
    profile = make_profile("m", {"compiled.w": 1, "seen.w": 3}, watched)
    assert figures(profile) == [
        (BETWEEN_STEPS, 0, pytest.approx(2.0 + 2.0), 4.0),  # a fifth of both passes
        ("compiled", 1, pytest.approx(2.0 + 1.0), 7.0),
        ("seen", 3, 6.0 + 3.0, 9.0),
    ]


def test_what_is_unused_is_sent_at_once_and_not_updated() -> None:
    watched = step({"used.w": 4.0}, {"used.w": 9.0})
    profile = make_profile("m", {"never.w": 50, "used.w": 3}, watched)
    assert figures(profile)[1:] == [("used", 3, 6.0 + 4.0, 9.0), (UNUSED, 50, 0.0, 0.0)]
    assert profile.parameter_bytes == 53


def test_a_parameter_that_is_used_without_a_gradient_keeps_its_place() -> None:
    watched = step({"read only.w": 3.0, "b.w": 5.0}, {"b.w": 9.0})
    profile = make_profile("m", {"read only.w": 1, "b.w": 3}, watched)
    assert [entry[0] for entry in figures(profile)] == [BETWEEN_STEPS, "read only", "b"]


def test_a_typical_step_is_no_disturbed_one() -> None:
    usual, odd = step({}, {}), StepTimes(forward=90.0, backward=5.0, update=3.0, step=100.0)
    assert typical([usual, odd, usual]) == usual


@pytest.mark.parametrize("watched", [step({"a.w": 1.0}, {}), step({}, {})])
def test_without_a_gradient_there_is_nothing_to_send(watched: StepTimes) -> None:
    with pytest.raises(UnsupportedError, match="No parameter of the module gets a gradient"):
        make_profile("m", {"a.w": 1}, watched)


@given(
    rest=st.floats(0, 50),
    update=st.floats(0, 50),
    moments=st.lists(
        st.tuples(st.integers(1, 99), st.none() | st.floats(0, 12), st.floats(0, 22)), min_size=1, max_size=6
    ),
)
def test_whatever_was_seen_the_sum_is_the_step_and_no_byte_is_lost(
    rest: float, update: float, moments: list[tuple[int, float | None, float]]
) -> None:
    names = [f"layer {number}.w" for number in range(len(moments))]
    watched = replace(
        step(
            {name: use for name, (_, use, _) in zip(names, moments, strict=True) if use is not None},
            {name: ready for name, (_, _, ready) in zip(names, moments, strict=True)},
        ),
        update=update,
        step=30.0 + update + rest,
    )
    sizes = {name: size for name, (size, _, _) in zip(names, moments, strict=True)}
    profile = make_profile("m", sizes, watched)
    assert profile.compute_seconds == pytest.approx(watched.step)
    assert profile.backward_seconds == pytest.approx(watched.backward)
    assert profile.parameter_bytes == sum(size for size, _, _ in moments)
