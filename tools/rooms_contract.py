"""A contract for import-linter: code enters a room of a package through the room's `__init__` only.

A room is a sub-package such as `planner.schema`. Its `__init__` hands out the names that other rooms may use. Modules of the
room itself import each other directly.
"""

from __future__ import annotations

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


def room_of(module: str) -> str:
    """Return the room of a module: its first two names, `planner.schema` for `planner.schema.trace`."""
    return ".".join(module.split(".")[:2])


def imports_past_the_door(graph: ImportGraph, roots: frozenset[str]) -> list[tuple[str, str]]:
    """Return (importer, imported) for every import of a module inside a room by a module outside of it, in order."""
    found = []
    for imported in sorted(graph.modules):
        if imported.split(".")[0] not in roots or imported.count(".") < 2:
            continue
        for importer in sorted(graph.find_modules_that_directly_import(imported)):
            if room_of(importer) != room_of(imported) and not _by_the_door(graph, importer, imported):
                found.append((importer, imported))
    return found


def _by_the_door(graph: ImportGraph, importer: str, imported: str) -> bool:
    """Return whether the import names the room only: `from planner.simulator import simulate`, a function or a module."""
    details = graph.get_import_details(importer=importer, imported=imported)
    return all(detail["line_contents"].startswith(f"from {room_of(imported)} import ") for detail in details)


class RoomsContract(Contract):
    """Configuration: `packages`, the packages whose sub-packages are rooms."""

    packages = fields.SetField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Check the graph. The contract is broken if any import goes past a room's `__init__`."""
        packages = frozenset(str(package) for package in self.packages)  # type: ignore[attr-defined]
        found = imports_past_the_door(graph, packages)
        return ContractCheck(kept=not found, metadata={"imports": found})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print each forbidden import and the remedy."""
        for importer, imported in check.metadata["imports"]:
            output.print_error(f"{importer} imports {imported}; import the name from {room_of(imported)} instead")
