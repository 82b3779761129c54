"""The words change with the figures, and the figures are those of the simulator."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from benchmarks.configuration import Configuration
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.predicting.link import LinkModel
from lightning_bytescheduler.predicting.prediction import (
    BF16,
    BYTESCHEDULER,
    DDP,
    DDP_BEST,
    DILOCO,
    FIXED,
    SERVERS,
    MeasuredStep,
    Prediction,
    chosen_schedule,
    predict,
)
from lightning_bytescheduler.predicting.profiles import LayerProfile, ModelProfile, network_profile
from lightning_bytescheduler.predicting.simulator import lower_bound, simulate
from tests.predicting.profiles import links, models

GIGABIT = 1e9 / 8
CLOSE = 1 + 1e-9
UNIFORM = network_profile("uniform")  # 100 MB, 200 ms
BALANCED = 6e9 / 8  # 100 MB take 200 ms over four workers


@pytest.fixture(scope="module")
def vgg16() -> ModelProfile:
    return network_profile("vgg16")


def of(bandwidth: float = BALANCED, *, workers: int = 4, **measured: Any) -> Prediction:
    link = LinkModel(workers=workers, bandwidth=bandwidth)
    step = MeasuredStep(**{"profile": UNIFORM, "device": "cpu", **measured})
    return predict(step, link)


# The figures.


@given(profile=models, link=links)
@settings(max_examples=30, deadline=None)
def test_lines_are_in_their_order(profile: ModelProfile, link: LinkModel) -> None:
    if link.workers < 2:
        link = replace(link, workers=2)
    found = predict(profile, link)
    seconds = {line.strategy: line.step_seconds for line in found.expectations}
    bound = lower_bound(profile, link)
    assert profile.compute_seconds <= bound * CLOSE
    for name in (DDP_BEST, BYTESCHEDULER):
        assert bound <= seconds[name] * CLOSE
    assert seconds[DDP_BEST] <= seconds[DDP]
    assert seconds[BYTESCHEDULER] <= seconds[DDP]


def test_each_line_can_be_simulated_again(vgg16: ModelProfile) -> None:
    link = LinkModel(workers=4, bandwidth=30 * GIGABIT, latency=20e-6)
    found = predict(vgg16, link)
    simulated = [line for line in found.expectations if line.same_training and line.schedule is not None]
    assert [line.strategy for line in simulated] == [DDP, DDP_BEST, BYTESCHEDULER]
    for line in simulated:
        assert simulate(vgg16, link, line.schedule) == pytest.approx(line.step_seconds)
    assert found.of(BYTESCHEDULER).schedule == chosen_schedule(vgg16, link)
    # Where the processor computes, the strategy chooses other sizes.
    assert of(device="cpu").of(BYTESCHEDULER).schedule == chosen_schedule(UNIFORM, of().link, busy_processor=True)


def test_what_vgg16_gains(vgg16: ModelProfile) -> None:
    def gain(gigabits: float) -> float:
        link = LinkModel(workers=4, bandwidth=gigabits * GIGABIT)
        found = predict(vgg16, link)
        return found.of(DDP_BEST).step_seconds / found.of(BYTESCHEDULER).step_seconds

    # Communication takes as long as computation at 33 Gbit/s; the most is won there, and it is nearly all of 4/3.
    assert 1.29 < gain(33) < 4 / 3
    assert gain(33) > gain(10) > gain(1) > 1
    # Where all is hidden, nothing is won, and next to nothing lost: which layers end up in the last bucket.
    assert gain(50) == pytest.approx(1, abs=5e-3)
    assert gain(100) == pytest.approx(1, abs=5e-3)


def test_own_sizes_are_those_of_the_strategy(vgg16: ModelProfile) -> None:
    link = LinkModel(workers=2, bandwidth=GIGABIT, latency=50e-6)
    chosen = chosen_schedule(vgg16, link)
    # Three times what latency costs, 100 us at 1 Gbit/s, is less than the least partition: 128 KiB.
    assert chosen.partition_bytes == 128 * 1024
    assert chosen.credit_bytes == 2 * chosen.partition_bytes
    assert chosen.bucket_bytes == vgg16.parameter_bytes // 64
    far = chosen_schedule(vgg16, replace(link, latency=5e-3))
    assert far.partition_bytes == pytest.approx(3 * 10e-3 * GIGABIT, abs=4)


def test_half_the_bytes_are_twice_the_bandwidth() -> None:
    given, twice = of(), of(2 * BALANCED)
    assert given.of(BF16).step_seconds == pytest.approx(twice.of(DDP).step_seconds)
    assert of(compressed_share=1.0).of(BF16).step_seconds == pytest.approx(given.of(DDP).step_seconds)


@pytest.mark.parametrize(
    ("bandwidth", "steps"), [(BALANCED, 20), (BALANCED / 2, 40), (20 * BALANCED, 1), (21 * BALANCED, 1)]
)
def test_diloco_exchanges_as_often_as_five_percent_allow(bandwidth: float, steps: int) -> None:
    given = of(bandwidth)
    expected = given.of(DILOCO)
    assert expected.inner_steps == steps
    assert expected.step_seconds == pytest.approx(0.2 + given.communication_seconds / steps)
    assert expected.step_seconds <= 0.2 * 1.05 * (1 + 1e-6)


def test_speed_of_all_workers() -> None:
    given = of()
    assert given.compute_seconds == given.communication_seconds == pytest.approx(0.2)
    assert given.speedup(0.4) == pytest.approx(2.0)


def test_all_gradients_compressed() -> None:
    given = of(BALANCED / 4)
    exact = given.of(BYTESCHEDULER).step_seconds
    int8, int4 = (given.of(FIXED[codec]) for codec in ("int8", "int4"))
    assert int4.step_seconds <= int8.step_seconds < exact
    assert not int8.same_training
    of_two_bytes = of(BALANCED / 4, compressed_share=1.0)
    assert int8.step_seconds < of_two_bytes.of(FIXED["int8"]).step_seconds < exact, "half as many times fewer bytes"
    names = {expected.strategy for expected in of(device="cuda").expectations}
    assert names.isdisjoint(FIXED.values()), "gradients on a GPU are not compressed"


@pytest.mark.parametrize("bandwidth", [BALANCED / 50, BALANCED / 2, BALANCED, 3 * BALANCED, 500 * BALANCED])
@pytest.mark.parametrize("clips", [(), ("gradient norm clipping",)])
def test_nothing_with_the_same_training_beats_the_ceiling(bandwidth: float, clips: tuple[str, ...]) -> None:
    given = of(bandwidth, norm_needed_by=clips)
    bound = min(given.ceiling_seconds, lower_bound(UNIFORM, given.link))
    for expected in given.expectations:
        if expected.same_training:
            assert expected.step_seconds >= bound * (1 - 1e-9)
    assert given.of(BYTESCHEDULER).step_seconds <= given.of(DDP).step_seconds * (1 + 1e-9)
    assert given.of(DDP_BEST).step_seconds <= given.of(DDP).step_seconds


def test_the_bound_holds_for_the_built_in_networks() -> None:
    for name in ("resnet50", "transformer", "uniform"):
        profile = network_profile(name)
        for gigabits in (1, 10, 100):
            link = LinkModel(workers=256, bandwidth=gigabits * GIGABIT, latency=5e-6)
            best = predict(profile, link).of(BYTESCHEDULER).step_seconds
            bound = lower_bound(profile, link)
            assert bound / CLOSE <= best <= 1.1 * bound


# The words.


def test_a_fast_link_leaves_nothing_to_gain() -> None:
    given = of(1000 * BALANCED)
    assert given.limited_by == "compute"
    assert given.recommended.strategy == DDP
    assert given.line == 'trainer = L.Trainer(strategy="ddp")'
    text = str(given)
    assert "nothing with the same training gains more" in text
    assert "What limits: computing." in text
    assert "diloco, every step *" in text
    assert "fewer bytes" not in text


def test_a_balanced_link_is_what_order_is_for() -> None:
    given = of()
    assert given.recommended.strategy == BYTESCHEDULER
    assert given.line == 'trainer = L.Trainer(strategy="bytescheduler")'
    gain = given.of(DDP).step_seconds / given.of(BYTESCHEDULER).step_seconds
    assert gain > 1.25
    text = str(given)
    assert f"{gain:.2f}x as fast as ddp" in text
    assert "1.00 times as long" in text
    assert text.startswith(f"Recommended: {given.line}"), "the answer comes first"


def test_a_slow_link_has_a_ceiling() -> None:
    given = of(BALANCED / 3)
    assert given.limited_by == "link"
    assert "What limits: the link." in str(given)
    assert "Only fewer bytes, larger batches or a faster link" in str(given)
    assert given.table()[-1][:2] == ("ceiling of ddp's training", f"{given.ceiling_seconds * 1e3:,.1f} ms")
    assert "slower than one alone" not in str(given)


def test_a_very_slow_link_makes_one_worker_the_better_choice() -> None:
    given = of(BALANCED / 100)
    text = str(given)
    assert text.startswith("Recommended: train on one machine. Over this network 4 workers are slower than one alone")
    assert "(diloco, every 2000 steps, would be 3.81x as fast as one, with another training)" in text
    assert text.count("Recommended") == 1
    assert given.line == "trainer = L.Trainer(devices=1)"


def test_ddp_with_other_buckets_is_enough_where_it_is_nearly_as_fast() -> None:
    # A layer whose gradients are final at once, and much to do after them: only DDP's bucket size is in the way.
    layers = [
        LayerProfile(name="first", parameter_bytes=400_000, forward_seconds=0.2, backward_seconds=0.4),
        LayerProfile(name="last", parameter_bytes=20_000_000, forward_seconds=0.001, backward_seconds=0.001),
        LayerProfile(name="head", parameter_bytes=1_100_000, forward_seconds=0.001, backward_seconds=0.001),
    ]
    given = of(BALANCED / 6, profile=ModelProfile(name="m", layers=tuple(layers)))
    assert given.recommended.strategy == DDP_BEST
    size = given.recommended.bucket_bytes
    assert size is not None
    assert given.line == f"trainer = L.Trainer(strategy=DDPStrategy(bucket_cap_mb={size // 2**20}))"


def test_clipping_takes_other_sizes_and_is_said() -> None:
    link = LinkModel(workers=4, bandwidth=BALANCED, latency=1e-4)
    clipped = predict(MeasuredStep(profile=UNIFORM, norm_needed_by=("gradient norm clipping",)), link)
    plain = predict(UNIFORM, link)
    assert clipped.of(BYTESCHEDULER).schedule == chosen_schedule(UNIFORM, link, in_shards=True)
    assert plain.of(BYTESCHEDULER).schedule == chosen_schedule(UNIFORM, link)
    assert clipped.of(BYTESCHEDULER).schedule != plain.of(BYTESCHEDULER).schedule
    assert clipped.of(DDP) == plain.of(DDP)
    assert "because of gradient norm clipping" in str(clipped)
    assert "norm" not in str(plain)


def test_synchronised_steps_are_not_overlapped() -> None:
    given = of(synchronised_because=("there are 2 optimizers (one keeps the overlap)",))
    assert given.of(BYTESCHEDULER).step_seconds > of().of(BYTESCHEDULER).step_seconds
    assert given.of(BYTESCHEDULER).step_seconds >= given.of(DDP_BEST).step_seconds * 0.97
    assert "there are 2 optimizers (one keeps the overlap)." in str(given)
    assert given.recommended.strategy != BYTESCHEDULER


def test_remarks_come_where_they_apply() -> None:
    text = str(of())
    assert "between steps" not in text
    assert "processor time" in text
    text = str(of(device="cuda", between_steps=0.05))
    assert "of which 50.0 ms pass between steps, as in waiting for data" in text
    assert "processor time" not in text


@pytest.mark.parametrize(("servers", "measured"), [(2, (1.10, 1.13)), (4, (1.29, 1.36))])
def test_servers_bring_what_was_measured(servers: int, measured: tuple[float, float]) -> None:
    """Steps over steps with servers, as docs/parameter_servers.md has them: 15 MB, 300 Mbit/s, 4 workers."""
    for ratio, speed in zip((2, 8), measured, strict=True):
        here = Configuration(network="uniform", ratio=ratio, workers=4, mbit=300.0, megabytes=15.0)
        found = predict(here.profile, replace(here.link, servers=servers))
        assert found.of(BYTESCHEDULER).step_seconds / found.of(SERVERS).step_seconds == pytest.approx(speed, rel=0.05)


def test_servers_are_recommended_where_they_help() -> None:
    link = LinkModel(workers=4, bandwidth=BALANCED / 4, servers=4)
    found, without = predict(UNIFORM, link), predict(UNIFORM, link.without_servers)
    assert found.line == "trainer = L.Trainer(strategy=ByteSchedulerStrategy(servers=4))"
    gain = found.of(BYTESCHEDULER).step_seconds / found.of(SERVERS).step_seconds
    assert f"with 4, bytescheduler is {gain:.2f}x as fast as without" in found.text()
    assert [line for line in found.expectations if line.strategy != SERVERS] == list(without.expectations)
    assert found.ceiling_seconds == without.ceiling_seconds
    assert "server" not in without.text()
    nothing_to_gain = predict(UNIFORM, replace(link, bandwidth=1e12))
    assert nothing_to_gain.recommended.strategy == DDP


def test_the_table() -> None:
    heading, alone, *rows = of().table()
    assert heading == ("", "a step", "speed of 4", "over ddp")
    assert alone == ("one worker alone", "200.0 ms", "1.00x", "")
    labels = [row[0] for row in rows]
    assert labels[:4] == [DDP, DDP_BEST, BYTESCHEDULER, f"{BF16} *"]
    assert labels[4:] == [
        "bytescheduler, int8 *",
        "bytescheduler, int4 *",
        "diloco, every 20 steps *",
        "ceiling of ddp's training",
    ]
    assert rows[1][3] == "1.00x"
    assert {len(row) for row in rows} == {len(heading)} == {4}


@pytest.mark.parametrize(
    ("bandwidth", "latency", "words"),
    [
        (62.5e6, 0.0, "4 workers, 500 Mbit/s each way)"),
        (1.25e9, 2e-4, "4 workers, 10 Gbit/s each way, 0.2 ms a hop)"),
        (1e3, 0.02, "4 workers, 8 kbit/s each way, 20 ms a hop)"),
        (1e3, 5e-5, "4 workers, 8 kbit/s each way, 50 µs a hop)"),
        (1.0, 0.0, "4 workers, 0.008 kbit/s each way)"),
    ],
)
def test_networks_in_words(bandwidth: float, latency: float, words: str) -> None:
    assert words in predict(UNIFORM, LinkModel(workers=4, bandwidth=bandwidth, latency=latency)).text()


def test_an_unknown_strategy_is_named() -> None:
    with pytest.raises(OptionError, match=r"strategy='fsdp' .* one of 'ddp', 'ddp, best buckets'"):
        of().of("fsdp")


# The picture.


@pytest.fixture
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("lightning_bytescheduler.predicting.prediction._POINTS", 1)  # to be quick


@pytest.mark.usefixtures("few_points")
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture(tmp_path: Path, suffix: str) -> None:
    target = tmp_path / "new" / f"out.{suffix}"
    predict(UNIFORM, LinkModel(workers=256, bandwidth=1.0)).draw(target)
    content = target.read_bytes()
    if suffix == "png":
        assert content.startswith(b"\x89PNG")
    else:
        words = (b"256 workers are", b"uniform (100 MB of gradients", b"diloco *", b"one worker alone")
        assert all(text in content for text in words)


@pytest.mark.usefixtures("few_points")
def test_a_picture_is_about_the_given_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = predict(UNIFORM, LinkModel(workers=6, bandwidth=62.5e6))
    seen = []

    def noted(model: Any, link: LinkModel) -> Prediction:
        seen.append(link)
        return predict(model, link)

    monkeypatch.setattr("lightning_bytescheduler.predicting.prediction.predict", noted)
    found.draw(tmp_path / "p.svg")
    assert [link.bandwidth for link in seen] == pytest.approx([6.25e6, 62.5e6, 625e6])
    assert {link.workers for link in seen} == {6}
    assert "ddp, best buckets" in (tmp_path / "p.svg").read_text(encoding="utf-8")


@pytest.mark.usefixtures("few_points")
def test_a_picture_leads_with_one_machine_where_that_is_best(tmp_path: Path) -> None:
    found = predict(UNIFORM, LinkModel(workers=4, bandwidth="10Mbit/s", latency="20ms"))
    found.draw(tmp_path / "p.svg")
    drawn = (tmp_path / "p.svg").read_text(encoding="utf-8")
    assert "Recommended: train on one machine" in drawn
    assert "bandwidth of each worker" in drawn
    assert "(Mbit/s)" in drawn


@pytest.mark.usefixtures("few_points")
def test_pictures_that_cannot_be_drawn(tmp_path: Path) -> None:
    found = predict(UNIFORM, LinkModel(workers=2, bandwidth=1.0))
    with pytest.raises(OptionError, match=r"^out=.*suffixes .*png"):
        found.draw(tmp_path / "out.xyz")
    assert not list(tmp_path.iterdir())


def test_a_picture_without_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"lightning-bytescheduler\[plots\]"):
        of().draw(tmp_path / "out.png")
