"""Partitions: which client holds which training samples."""
