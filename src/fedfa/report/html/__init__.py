"""The report: run directories in, one HTML page and its figures out."""
