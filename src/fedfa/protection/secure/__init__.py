"""Sums that reveal nothing but themselves: encoding, secret sharing, masks, the protocol of sites and server."""
