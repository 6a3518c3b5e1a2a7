"""Tables, pages, pictures and exports of runs.

There are two drawing stacks on purpose: the HTML page needs interactive, themed, self-contained charts without a
dependency, so ``report.html`` writes its own SVG; pictures of data and of the paper are plain files and use matplotlib,
an optional extra, which also turns the page's charts into PNG files.
"""
