"""The paper's tables and figures as declared studies: what to run, which runs exist, our numbers and the paper's.

``studies/*.toml`` declare the studies, ``readings.toml`` the readings of the paper, ``numbers.toml`` what it reports;
``declarations`` reads them. ``cells`` makes the runs of a study, ``run_index`` finds existing ones by configuration,
``plan`` lists the missing ones; ``tables``, ``diagnostics_tables`` and ``figures`` show them.
"""
