"""Thin Lightning adapters around the scheduler."""
