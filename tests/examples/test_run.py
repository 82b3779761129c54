"""Each example trains and prints its result: a short run on ranks of a nursery, and as it is launched."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE, STDOUT
from types import ModuleType

import pytest
import torch

from examples import advised, parameter_servers, slices, tuning, two_machines, unequal
from lightning_bytescheduler.__main__ import main
from tests.faults.ranks import Nursery
from tests.support.rank_pool import free_port

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(REPOSITORY / "src"),
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONUNBUFFERED": "1",
}


def commands(example: ModuleType) -> list[list[str]]:
    """Those in its docstring."""
    assert example.__doc__ is not None
    return [shlex.split(line) for line in example.__doc__.splitlines() if line.startswith("    ")]


def said(nursery: Nursery, folder: Path, *argv: str, ranks: int = 2) -> str:
    """Output of the first rank, when all ranks run a module."""
    script = Path(__file__).with_name("run_module.py")
    ended = nursery.run(script, {"argv": argv}, world_size=ranks, folder=folder, timeout=480.0)
    assert all(rank.code == 0 for rank in ended), "\n".join(rank.log for rank in ended)
    return ended[0].log


def launched(*argv: str) -> str:
    done = subprocess.run(
        [sys.executable, *argv], cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, timeout=480
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_advised(capsys: pytest.CaptureFixture[str]) -> None:
    ((program, *argv),) = commands(advised)
    assert program == "lightning-bytescheduler"
    assert main(argv) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "Classifier" in words
    assert "A step takes" in words
    assert "4 workers, 1 Gbit/s each way, 0.1 ms a hop" in words


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_slices_train_over_http_and_resume_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    assert slices.main(["--size", "20000", "--steps", "10", "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    found = re.search(r"slices of (\d+) lines at http://127", printed)
    assert found is not None
    lines = int(found[1])
    assert lines > 10 * 32
    assert f"{10 * 32} + {lines - 10 * 32} = {lines} lines: the epoch, each line once" in printed


@pytest.mark.slow
def test_fabric_loop(nursery: Nursery, tmp_path: Path) -> None:
    text = said(nursery, tmp_path, "examples.fabric_loop", "--epochs", "2")
    assert "the weights are DDP's, bit for bit" in text
    assert "97% of the updates crossed the step boundary" in text


@pytest.mark.slow
def test_unequal(nursery: Nursery, tmp_path: Path) -> None:
    ((_, _, *argv),) = commands(unequal)
    text = said(nursery, tmp_path, *argv, "--steps", "12")
    assert "step 1: samples by rank (32, 32)" in text
    assert "batches of 64 samples, by rank (" in text
    for shares in re.findall(r"samples by rank \((\d+), (\d+)\)", text):
        assert sum(map(int, shares)) == 64


@pytest.mark.slow
def test_parameter_servers(nursery: Nursery, tmp_path: Path) -> None:
    text = said(nursery, tmp_path, "examples.parameter_servers", "--servers", "0", "--steps", "4")
    check_servers(text)


@pytest.mark.slow
def test_parameter_servers_as_its_docstring_has_it() -> None:
    ((_, *argv),) = commands(parameter_servers)
    text = launched(*argv, "--steps", "4")
    check_servers(text)
    assert "spare server 0" in text
    assert "serving 2 workers, with 1 servers in all" in text


def check_servers(text: str) -> None:
    assert "The weights are those of DDP, bit for bit." in text
    for server in ("server of worker 0", "server of worker 1"):
        assert server in text


@pytest.mark.slow
def test_tuning(nursery: Nursery, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(nursery, tmp_path, "examples.tuning", "--steps", "50", "--output", str(tmp_path / "tuned"))
    assert "start, credit" in text
    assert re.search("^(Settled on|At present): ", text, re.MULTILINE)
    check_tuned(tmp_path, capsys)


@pytest.mark.slow
def test_tuning_as_its_docstring_has_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (_, *argv), _ = commands(tuning)
    text = launched(*(word.replace("tuned", str(tmp_path / "tuned")) for word in argv))
    for word in ("start, credit", "plain DDP", "Settled on"):
        assert word in text
    check_tuned(tmp_path, capsys)


def check_tuned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The docstring's other command shows what was tried."""
    _, (_, *argv) = commands(tuning)
    assert main([word.replace("tuned", str(folder / "tuned")) for word in argv]) == 0
    assert "start" in capsys.readouterr().out
    assert (folder / "tuned" / "search.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_elastic_torchrun(nursery: Nursery, tmp_path: Path) -> None:
    options = ["--epochs", "1", "--samples", "480", "--pause", "0", "--output", str(tmp_path / "kept")]
    text = said(nursery, tmp_path, "examples.elastic_torchrun", *options)
    assert "epoch 0: 480 samples, each 1 to 1 times" in text


@pytest.mark.slow
def test_elastic_torchrun_counts_each_sample_once_although_processes_die() -> None:
    """A rank, a machine, which leaves one rank; batches are drawn ahead, steps accumulate, validations are between."""
    options = "--kills 3 --nodes 2 --machines 0.5 --epochs 2 --samples 1900 --every 3 --accumulate 2 --loader-workers 1"
    text = launched("-m", "tests.faults.elastic_kills", *options.split())
    assert "Each sample once an epoch, in one process's batches: yes." in text
    happened = json.loads(text[: text.index("}") + 1])
    assert happened["rank"] + happened["machine"] == 3
    assert happened["world sizes"][0] == 2
    assert happened["world sizes"][-1] == 1, "a machine has been lost"
    middles = [place for place in happened["first epoch, batch"] if not place.endswith(", 0")]
    assert len(middles) > 1, "epochs went on where they stood"
    apart = re.search(r"weights differ by (\S+) of a tensor's norm", text)
    assert apart is not None
    assert float(apart[1]) < 1e-5


@pytest.mark.parametrize("inner", ["adamw", "muon"])
def test_diloco(nursery: Nursery, tmp_path: Path, inner: str) -> None:
    if inner == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("This torch has no Muon.")
    options = ["--tiny", "--steps=12", "--windows=64", "--fragments=2", "--overlap=1", f"--inner={inner}"]
    options.append(f"--output={tmp_path}")
    text = said(nursery, tmp_path, "examples.diloco", *options)
    assert "validation loss " in text
    for worker in (0, 1):
        found = re.search(rf"worker{worker}: (\d+) steps, (\d+) windows", text)
        assert found is not None, text
        assert int(found[2]) == 8 * int(found[1]) > 0
    assert main(["rounds", str(tmp_path / "rounds.jsonl"), "--png", str(tmp_path / "rounds.png")]) == 0
    assert (tmp_path / "rounds.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_two_machines() -> None:
    ranks = ["--nproc-per-node=2", f"--master-port={free_port()}"]
    text = launched("-m", "torch.distributed.run", *ranks, "-m", "examples.two_machines", "--tiny", "--steps=80")
    rows = re.findall(r"^(.*\S) +\d+ ms +[\d.]+ +[\d.]+x +[\d.]+x +[\d.]+$", text, re.MULTILINE)
    assert rows == list(two_machines.STRATEGIES)


@pytest.mark.slow
def test_coordinator(nursery: Nursery, tmp_path: Path) -> None:
    """Three terminals: a coordinator and two workers."""
    rounds = ["--samples-per-round=64", "--outer-steps=2", "--wire-dtype=bf16", "--start-workers=2"]
    command = [sys.executable, "-m", "lightning_bytescheduler", "coordinator", "--bind=127.0.0.1:0", *rounds]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=PIPE, stderr=STDOUT, text=True) as coordinator:
        try:
            assert coordinator.stdout is not None
            words = (word for line in coordinator.stdout for word in line.split())
            url = next(word for word in words if word.startswith("http://")).rstrip(".,")

            def worker(slowness: str) -> str:
                folder = tmp_path / slowness
                folder.mkdir()
                options = ["--tiny", f"--url={url}", f"--slowness={slowness}", f"--output={folder / 'kept'}"]
                return said(nursery, folder, "examples.coordinator", *options, ranks=1)

            with ThreadPoolExecutor(2) as pool:
                texts = list(pool.map(worker, ("1", "3")))
        finally:
            coordinator.terminate()
    assert all("in 2 rounds" in text for text in texts), texts
    assert sum("which leads" in text for text in texts) == 1
