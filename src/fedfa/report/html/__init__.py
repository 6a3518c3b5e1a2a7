"""The report: run folders in, one HTML page and its figures out."""
