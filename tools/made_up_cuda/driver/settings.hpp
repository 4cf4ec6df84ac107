// What the environment asks of the made-up GPU, and how it speaks. `python -m tools.made_up_cuda` sets these variables.
#pragma once
#include <cstddef>

namespace made_up {

struct Settings {
  size_t device_bytes;   // MADE_UP_CUDA_DEVICE_BYTES: memory of the device
  size_t host_bytes;     // MADE_UP_CUDA_HOST_BYTES: the most host memory that may be pinned at a time
  unsigned delay_us;     // MADE_UP_CUDA_DELAY_US: each queued operation begins late, by up to so many microseconds
  unsigned seed;         // MADE_UP_CUDA_SEED: of those delays
  unsigned map_us;       // MADE_UP_CUDA_MAP_US: what the host takes to map or to unmap a MiB
  bool poison;           // MADE_UP_CUDA_POISON=0: leave new memory untouched, so that unused memory costs nothing
  unsigned capability;       // MADE_UP_CUDA_CAPABILITY: 90 for 9.0
  unsigned multiprocessors;  // MADE_UP_CUDA_MULTIPROCESSORS
  bool refuse_kernels;   // MADE_UP_CUDA_KERNELS=nothing: a kernel that nobody stands in for does nothing, instead of failing
};

const Settings& settings();

// Print one line that names what the program did wrong, and end the process: on a real GPU such an error can stay unseen.
[[noreturn]] void misuse(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Print one line once for each `format`: something was asked for that is not made up.
void tell(const char* format, const char* name);

}  // namespace made_up
