"""The strategy by ``class_path`` in a LightningCLI config, as the documentation shows it."""

from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_bytescheduler import (
    ByteSchedulerStrategy,
    CreditTuner,
    DiLoCoStrategy,
    LinkModel,
    PerformanceMonitor,
)

ArgumentParser = pytest.importorskip("jsonargparse").ArgumentParser
# Lightning's own use of the parser, not ours.
pytestmark = pytest.mark.filterwarnings(r"ignore:[\s\S]*JSONARGPARSE_DEPRECATION_WARNINGS")

_CONFIG = """
trainer:
  accelerator: cpu
  devices: 2
  logger: false
  strategy:
    class_path: lightning_bytescheduler.ByteSchedulerStrategy
    init_args:
      partition_size: 1000
      credit: 4000
      cross_barrier: false
      timeline: trace.json
      log_metrics: false
      find_unused_parameters: true
"""


@pytest.fixture(autouse=True)
def _no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])


def _strategy(tmp_path: Path, config: str) -> ByteSchedulerStrategy:
    path = tmp_path / "config.yaml"
    path.write_text(config)
    cli = LightningCLI(BoringModel, run=False, seed_everything_default=1, args=["--config", str(path)])
    strategy = cli.trainer.strategy
    assert isinstance(strategy, ByteSchedulerStrategy)
    return strategy


@pytest.mark.parametrize("policy", ["p3", "fifo"])
def test_a_policy_arrives_by_name(tmp_path: Path, policy: str) -> None:
    config = _CONFIG.replace("partition_size: 1000", f"policy: {policy}").replace("      credit: 4000\n", "")
    assert _strategy(tmp_path, config)._options.policy.name == policy


def test_options_of_several_values_arrive(tmp_path: Path) -> None:
    given = (
        "tuning: both\n      servers: {spare: 1, group: node}\n"
        "      weighting: samples\n      batch_size: {balanced: [4, 8]}"
    )
    config = _CONFIG.replace("partition_size: 1000", given)
    strategy = _strategy(tmp_path, config)
    assert strategy._options.tunes_credit
    assert strategy._options.tunes_partition
    assert (strategy._servers.spare, strategy._servers.group) == (1, "node")
    assert strategy._weighting.limits(2, 10) == [4, 8]


def test_options_arrive(tmp_path: Path) -> None:
    strategy = _strategy(tmp_path, _CONFIG)
    options = strategy._options
    assert (options.partition_size, options.credit, options.timeline) == (1000, 4000, "trace.json")
    assert not options.cross_barrier
    assert not strategy._log_metrics
    assert strategy._ddp_kwargs["find_unused_parameters"] is True


def test_what_the_config_leaves_out_keeps_the_strategys_defaults(tmp_path: Path) -> None:
    """The parser passes every default explicitly: DDP's own must not replace ours."""
    strategy = _strategy(tmp_path, _CONFIG.split("    init_args")[0])
    assert strategy._ddp_kwargs["gradient_as_bucket_view"] is True
    assert not strategy._fit_options.own_buckets
    assert strategy._options.cross_barrier


def test_a_bad_value_names_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, ValueError)) as caught:
        _strategy(tmp_path, _CONFIG.replace("partition_size: 1000", "partition_size: 0"))
    assert "partition_size=0" in f"{capsys.readouterr().err} {caught.value}"


@pytest.mark.parametrize(
    ("taker", "choices"),
    [
        (
            ByteSchedulerStrategy,
            ["--strategy.mode {auto,overlapped,ddp}", "--strategy.start_method {popen,spawn,fork,forkserver}"],
        ),
        (DiLoCoStrategy, ["--strategy.start_method {popen,spawn,fork,forkserver}"]),
        (LinkModel, ["--strategy.latency"]),
        (CreditTuner, ["--strategy.trials"]),
        (PerformanceMonitor, ["--strategy.log_metrics {true,false}"]),
    ],
)
def test_help_lists_what_a_value_may_be(taker: type, choices: list[str]) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(taker, "strategy")
    text = " ".join(parser.format_help().split())
    assert [choice for choice in choices if choice not in text] == []
