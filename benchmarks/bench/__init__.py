"""How fast fedfa is, compared with a bare torch loop and with other simulators: ``python -m benchmarks.bench``."""
