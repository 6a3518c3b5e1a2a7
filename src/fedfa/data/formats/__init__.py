"""Readers of file formats: bytes on disk to arrays, with errors that name the file."""
