"""Checkpoints are compared by a digest."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from lightning_bytescheduler.ddp.rank_strategy import digest_of


def test_copies_have_one_digest_and_other_values_another(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one.ckpt", "copied.ckpt", "written.ckpt", "moved.ckpt", "later.ckpt")]
    moments = torch.ones(1000)
    torch.save({"step": 3, "moments": moments}, files[0])
    shutil.copy(files[0], files[1])
    torch.save({"step": 3, "moments": moments}, files[2])
    moments[700] += 1e-3
    torch.save({"step": 3, "moments": moments}, files[3])
    torch.save({"step": 4, "moments": torch.ones(1000)}, files[4])
    one, copied, written, *others = map(digest_of, files)
    assert one == copied == written
    assert len({one, *others}) == 3


def test_nothing_is_told_of_what_only_a_plugin_reads() -> None:
    assert digest_of("mydb://runs/last.ckpt") == "unknown"


def test_nothing_is_told_of_what_is_no_archive(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"0" * 100)
    assert digest_of(other) == digest_of(tmp_path) == digest_of(tmp_path / "absent") == "unknown"
