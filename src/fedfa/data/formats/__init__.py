"""Readers of file formats: files to arrays, with errors that name the file."""
