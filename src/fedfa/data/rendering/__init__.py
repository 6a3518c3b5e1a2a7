"""Renderer of digits: font outlines, painted in colours over backgrounds."""
