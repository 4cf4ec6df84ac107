#include "kernels.hpp"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "api.hpp"
#include "settings.hpp"
#include "streams.hpp"

namespace made_up {
namespace {

struct Kernels {
  std::mutex mutex;
  std::map<const void*, Kernel*> by_function;
  std::map<std::string, Kernel*> by_name;
  std::set<const void*> known;

  Kernel* named(const char* name) {
    Kernel*& kernel = by_name[name];
    if (!kernel) known.insert(kernel = new Kernel{strdup(name)});
    return kernel;
  }
};

Kernels& kernels() {
  static auto& made = *new Kernels;
  return made;
}

std::atomic<MadeUpLaunchHook> hook{nullptr};

}  // namespace

Kernel* kernel_of_host_function(const void* function) {
  std::lock_guard lock(kernels().mutex);
  auto found = kernels().by_function.find(function);
  return found == kernels().by_function.end() ? nullptr : found->second;
}

Kernel* kernel_of_module(const char* name) {
  std::lock_guard lock(kernels().mutex);
  return kernels().named(name);
}

bool is_kernel(const void* pointer) {
  std::lock_guard lock(kernels().mutex);
  return kernels().known.count(pointer);
}

// torch.cuda._sleep: its kernel counts clock cycles, and is the only one whose work is known from its name alone.
static bool sleeps(const MadeUpLaunch& launch) {
  if (!strstr(launch.name, "11spin_kernel")) return false;
  double cycles = (double)*(int64_t*)launch.arguments[0];
  enqueue(launch.stream, {.what = "torch.cuda._sleep", .seconds = cycles / (1e3 * device_attribute(cudaDevAttrClockRate))});
  return true;
}

cudaError_t launch(const MadeUpLaunch& launch) {
  if (sleeps(launch)) return cudaSuccess;
  if (MadeUpLaunchHook stands_in = hook.load()) {
    cudaError_t result = stands_in(&launch);
    if (result != cudaErrorNotSupported) return result;
  }
  if (settings().refuse_kernels) {
    tell("nothing stands in for the kernel %s; it was not run", launch.name);
    return cudaErrorNotSupported;
  }
  enqueue(launch.stream, {.what = launch.name, .run = [] {}});
  return cudaSuccess;
}

}  // namespace made_up

using namespace made_up;

EXPORTED void made_up_on_launch(MadeUpLaunchHook to) { hook = to; }

EXPORTED void made_up_queue(
    cudaStream_t stream, const char* what, const MadeUpRange* uses, size_t count, void (*run)(void*), void* argument) {
  std::vector<Range> ranges;
  for (size_t i = 0; i < count; ++i) ranges.push_back({(const char*)uses[i].begin, uses[i].size});
  enqueue(stream, {.what = what, .uses = std::move(ranges), .run = [run, argument] { run(argument); }});
}

EXPORTED void made_up_wait(cudaStream_t stream, const char* what, double seconds) {
  enqueue(stream, {.what = what, .seconds = seconds});
}

// ---- what compiled code calls to tell of its kernels when it is loaded, and to launch them

EXPORTED void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
EXPORTED void __cudaRegisterFatBinaryEnd(void**) {}
EXPORTED void __cudaUnregisterFatBinary(void**) {}
EXPORTED char __cudaInitModule(void**) { return 1; }

EXPORTED void __cudaRegisterFunction(
    void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  std::lock_guard lock(kernels().mutex);
  kernels().by_function[function] = kernels().named(name);
}

namespace {

// Variables of the device, by their stand-ins in the host's code. They lie in main memory.
std::map<const void*, void*>& variables() {
  static auto& made = *new std::map<const void*, void*>;
  return made;
}

thread_local struct {
  dim3 grid, block;
  size_t shared_bytes;
  CUstream_st* stream;
} configuration;

}  // namespace

EXPORTED void __cudaRegisterVar(void**, char* variable, char*, const char*, int, size_t size, int, int) {
  std::lock_guard lock(kernels().mutex);
  variables()[variable] = calloc(1, size);
}

EXPORTED cudaError_t cudaGetSymbolAddress(void** address, const void* variable) {
  std::lock_guard lock(kernels().mutex);
  auto found = variables().find(variable);
  if (found == variables().end()) return failed(cudaErrorInvalidSymbol);
  *address = found->second;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaMemcpyToSymbol(const void* variable, const void* source, size_t size, size_t offset, cudaMemcpyKind) {
  void* address;
  if (cudaError_t error = cudaGetSymbolAddress(&address, variable)) return error;
  memcpy((char*)address + offset, source, size);
  return cudaSuccess;
}

EXPORTED unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, CUstream_st* stream) {
  configuration = {grid, block, shared_bytes, stream};
  return 0;
}

EXPORTED cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  *grid = configuration.grid, *block = configuration.block, *shared_bytes = configuration.shared_bytes;
  *(CUstream_st**)stream = configuration.stream;
  return cudaSuccess;
}

EXPORTED cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)kernel_of_host_function(function);
  return *kernel ? cudaSuccess : failed(cudaErrorInvalidDeviceFunction);
}

namespace {

cudaError_t launch_by_runtime(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
  count("a kernel");
  const Kernel* kernel = is_kernel(function) ? (const Kernel*)function : kernel_of_host_function(function);
  if (!kernel) return failed(cudaErrorInvalidDeviceFunction);
  return failed(launch({kernel->name, {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared, stream, arguments}));
}

}  // namespace

EXPORTED cudaError_t __cudaLaunchKernel(
    cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
  return launch_by_runtime(kernel, grid, block, arguments, shared, stream);
}

EXPORTED cudaError_t cudaLaunchKernel(
    const void* function, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
  return launch_by_runtime(function, grid, block, arguments, shared, stream);
}

EXPORTED cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* function, void** arguments) {
  return launch_by_runtime(function, how->gridDim, how->blockDim, arguments, how->dynamicSmemBytes, how->stream);
}

EXPORTED cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

EXPORTED cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }

EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 4;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 4;
  return cudaSuccess;
}
