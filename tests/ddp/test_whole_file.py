"""A checkpoint is whole or not there, also where temporary files are on another disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins import AsyncCheckpointIO

from lightning_bytescheduler.ddp.rank_strategy import digest_of, written_whole


def save(path: Path, value: int) -> None:
    with written_whole(TorchCheckpointIO(), path) as file:
        TorchCheckpointIO().save_checkpoint({"value": value}, file)


def test_who_is_stopped_while_it_copies_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "last.ckpt"
    save(path, 1)
    save(path, 2)
    assert torch.load(path) == {"value": 2}

    def copy_half(source: str, target: str) -> None:
        Path(target).write_bytes(Path(source).read_bytes()[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "move", copy_half)
    with pytest.raises(KeyboardInterrupt):
        save(path, 3)
    assert torch.load(path) == {"value": 2}
    assert list(path.parent.iterdir()) == [path]


def test_what_a_killed_writer_has_left_is_written_over(tmp_path: Path) -> None:
    (tmp_path / ".last.ckpt.part").write_bytes(b"half")
    save(tmp_path / "last.ckpt", 1)
    assert torch.load(tmp_path / "last.ckpt") == {"value": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_other_writers_and_other_places_are_left_alone(tmp_path: Path) -> None:
    for writer, path in ((AsyncCheckpointIO(), tmp_path / "a.ckpt"), (TorchCheckpointIO(), "s3://bucket/a.ckpt")):
        with written_whole(writer, path) as file:
            assert file == path


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
