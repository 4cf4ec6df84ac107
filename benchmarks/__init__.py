"""What teraio costs and gains, measured: `python -m benchmarks [part ...]`.

Each variant runs in a process of its own; figures that are compared come from turns taken in one run.
"""
