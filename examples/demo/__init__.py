"""Trains one small language model twice over a slow link, under DDP and under ByteScheduler, and compares.

Run it from the root of the repository with ``python -m examples.demo``.
"""
