// What the files of the runtime's and the driver's functions share.
#pragma once
#include <cuda_runtime_api.h>

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Says once that a function is not made up, and fails.
EXPORTED cudaError_t made_up_missing(const char* name);

namespace made_up {

// Remember an error as the calling thread's last one, as the runtime does. Returns it.
cudaError_t failed(cudaError_t error);

// The context of the calling thread: functions of the runtime enter it by themselves, and those of the driver fail outside of it.
void enter_context();
bool in_context();

// Count a call of a function, for made_up_calls.
void count(const char* function);

// All copies. waits: return after the copy, like cudaMemcpy.
cudaError_t copy(void* target, const void* source, size_t size, cudaMemcpyKind kind, cudaStream_t stream, bool waits);
// Fill `count` values of `width` bytes each.
cudaError_t fill(void* target, unsigned value, size_t width, size_t count, cudaStream_t stream, bool waits);

// An attribute of the device; the runtime and the driver number them alike.
int device_attribute(int attribute);

// The function of the driver that has this name here, or one that says that it is missing.
void* driver_function(const char* name);

}  // namespace made_up
