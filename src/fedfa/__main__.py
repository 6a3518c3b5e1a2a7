"""`python -m fedfa` is the same as `fedfa`."""

from fedfa.cli import main

main()
