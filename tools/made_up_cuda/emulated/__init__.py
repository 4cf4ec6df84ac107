"""Emulated time: kernels and copies of the made-up GPU take the time that a machine's description says, and touch no memory.

So a training at full size runs in real time on a small machine: PyTorch, its allocator and teraio's Python are real; the device,
its links and updates on the processor are modelled. It shows the host's part, and nothing of real kernels. Every figure from it
is called *emulated*, with the machine's description beside it.

* `timeline.cpp`: streams whose operations have a known begin and end; takes the place of `driver/streams.cpp`.
* `operators.cpp`: what an operator costs: `teraio.stages.operator_kernel` and `MachineDescription.seconds`, the formulas
  of `teraio capture`, asked once for each operator and shape. Also AdamW on the host's processor, which only waits.
* `libraries.cpp`: cuBLAS, whose products are launches.
"""
