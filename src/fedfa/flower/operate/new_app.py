"""Writes an app for somebody's own data and network; it runs as written, with a small example."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from fedfa.errors import FedfaError
from fedfa.flower import app_folder
from fedfa.studies.files import write_atomically

MODULE = "site_app"
_OWN = {"preset": '""', "rounds": "5", "settings": '"local.lr=0.1 local.batch_size=16"', "evaluation": '"sites"'}
"""Where the new app differs from the built-in one, whose pyproject.toml it begins with."""


def write_app(folder: Path) -> None:
    """Write the app.

    Args:
        folder: Does not exist yet, or is empty.

    Raises:
        FedfaError: The folder holds something, or cannot be written.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FedfaError(f"{folder} holds something already; choose a folder that does not exist yet")
        folder.mkdir(parents=True, exist_ok=True)
        name = project_name(folder.absolute().name)
        write_atomically(folder / "pyproject.toml", _pyproject(name))
        write_atomically(folder / f"{MODULE}.py", SITE_APP)
        write_atomically(folder / "README.md", README.format(name=name))
    except OSError as error:
        raise FedfaError(f"cannot write to {folder}: {error.strerror}") from None


def project_name(folder: str) -> str:
    """A name that Python's packaging and Flower allow.

    Example:
        >>> project_name("Meine Klinik (2)"), project_name("???")
        ('meine-klinik-2', 'federation')
    """
    return re.sub(r"[^a-z0-9]+", "-", folder.lower()).strip("-") or "federation"


def _pyproject(name: str) -> str:
    """The built-in app's, so that every key of the run config is there, with another name, components and values."""
    lines = []
    for line in app_folder().joinpath("pyproject.toml").read_text(encoding="utf-8").splitlines():
        key, sign, _ = line.partition(" = ")
        if sign and key == "name":
            line = f'name = "{name}"'
        elif sign and key == "description":
            line = 'description = "A federation of our own"'
        elif sign and key == "publisher":
            line = 'publisher = "us"'
        elif sign and key in ("serverapp", "clientapp"):
            line = f'{key} = "{MODULE}:{key.removesuffix("app")}"'
        elif sign and key in _OWN:
            line = f"{key} = {_OWN[key]}"
        if not line.startswith("# A Flower app for"):
            lines.append(line)
    text = "\n".join(lines) + "\n"
    tomllib.loads(text)  # what is handed to the user is TOML for certain
    return text


SITE_APP = '''\
"""Our federation: what a site's data are, and which network learns from them. The method is chosen in pyproject.toml.

Each message from the server starts a new process at the site: import what is large inside the functions, and read large
data as memory-mapped files.
"""

from fedfa.flower import make_client_app, make_server_app


def load_data(node_config):
    """This site's samples; called at the site, with what its SuperNode was started with (--node-config)."""
    import numpy as np

    # An example to replace: clouds of points in four classes, of which each site has two. Yours could be arrays from
    # np.load(..., mmap_mode="r"), a torch Dataset, or the path of an .npz file or of a folder of class folders.
    site = int(node_config["partition-id"])
    draw = np.random.default_rng(site)
    y = (site + draw.integers(0, 2, 200)) % 4
    x = (draw.normal(size=(200, 8)) + 3 * np.eye(8)[y]).astype(np.float32)
    return {"train": (x[:150], y[:150]), "test": (x[150:], y[150:])}


def make_model():
    """The network, the same at every site: any nn.Module that ends in a Linear with one output per class."""
    from torch import nn

    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


client = make_client_app(load_data, make_model)
server = make_server_app(make_model)
'''

README = """\
# {name}

Fill in `load_data` and `make_model` in `site_app.py`; choose method and rounds in `pyproject.toml`.

    fedfa flower up --app . --sites 3       # a try-out on this machine, with certificates and keys
    flwr run . NAME --stream                # on the SuperLink called NAME in Flower's config.toml

`fedfa` (with its extra `flower`) must be installed at the server and at every site: Flower sends this folder, not
the packages that it imports. The manual for real machines is `docs/flower.md` of fedfa.
"""
