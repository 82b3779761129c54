"""Models and networks for these tests, small ones by hand and random ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from lightning_bytescheduler.predicting.link import LinkModel
from lightning_bytescheduler.predicting.profiles import LayerProfile, ModelProfile
from lightning_bytescheduler.predicting.simulator import Schedule

unhurried = settings(deadline=None)
"""For properties: the machine may be busy."""


def model(layers: Sequence[tuple[int, float, float]]) -> ModelProfile:
    """A model from pairs of bytes, forward and backward seconds."""
    return ModelProfile(
        name="model",
        layers=tuple(
            LayerProfile(name=f"layer{i}", parameter_bytes=size, forward_seconds=forward, backward_seconds=backward)
            for i, (size, forward, backward) in enumerate(layers)
        ),
    )


def plain_link(**changes: Any) -> LinkModel:
    """One byte takes one second: for two workers, ``2(n-1)/n`` is 1."""
    return LinkModel(**{"workers": 2, "bandwidth": 1.0, **changes})


# The published contrived example, in half units of computation: pushing layers 0, 1, 2 takes 3, 6, 3.
CONTRIVED = model([(3, 2, 2), (6, 2, 2), (3, 2, 2)])

_times = st.floats(0, 5, allow_subnormal=False).map(lambda seconds: round(seconds, 3))
_layers = st.tuples(st.one_of(st.integers(0, 40), st.integers(0, 400)), _times, _times)
models = (
    st.lists(_layers, min_size=1, max_size=8).filter(lambda layers: sum(f + b for _, f, b in layers) > 0).map(model)
)

links = st.builds(
    LinkModel,
    workers=st.sampled_from([2, 3, 8, 4096]),
    bandwidth=st.floats(0.5, 100),
    latency=st.sampled_from([0.0, 0.001, 0.3]),
)
silent_links = st.builds(LinkModel, workers=st.sampled_from([2, 3, 64]), bandwidth=st.floats(0.5, 100))
"""Without latency."""

sizes = st.one_of(st.none(), st.integers(1, 500))
schedules = st.builds(
    Schedule,
    bucket_bytes=sizes,
    # A few hundred pieces at most, so that a property is quick.
    partition_bytes=st.one_of(st.none(), st.integers(5, 200)),
    credit_bytes=sizes,
    barrier=st.booleans(),
)
