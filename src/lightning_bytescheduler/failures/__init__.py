"""Failures: every rank learns which rank failed and why, and no rank waits forever."""
