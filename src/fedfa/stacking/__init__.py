"""Training several clients as one network with a leading client axis: performance only, no change of results.

A reader of the local loop or of a method does not need this package. Small networks leave a processor idle: a step
costs what starting its operations costs, not their arithmetic. Here the networks of K clients of equal size become one
network, so that every operation is started once instead of K times.

- :mod:`~fedfa.stacking.products`: stacked matrix products with the bits of single ones.
- :mod:`~fedfa.stacking.stacked_model`: a network of K networks.
- :mod:`~fedfa.stacking.chain`: the gradient of fully connected networks without autograd.
- :mod:`~fedfa.stacking.client_axis`: joining and splitting what clients prepared.
- :mod:`~fedfa.stacking.trainer`: the client loop over a group of clients.
- :mod:`~fedfa.stacking.support`: which components can be stacked.
- :mod:`~fedfa.stacking.choice`: whether to stack; tried on real clients and compared bit by bit.
"""
