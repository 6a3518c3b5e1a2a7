"""What the documentation site adds to the pages in docs/: generated pages, equations, links."""
