// The memory of the made-up GPU, and the host memory that it knows.
//
// Device memory is an address range of its own, of which only mapped parts can be touched. Behind it is one sparse file without a
// name: memory that nobody touches costs nothing, and the same physical memory can be mapped at several addresses. Addresses are
// handed out in turns, so that a stale address does not soon mean something else.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

namespace made_up {

constexpr size_t PAGE_BYTES = 2 << 20;  // granularity of device memory, as on real GPUs

struct Range {
  const char* begin;
  size_t size;
};

enum class Kind { DEVICE, PINNED, PAGEABLE };

struct Place {
  Kind kind;
  bool whole;         // the range does not cross from one allocation or registration into the next, or beyond
  const char* begin;  // of the allocation or registration that holds the address; null if pageable
  size_t size;
  bool is_virtual;    // mapped by cuMemMap
};

bool is_device_address(const void* address);
Place place_of(const void* address, size_t size);

// Bytes of the device that are free, and all of them; bytes of host memory that are pinned.
void device_memory(size_t* free_bytes, size_t* total_bytes);
size_t pinned_bytes();

// cudaMalloc, cudaFree
cudaError_t allocate(size_t size, void** address);
void release(void* address);  // waits for the device

// cuMemAddressReserve and so on: addresses and physical memory apart from each other
struct Physical;
cudaError_t reserve_addresses(size_t size, void** address);
void free_addresses(void* address, size_t size);
cudaError_t create_physical(size_t size, Physical** physical);
void release_physical(Physical* physical);  // takes effect when it is mapped nowhere
void map_physical(void* address, size_t size, size_t offset, Physical* physical);
void allow_access(void* address, size_t size);
void unmap(void* address, size_t size);  // does not wait for the device: memory in use is an error of the program

// cudaHostAlloc, cudaHostRegister and so on
cudaError_t allocate_pinned(size_t size, void** address);
void release_pinned(void* address);  // waits for the device
cudaError_t register_host(void* address, size_t size);
cudaError_t unregister_host(void* address);

// Misuse unless all of the range is device memory or pinned memory that is there.
void require_mapped(Range range, const char* what, const char* when);

// While ranges are held, giving their memory away is misuse. `what`: by whom.
void hold(const std::vector<Range>& ranges, const char* what);
void let_go(const std::vector<Range>& ranges);

}  // namespace made_up
