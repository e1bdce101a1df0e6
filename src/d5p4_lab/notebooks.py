"""`python -m d5p4_lab notebooks`: run the notebooks in examples/ and write their outputs into them."""

import os
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ALL = sorted(EXAMPLES.glob("*.ipynb"))
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def executed(path: Path) -> Any:
    """Run a notebook in an empty folder and return it with its new outputs. The file is not changed.

    The kernel is the running Python with the d5p4 of this checkout, and without the user's settings. The returned
    notebook has neither times nor versions, so only the outputs of the code can change.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "PYTHONPATH": str(EXAMPLES.parent / "src"),
            "IPYTHONDIR": folder,
            "OMP_WAIT_POLICY": "passive",  # threads that spin while they wait would take minutes on a busy machine
        }
        client = NotebookClient(
            notebook,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            extra_arguments=["--log-level=ERROR"],  # the kernel warns that it listens without encryption
            record_timing=False,
            coalesce_streams=True,
        )
        client.execute(env=environment)
    notebook.metadata = METADATA
    for cell in notebook.cells:
        cell.metadata = {}
    return notebook


def write(path: Path, notebook: Any) -> None:
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
