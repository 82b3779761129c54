"""Predicts how long a training step takes on a network. Imports neither Lightning nor torch.distributed."""

from lightning_bytescheduler.simulation.link import LinkModel
from lightning_bytescheduler.simulation.prediction import Expectation, MeasuredStep, Prediction, predict
from lightning_bytescheduler.simulation.profiles import NETWORKS, LayerProfile, ModelProfile, network_profile
from lightning_bytescheduler.simulation.simulator import Schedule, ddp_bound, lower_bound, simulate

__all__ = [
    "NETWORKS",
    "Expectation",
    "LayerProfile",
    "LinkModel",
    "MeasuredStep",
    "ModelProfile",
    "Prediction",
    "Schedule",
    "ddp_bound",
    "lower_bound",
    "network_profile",
    "predict",
    "simulate",
]
