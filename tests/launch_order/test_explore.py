"""A share of the schedules that ``python -m tests.launch_order.explore`` plays; the rest is a command."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.launch_order.explore import SMALL, explore, main, reach_all
from tests.launch_order.world import Case, Deadlock, World, stepped


def test_one_order_ends_in_all_schedules() -> None:
    ends, shown, _ = explore("one-order", 0, 400)
    assert ends == {"ended": 400}, shown


@pytest.mark.parametrize(
    ("design", "end", "schedules"),
    [
        ("two-communicators", "deadlock", 30),
        ("at-once", "deadlock", 60),
        ("overtaking", "deadlock", 60),
        ("no-order", "mismatch", 30),
    ],
)
def test_without_what_makes_it_one_order_it_is_seen_to_fail(design: str, end: str, schedules: int) -> None:
    ends, _, _ = explore(design, 0, schedules)
    assert ends[end], "this test of the order cannot fail"


def test_two_communicators_end_where_each_has_a_slot_of_its_own() -> None:
    """So the deadlocks above are for want of a slot, not for something that the simulation left out."""
    with stepped():
        for seed in range(60):
            world = World(replace(Case.drawn(seed, "two-communicators"), slots=2))
            while steps := world.steps():
                steps[seed % len(steps)][2]()


def test_all_schedules_of_a_small_case() -> None:
    states, all_of_them = reach_all(SMALL[0], 5_000)
    assert all_of_them
    assert states > 100
    with pytest.raises(Deadlock):
        reach_all(replace(SMALL[0], design="two-communicators"), 5_000)


def test_the_command_says_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schedules", "5"]) == 0
    assert "one-order: 5 ended" in capsys.readouterr().out
    assert main(["--design", "two-communicators", "--schedules", "30"]) == 1
    assert "its GPU runs" in capsys.readouterr().out
