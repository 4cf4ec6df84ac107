// Kernels: their names, and who stands in for them. The made-up GPU cannot run their code.
#pragma once
#include <cuda_runtime_api.h>

#include "hooks.h"

namespace made_up {

// A kernel as the runtime or a loaded module knows it. It stays for as long as the process runs.
struct Kernel {
  const char* name;  // mangled, as the compiler has written it
};

Kernel* kernel_of_host_function(const void* function);  // by __cudaRegisterFunction; null if unknown
Kernel* kernel_of_module(const char* name);             // one for each name
bool is_kernel(const void* pointer);

// Hand the launch to the hook. Without one it fails, or does nothing in its stream, as the settings say.
cudaError_t launch(const MadeUpLaunch& launch);

}  // namespace made_up
