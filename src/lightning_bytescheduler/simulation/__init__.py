"""Predicts how long a training step takes on a network. Imports neither Lightning nor torch.distributed."""
