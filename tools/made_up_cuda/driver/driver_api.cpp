// libcuda: what PyTorch, KvikIO and Triton ask of the driver itself. One device, one context.
#include <cuda.h>
#include <dlfcn.h>

#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "api.hpp"
#include "hooks.h"
#include "kernels.hpp"
#include "memory.hpp"
#include "settings.hpp"
#include "streams.hpp"

using namespace made_up;

namespace {

int the_context;
const CUcontext CONTEXT = (CUcontext)&the_context;

// The two libraries number their errors alike, as far as they are used here.
CUresult result(cudaError_t error) { return (CUresult)error; }

// Functions that say their own name: those that somebody has looked up, and that are not made up.
constexpr size_t MISSING = 1024;
std::mutex missing_mutex;
std::string missing_names[MISSING];

template <size_t I>
CUresult missing() {
  return result(made_up_missing(missing_names[I].c_str()));
}

template <size_t... I>
void* missing_function(const char* name, std::index_sequence<I...>) {
  static CUresult (*const functions[])() = {missing<I>...};
  std::lock_guard lock(missing_mutex);
  for (size_t i = 0; i < MISSING; ++i)
    if (missing_names[i].empty() || missing_names[i] == name) {
      missing_names[i] = name;
      return (void*)functions[i];
    }
  misuse("more than %zu functions of the driver were looked up that are not made up, the last is %s", MISSING, name);
}

}  // namespace

void* made_up::driver_function(const char* name) {
  // This library, under whatever name it was loaded: PyTorch, KvikIO and others must see the same one.
  static void* self = [] {
    Dl_info info;
    dladdr((void*)&the_context, &info);
    return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  for (const char* ending : {"_v4", "_v3", "_v2", ""})
    if (void* found = dlsym(self, (std::string(name) + ending).c_str())) return found;
  return missing_function(name, std::make_index_sequence<MISSING>{});
}

EXPORTED CUresult cuGetProcAddress_v2(
    const char* name, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult* status) {
  *function = driver_function(name);
  if (status) *status = CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}

// ---- device and context

EXPORTED CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
EXPORTED CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceGetCount(int* count) {
  *count = 1;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceGet(CUdevice* device, int) {
  *device = 0;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceGetName(char* name, int size, CUdevice) {
  strncpy(name, "made-up GPU", (size_t)size);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceTotalMem_v2(size_t* size, CUdevice) {
  *size = settings().device_bytes;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  *value = device_attribute(attribute);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = CONTEXT;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxSetCurrent(CUcontext) {
  enter_context();
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxPushCurrent_v2(CUcontext) { return CUDA_SUCCESS; }
EXPORTED CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  *context = CONTEXT;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxGetDevice(CUdevice* device) {
  *device = 0;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxSynchronize() {
  synchronize_device();
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxGetLimit(size_t* value, CUlimit) {
  *value = 0;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
EXPORTED CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  *context = CONTEXT;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }
EXPORTED CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0, *active = 1;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxCreate_v2(CUcontext* context, unsigned, CUdevice) {
  *context = CONTEXT;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxCreate_v4(CUcontext* context, CUctxCreateParams*, unsigned, CUdevice) {
  *context = CONTEXT;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxDestroy_v2(CUcontext) { return CUDA_SUCCESS; }
EXPORTED CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString((cudaError_t)error);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuGetErrorName(CUresult error, const char** text) {
  *text = cudaGetErrorName((cudaError_t)error);
  return CUDA_SUCCESS;
}

// Messages of the driver go to standard error, not to who asks for them.
EXPORTED CUresult cuLogsRegisterCallback(CUlogsCallback, void*, CUlogsCallbackHandle* handle) {
  *handle = (CUlogsCallbackHandle)&the_context;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle) { return CUDA_SUCCESS; }

// ---- memory: addresses and physical memory apart from each other (PyTorch's expandable segments)

EXPORTED CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = PAGE_BYTES;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemAddressReserve(CUdeviceptr* address, size_t size, size_t, CUdeviceptr, unsigned long long) {
  return result(reserve_addresses(size, (void**)address));
}
EXPORTED CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  free_addresses((void*)address, size);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp*, unsigned long long) {
  count(__func__);
  return result(create_physical(size, (Physical**)handle));
}
EXPORTED CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  release_physical((Physical*)handle);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemMap(
    CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long) {
  count(__func__);
  map_physical((void*)address, size, offset, (Physical*)handle);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc*, size_t) {
  allow_access((void*)address, size);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  count(__func__);
  unmap((void*)address, size);
  return CUDA_SUCCESS;
}

// ---- memory: the rest

EXPORTED CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t size) { return result(allocate(size, (void**)address)); }
EXPORTED CUresult cuMemFree_v2(CUdeviceptr address) {
  release((void*)address);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
  device_memory(free_bytes, total_bytes);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemHostAlloc(void** address, size_t size, unsigned) { return result(allocate_pinned(size, address)); }
EXPORTED CUresult cuMemAllocHost_v2(void** address, size_t size) { return result(allocate_pinned(size, address)); }
EXPORTED CUresult cuMemFreeHost(void* address) {
  release_pinned(address);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemHostRegister_v2(void* address, size_t size, unsigned) { return result(register_host(address, size)); }
EXPORTED CUresult cuMemHostUnregister(void* address) { return result(unregister_host(address)); }
EXPORTED CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* on_device, void* on_host, unsigned) {
  *on_device = (CUdeviceptr)on_host;
  return place_of(on_host, 1).kind == Kind::PINNED ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
EXPORTED CUresult cuMemGetAddressRange_v2(CUdeviceptr* begin, size_t* size, CUdeviceptr address) {
  Place place = place_of((void*)address, 1);
  if (place.kind == Kind::PAGEABLE || !place.begin) return CUDA_ERROR_NOT_FOUND;
  if (begin) *begin = (CUdeviceptr)place.begin;
  if (size) *size = place.size;
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  Place place = place_of((void*)address, 1);
  if (place.kind == Kind::PAGEABLE || !place.begin) return CUDA_ERROR_INVALID_VALUE;
  bool on_device = place.kind == Kind::DEVICE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *(unsigned*)value = on_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *(CUcontext*)value = place.is_virtual ? nullptr : CONTEXT;  // such memory belongs to no context
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      *(CUdeviceptr*)value = address;
      return attribute == CU_POINTER_ATTRIBUTE_HOST_POINTER && on_device ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *(int*)value = 0;
      return CUDA_SUCCESS;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
}
EXPORTED CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** values, CUdeviceptr address) {
  for (unsigned i = 0; i < count; ++i)
    if (cuPointerGetAttribute(values[i], attributes[i], address)) *(int*)values[i] = 0;
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void* source, size_t size, CUstream stream) {
  return result(copy((void*)target, source, size, cudaMemcpyHostToDevice, stream, false));
}
EXPORTED CUresult cuMemcpyDtoHAsync_v2(void* target, CUdeviceptr source, size_t size, CUstream stream) {
  return result(copy(target, (void*)source, size, cudaMemcpyDeviceToHost, stream, false));
}
EXPORTED CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t size, CUstream stream) {
  if (!in_context()) return CUDA_ERROR_INVALID_CONTEXT;
  return result(copy((void*)target, (void*)source, size, cudaMemcpyDefault, stream, false));
}
// KvikIO copies through its bounce buffers with it. The order within the batch is free; here it is that of the arrays.
EXPORTED CUresult cuMemcpyBatchAsync_v2(
    CUdeviceptr* targets, CUdeviceptr* sources, size_t* sizes, size_t count, CUmemcpyAttributes*, size_t*, size_t, CUstream stream) {
  if (!stream) return CUDA_ERROR_INVALID_VALUE;  // as the real one: batches are not for the NULL stream
  for (size_t i = 0; i < count; ++i)
    if (cudaError_t error = copy((void*)targets[i], (void*)sources[i], sizes[i], cudaMemcpyDefault, stream, false))
      return result(error);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void* source, size_t size) {
  return result(copy((void*)target, source, size, cudaMemcpyHostToDevice, nullptr, true));
}
EXPORTED CUresult cuMemcpyDtoH_v2(void* target, CUdeviceptr source, size_t size) {
  return result(copy(target, (void*)source, size, cudaMemcpyDeviceToHost, nullptr, true));
}
EXPORTED CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t size, CUstream stream) {
  return result(fill((void*)target, value, 1, size, stream, false));
}
EXPORTED CUresult cuMemsetD16Async(CUdeviceptr target, unsigned short value, size_t size, CUstream stream) {
  return result(fill((void*)target, value, 2, size, stream, false));
}
EXPORTED CUresult cuMemsetD32Async(CUdeviceptr target, unsigned value, size_t size, CUstream stream) {
  return result(fill((void*)target, value, 4, size, stream, false));
}

// ---- streams and events

EXPORTED CUresult cuStreamCreate(CUstream* stream, unsigned flags) { return result(create_stream(stream, flags, 0)); }
EXPORTED CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int priority) {
  return result(create_stream(stream, flags, priority));
}
EXPORTED CUresult cuStreamDestroy_v2(CUstream stream) { return result(destroy_stream(stream)); }
EXPORTED CUresult cuStreamQuery(CUstream stream) { return is_idle(stream) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY; }
EXPORTED CUresult cuStreamSynchronize(CUstream stream) {
  synchronize(stream);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) { return result(wait_for_event(stream, event)); }
EXPORTED CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuStreamGetCtx(CUstream, CUcontext* context) {
  *context = CONTEXT;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return result(cudaDeviceGetStreamPriorityRange(least, greatest));
}
EXPORTED CUresult cuEventCreate(CUevent* event, unsigned flags) { return result(create_event(event, flags)); }
EXPORTED CUresult cuEventDestroy_v2(CUevent event) { return result(destroy_event(event)); }
EXPORTED CUresult cuEventRecord(CUevent event, CUstream stream) { return result(record_event(event, stream)); }
EXPORTED CUresult cuEventQuery(CUevent event) { return result(query_event(event)); }
EXPORTED CUresult cuEventSynchronize(CUevent event) { return result(synchronize_event(event)); }
EXPORTED CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* argument) {
  return result(cudaLaunchHostFunc(stream, function, argument));
}

// ---- modules: their code is not looked at; a function is a name

EXPORTED CUresult cuModuleLoadData(CUmodule* module, const void*) {
  *module = (CUmodule)&the_context;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
  return cuModuleLoadData(module, image);
}
EXPORTED CUresult cuModuleLoad(CUmodule* module, const char*) { return cuModuleLoadData(module, nullptr); }
EXPORTED CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
EXPORTED CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  *function = (CUfunction)kernel_of_module(name);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
EXPORTED CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
EXPORTED CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) {
  *blocks = 4;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
  *clusters = 4;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuLaunchKernel(
    CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z,
    unsigned shared_bytes, CUstream stream, void** arguments, void**) {
  count("a kernel of a module");
  const char* name = ((Kernel*)function)->name;
  return result(launch({name, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, stream, arguments}));
}
EXPORTED CUresult cuLaunchKernelEx(const CUlaunchConfig* how, CUfunction function, void** arguments, void** extra) {
  return cuLaunchKernel(function, how->gridDimX, how->gridDimY, how->gridDimZ, how->blockDimX, how->blockDimY, how->blockDimZ,
                        how->sharedMemBytes, how->hStream, arguments, extra);
}
