"""Looking inside a training: what clients' features, classifiers and weights do, measured on a probe of the test set.

``probe`` chooses the samples, ``look`` asks the clients, ``measures`` holds the mathematics, ``observer`` puts a
round's record together, ``records`` keeps it, ``embedding`` brings features into the plane, ``theory`` checks the
paper's lemmas.
"""
