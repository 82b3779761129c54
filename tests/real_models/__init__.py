"""Trainings with networks, optimizers and callbacks of third parties, compared with DDP's."""

from __future__ import annotations

from tests.real_models.torchvision_operators import why_no_torchvision

# Before anything else is imported: transformers and diffusers import torchvision when they find it.
WHY_NO_TORCHVISION = why_no_torchvision()
