"""The notebooks of examples/notebooks run from top to bottom, in a new kernel and an empty folder."""

import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager

from tests.runs import environment, weights

NOTEBOOKS = Path(__file__).resolve().parents[2] / "examples" / "notebooks"


class _Kernel(AsyncKernelManager):
    """A kernel of this Python: which kernels are installed on the machine does not matter."""

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])


def execute(cells: list[Any], folder: Path, *, allow_errors: bool = False) -> list[str]:
    """Run cells in a new kernel, and return the text output of each."""
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(
        notebook, timeout=180, kernel_manager_class=_Kernel, resources={"metadata": {"path": str(folder)}},
        allow_errors=allow_errors,
    )  # fmt: skip
    # ipykernel shows what other processes print, but not under pytest.
    variables = environment(IPYTHONDIR=str(folder / ".ipython"), MPLBACKEND="module://matplotlib_inline.backend_inline")
    client.execute(env={name: value for name, value in variables.items() if name != "PYTEST_CURRENT_TEST"})
    return [_text(cell) for cell in cells if cell.cell_type == "code"]


def _text(cell: Any) -> str:
    texts = []
    for output in cell.outputs:
        texts.append(output.get("text") or output.get("data", {}).get("text/plain", ""))
        texts.append("\n".join(output.get("traceback", ())))
    return "".join(texts)


def _cells(name: str) -> list[Any]:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells


@pytest.mark.full
def test_the_notebook_trains_on_own_images(tmp_path: Path) -> None:
    said = execute(_cells("own_images"), tmp_path)
    assert "circles" in said[0]
    assert "epoch 2" in said[1]  # what the processes print is shown in the notebook
    assert "top1" in said[2]
    assert "probability" in said[4]
    assert (tmp_path / "runs/own-images/weights.safetensors").is_file()


@pytest.mark.full
def test_the_notebook_launches_two_processes_from_a_cell(tmp_path: Path) -> None:
    said = execute(_cells("two_processes"), tmp_path)
    assert "rank 0 of 2 is done" in said[2]
    assert "rank 1 of 2 is done" in said[2]
    assert "count or its arguments cannot be sent to another process" in said[4]
    assert said[6].splitlines()[-1].startswith("History(2 evaluations: loss, top1; 16 training records)")


@pytest.mark.lab
def test_the_notebook_compares_runs(tmp_path: Path) -> None:
    said = execute(_cells("compare_runs"), tmp_path)
    assert "0.10" in said[1]
    assert "optim.lr" in said[4]
    folders = sorted((tmp_path / "runs").glob("digits-*"))
    assert len({weights(folder) for folder in folders}) == 2


def test_notebooks_are_stored_without_outputs() -> None:
    for path in NOTEBOOKS.glob("*.ipynb"):
        for cell in nbformat.read(path, as_version=4).cells:
            assert cell.cell_type != "code" or (not cell.outputs and cell.execution_count is None), path.name
