"""The paper's tables and figures as declared studies: what to run, what has been run, ours beside the paper's.

``studies/*.toml`` declare them, ``numbers.toml`` holds what the paper reports, ``declare`` reads both, ``cells`` makes
the runs they consist of, ``found`` looks for these runs by their settings, ``tables`` and ``figures`` show them.
"""
