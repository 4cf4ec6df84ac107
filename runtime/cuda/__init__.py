"""An NVIDIA GPU as the device tier."""

from runtime.cuda.measurement import computing, measure_host_links
from runtime.cuda.mover import StreamMover
from runtime.cuda.storage_paths import CudaMemory, cuda_candidates
from runtime.cuda.streams import CudaStreams
