"""The words change with the figures, and the figures are those of the simulator."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lightning_bytescheduler
from lightning_bytescheduler import Advice, LinkModel, OptionError, UnsupportedError, advise
from lightning_bytescheduler.advice.advice import _device, give_advice
from lightning_bytescheduler.advice.expectations import (
    AUTO,
    BF16,
    BYTESCHEDULER,
    DDP,
    DDP_BEST,
    DILOCO,
    FIXED,
    SERVERS,
    MeasuredStep,
)
from lightning_bytescheduler.simulation import (
    LayerProfile,
    ModelProfile,
    clipped_bound,
    lower_bound,
    network_profile,
    predict,
    simulate,
)
from lightning_bytescheduler.simulation.prediction import chosen_schedule
from tests.ddp.stepping import Batches, Clock, Stepping
from tests.support.models import Tower
from tests.support.rank_pool import RankPool, let_go

UNIFORM = network_profile("uniform")  # 100 MB, 200 ms
BALANCED = 6e9 / 8  # 100 MB take 200 ms over four workers


def advice(
    bandwidth: float = BALANCED, *, workers: int = 4, worker_seconds: tuple[float, ...] = (), **measured: Any
) -> Advice:
    link = LinkModel(workers=workers, bandwidth=bandwidth)
    step = MeasuredStep(**{"profile": UNIFORM, "batch_size": 32, **measured})
    return give_advice(step, link, worker_seconds=worker_seconds)


def test_figures_are_the_simulators() -> None:
    given = advice(device="cuda")
    predicted = {line.name: line.step_seconds for line in predict(UNIFORM, given.link)}
    assert given.of(DDP).step_seconds == predicted["ddp, default buckets"]
    assert given.of(DDP_BEST).step_seconds == predicted["ddp, best buckets"]
    assert given.of(BYTESCHEDULER).step_seconds == predicted["bytescheduler, own sizes"]
    assert given.ceiling_seconds == predicted["lower bound"] == lower_bound(UNIFORM, given.link)
    assert given.compute_seconds == pytest.approx(0.2)
    assert given.communication_seconds == pytest.approx(0.2)
    # Where the processor computes, the strategy chooses other sizes.
    busy = chosen_schedule(UNIFORM, given.link, busy_processor=True)
    assert (
        advice(device="cpu").of(BYTESCHEDULER).step_seconds == simulate(UNIFORM, given.link, busy, steps=1).step_seconds
    )


def test_half_the_bytes_are_twice_the_bandwidth() -> None:
    given, twice = advice(), advice(2 * BALANCED)
    assert given.of(BF16).step_seconds == pytest.approx(twice.of(DDP).step_seconds)
    assert advice(compressed_share=1.0).of(BF16).step_seconds == pytest.approx(given.of(DDP).step_seconds)


@pytest.mark.parametrize(
    ("bandwidth", "steps"), [(BALANCED, 20), (BALANCED / 2, 40), (20 * BALANCED, 1), (21 * BALANCED, 1)]
)
def test_diloco_exchanges_as_often_as_five_percent_allow(bandwidth: float, steps: int) -> None:
    given = advice(bandwidth)
    expected = given.of(DILOCO)
    assert expected.inner_steps == steps
    assert expected.step_seconds == pytest.approx(0.2 + given.communication_seconds / steps)
    assert expected.step_seconds <= 0.2 * 1.05 * (1 + 1e-6)


def test_speed_of_all_workers() -> None:
    given = advice()
    assert given.efficiency(0.4) == pytest.approx(0.5)
    assert given.speedup(0.4) == pytest.approx(2.0)
    assert given.samples_per_second(0.4) == pytest.approx(320.0)
    assert advice(batch_size=None).samples_per_second(0.4) is None


def test_a_fast_link_leaves_nothing_to_gain() -> None:
    given = advice(1000 * BALANCED)
    assert given.limited_by == "compute"
    assert given.recommended.strategy == DDP
    assert given.line == 'trainer = L.Trainer(strategy="ddp")'
    text = str(given)
    assert "nothing to gain over ddp" in text
    assert "What limits: computing." in text
    assert "saves ddp nothing that shows" in text
    assert "diloco: not needed" in text
    assert "ceiling is" not in text
    assert "fewer bytes" not in text


def test_a_balanced_link_is_what_order_is_for() -> None:
    given = advice()
    assert given.recommended.strategy == BYTESCHEDULER
    assert given.line == 'trainer = L.Trainer(strategy="bytescheduler")'
    gain = given.of(DDP).step_seconds / given.of(BYTESCHEDULER).step_seconds
    assert gain > 1.25
    text = str(given)
    assert f"{gain:.2f}x as fast as ddp" in text
    assert "with the same training" in text
    assert "nothing to gain" not in text
    assert "1.00 times as long" in text
    assert text.startswith(f"Recommended: {given.line}"), "the answer comes first"


def test_a_slow_link_has_a_ceiling() -> None:
    given = advice(BALANCED / 3)
    assert given.limited_by == "link"
    text = str(given)
    assert "What limits: the link." in text
    assert f"The ceiling is {given.ceiling_seconds * 1e3:,.1f} ms a step" in text
    assert "Only fewer bytes, larger batches or a faster link" in text
    assert "More than that needs fewer bytes" in text
    assert "slower than one alone" not in text


def test_a_very_slow_link_makes_one_worker_the_better_choice() -> None:
    text = str(advice(BALANCED / 100))
    assert "4 workers slower than one alone (0.04x)" in text
    assert text.startswith("Recommended: train on one machine. Over this network 4 workers are slower than one alone")
    assert "(diloco, every 2000 steps, would be 3.81x as fast as one, with another training)" in text
    assert text.count("Recommended") == 1
    given = advice(BALANCED / 100)
    assert given.line == "trainer = L.Trainer(devices=1)"
    assert given.figures()["recommended"] == "one worker alone"
    assert "From H = 2000 on it adds 5% at most" in text


def test_ddp_with_other_buckets_is_enough_where_it_is_nearly_as_fast() -> None:
    # A layer whose gradients are final at once, and much to do after them: only DDP's bucket size is in the way.
    layers = [
        LayerProfile(name="first", parameter_bytes=400_000, forward_seconds=0.2, backward_seconds=0.4),
        LayerProfile(name="last", parameter_bytes=20_000_000, forward_seconds=0.001, backward_seconds=0.001),
        LayerProfile(name="head", parameter_bytes=1_100_000, forward_seconds=0.001, backward_seconds=0.001),
    ]
    given = advice(BALANCED / 6, profile=ModelProfile(name="m", layers=tuple(layers)))
    assert given.recommended.strategy == DDP_BEST
    size = given.recommended.bucket_bytes
    assert size is not None
    assert given.line == f"trainer = L.Trainer(strategy=DDPStrategy(bucket_cap_mb={size // 2**20}))"
    assert f"With bucket_cap_mb={size // 2**20} it takes" in str(given)


def test_clipping_has_a_ceiling_of_its_own() -> None:
    # A backward pass that is too short to hide half of the bytes.
    layers = [
        LayerProfile(name=f"{index}", parameter_bytes=7_500_000, forward_seconds=0.01, backward_seconds=0.005)
        for index in range(10)
    ]
    profile = ModelProfile(name="m", layers=tuple(layers))
    plain = advice(profile=profile)
    clipped = advice(profile=profile, norm_needed_by=("gradient norm clipping",))
    assert clipped.ceiling_seconds == clipped_bound(profile, clipped.link) > plain.ceiling_seconds
    assert clipped.of(BYTESCHEDULER).step_seconds > plain.of(BYTESCHEDULER).step_seconds
    assert clipped.of(DDP) == plain.of(DDP)
    assert "because of gradient norm clipping" in str(clipped)
    assert "norm" not in str(plain)


def test_synchronised_steps_are_not_overlapped() -> None:
    given = advice(synchronised_because=("there are 2 optimizers (one keeps the overlap)",))
    assert given.of(BYTESCHEDULER).step_seconds > advice().of(BYTESCHEDULER).step_seconds
    assert given.of(BYTESCHEDULER).step_seconds >= given.of(DDP_BEST).step_seconds * 0.97
    assert "there are 2 optimizers (one keeps the overlap)." in str(given)
    assert given.recommended.strategy != BYTESCHEDULER


@pytest.mark.parametrize("bandwidth", [BALANCED / 50, BALANCED / 2, BALANCED, 3 * BALANCED, 500 * BALANCED])
@pytest.mark.parametrize("clips", [(), ("gradient norm clipping",)])
def test_nothing_with_the_same_training_beats_the_ceiling(bandwidth: float, clips: tuple[str, ...]) -> None:
    given = advice(bandwidth, norm_needed_by=clips)
    bound = min(given.ceiling_seconds, lower_bound(UNIFORM, given.link))
    for expected in given.expectations:
        if expected.same_training:
            assert expected.step_seconds >= bound * (1 - 1e-9)
    assert given.of(BYTESCHEDULER).step_seconds <= given.of(DDP).step_seconds * (1 + 1e-9)
    assert given.of(DDP_BEST).step_seconds <= given.of(DDP).step_seconds


def test_remarks_come_where_they_apply() -> None:
    text = str(advice())
    assert "wait for data" not in text
    assert "Unused" not in text
    assert "Uneven" not in text
    assert "takes processor time" in text
    text = str(
        advice(
            device="cuda", waiting=0.05, unused=("a", "b", "c", "d", "e"), worker_seconds=(0.1, 0.2), batch_size=None
        )
    )
    assert "of which 50.0 ms wait for data" in text
    assert "'a', 'b', 'c' and 2 more got no gradient" in text
    assert "the slowest takes 2.00x as long" in text
    assert "takes processor time" not in text
    assert "samples" not in text
    assert "2 bytes a value already" in str(advice(compressed_share=1.0))


def test_long_hops_come_with_a_warning() -> None:
    def words(latency: float, *worker_seconds: float) -> str:
        link = LinkModel(workers=4, bandwidth=BALANCED, latency=latency)
        return str(give_advice(MeasuredStep(profile=UNIFORM), link, worker_seconds=worker_seconds))

    assert "Long hops: " in words(0.01)
    assert "Long hops: " not in words(0.01, 0.2, 0.2)  # it was measured
    assert "Long hops: " not in words(0.0001)


def test_all_gradients_compressed() -> None:
    given = advice(BALANCED / 4)
    exact = given.of(BYTESCHEDULER).step_seconds
    int8, int4 = (given.of(FIXED[codec]) for codec in ("int8", "int4"))
    assert int4.step_seconds <= int8.step_seconds < exact
    assert not int8.same_training
    assert given.of(AUTO).step_seconds >= int4.step_seconds
    assert f"{1e3 * int8.step_seconds:,.1f} ms with 'int8'" in str(given)
    of_two_bytes = advice(BALANCED / 4, compressed_share=1.0)
    assert int8.step_seconds < of_two_bytes.of(FIXED["int8"]).step_seconds < exact, "half as many times fewer bytes"
    names = {expected.strategy for expected in advice(device="cuda").expectations}
    assert names.isdisjoint(FIXED.values()), "gradients on a GPU are not compressed"


def test_the_table() -> None:
    heading, alone, *rows = advice().table()
    assert heading[-1] == "samples/s"
    assert alone == ("one worker alone", "200.0 ms", "1.00x", "100%", "160")
    assert [row[0] for row in rows] == [
        "ddp",
        "ddp, best bucket size",
        "bytescheduler",
        "ddp, bf16 on the wire",
        "bytescheduler, compression auto",
        "bytescheduler, compression int8",
        "bytescheduler, compression int4",
        "diloco, every 20 steps",
        "ceiling of ddp's training",
    ]
    assert {len(row) for row in rows} == {len(heading)} == {5}
    assert {len(row) for row in advice(batch_size=None).table()} == {4}


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
    link = LinkModel(workers=4, bandwidth=bandwidth, latency=latency)
    assert words in give_advice(MeasuredStep(profile=UNIFORM), link).text()


@pytest.mark.parametrize(
    ("link", "option"),
    [
        (LinkModel(workers=1, bandwidth=1e9), "workers=1"),
    ],
)
def test_networks_that_make_no_sense_here(link: LinkModel, option: str) -> None:
    with pytest.raises(OptionError, match=option):
        give_advice(MeasuredStep(profile=UNIFORM), link)


def test_servers_are_advised_where_they_help() -> None:
    link = LinkModel(workers=4, bandwidth=SLOW.bandwidth, architecture="ps", servers=6)
    given, without = (give_advice(MeasuredStep(profile=UNIFORM), each) for each in (link, link.without_servers))
    assert given.of(SERVERS).step_seconds < given.of(BYTESCHEDULER).step_seconds
    assert SERVERS not in [one.strategy for one in without.expectations]
    for name in (DDP, BYTESCHEDULER):
        assert given.of(name) == without.of(name)
    assert given.recommended.strategy == SERVERS
    assert given.line == "trainer = L.Trainer(strategy=ByteSchedulerStrategy(servers=4))" or (given.alone_is_faster)
    assert "6 servers count as 4" in given.text()
    assert given.figures()["architecture"] == "ps"


def test_an_unknown_strategy_is_named() -> None:
    with pytest.raises(OptionError, match=r"strategy='fsdp' .* one of 'ddp', 'ddp, best bucket size'"):
        advice().of("fsdp")


def test_figures_are_kept_and_can_be_predicted_from(tmp_path: Path) -> None:
    given = replace(advice(), worker_seconds=(0.1, 0.2))
    given.save(tmp_path / "advice.json")
    kept = json.loads((tmp_path / "advice.json").read_text())
    assert kept["limited_by"] == "link"
    assert kept["recommended"] == BYTESCHEDULER
    assert kept["ceiling_seconds"] == given.ceiling_seconds
    assert kept["worker_seconds"] == [0.1, 0.2]
    by_name = {entry["strategy"]: entry for entry in kept["strategies"]}
    assert by_name[DDP]["step_seconds"] == given.of(DDP).step_seconds
    assert by_name[DILOCO]["inner_steps"] == 20
    assert ModelProfile.load(tmp_path / "advice.json") == UNIFORM


def test_it_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    advice().draw(tmp_path / "new" / "a.svg")
    drawn = (tmp_path / "new" / "a.svg").read_text()
    assert "uniform" in drawn
    assert all(f"{count} workers" in drawn for count in (4, 16, 64)), "other networks are around the given one"
    assert "bandwidth of each worker" in drawn
    with pytest.raises(OptionError, match=r"a\.xyz"):
        advice().draw(tmp_path / "a.xyz")


def test_a_picture_without_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"lightning-bytescheduler\[plots\]"):
        advice().draw(tmp_path / "a.png")


# Measuring.

# Sending the 80 bytes of a Stepping takes four workers 60 seconds; its step takes 71.5.
SLOW = LinkModel(workers=4, bandwidth=2.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    clock.install(monkeypatch)
    return clock


def test_it_is_public() -> None:
    assert {"Advice", "LinkModel", "advise"} <= set(lightning_bytescheduler.__all__)


def test_a_model_on_a_link(clock: Clock) -> None:
    given = advise(Stepping(clock), Batches(clock), link=SLOW, steps=2)
    assert isinstance(given, Advice)
    assert given.link == SLOW
    assert given.compute_seconds == pytest.approx(71.5)
    assert given.communication_seconds == pytest.approx(60.0)
    # All gradients are in one bucket: nothing is hidden.
    assert given.of(DDP).step_seconds == pytest.approx(131.5)
    assert given.of(DDP).step_seconds > given.of(BYTESCHEDULER).step_seconds >= given.ceiling_seconds
    assert given.worker_seconds == ()
    assert "a step of 4 samples takes 71,500.0 ms on one worker (cpu)" in str(given)


def test_cuda_is_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert _device("cuda") == _device(None) == torch.device("cuda", 3)
    assert _device("cuda:1") == torch.device("cuda", 1)


def test_workers_of_the_call_beat_those_of_the_link(clock: Clock) -> None:
    given = advise(Stepping(clock), Batches(clock), link=SLOW, workers=2, steps=1)
    assert given.link == replace(SLOW, workers=2)
    assert given.communication_seconds == pytest.approx(40.0)


def test_clipping_is_as_for_the_trainer(clock: Clock) -> None:
    given = advise(Stepping(clock), Batches(clock), link=SLOW, gradient_clip_val=1.0, steps=1)
    assert given.measured.norm_needed_by == ("gradient norm clipping",)
    given = advise(
        Stepping(clock), Batches(clock), link=SLOW, gradient_clip_val=1.0, gradient_clip_algorithm="value", steps=1
    )
    assert given.measured.norm_needed_by == ()


def test_precision_is_as_for_the_trainer() -> None:
    seen = []

    class Module(Tower):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().training_step(batch, batch_idx)

        def __deepcopy__(self, memo: Any) -> Any:
            return Module()

    assert advise(Module(), link=SLOW, precision="bf16-mixed", device="cpu", steps=1).measured.compressed_share == 0.5
    assert set(seen) == {True}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"link": SLOW, "workers": 1}, OptionError, "workers=1 .* 2 or more: one worker has nobody to talk to"),
        ({"link": SLOW, "workers": 0}, OptionError, "workers=0"),
        ({"link": SLOW, "workers": 2.5}, OptionError, r"workers=2\.5"),
        ({"link": "500mbit"}, OptionError, "link='500mbit' .* a LinkModel, or left out"),
        ({"link": SLOW, "steps": 0}, OptionError, "steps=0"),
        ({"link": SLOW, "steps": True}, OptionError, "steps=True"),
        ({"link": SLOW, "device": "abacus"}, OptionError, "device='abacus'"),
        ({"link": SLOW, "device": "meta"}, OptionError, "device='meta'"),
        ({}, UnsupportedError, "There is no link to measure, as this process is alone.*LinkModel.*torchrun"),
    ],
)
def test_bad_options_are_named_before_anything_is_trained(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    class Untouched(Tower):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise AssertionError("trained")

    with pytest.raises(error, match=message):
        advise(Untouched(), **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_not_there() -> None:
    with pytest.raises(OptionError, match=r"device='cuda' .* 'cpu', as torch finds no CUDA device here"):
        advise(Tower(), link=SLOW, device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_cuda() -> None:
    given = advise(Tower(depth=2, width=512), link=LinkModel(workers=4, bandwidth=1e9), steps=3)
    assert given.measured.device == "cuda"
    assert given.compute_seconds > 0
    names = [layer.name for layer in given.measured.profile.layers]
    assert names == ["(between steps)", "first", "layers.0", "layers.1", "last"]


def advise_on(rank: int) -> tuple[LinkModel, tuple[float, ...], float]:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        given = advise(Tower(), steps=2, workers=16)
        return given.link, given.worker_seconds, given.compute_seconds
    finally:
        let_go()
        dist.destroy_process_group()


def test_ranks_measure_their_link_and_agree(two_plain_ranks: RankPool) -> None:
    first, second = two_plain_ranks.run(advise_on)
    assert first[:2] == second[:2]
    link, seconds, step = first
    assert link.workers == 16
    assert link.bandwidth > 0
    assert len(seconds) == 2
    assert step == pytest.approx(max(seconds))
