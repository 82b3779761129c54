from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from lightning_bytescheduler.exceptions import OptionError, UnsupportedError
from lightning_bytescheduler.simulation import LinkModel, ModelProfile, lower_bound, network_profile, predict, simulate
from lightning_bytescheduler.simulation.picture import bandwidths_around, draw_prediction, workers_around
from lightning_bytescheduler.simulation.prediction import best_ddp, best_scheduled, chosen_schedule
from tests.simulation.profiles import links, models

GIGABIT = 1e9 / 8
CLOSE = 1 + 1e-9


@pytest.fixture(scope="module")
def vgg16() -> ModelProfile:
    return network_profile("vgg16")


@given(profile=models, link=links)
@settings(max_examples=30, deadline=None)
def test_lines_are_in_their_order(profile: ModelProfile, link: LinkModel) -> None:
    seconds = {line.name: line.step_seconds for line in predict(profile, link)}
    assert seconds["computation alone"] <= seconds["lower bound"] * CLOSE
    for name in ("fifo", "p3", "ddp, best buckets", "bytescheduler, best sizes"):
        assert seconds["lower bound"] <= seconds[name] * CLOSE
    assert seconds["ddp, best buckets"] <= seconds["ddp, default buckets"]
    assert seconds["bytescheduler, best sizes"] <= seconds["bytescheduler, own sizes"]
    clipped = seconds.get("bytescheduler with norm clipping")
    assert (clipped is None) == (link.architecture == "ps")
    if clipped is not None:
        assert seconds["lower bound with norm clipping"] <= clipped * CLOSE


def test_each_line_can_be_simulated_again(vgg16: ModelProfile) -> None:
    link = LinkModel(workers=4, bandwidth=30 * GIGABIT, latency=20e-6)
    lines = predict(vgg16, link)
    simulated = [line for line in lines if line.schedule is not None]
    assert [line.name for line in lines if line.schedule is None] == [
        "computation alone",
        "lower bound",
        "lower bound with norm clipping",
        "bytescheduler, int8",
        "bytescheduler, auto",
    ]
    for line in simulated:
        assert simulate(vgg16, link, line.schedule).step_seconds == pytest.approx(line.step_seconds)


def test_what_vgg16_gains(vgg16: ModelProfile) -> None:
    def gain(gigabits: float) -> float:
        link = LinkModel(workers=4, bandwidth=gigabits * GIGABIT)
        return best_ddp(vgg16, link).step_seconds / best_scheduled(vgg16, link).step_seconds

    # Communication takes as long as computation at 33 Gbit/s; the most is won there, and it is nearly all of 4/3.
    assert 1.29 < gain(33) < 4 / 3
    assert gain(33) > gain(10) > gain(1) > 1
    # Where all is hidden, nothing is won, and next to nothing lost: which layers end up in the last bucket.
    assert gain(50) == pytest.approx(1, abs=1e-3)
    assert gain(100) == pytest.approx(1, abs=1e-3)


def test_best_sizes_follow_the_network(vgg16: ModelProfile) -> None:
    def best(link: LinkModel) -> tuple[int, int]:
        schedule = best_scheduled(vgg16, link).schedule
        return schedule.partition_bytes or 0, schedule.credit_bytes or 0

    partition, credit = best(LinkModel(workers=4, bandwidth=30 * GIGABIT))
    assert credit == partition
    partition_with_overhead, _ = best(LinkModel(workers=4, bandwidth=30 * GIGABIT, overhead=2e-3))
    assert partition_with_overhead > partition
    # Six hops of 1 ms, at two thirds of the link's rate.
    partition, credit = best(LinkModel(workers=4, bandwidth=30 * GIGABIT, latency=1e-3))
    assert credit - partition >= int(6e-3 * 20 * GIGABIT)


def test_norm_clipping_keeps_nearly_all_of_the_gain(vgg16: ModelProfile) -> None:
    link = LinkModel(workers=4, bandwidth=30 * GIGABIT, latency=20e-6)
    clipped = best_scheduled(vgg16, link, clipping="gather_early").step_seconds
    assert clipped <= 1.02 * best_scheduled(vgg16, link).step_seconds
    assert clipped < best_ddp(vgg16, link).step_seconds / 1.2


def test_own_sizes_are_those_of_the_strategy(vgg16: ModelProfile) -> None:
    link = LinkModel(workers=2, bandwidth=GIGABIT, latency=50e-6)
    chosen = chosen_schedule(vgg16, link)
    # Three times what latency costs, 100 us at 1 Gbit/s, is less than the least partition: 128 KiB.
    assert chosen.partition_bytes == 128 * 1024
    assert chosen.credit_bytes == 2 * chosen.partition_bytes
    assert chosen.bucket_bytes == vgg16.parameter_bytes // 64
    far = chosen_schedule(vgg16, replace(link, latency=5e-3))
    assert far.partition_bytes == pytest.approx(3 * 10e-3 * GIGABIT, abs=4)
    # What nothing hides weighs four times as much.
    busy = chosen_schedule(vgg16, replace(link, latency=0.0, overhead=5e-3))
    assert busy.partition_bytes == pytest.approx(12 * 5e-3 * GIGABIT, abs=4)


def test_clipping_takes_an_all_reduce(vgg16: ModelProfile) -> None:
    with pytest.raises(UnsupportedError):
        best_scheduled(vgg16, LinkModel(workers=2, bandwidth=1.0, architecture="ps"), clipping="gather_early")


def test_one_worker_needs_no_network(vgg16: ModelProfile) -> None:
    link = LinkModel(workers=1, bandwidth=1.0, latency=1.0, overhead=1.0)
    lines = predict(vgg16, link)
    assert [line.step_seconds for line in lines] == pytest.approx([vgg16.compute_seconds] * len(lines))


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "new" / f"out.{suffix}"
    link = LinkModel(workers=2, bandwidth=1.0)
    draw_prediction(network_profile("uniform"), link, target, workers=(2, 4096), bandwidths=(GIGABIT, 10 * GIGABIT))
    content = target.read_bytes()
    if suffix == "png":
        assert content.startswith(b"\x89PNG")
    else:
        assert all(text in content for text in (b"4,096 workers", b"uniform (100 MB of gradients", b"1.00x"))


def test_a_picture_is_about_the_given_network() -> None:
    assert workers_around(6) == (6, 24, 96)
    rates = bandwidths_around(62.5e6)
    assert rates[0] == pytest.approx(6.25e6)
    assert rates[len(rates) // 2] == 62.5e6
    assert rates[-1] == pytest.approx(625e6)


def test_a_picture_leads_with_one_machine_where_that_is_best(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    link = LinkModel(workers=4, bandwidth="10Mbit/s", latency="20ms")
    draw_prediction(network_profile("uniform"), link, tmp_path / "p.svg", bandwidths=(1e6, 2e6))
    drawn = (tmp_path / "p.svg").read_text(encoding="utf-8")
    assert "Train on one machine: 4 workers are slower" in drawn
    assert "bandwidth of each worker" in drawn
    assert "(Mbit/s)" in drawn
    assert all(f"{count} workers" in drawn for count in (4, 16, 64))


def test_a_picture_keeps_spare_servers_in_proportion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    seen = set()

    def bound(profile: ModelProfile, link: LinkModel) -> float:
        seen.add((link.workers, link.servers))
        return lower_bound(profile, link)

    monkeypatch.setattr("lightning_bytescheduler.simulation.picture.lower_bound", bound)
    link = LinkModel(workers=8, bandwidth=1.0, architecture="ps", servers=4)
    draw_prediction(
        network_profile("uniform"), link, tmp_path / "p.png", workers=(1, 4, 256), bandwidths=(GIGABIT, 2 * GIGABIT)
    )
    assert seen == {(8, 4), (1, 0), (4, 2), (256, 128)}


def test_pictures_that_cannot_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    profile, link = network_profile("uniform"), LinkModel(workers=2, bandwidth=1.0)
    with pytest.raises(OptionError, match=r"^out=.*suffixes .*png"):
        draw_prediction(profile, link, tmp_path / "out.xyz")
    with pytest.raises(OptionError, match=r"^workers=.* 5 numbers at most"):
        draw_prediction(profile, link, tmp_path / "out.png", workers=(1, 2, 3, 4, 5, 6))
    assert not list(tmp_path.iterdir())


def test_a_picture_without_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"lightning-bytescheduler\[plots\]"):
        draw_prediction(network_profile("uniform"), LinkModel(workers=2, bandwidth=1.0), tmp_path / "out.png")


def test_the_bound_holds_for_the_built_in_networks() -> None:
    for name in ("resnet50", "transformer", "uniform"):
        profile = network_profile(name)
        for gigabits in (1, 10, 100):
            link = LinkModel(workers=256, bandwidth=gigabits * GIGABIT, latency=5e-6)
            best = best_scheduled(profile, link).step_seconds
            bound = lower_bound(profile, link)
            assert bound / CLOSE <= best <= 1.05 * bound
