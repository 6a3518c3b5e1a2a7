"""Template of an app for the user's own data and network; it runs as written, with a small example."""

from __future__ import annotations

import re
from pathlib import Path

from fedfa.errors import FedfaError
from fedfa.experiment.files import write_atomically
from fedfa.flower import app_folder

MODULE = "site_app"
_VALUES = {
    "description": '"A custom federation"',
    "publisher": '"us"',
    "serverapp": f'"{MODULE}:server"',
    "clientapp": f'"{MODULE}:client"',
    "preset": '""',
    "rounds": "5",
    "settings": '"local.lr=0.1 local.batch_size=16"',
    "evaluation": '"sites"',
}
"""Values that differ from the built-in app's pyproject.toml."""


def write_app(folder: Path) -> None:
    """Write the app.

    Raises:
        FedfaError: The directory is not empty, or cannot be written.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FedfaError(f"{folder} exists and is not empty; choose a directory that does not exist yet")
        folder.mkdir(parents=True, exist_ok=True)
        name = project_name(folder.absolute().name)
        write_atomically(folder / "pyproject.toml", _pyproject(name))
        write_atomically(folder / f"{MODULE}.py", SITE_APP)
        write_atomically(folder / "README.md", README.format(name=name))
    except OSError as error:
        raise FedfaError(f"cannot write to {folder}: {error.strerror}") from None


def project_name(folder: str) -> str:
    """A name that Python's packaging and Flower accept.

    Example:
        >>> project_name("Meine Klinik (2)"), project_name("???")
        ('meine-klinik-2', 'federation')
    """
    return re.sub(r"[^a-z0-9]+", "-", folder.lower()).strip("-") or "federation"


def _pyproject(name: str) -> str:
    """The built-in app's pyproject.toml, which has every key of the run config, with other values."""
    values = {"name": f'"{name}"', **_VALUES}
    lines = []
    for line in app_folder().joinpath("pyproject.toml").read_text(encoding="utf-8").splitlines():
        key, sign, _ = line.partition(" = ")
        if sign and key in values:
            line = f"{key} = {values[key]}"
        if not line.startswith("# A Flower app for"):
            lines.append(line)
    return "\n".join(lines) + "\n"


SITE_APP = '''\
"""A custom federation: the data of a site, and the network. The algorithm is chosen in pyproject.toml.

Each message from the server starts a new process at the site: import large packages inside the functions, and read
large data as memory-mapped files.
"""

from fedfa.flower import make_client_app, make_server_app


def load_data(node_config):
    """Return this site's samples; called at the site with the node config of its SuperNode (--node-config)."""
    import numpy as np

    # Replace this example: clusters of points in four classes, of which each site has two. Return arrays, e.g. from
    # np.load(..., mmap_mode="r"), a torch Dataset, or the path of an .npz file or of a directory of class directories.
    site = int(node_config["partition-id"])
    draw = np.random.default_rng(site)
    y = (site + draw.integers(0, 2, 200)) % 4
    x = (draw.normal(size=(200, 8)) + 3 * np.eye(8)[y]).astype(np.float32)
    return {"train": (x[:150], y[:150]), "test": (x[150:], y[150:])}


def make_model():
    """Return the network, the same at every site: any nn.Module that ends in a Linear with one output per class."""
    from torch import nn

    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


client = make_client_app(load_data, make_model)
server = make_server_app(make_model)
'''

README = """\
# {name}

Fill in `load_data` and `make_model` in `site_app.py`; choose algorithm and rounds in `pyproject.toml`.

    fedfa flower up --app . --sites 3       # a local deployment, with certificates and keys
    flwr run . NAME --stream                # on the SuperLink called NAME in Flower's config.toml

`fedfa` (with its extra `flower`) must be installed at the server and at every site: Flower sends this directory, not
the packages that it imports. The manual for real machines is `docs/flower.md` of fedfa.
"""
