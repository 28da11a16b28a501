"""Helpers for the notebooks: small modules of plain functions, imported by name."""
