"""The channel between server and clients: what tensors become on the wire, and how many bytes that is."""
