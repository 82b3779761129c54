"""Connects DDP to the scheduler: buckets become tasks, parameters get gates, optimizer steps are deferred.

Imports neither Lightning nor torch.distributed's collectives. A strategy drives it, and it sends through a callable.
"""
