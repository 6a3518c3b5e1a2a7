"""Operation of a federation on one machine: keys, processes, a local deployment. Uses Flower's commands only."""
