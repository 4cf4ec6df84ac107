"""What the machine and its operating system give: NUMA nodes, memory limits, pinning, native code."""
