"""Operating a federation on one machine: keys, processes, a whole try-out. Knows Flower's commands, not its Python."""
