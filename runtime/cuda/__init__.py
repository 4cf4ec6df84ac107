"""An NVIDIA GPU as the device tier."""

from runtime.cuda.drive_paths import CudaMemory, computing, cuda_candidates, measure_host_links
from runtime.cuda.mover import StreamMover
from runtime.cuda.streams import CudaStreams
