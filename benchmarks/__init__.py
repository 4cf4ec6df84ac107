"""Benchmarks of teraio: `python -m benchmarks [part ...]`.

Each variant runs in a process of its own. Variants that are compared take turns in one run.
"""
