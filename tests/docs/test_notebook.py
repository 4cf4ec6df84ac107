"""The notebook runs from its first cell to its last, without Jupyter, and shows the page at its end."""

from __future__ import annotations

import json
from pathlib import Path

from ..runtime.processes import Forking
from .pages import ROOT

LAYERS = "in range(10))"
"""Of the notebook's model; half of them show the same in half the time."""
NOTEBOOK = ROOT / "examples" / "half_the_memory.ipynb"
IPYTHON = """
import sys, types
shown = []
sys.modules["IPython"] = sys.modules["IPython.display"] = types.SimpleNamespace(HTML=shown.append)
"""


def test_the_notebook_runs(tmp_path: Path, forking: Forking) -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells), "no results of some machine"
    code = "\n".join(["".join(cell["source"]) for cell in cells])
    assert LAYERS in code
    code = code.replace(LAYERS, "in range(5))")
    begin = f"import os; os.chdir({str(tmp_path)!r})\n{IPYTHON}"
    status, printed, errors = forking.run(f"{begin}\n{code}\nprint(len(shown[0]) > 10_000)", TERAIO_CODEGEN="eager")
    assert (status, printed.splitlines()[-1:]) == (0, ["True"]), errors
    assert "phase 'planned'" in printed and ": after " in printed
