// The memory of the CPU device tier: PyTorch's CPU allocator, over page mappings that can be taken away and given back.
//
// A large allocation gets whole pages that are mapped for it alone, and the pool knows it. An allocation gives up its pages
// when it is freed, or when its content lies in a file instead. The pool keeps these pages and uses them for the next
// allocation, wherever its address is: mremap moves pages a hundred times faster than the kernel clears and maps new ones.
// New pages are mapped only when no pages are kept. So the process never holds more pages than its allocations needed at
// the same time.
//
// All functions may be called by any thread. Those that return int return 0 or an errno. If they fail, memory reads as before.

#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/alloc_cpu.h>

#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

// -- the pool: all large allocations, and the pages that are free, in ranges that mremap moves from one address to another

#ifndef MREMAP_DONTUNMAP
constexpr int MREMAP_DONTUNMAP = 4;
#endif

constexpr size_t kHugePage = 2 << 20;
constexpr int kReadWrite = PROT_READ | PROT_WRITE;
constexpr int kAnonymous = MAP_PRIVATE | MAP_ANONYMOUS;
constexpr int kPrivate = MAP_PRIVATE | MAP_NORESERVE;  // of files: most of its pages are never written

// Rounds up to whole pages.
size_t whole_pages(size_t bytes) {
  static const size_t page = sysconf(_SC_PAGESIZE);
  return (bytes + page - 1) / page * page;
}

// Contiguous pages. mremap can only move one mapping at a time, so the range knows the lengths of its mappings.
struct Range {
  char* address = nullptr;
  std::vector<size_t> mappings;

  size_t length() const {
    size_t sum = 0;
    for (size_t mapping : mappings) sum += mapping;
    return sum;
  }

  // Keeps the first `bytes` and returns the rest.
  Range split(size_t bytes) {
    Range rest{address + bytes, {}};
    size_t position = 0;
    std::vector<size_t> kept;
    for (size_t mapping : mappings) {
      size_t here = position >= bytes ? 0 : std::min(mapping, bytes - position);
      if (here) kept.push_back(here);
      if (mapping > here) rest.mappings.push_back(mapping - here);
      position += mapping;
    }
    mappings = std::move(kept);
    return rest;
  }
};

// Moves pages to `target`, one mapping after the other. Returns how many bytes were moved: all of them, unless the system refuses.
size_t move_pages(const Range& range, char* target, int flags) {
  size_t moved = 0;
  for (size_t mapping : range.mappings) {
    void* at = mremap(range.address + moved, mapping, mapping, MREMAP_MAYMOVE | MREMAP_FIXED | flags, target + moved);
    if (at == MAP_FAILED) break;
    moved += mapping;
  }
  return moved;
}

// Reserves address space without memory. It begins at the border of a huge page if it is large enough to hold one.
// Returns nullptr if the system has no address space left.
char* reserve(size_t length) {
  size_t slack = length >= kHugePage ? kHugePage : 0;
  void* begin = mmap(nullptr, length + slack, PROT_NONE, kAnonymous | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) return nullptr;
  char* first = static_cast<char*>(begin);
  if (!slack) return first;
  size_t lead = (kHugePage - reinterpret_cast<uintptr_t>(first) % kHugePage) % kHugePage;
  if (lead) munmap(first, lead);
  if (slack > lead) munmap(first + lead + length, slack - lead);
  return first + lead;
}

constexpr size_t kMinKept = 256 << 10;
constexpr size_t kMaxMappings = 16 << 10;  // a quarter of the usual limit on mappings of a process

// All calls need `mutex`.
class Pool {
 public:
  // Returns pages for `length` bytes: kept pages first, then new ones. The address is null if the system has none left.
  Range take(size_t length) {
    auto fitting = kept_.lower_bound(length);
    if (fitting != kept_.end()) {
      Range range = pop(fitting);
      keep(range.split(length));
      return range;
    }
    Range range{reserve(length), {}};
    if (!range.address) return range;
    size_t filled = 0;
    while (filled < length && !kept_.empty()) {
      Range source = pop(std::prev(kept_.end()));
      keep(source.split(std::min(source.length(), length - filled)));
      size_t moved = move_pages(source, range.address + filled, 0);
      Range refused = source.split(moved);
      drop(refused);
      range.mappings.insert(range.mappings.end(), source.mappings.begin(), source.mappings.end());
      filled += moved;
      if (!refused.mappings.empty()) break;  // too many mappings: map the rest as a single new one
    }
    if (filled < length) {
      char* rest = range.address + filled;
      if (mmap(rest, length - filled, kReadWrite, kAnonymous | MAP_FIXED, -1, 0) == MAP_FAILED) {
        munmap(range.address, length);
        return {};
      }
      madvise(rest, length - filled, MADV_HUGEPAGE);
      range.mappings.push_back(length - filled);
    }
    return range;
  }

  // Keeps pages for later. Gives them back to the system if their mappings are small: the mappings would get smaller and more
  // numerous with each use.
  void keep(Range range) {
    size_t length = range.length();
    size_t least = std::max(kMinKept, (mapped_bytes + kept_bytes) / kMaxMappings);
    if (!serving || length < least * std::max<size_t>(range.mappings.size(), 1)) {
      drop(range);
      return;
    }
    kept_bytes += length;
    kept_.emplace(length, std::move(range));
  }

  // Gives kept pages back to the system until at most `bytes` of them are left.
  void trim(size_t bytes) {
    while (kept_bytes > bytes) {
      Range range = pop(kept_.begin());
      size_t surplus = whole_pages(std::min(kept_bytes + range.length() - bytes, range.length()));
      Range rest = range.split(range.length() - surplus);
      drop(rest);
      keep(std::move(range));
    }
  }

  static void drop(const Range& range) {
    if (!range.mappings.empty()) munmap(range.address, range.length());
  }

  // A large allocation.
  struct Allocation {
    size_t length;  // of its address range
    Range pages;    // empty while files are mapped over the address range
    long serial;    // tells it apart from a later allocation at the same address
    size_t lead;    // where the storage's data begins in it
  };

  Allocation* find(void* address) {
    auto found = allocations.find(address);
    return found == allocations.end() ? nullptr : &found->second;
  }

  std::mutex mutex;
  std::unordered_map<void*, Allocation> allocations;
  std::unordered_map<void*, Range> areas;  // pages that were taken and not installed yet, by their address
  size_t kept_bytes = 0;
  size_t mapped_bytes = 0;  // of all allocations
  long serial = 0;
  std::atomic<bool> serving{false};  // whether large allocations come from here

 private:
  std::multimap<size_t, Range> kept_;

  Range pop(std::multimap<size_t, Range>::iterator at) {
    kept_bytes -= at->first;
    return std::move(kept_.extract(at).mapped());
  }
};

// The pool of the process. It is never destroyed, because tensors may outlive everything else.
Pool& pool() {
  static Pool& instance = *new Pool;
  return instance;
}

// -- the allocator

std::atomic<long> live_bytes{0}, peak_bytes{0};

void count(long change) {
  long now = live_bytes += change;
  long peak = peak_bytes;
  while (now > peak && !peak_bytes.compare_exchange_weak(peak, now)) {
  }
}

std::atomic<size_t> min_pooled_bytes{0};

void free_pooled(void* address) {
  std::lock_guard lock(pool().mutex);
  Pool::Allocation allocation = std::move(pool().allocations.extract(address).mapped());
  pool().mapped_bytes -= allocation.length;
  count(-static_cast<long>(allocation.length));
  if (allocation.pages.address)
    pool().keep(std::move(allocation.pages));
  else
    munmap(address, allocation.length);
}

void* new_pooled(size_t bytes) {
  std::lock_guard lock(pool().mutex);
  size_t length = whole_pages(bytes);
  Range pages = pool().take(length);
  void* address = pages.address;
  if (address) {
    pool().allocations.emplace(address, Pool::Allocation{length, std::move(pages), ++pool().serial, 0});
    pool().mapped_bytes += length;
    count(static_cast<long>(length));
  }
  return address;
}

bool is_pooled(void* address) {
  if (reinterpret_cast<uintptr_t>(address) % whole_pages(1)) return false;
  std::lock_guard lock(pool().mutex);
  return pool().find(address);
}

void free_any(void* address) {
  if (!address) return;
  c10::profiledCPUMemoryReporter().Delete(address);
  if (is_pooled(address)) {
    free_pooled(address);
  } else {
    count(-static_cast<long>(malloc_usable_size(address)));
    c10::free_cpu(address);
  }
}

struct PoolAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &free_any, cpu};
    void* address = pool().serving && bytes >= min_pooled_bytes ? new_pooled(bytes) : nullptr;
    if (!address) {
      address = c10::alloc_cpu(bytes);  // throws if there is no memory
      count(static_cast<long>(malloc_usable_size(address)));
    }
    c10::profiledCPUMemoryReporter().New(address, bytes);
    return {address, address, &free_any, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_any; }
  void copy_data(void* target, const void* source, size_t bytes) const override { default_copy_data(target, source, bytes); }
};

PoolAllocator& allocator() {
  static PoolAllocator& instance = *new PoolAllocator;
  return instance;
}

}  // namespace

extern "C" {

// Becomes PyTorch's CPU allocator. Allocations of at least `min_bytes` come from the pool. Returns EBUSY if another
// allocator has precedence.
int teraio_install(size_t min_bytes) {
  // Once. (std::call_once would need glibc 2.34, where wheels are built on one.)
  [[maybe_unused]] static const int error =
      pthread_atfork([] { pool().mutex.lock(); }, [] { pool().mutex.unlock(); }, [] { pool().mutex.unlock(); });
  std::lock_guard lock(pool().mutex);
  min_pooled_bytes = min_bytes;
  pool().serving = true;
  if (c10::GetCPUAllocator() != &allocator()) {
    c10::SetCPUAllocator(&allocator());
    if (c10::GetCPUAllocator() != &allocator()) {
      pool().serving = false;
      return EBUSY;
    }
  }
  return 0;
}

// Takes no more allocations into the pool, allocates as PyTorch itself does, and gives all kept pages back to the system.
// Allocations in the pool stay valid. This remains PyTorch's allocator and counts its bytes, because it must free what it
// has allocated.
void teraio_stand_back() {
  std::lock_guard lock(pool().mutex);
  pool().serving = false;
  pool().trim(0);
}

// Returns the length of the pooled allocation that a storage owns, its serial number, and where the data begins in it. Returns
// 0 if it owns none.
size_t teraio_allocation(void* storage_impl, long* serial, size_t* lead) {
  const c10::DataPtr& data = static_cast<c10::StorageImpl*>(storage_impl)->_mutable_data_ptr_no_checks();
  if (data.get_deleter() != &free_any) return 0;  // the storage does not own its data
  std::lock_guard lock(pool().mutex);
  Pool::Allocation* allocation = pool().find(data.get_context());
  if (!allocation || data.get() != static_cast<char*>(data.get_context()) + allocation->lead) return 0;
  *serial = allocation->serial;
  *lead = allocation->lead;
  return allocation->length;
}

// Gives an empty storage `bytes` that lie in a file: pages from `offset` on are mapped privately, and the data begins `lead`
// bytes after. Takes address space and no memory.
int teraio_map_new(void* storage_impl, size_t bytes, size_t lead, int file, size_t offset) {
  auto* storage = static_cast<c10::StorageImpl*>(storage_impl);
  size_t length = whole_pages(lead + bytes);
  {
    std::lock_guard lock(pool().mutex);
    char* address = reserve(length);
    if (!address) return ENOMEM;
    if (mmap(address, length, kReadWrite, kPrivate | MAP_FIXED, file, offset) == MAP_FAILED) {
      int error = errno;
      munmap(address, length);
      return error;
    }
    pool().allocations.emplace(address, Pool::Allocation{length, {}, ++pool().serial, lead});
    pool().mapped_bytes += length;
    count(static_cast<long>(length));
    storage->set_data_ptr_noswap({address + lead, address, &free_any, c10::Device(c10::DeviceType::CPU)});
  }
  storage->set_nbytes(bytes);
  return 0;
}

// Moves a storage's data to the pool. All tensors that share the storage follow. Nobody may be using the data.
int teraio_adopt(void* storage_impl) {
  auto* storage = static_cast<c10::StorageImpl*>(storage_impl);
  size_t bytes = storage->nbytes();
  void* address = new_pooled(bytes);
  if (!address) return ENOMEM;
  std::memcpy(address, storage->data(), bytes);
  c10::profiledCPUMemoryReporter().New(address, bytes);
  storage->set_data_ptr_noswap({address, address, &free_any, c10::Device(c10::DeviceType::CPU)});
  malloc_trim(0);  // otherwise the heap keeps what has just been freed
  return 0;
}

// Maps file ranges in place of the pages of the allocation at `address`. Together they are as long as the allocation.
// keep_pages: keep the pages for later allocations. A thread that reads the allocation at this moment may see zeros.
// Otherwise the system replaces each page by its part of the file in one step and takes the page back.
// shared: what is written to the allocation goes to the files. Otherwise it stays in memory, and the files stay as they are.
// poison: the byte that fills the kept pages, -1 for none.
int teraio_map_files(void* address, size_t count, const int* files, const size_t* offsets, const size_t* lengths,
                     int keep_pages, int shared, int poison) {
  std::lock_guard lock(pool().mutex);
  Pool::Allocation* allocation = pool().find(address);
  if (!allocation) return EINVAL;
  char* target = static_cast<char*>(address);
  Range saved;
  if (keep_pages && pool().serving && allocation->pages.address) {
    saved = Range{reserve(allocation->length), allocation->pages.mappings};
    if (saved.address) {
      size_t moved = move_pages(allocation->pages, saved.address, MREMAP_DONTUNMAP);
      if (moved < allocation->length) {  // the files replace the rest below
        munmap(saved.address + moved, allocation->length - moved);
        saved.split(moved);
      }
    }
  }
  char* at = target;
  for (size_t i = 0; i < count; ++i) {
    if (mmap(at, lengths[i], kReadWrite, (shared ? MAP_SHARED : kPrivate) | MAP_FIXED, files[i], offsets[i]) == MAP_FAILED) {
      int error = errno;
      size_t back = saved.address ? move_pages(saved, target, 0) : 0;
      Range stuck = saved.split(back);
      if (!stuck.mappings.empty()) std::memcpy(target + back, stuck.address, stuck.length());
      Pool::drop(stuck);
      if ((i > 0 || saved.address) && back < allocation->length) allocation->pages = {};  // now partly pages, partly files
      return error;
    }
    at += lengths[i];
  }
  allocation->pages = {};
  if (saved.address) {
    if (poison >= 0) std::memset(saved.address, poison, saved.length());
    pool().keep(std::move(saved));
  }
  return 0;
}

// Returns pages (an "area") that belong to no allocation yet, to be filled and then installed or dropped. Returns nullptr
// if there are none.
void* teraio_take(size_t length) {
  std::lock_guard lock(pool().mutex);
  Range range = pool().take(whole_pages(length));
  void* address = range.address;
  if (address) pool().areas.emplace(address, std::move(range));
  return address;
}

// Puts the pages of an area in place of the files that are mapped over the allocation at `address`. The area ends.
int teraio_install_pages(void* area, void* address) {
  std::lock_guard lock(pool().mutex);
  Range range = std::move(pool().areas.extract(area).mapped());
  Pool::Allocation* allocation = pool().find(address);
  if (!allocation || allocation->length != range.length() || allocation->pages.address) {
    pool().keep(std::move(range));
    return EINVAL;
  }
  char* target = static_cast<char*>(address);
  size_t moved = move_pages(range, target, 0);
  Range stuck = range.split(moved);
  if (!stuck.mappings.empty()) {  // too many mappings: copy the rest into a single new one
    size_t length = stuck.length();
    if (mmap(target + moved, length, kReadWrite, kAnonymous | MAP_FIXED, -1, 0) == MAP_FAILED) {
      int error = errno;
      Pool::drop(stuck);
      return error;
    }
    std::memcpy(target + moved, stuck.address, length);
    Pool::drop(stuck);
    range.mappings.push_back(length);
  }
  range.address = target;
  allocation->pages = std::move(range);
  return 0;
}

// Ends an area. The pool keeps its pages.
void teraio_drop(void* area) {
  std::lock_guard lock(pool().mutex);
  pool().keep(std::move(pool().areas.extract(area).mapped()));
}

// Gives kept pages back to the system until at most `bytes` of them are left.
void teraio_trim(size_t bytes) {
  std::lock_guard lock(pool().mutex);
  pool().trim(bytes);
}

// Returns the bytes of all kept pages.
size_t teraio_kept_bytes() {
  std::lock_guard lock(pool().mutex);
  return pool().kept_bytes;
}

// Returns the bytes that PyTorch has allocated by this allocator and not freed, including those mapped to files.
long teraio_live_bytes() { return live_bytes; }

// Returns the highest teraio_live_bytes since the last reset.
long teraio_peak_bytes() { return peak_bytes; }

void teraio_reset_peak() { peak_bytes = live_bytes.load(); }

}  // extern "C"
