// libcudart: streams, events, memory and copies, the device. Kernels are in kernels.cpp.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "api.hpp"
#include "hooks.h"
#include "memory.hpp"
#include "settings.hpp"
#include "streams.hpp"

namespace made_up {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local bool entered = false;

struct Calls {
  std::mutex mutex;
  std::map<std::string, size_t> counts;
};

Calls& calls() {
  static auto& made = *new Calls;
  return made;
}

}  // namespace

void enter_context() { entered = true; }
bool in_context() { return entered; }

cudaError_t failed(cudaError_t error) {
  enter_context();
  if (error) last_error = error;
  return error;
}

void count(const char* function) {
  std::lock_guard lock(calls().mutex);
  ++calls().counts[function];
}

// Whether the two places are those that the caller has named.
static bool is_kind(cudaMemcpyKind kind, const Place& target, const Place& source) {
  bool to_device = target.kind == Kind::DEVICE, from_device = source.kind == Kind::DEVICE;
  switch (kind) {  // pinned memory is also mapped into the device, so it may take the device's part
    case cudaMemcpyHostToDevice: return !from_device && target.kind != Kind::PAGEABLE;
    case cudaMemcpyDeviceToHost: return !to_device && source.kind != Kind::PAGEABLE;
    case cudaMemcpyDeviceToDevice: return target.kind != Kind::PAGEABLE && source.kind != Kind::PAGEABLE;
    case cudaMemcpyHostToHost: return !to_device && !from_device;
    default: return true;
  }
}

cudaError_t copy(void* target, const void* source, size_t size, cudaMemcpyKind kind, cudaStream_t stream, bool waits) {
  if (!size) return cudaSuccess;
  Place to = place_of(target, size), from = place_of(source, size);
  if ((to.kind == Kind::DEVICE && !to.whole) || (from.kind == Kind::DEVICE && !from.whole))
    misuse("a copy of %zu bytes from %p to %p touches device memory that is not mapped", size, source, target);
  if (!to.whole || !from.whole) return failed(cudaErrorInvalidValue);  // from one registration into the next
  if (!is_kind(kind, to, from)) return failed(cudaErrorInvalidValue);
  Work work{.what = "copy"};
  if (to.kind != Kind::PAGEABLE) work.uses.push_back({(char*)target, size});
  if (from.kind == Kind::PAGEABLE && to.kind != Kind::PAGEABLE) {
    // The driver takes pageable memory into a buffer of its own before the call returns.
    auto taken = std::make_shared<std::string>((const char*)source, size);
    work.run = [=] { memcpy(target, taken->data(), size); };
  } else {
    if (from.kind != Kind::PAGEABLE) work.uses.push_back({(const char*)source, size});
    work.run = [=] { memcpy(target, source, size); };
    waits |= to.kind == Kind::PAGEABLE;  // and it returns after it has written to it
  }
  enqueue(stream, std::move(work));
  if (waits) synchronize(stream);
  return cudaSuccess;
}

cudaError_t fill(void* target, unsigned value, size_t width, size_t count, cudaStream_t stream, bool waits) {
  if (!count) return cudaSuccess;
  auto run = [=] {
    if (width == 1) memset(target, (int)value, count);
    if (width == 2) std::fill_n((uint16_t*)target, count, (uint16_t)value);
    if (width == 4) std::fill_n((uint32_t*)target, count, (uint32_t)value);
  };
  enqueue(stream, {.what = "fill", .uses = {{(char*)target, count * width}}, .run = run});
  if (waits) synchronize(stream);
  return cudaSuccess;
}

int device_attribute(int attribute) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: return (int)settings().capability / 10;
    case cudaDevAttrComputeCapabilityMinor: return (int)settings().capability % 10;
    case cudaDevAttrMultiProcessorCount: return (int)settings().multiprocessors;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 0x7fffffff;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 48 << 10;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 227 << 10;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 228 << 10;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrL2CacheSize: return 50 << 20;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrAsyncEngineCount: return 3;
    case cudaDevAttrPciBusId: return 0xff;
    case cudaDevAttrPciDeviceId: return 0x1f;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrStreamPrioritiesSupported:
    case 102: return 1;  // CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    default: return 0;   // no memory pools, no managed memory, no IPC, no GPUDirect RDMA, one device
  }
}

}  // namespace made_up

using namespace made_up;

// ---- streams

EXPORTED cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return failed(create_stream(stream, flags, priority));
}
EXPORTED cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) { return create_stream(stream, flags, 0); }
EXPORTED cudaError_t cudaStreamCreate(cudaStream_t* stream) { return create_stream(stream, cudaStreamDefault, 0); }
EXPORTED cudaError_t cudaStreamDestroy(cudaStream_t stream) { return failed(destroy_stream(stream)); }
EXPORTED cudaError_t cudaStreamQuery(cudaStream_t stream) { return failed(is_idle(stream) ? cudaSuccess : cudaErrorNotReady); }
EXPORTED cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  count(__func__);
  synchronize(stream);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  count(__func__);
  return failed(wait_for_event(stream, event));
}
EXPORTED cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = priority_of(stream);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  *flags = flags_of(stream);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0, *greatest = -5;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  enqueue(stream, {.what = "a host function", .run = [=] { function(argument); }});
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* argument, unsigned) {
  enqueue(stream, {.what = "a callback", .run = [=] { function(stream, cudaSuccess, argument); }});
  return cudaSuccess;
}

// Graphs are not made up: no stream ever captures.
EXPORTED cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*, const cudaGraphNode_t**,
    const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

// ---- events

EXPORTED cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  count(__func__);
  enter_context();
  return create_event(event, flags);
}
EXPORTED cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
EXPORTED cudaError_t cudaEventDestroy(cudaEvent_t event) { return destroy_event(event); }
EXPORTED cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  count("cudaEventRecord");
  enter_context();
  return record_event(event, stream);
}
EXPORTED cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
EXPORTED cudaError_t cudaEventQuery(cudaEvent_t event) {
  count(__func__);
  return failed(query_event(event));
}
EXPORTED cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  count(__func__);
  return synchronize_event(event);
}
EXPORTED cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  return failed(milliseconds_between(milliseconds, begin, end));
}

// ---- memory

EXPORTED cudaError_t cudaMalloc(void** address, size_t size) {
  count(__func__);
  return failed(allocate(size, address));
}
EXPORTED cudaError_t cudaFree(void* address) {
  count(__func__);
  release(address);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  count(__func__);
  device_memory(free_bytes, total_bytes);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaHostAlloc(void** address, size_t size, unsigned) {
  count(__func__);
  return failed(allocate_pinned(size, address));
}
EXPORTED cudaError_t cudaMallocHost(void** address, size_t size) { return cudaHostAlloc(address, size, 0); }
EXPORTED cudaError_t cudaFreeHost(void* address) {
  count(__func__);
  release_pinned(address);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaHostRegister(void* address, size_t size, unsigned) {
  count(__func__);
  return failed(register_host(address, size));
}
EXPORTED cudaError_t cudaHostUnregister(void* address) {
  count(__func__);
  return failed(unregister_host(address));
}
EXPORTED cudaError_t cudaHostGetDevicePointer(void** on_device, void* on_host, unsigned) {
  if (place_of(on_host, 1).kind != Kind::PINNED) return failed(cudaErrorInvalidValue);
  *on_device = on_host;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  memset(attributes, 0, sizeof *attributes);
  void* pointer = (void*)address;
  switch (place_of(address, 1).kind) {
    case Kind::DEVICE:
      attributes->type = cudaMemoryTypeDevice;
      attributes->devicePointer = pointer;
      break;
    case Kind::PINNED:
      attributes->type = cudaMemoryTypeHost;
      attributes->devicePointer = attributes->hostPointer = pointer;
      break;
    case Kind::PAGEABLE:
      attributes->type = cudaMemoryTypeUnregistered;
      attributes->device = -2;  // cudaInvalidDeviceId
      attributes->hostPointer = pointer;
  }
  return cudaSuccess;
}

// ---- copies

EXPORTED cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
  count(__func__);
  return copy(target, source, size, kind, stream, false);
}
EXPORTED cudaError_t cudaMemcpy(void* target, const void* source, size_t size, cudaMemcpyKind kind) {
  count(__func__);
  return copy(target, source, size, kind, nullptr, true);
}
EXPORTED cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t size, cudaStream_t stream) {
  return copy(target, source, size, cudaMemcpyDeviceToDevice, stream, false);
}
EXPORTED cudaError_t cudaMemcpy2DAsync(
    void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t width, size_t height, cudaMemcpyKind kind,
    cudaStream_t stream) {
  for (size_t row = 0; row < height; ++row) {
    const char* from = (const char*)source + row * source_pitch;
    if (cudaError_t error = copy((char*)target + row * target_pitch, from, width, kind, stream, false)) return error;
  }
  return cudaSuccess;
}
EXPORTED cudaError_t cudaMemsetAsync(void* target, int value, size_t size, cudaStream_t stream) {
  count(__func__);
  return fill(target, (unsigned)value, 1, size, stream, false);
}
EXPORTED cudaError_t cudaMemset(void* target, int value, size_t size) {
  return fill(target, (unsigned)value, 1, size, nullptr, place_of(target, 1).kind == Kind::PINNED);
}

// ---- the device

EXPORTED cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaSetDevice(int device) { return failed(device ? cudaErrorInvalidDevice : cudaSuccess); }
EXPORTED cudaError_t cudaDeviceSynchronize() {
  count(__func__);
  synchronize_device();
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = device_attribute(attribute);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device) return failed(cudaErrorInvalidDevice);
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "made-up GPU");
  memcpy(properties->uuid.bytes, "made-up GPU 0000", 16);
  properties->totalGlobalMem = settings().device_bytes;
  properties->major = device_attribute(cudaDevAttrComputeCapabilityMajor);
  properties->minor = device_attribute(cudaDevAttrComputeCapabilityMinor);
  properties->multiProcessorCount = device_attribute(cudaDevAttrMultiProcessorCount);
  properties->warpSize = device_attribute(cudaDevAttrWarpSize);
  properties->maxThreadsPerBlock = device_attribute(cudaDevAttrMaxThreadsPerBlock);
  properties->maxThreadsPerMultiProcessor = device_attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  properties->maxBlocksPerMultiProcessor = 32;
  properties->maxThreadsDim[0] = device_attribute(cudaDevAttrMaxBlockDimX);
  properties->maxThreadsDim[1] = device_attribute(cudaDevAttrMaxBlockDimY);
  properties->maxThreadsDim[2] = device_attribute(cudaDevAttrMaxBlockDimZ);
  properties->maxGridSize[0] = device_attribute(cudaDevAttrMaxGridDimX);
  properties->maxGridSize[1] = device_attribute(cudaDevAttrMaxGridDimY);
  properties->maxGridSize[2] = device_attribute(cudaDevAttrMaxGridDimZ);
  properties->sharedMemPerBlock = device_attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  properties->sharedMemPerBlockOptin = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  properties->sharedMemPerMultiprocessor = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  properties->regsPerBlock = device_attribute(cudaDevAttrMaxRegistersPerBlock);
  properties->regsPerMultiprocessor = device_attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
  properties->l2CacheSize = device_attribute(cudaDevAttrL2CacheSize);
  properties->memoryBusWidth = device_attribute(cudaDevAttrGlobalMemoryBusWidth);
  properties->asyncEngineCount = device_attribute(cudaDevAttrAsyncEngineCount);
  properties->pciBusID = device_attribute(cudaDevAttrPciBusId);
  properties->pciDeviceID = device_attribute(cudaDevAttrPciDeviceId);
  properties->concurrentKernels = properties->unifiedAddressing = properties->canMapHostMemory = 1;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int) {
  snprintf(text, (size_t)size, "0000:ff:1f.0");
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaProfilerStart() { return cudaSuccess; }
EXPORTED cudaError_t cudaProfilerStop() { return cudaSuccess; }

EXPORTED cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  *function = driver_function(name);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// ---- errors

EXPORTED cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
EXPORTED cudaError_t cudaPeekAtLastError() { return last_error; }

static const struct {
  cudaError_t error;
  const char *name, *text;
} ERRORS[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidSymbol, "cudaErrorInvalidSymbol", "invalid device symbol"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorDeviceUninitialized, "cudaErrorDeviceUninitialized", "invalid device context"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported by the made-up GPU"},
};

EXPORTED const char* cudaGetErrorName(cudaError_t error) {
  for (auto& known : ERRORS)
    if (known.error == error) return known.name;
  return "cudaErrorUnknown";
}
EXPORTED const char* cudaGetErrorString(cudaError_t error) {
  for (auto& known : ERRORS)
    if (known.error == error) return known.text;
  return "an error that the made-up GPU never makes";
}

// The build adds a function for each other name of libcudart; it calls this.
EXPORTED cudaError_t made_up_missing(const char* name) {
  tell("%s was called, which is not made up", name);
  return failed(cudaErrorNotSupported);
}

// ---- for hooks.h

EXPORTED size_t made_up_calls(char* text, size_t size) {
  std::lock_guard lock(calls().mutex);
  std::string lines;
  for (auto& [name, times] : calls().counts) lines += name + " " + std::to_string(times) + "\n";
  if (size) snprintf(text, size, "%s", lines.c_str());
  return lines.size();
}
EXPORTED size_t made_up_pinned_bytes() { return pinned_bytes(); }
