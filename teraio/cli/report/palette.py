"""The colours of a report, in light and in dark. Blocks have one palette and stages another: no colour has two meanings."""

from __future__ import annotations

# From the bottom of a stack to its top.
KINDS = {
    "parameter": ("#0072b2", "#3b9bdc"),
    "gradient": ("#e69f00", "#f0b429"),
    "optimizer_state": ("#009e73", "#2bbf93"),
    "activation": ("#cc79a7", "#d88fb8"),
    "buffer": ("#8c8c8c", "#9a9a9a"),
    "workspace": ("#56b4e9", "#8fd4f7"),
}
PHASES = {
    "forward": ("#5e4fa2", "#8f7de0"),
    "recompute": ("#b8a9e6", "#d3c6f2"),  # a forward stage that runs again
    "backward": ("#7f4f24", "#b07d4f"),
    "optimizer": ("#93ab1a", "#b5d334"),
    "user": ("#d9c8a0", "#6f6750"),
}
STALL = {"stall": ("#d7191c", "#ff4d3d")}


def style() -> str:
    """Return the colours as CSS: a class for each, with what it fills in one of the two."""
    colours = KINDS | PHASES | STALL
    light, dark = (" ".join(f"--{name}: {pair[shade]};" for name, pair in colours.items()) for shade in (0, 1))
    classes = "\n".join(f".{name} {{ fill: var(--{name}); background: var(--{name}); }}" for name in colours)
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{classes}\n"
