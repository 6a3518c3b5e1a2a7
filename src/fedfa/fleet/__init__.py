"""A federation on a clock: devices, links, availability, round policies in virtual time."""
