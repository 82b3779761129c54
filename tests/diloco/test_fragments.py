from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.diloco.coordinator_protocol import run_options
from lightning_bytescheduler.diloco.fragments import TrainedWeights, fragment_of, mix, split_fragments
from lightning_bytescheduler.exceptions import OptionError


def test_rounds_of_uneven_workers_go_through_the_fragments() -> None:
    assert [fragment_of(round, fragments=3) for round in range(1, 8)] == [0, 1, 2, 0, 1, 2, 0]


def test_mixing_is_for_overlap() -> None:
    module = torch.nn.Linear(2, 1)
    assert TrainedWeights(module).mixing == 0.0
    assert TrainedWeights(module, overlaps=True).mixing == 0.5


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
        ({"overlap_steps": "soon"}, "overlap_steps must be a whole number, 0 or more"),
    ],
)
def test_what_is_not_allowed(options: dict, reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        run_options(**options)


def test_what_does_not_fit_together() -> None:
    with pytest.raises(OptionError, match="fragments must be 2 at most"):
        split_fragments({"a": 1, "b": 1}, 3)
    with pytest.raises(OptionError, match="round"):
        fragment_of(0, fragments=1)
