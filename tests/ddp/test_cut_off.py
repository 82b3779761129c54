"""An error about a checkpoint that is cut off names the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_bytescheduler import ByteSchedulerStrategy, OptionError


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_an_error_of_a_file_that_is_cut_off_names_it(share: float, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    torch.save({"epoch": 1, "global_step": 3, "moments": torch.ones(1000)}, path)
    assert ByteSchedulerStrategy().load_checkpoint(path)["epoch"] == 1
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(OptionError, match=r"^ckpt_path='.*last\.ckpt' is not allowed.* The file is cut off"):
        ByteSchedulerStrategy().load_checkpoint(path)


def test_another_error_of_a_checkpoint_stays_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.ckpt"):
        ByteSchedulerStrategy().load_checkpoint(tmp_path / "absent.ckpt")
