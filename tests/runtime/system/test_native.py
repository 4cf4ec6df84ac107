"""The text of a C++ file that is given to the compiler."""

from __future__ import annotations

from pathlib import Path

from runtime.system import native


def test_included_files_of_the_package_are_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "inner.h").write_text("int inner;\n")
    (tmp_path / "outer.h").write_text('#include <vector>\n#include "inner.h"\nint outer;\n')
    (tmp_path / "source.cpp").write_text('#include "outer.h"\nint source;\n')
    assert native._with_includes(tmp_path / "source.cpp").split("\n") == [
        "#include <vector>",
        "int inner;",
        "",
        "int outer;",
        "",
        "int source;",
        "",
    ]
