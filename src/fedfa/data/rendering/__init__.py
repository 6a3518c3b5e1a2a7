"""A renderer of digits: outlines of fonts, painted in colours over backgrounds."""
