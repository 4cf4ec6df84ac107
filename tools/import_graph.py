"""Print the import graph of the three packages: files and lines of each room, imports between rooms, circles of rooms.

`python -m tools.import_graph` analyses the packages of the current directory. The exit status is 1 if there is a circle.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import grimp
import networkx as nx
from rich.console import Console
from rich.table import Table

from tools.rooms_contract import room_of

PACKAGES = ("planner", "runtime", "teraio")


def imports_between_rooms(graph: grimp.ImportGraph, package: str) -> Counter[tuple[str, str]]:
    """Return how many modules of one room import from another room, by (importing room, imported room).

    The package's own `__init__` is left out: it hands out names of all rooms.
    """
    count: Counter[tuple[str, str]] = Counter()
    for importer in graph.modules:
        if not importer.startswith(f"{package}."):
            continue
        for imported in graph.find_modules_directly_imported_by(importer):
            if imported.startswith(f"{package}.") and room_of(imported) != room_of(importer):
                count[room_of(importer), room_of(imported)] += 1
    return count


def circles(between: Counter[tuple[str, str]]) -> list[list[str]]:
    """Return the groups of rooms that import each other in a circle."""
    graph = nx.DiGraph(list(between))
    return [sorted(group) for group in nx.strongly_connected_components(graph) if len(group) > 1]


def _size(room: str) -> tuple[int, int]:
    """Return the number of files of a room, and their lines."""
    path = Path(*room.split("."))
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return len(files), sum(len(file.read_text().splitlines()) for file in files)


def main() -> int:
    """Print a table for each package. Return the exit status."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    console, found = Console(), False
    for package in PACKAGES:
        between = imports_between_rooms(graph, package)
        rooms = sorted({room_of(module) for module in graph.modules if module.startswith(f"{package}.")})
        title = f"{package}: {len(rooms)} rooms, {len(between)} pairs of them with imports, {sum(between.values())} imports"
        table = Table(title=title)
        for column in ("room", "files", "lines", "imports from"):
            table.add_column(column, justify="right" if column in ("files", "lines") else "left")
        for room in rooms:
            files, lines = _size(room)
            targets = (f"{to.split('.')[1]} {count}" for (source, to), count in sorted(between.items()) if source == room)
            table.add_row(room, str(files), str(lines), ", ".join(targets))
        console.print(table)
        for circle in circles(between):
            found = True
            console.print(f"circle: {', '.join(circle)}")
    return int(found)


if __name__ == "__main__":
    sys.exit(main())
