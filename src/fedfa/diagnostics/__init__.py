"""Diagnostics: measurements of clients' features, classifiers and weights on a probe of the test set.

``probe`` selects the samples and collects the clients' responses, ``measures`` has the mathematics,
``observer`` builds the record of a round, ``records`` stores it, ``embedding`` computes t-SNE, ``theory`` checks the
paper's lemmas.
"""
