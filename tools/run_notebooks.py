"""Execute the notebooks in examples/ and store their outputs: ``make notebooks``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"


def execute(notebook: Path, directory: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of an execution in a directory; an error in a cell is raised."""
    content = nbformat.read(notebook, as_version=4)
    place = {"metadata": {"path": str(directory)}}
    client = NotebookClient(content, timeout=300, kernel_name="python3", resources=place)
    client.execute()
    for cell in content.cells:
        cell.metadata.pop("execution", None)  # times, which differ each time
    content.metadata = {"kernelspec": content.metadata["kernelspec"], "language_info": {"name": "python"}}
    return content


def main() -> None:
    """Execute all notebooks, or those named on the command line."""
    for notebook in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(EXAMPLES.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as directory:
            nbformat.write(execute(notebook, Path(directory)), notebook)
        print(f"{notebook.name}: {notebook.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
