"""Thin Lightning adapters."""
