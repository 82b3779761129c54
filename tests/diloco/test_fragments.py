from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.diloco.fragments import (
    FragmentAction,
    FragmentOptions,
    FragmentSchedule,
    mix,
    split_fragments,
)
from lightning_bytescheduler.exceptions import OptionError


def schedule(fragments: int, steps: int, overlap: int) -> FragmentSchedule:
    return FragmentSchedule(options=FragmentOptions(fragments=fragments, overlap_steps=overlap), steps=steps)


def test_one_fragment_without_overlap_is_diloco() -> None:
    actions = [(step, action.do) for step in range(1, 13) for action in schedule(1, 4, 0).actions(step)]
    assert actions == [(4, "send"), (4, "merge"), (8, "send"), (8, "merge"), (12, "send"), (12, "merge")]


def test_fragments_are_staggered_and_merged_later() -> None:
    plan = schedule(2, 6, 2)
    actions = {step: plan.actions(step) for step in range(1, 13) if plan.actions(step)}
    assert actions == {
        3: (FragmentAction(do="send", fragment=0, sent=3),),
        5: (FragmentAction(do="merge", fragment=0, sent=3),),
        6: (FragmentAction(do="send", fragment=1, sent=6),),
        8: (FragmentAction(do="merge", fragment=1, sent=6),),
        9: (FragmentAction(do="send", fragment=0, sent=9),),
        11: (FragmentAction(do="merge", fragment=0, sent=9),),
        12: (FragmentAction(do="send", fragment=1, sent=12),),
    }


@given(st.integers(1, 12), st.integers(1, 40), st.integers(0, 39))
def test_each_fragment_is_sent_and_merged_in_turn(fragments: int, steps: int, overlap: int) -> None:
    fragments, overlap = min(fragments, steps), min(overlap, steps - 1)
    plan = schedule(fragments, steps, overlap)
    seen: dict[int, list[tuple[str, int]]] = {}
    sends_after = []
    for step in range(1, 3 * steps + overlap + 1):
        actions = plan.actions(step)
        sends_after.append(sum(action.do == "send" for action in actions))
        for action in actions:
            seen.setdefault(action.fragment, []).append((action.do, step))
            assert action.sent == (step if action.do == "send" else step - overlap)
    assert max(sends_after) == 1
    assert sum(sends_after[steps : 2 * steps]) == fragments
    for done in seen.values():
        assert [do for do, _ in done[:6]] == ["send", "merge"] * 3  # never sent again before it was merged
        sent = [step for do, step in done if do == "send"]
        assert all(later - earlier == steps for earlier, later in itertools.pairwise(sent))
    firsts = sorted(done[0][1] for done in seen.values())
    gaps = [later - earlier for earlier, later in zip(firsts, [*firsts[1:], firsts[0] + steps], strict=True)]
    assert max(gaps) - min(gaps) <= 1  # spread evenly


def test_rounds_of_uneven_workers_go_through_the_fragments() -> None:
    options = FragmentOptions(fragments=3)
    assert [options.fragment_of(round) for round in range(1, 8)] == [0, 1, 2, 0, 1, 2, 0]


def test_mixing_is_for_overlap() -> None:
    assert FragmentOptions().mixing == 0.0
    assert FragmentOptions(overlap_steps=2).mixing == 0.5
    assert FragmentOptions(overlap_steps=2, mixing=0.25).mixing == 0.25


def test_the_mixing_formula() -> None:
    local, merged = torch.tensor([1.0, 3.0, 1e-8]), torch.tensor([2.0, -1.0, 1e8])
    torch.testing.assert_close(mix(local, merged, 0.25), 0.25 * local + 0.75 * merged)
    assert torch.equal(mix(local, merged, 0.0), merged)
    assert torch.equal(mix(local, merged, 1.0), local)
    assert mix(local.bfloat16(), merged, 0.5).dtype == torch.bfloat16


@given(
    st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 1000), min_size=1, max_size=20), st.integers(1, 8)
)
def test_every_parameter_is_in_one_fragment_of_about_the_same_size(sizes: dict[str, int], fragments: int) -> None:
    fragments = min(fragments, len(sizes))
    parts = split_fragments(sizes, fragments)
    assert len(parts) == fragments
    assert all(parts)
    assert sorted(name for part in parts for name in part) == sorted(sizes)
    order = list(sizes)
    assert all(list(part) == sorted(part, key=order.index) for part in parts)
    filled = [sum(sizes[name] for name in part) for part in parts]
    assert max(filled) - min(filled) <= max(sizes.values())


def test_neighbours_go_to_different_fragments() -> None:
    sizes = {f"layer{index}": 10 for index in range(6)}
    assert split_fragments(sizes, 2) == (("layer0", "layer2", "layer4"), ("layer1", "layer3", "layer5"))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"fragments": 0}, "fragments"),
        ({"overlap_steps": -1}, "overlap_steps"),
        ({"mixing": 1.5}, "mixing"),
        ({"mixing": -0.5}, "mixing"),
    ],
)
def test_what_is_not_allowed(options: dict, reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        FragmentOptions(**options)


def test_what_does_not_fit_together() -> None:
    with pytest.raises(OptionError, match="fragments=5 is not allowed: fragments must be 4 at most"):
        schedule(5, 4, 0)
    with pytest.raises(OptionError, match="overlap_steps=4 is not allowed: overlap_steps must be less than 4"):
        schedule(1, 4, 4)
    with pytest.raises(OptionError, match="fragments must be 2 at most"):
        split_fragments({"a": 1, "b": 1}, 3)
    with pytest.raises(OptionError, match="round"):
        FragmentOptions().fragment_of(0)
