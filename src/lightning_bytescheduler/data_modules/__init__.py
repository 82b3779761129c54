"""Thin Lightning adapters around data: what Lightning calls data modules."""
