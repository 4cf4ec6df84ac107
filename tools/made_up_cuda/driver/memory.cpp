#include "memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "settings.hpp"
#include "streams.hpp"

namespace made_up {

struct Physical {
  size_t offset, size;  // in the file
  size_t mappings = 0;
  bool released = false, poisoned = false;
};

namespace {

constexpr size_t ADDRESSES = 1ull << 42;  // far more than memory, so that addresses are not soon used again
constexpr int POISON = 0xA5;

size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

// Free ranges of numbers, handed out in turns (next fit).
class Space {
 public:
  explicit Space(size_t size) { free_[0] = size; }

  size_t take(size_t size) {
    auto found = free_.lower_bound(next_);
    for (size_t tries = 0; tries <= free_.size(); ++tries, ++found) {
      if (found == free_.end()) found = free_.begin();
      if (found->second < size) continue;
      auto [begin, length] = *found;
      free_.erase(found);
      if (length > size) free_[begin + size] = length - size;
      next_ = begin + size;
      return begin;
    }
    misuse("no address range of %zu bytes is free", size);
  }

  void give(size_t begin, size_t size) {
    auto after = free_.lower_bound(begin);
    if (after != free_.end() && begin + size == after->first) size += after->second, after = free_.erase(after);
    if (after != free_.begin()) {
      auto before = std::prev(after);
      if (before->first + before->second == begin) {
        before->second += size;
        return;
      }
    }
    free_[begin] = size;
  }

 private:
  std::map<size_t, size_t> free_;  // begin to length
  size_t next_ = 0;
};

struct Mapping {
  size_t size;
  Physical* physical;
  bool is_virtual;  // by cuMemMap, not by cudaMalloc
};

struct HostRange {
  size_t size;
  bool registered;  // by cudaHostRegister, not by cudaHostAlloc
};

// The part of a map from begin to something with a size that holds `address`.
template <class Map>
auto holding(Map& map, const void* address) {
  auto found = map.upper_bound((char*)address);
  if (found == map.begin()) return map.end();
  --found;
  return (char*)address < found->first + found->second.size ? found : map.end();
}

struct Use {
  const char* what;
  size_t size;
};

struct Memory {
  std::mutex mutex;
  char* base;
  int file;
  size_t used = 0, pinned = 0;  // bytes of physical device memory, and of pinned host memory
  Space addresses{ADDRESSES}, offsets{ADDRESSES};
  std::map<char*, Mapping> mappings;
  std::map<char*, size_t> reserved;
  std::map<char*, HostRange> host;
  std::multimap<const char*, Use> uses;

  Memory() {
    base = (char*)mmap((void*)0x300000000000, ADDRESSES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    file = memfd_create("made-up device memory", MFD_CLOEXEC);
    if (base == MAP_FAILED || file < 0 || ftruncate(file, ADDRESSES)) misuse("the system gives no address range for device memory");
  }

  // The methods are to be called with the lock held.

  Physical* create(size_t size) {
    if (used + size > settings().device_bytes) return nullptr;
    used += size;
    return new Physical{offsets.take(size), size};
  }

  void drop(Physical* physical) {
    if (!physical->released || physical->mappings) return;
    fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, physical->offset, physical->size);
    offsets.give(physical->offset, physical->size);
    used -= physical->size;
    delete physical;
  }

  void map(char* address, size_t size, Physical* physical, size_t offset, bool is_virtual) {
    void* made = mmap(address, size, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file, physical->offset + offset);
    if (made == MAP_FAILED) misuse("the system cannot map %zu bytes (vm.max_map_count?)", size);
    mappings[address] = {size, physical, is_virtual};
    ++physical->mappings;
  }

  void open(char* address, const Mapping& mapping) {
    if (mprotect(address, mapping.size, PROT_READ | PROT_WRITE)) misuse("the system cannot open %zu bytes", mapping.size);
    if (settings().poison && !mapping.physical->poisoned) memset(address, POISON, mapping.size);
    mapping.physical->poisoned = true;
  }

  void close(std::map<char*, Mapping>::iterator mapping) {
    auto [address, what] = *mapping;
    require_unused(address, what.size, "unmapped");
    // Nothing can be read here any more.
    mmap(address, what.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    mappings.erase(mapping);
    --what.physical->mappings;
    drop(what.physical);
  }

  void require_unused(const char* begin, size_t size, const char* how) {
    for (auto& [used_begin, use] : uses)
      if (used_begin < begin + size && begin < used_begin + use.size)
        misuse("%zu bytes at %p are %s while the queued %s still uses %zu bytes at %p", size, begin, how, use.what, use.size,
               used_begin);
  }
};

Memory& memory() {
  static auto& made = *new Memory;
  return made;
}

}  // namespace

bool is_device_address(const void* address) {
  char* base = memory().base;
  return (char*)address >= base && (char*)address < base + ADDRESSES;
}

Place place_of(const void* address, size_t size) {
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  if (is_device_address(address)) {
    auto first = holding(all.mappings, address);
    if (first == all.mappings.end()) return {Kind::DEVICE, false, nullptr, 0, false};
    // Several mappings side by side are one piece of memory.
    char* end = first->first + first->second.size;
    for (auto next = std::next(first); end < (char*)address + size && next != all.mappings.end() && next->first == end; ++next)
      end += next->second.size;
    return {Kind::DEVICE, (char*)address + size <= end, first->first, first->second.size, first->second.is_virtual};
  }
  auto found = holding(all.host, address);
  if (found != all.host.end()) {
    bool whole = (char*)address + size <= found->first + found->second.size;
    return {Kind::PINNED, whole, found->first, found->second.size, false};
  }
  auto next = all.host.lower_bound((char*)address);
  bool whole = next == all.host.end() || next->first >= (char*)address + size;
  return {Kind::PAGEABLE, whole, nullptr, 0, false};
}

void device_memory(size_t* free_bytes, size_t* total_bytes) {
  std::lock_guard lock(memory().mutex);
  *total_bytes = settings().device_bytes;
  *free_bytes = *total_bytes - memory().used;
}

size_t pinned_bytes() {
  std::lock_guard lock(memory().mutex);
  return memory().pinned;
}

// ---- device memory in one piece

cudaError_t allocate(size_t size, void** address) {
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  size = round_up(size, PAGE_BYTES);
  Physical* physical = all.create(size);
  if (!physical) return cudaErrorMemoryAllocation;
  physical->released = true;  // it goes with its only mapping
  char* made = all.base + all.addresses.take(size);
  all.map(made, size, physical, 0, false);
  all.open(made, all.mappings[made]);
  *address = made;
  return cudaSuccess;
}

void release(void* address) {
  if (!address) return;
  synchronize_device();
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  auto found = all.mappings.find((char*)address);
  if (found == all.mappings.end() || found->second.is_virtual) misuse("cudaFree of %p, which is not allocated (freed twice?)", address);
  size_t size = found->second.size;
  all.close(found);
  all.addresses.give((char*)address - all.base, size);
}

// ---- addresses and physical memory apart from each other

cudaError_t reserve_addresses(size_t size, void** address) {
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  size = round_up(size, PAGE_BYTES);
  char* made = all.base + all.addresses.take(size);
  all.reserved[made] = size;
  *address = made;
  return cudaSuccess;
}

void free_addresses(void* address, size_t size) {
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  auto found = all.reserved.find((char*)address);
  if (found == all.reserved.end() || found->second != round_up(size, PAGE_BYTES))
    misuse("cuMemAddressFree of %zu bytes at %p, which are not reserved", size, address);
  auto mapped = all.mappings.lower_bound((char*)address);
  if (mapped != all.mappings.end() && mapped->first < (char*)address + size)
    misuse("cuMemAddressFree of %p, where memory is still mapped", address);
  all.addresses.give((char*)address - all.base, found->second);
  all.reserved.erase(found);
}

cudaError_t create_physical(size_t size, Physical** physical) {
  if (size % PAGE_BYTES) return cudaErrorInvalidValue;
  std::lock_guard lock(memory().mutex);
  *physical = memory().create(size);
  return *physical ? cudaSuccess : cudaErrorMemoryAllocation;
}

void release_physical(Physical* physical) {
  std::lock_guard lock(memory().mutex);
  if (physical->released) misuse("cuMemRelease of a handle that was released before");
  physical->released = true;
  memory().drop(physical);
}

// Let the host take its time to map or to unmap, as a driver does.
static void take_time(size_t size) {
  if (unsigned us = settings().map_us) std::this_thread::sleep_for(std::chrono::microseconds(us * (size >> 20)));
}

void map_physical(void* address, size_t size, size_t offset, Physical* physical) {
  take_time(size);
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  auto reserved = all.reserved.upper_bound((char*)address);
  if (reserved == all.reserved.begin() || (char*)address + size > std::prev(reserved)->first + std::prev(reserved)->second)
    misuse("cuMemMap of %zu bytes at %p, which are not reserved", size, address);
  auto next = all.mappings.lower_bound((char*)address);
  if (holding(all.mappings, address) != all.mappings.end() || (next != all.mappings.end() && next->first < (char*)address + size))
    misuse("cuMemMap of %zu bytes at %p, where memory is mapped already", size, address);
  if (offset + size > physical->size) misuse("cuMemMap of %zu bytes of a handle of %zu bytes", offset + size, physical->size);
  all.map((char*)address, size, physical, offset, true);
}

void allow_access(void* address, size_t size) {
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  for (auto mapping = all.mappings.lower_bound((char*)address); mapping != all.mappings.end(); ++mapping) {
    if (mapping->first >= (char*)address + size) break;
    all.open(mapping->first, mapping->second);
  }
}

void unmap(void* address, size_t size) {
  take_time(size);
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  char *at = (char*)address, *end = at + size;
  while (at < end) {
    auto found = all.mappings.find(at);
    if (found == all.mappings.end() || !found->second.is_virtual || at + found->second.size > end)
      misuse("cuMemUnmap of %zu bytes at %p, which are not mapped as one or more whole pieces", size, address);
    at += found->second.size;
    all.close(found);
  }
}

// ---- host memory

cudaError_t allocate_pinned(size_t size, void** address) {
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  size = round_up(size, 4096);
  if (all.pinned + size > settings().host_bytes) return cudaErrorMemoryAllocation;
  void* made = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) return cudaErrorMemoryAllocation;
  all.pinned += size;
  all.host[(char*)made] = {size, false};
  *address = made;
  return cudaSuccess;
}

void release_pinned(void* address) {
  if (!address) return;
  synchronize_device();
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  auto found = all.host.find((char*)address);
  if (found == all.host.end() || found->second.registered)
    misuse("cudaFreeHost of %p, which is not allocated (freed twice?)", address);
  munmap(address, found->second.size);
  all.pinned -= found->second.size;
  all.host.erase(found);
}

cudaError_t register_host(void* address, size_t size) {
  if (!size) return cudaErrorInvalidValue;
  char* page = (char*)((size_t)address & ~4095ull);
  std::vector<unsigned char> in_core((round_up((char*)address + size - page, 4096)) / 4096);
  if (is_device_address(address) || mincore(page, (char*)address + size - page, in_core.data())) return cudaErrorInvalidValue;
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  auto next = all.host.lower_bound((char*)address);
  if (holding(all.host, address) != all.host.end() || (next != all.host.end() && next->first < (char*)address + size))
    return cudaErrorHostMemoryAlreadyRegistered;
  if (all.pinned + size > settings().host_bytes) return cudaErrorMemoryAllocation;
  all.pinned += size;
  all.host[(char*)address] = {size, true};
  return cudaSuccess;
}

cudaError_t unregister_host(void* address) {
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  auto found = all.host.find((char*)address);
  if (found == all.host.end() || !found->second.registered) return cudaErrorHostMemoryNotRegistered;
  all.require_unused(found->first, found->second.size, "unregistered");
  all.pinned -= found->second.size;
  all.host.erase(found);
  return cudaSuccess;
}

// ---- memory in use

void require_mapped(Range range, const char* what, const char* when) {
  if (!range.size) return;
  Place place = place_of(range.begin, range.size);
  if (place.kind == Kind::PAGEABLE)
    misuse("%s uses %zu bytes at %p, which are neither device memory nor pinned %s", what, range.size, range.begin, when);
  if (!place.whole) misuse("%s uses %zu bytes at %p, of which not all are mapped %s", what, range.size, range.begin, when);
}

void hold(const std::vector<Range>& ranges, const char* what) {
  std::lock_guard lock(memory().mutex);
  for (const Range& range : ranges) memory().uses.insert({range.begin, {what, range.size}});
}

void let_go(const std::vector<Range>& ranges) {
  if (ranges.empty()) return;
  std::lock_guard lock(memory().mutex);
  for (const Range& range : ranges) {
    auto [first, last] = memory().uses.equal_range(range.begin);
    for (; first != last; ++first)
      if (first->second.size == range.size) break;
    if (first != last) memory().uses.erase(first);
  }
}

}  // namespace made_up
