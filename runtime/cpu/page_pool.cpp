// The memory of the CPU device tier: PyTorch's CPU allocator, over page mappings that can be taken away and given back.
//
// A large allocation is a chunk: whole pages, mapped for it alone. Pages that a chunk gives up, because it is freed or
// because its content now lies in a file, are kept and serve the next chunk, wherever in the address space that is:
// mremap moves pages a hundred times faster than the kernel hands out and clears new ones. New pages are mapped only when
// none are kept, so the process never holds more pages than its chunks needed at once.
//
// All functions may be called by any thread. Those that return int return 0 or an errno; if they fail, memory reads as
// before.

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
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

#ifndef MREMAP_DONTUNMAP
constexpr int MREMAP_DONTUNMAP = 4;
#endif

constexpr size_t kLeastKept = 256 << 10;
constexpr size_t kMostPieces = 16 << 10;  // the system's usual limit on mappings is four times as high
constexpr size_t kHugePage = 2 << 20;
constexpr int kReadWrite = PROT_READ | PROT_WRITE;
constexpr int kAnonymous = MAP_PRIVATE | MAP_ANONYMOUS;

size_t whole_pages(size_t bytes) {
  static const size_t page = sysconf(_SC_PAGESIZE);
  return (bytes + page - 1) / page * page;
}

// Pages in a row. mremap moves what is one mapping, so the length of every piece that was mapped as one is remembered.
struct Range {
  char* address = nullptr;
  std::vector<size_t> pieces;

  size_t length() const {
    size_t sum = 0;
    for (size_t piece : pieces) sum += piece;
    return sum;
  }

  // Keeps the first `bytes` and returns the rest.
  Range split(size_t bytes) {
    Range rest{address + bytes, {}};
    size_t position = 0;
    std::vector<size_t> kept;
    for (size_t piece : pieces) {
      size_t here = position >= bytes ? 0 : std::min(piece, bytes - position);
      if (here) kept.push_back(here);
      if (piece > here) rest.pieces.push_back(piece - here);
      position += piece;
    }
    pieces = std::move(kept);
    return rest;
  }
};

// Moves pages, piece by piece, to `target`; returns how many bytes have moved, all of them unless the system refuses.
size_t move_pages(const Range& range, char* target, int flags) {
  size_t moved = 0;
  for (size_t piece : range.pieces) {
    void* at = mremap(range.address + moved, piece, piece, MREMAP_MAYMOVE | MREMAP_FIXED | flags, target + moved);
    if (at == MAP_FAILED) break;
    moved += piece;
  }
  return moved;
}

// Address space without memory, at a huge page's border if it is large enough to hold one; nullptr if there is none.
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

class Pool {
 public:
  // Pages for `length` bytes: kept ones as far as they reach, then new ones. No address if the system has none left.
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
      range.pieces.insert(range.pieces.end(), source.pieces.begin(), source.pieces.end());
      filled += moved;
      if (!refused.pieces.empty()) break;  // too many mappings: go on with a single new one
    }
    if (filled < length) {
      char* rest = range.address + filled;
      if (mmap(rest, length - filled, kReadWrite, kAnonymous | MAP_FIXED, -1, 0) == MAP_FAILED) {
        munmap(range.address, length);
        return {};
      }
      madvise(rest, length - filled, MADV_HUGEPAGE);
      range.pieces.push_back(length - filled);
    }
    return range;
  }

  // Keeps pages for later; not if they lie in small pieces, which would become ever smaller and more.
  void keep(Range range) {
    size_t length = range.length();
    size_t least = std::max(kLeastKept, (mapped_bytes + kept_bytes) / kMostPieces);
    if (!serving || length < least * std::max<size_t>(range.pieces.size(), 1)) {
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
    if (!range.pieces.empty()) munmap(range.address, range.length());
  }

  struct Chunk {
    size_t length;  // of its address range
    Range pages;    // none while files are mapped over it
    long serial;    // another chunk may come to lie at the same address
  };

  Chunk* find(void* address) {
    auto found = chunks.find(address);
    return found == chunks.end() ? nullptr : &found->second;
  }

  std::mutex mutex;
  std::unordered_map<void*, Chunk> chunks;
  std::unordered_map<void*, Range> areas;
  size_t kept_bytes = 0;
  size_t mapped_bytes = 0;  // of all chunks
  long serial = 0;
  std::atomic<bool> serving{false};

 private:
  std::multimap<size_t, Range> kept_;

  Range pop(std::multimap<size_t, Range>::iterator at) {
    Range range = std::move(at->second);
    kept_bytes -= at->first;
    kept_.erase(at);
    return range;
  }
};

// Never destroyed: tensors may outlive everything.
Pool& pool() {
  static Pool& instance = *new Pool;
  return instance;
}

std::atomic<long> live_bytes{0}, peak_bytes{0};

void count(long change) {
  long now = live_bytes += change;
  long peak = peak_bytes;
  while (now > peak && !peak_bytes.compare_exchange_weak(peak, now)) {
  }
}

std::atomic<size_t> smallest_chunk{0};

void free_chunk(void* address) {
  std::lock_guard lock(pool().mutex);
  auto found = pool().chunks.find(address);
  Pool::Chunk chunk = std::move(found->second);
  pool().chunks.erase(found);
  pool().mapped_bytes -= chunk.length;
  count(-static_cast<long>(chunk.length));
  if (chunk.pages.address)
    pool().keep(std::move(chunk.pages));
  else
    munmap(address, chunk.length);
}

void* new_chunk(size_t bytes) {
  std::lock_guard lock(pool().mutex);
  size_t length = whole_pages(bytes);
  Range pages = pool().take(length);
  void* address = pages.address;
  if (address) {
    pool().chunks.emplace(address, Pool::Chunk{length, std::move(pages), ++pool().serial});
    pool().mapped_bytes += length;
    count(static_cast<long>(length));
  }
  return address;
}

bool is_chunk(void* address) {
  if (reinterpret_cast<uintptr_t>(address) % whole_pages(1)) return false;
  std::lock_guard lock(pool().mutex);
  return pool().find(address);
}

void free_any(void* address) {
  if (!address) return;
  c10::profiledCPUMemoryReporter().Delete(address);
  if (is_chunk(address)) {
    free_chunk(address);
  } else {
    count(-static_cast<long>(malloc_usable_size(address)));
    c10::free_cpu(address);
  }
}

struct PoolAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &free_any, cpu};
    void* address = pool().serving && bytes >= smallest_chunk ? new_chunk(bytes) : nullptr;
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

// Becomes PyTorch's CPU allocator; from `smallest` bytes on an allocation is a chunk. EBUSY if another one has precedence.
int teraio_install(size_t smallest) {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork([] { pool().mutex.lock(); }, [] { pool().mutex.unlock(); }, [] { pool().mutex.unlock(); });
  });
  std::lock_guard lock(pool().mutex);
  smallest_chunk = smallest;
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

// Makes no more chunks: allocates as PyTorch itself does, and gives all kept pages back. Chunks that are in use stay what
// they are. (This remains PyTorch's allocator, and counts: what was allocated raw here must be freed here.)
void teraio_stand_back() {
  std::lock_guard lock(pool().mutex);
  pool().serving = false;
  pool().trim(0);
}

// Bytes of the address range of the chunk that a storage owns, and the chunk's serial number; 0 if it owns none.
size_t teraio_chunk(void* storage_impl, long* serial) {
  const c10::DataPtr& data = static_cast<c10::StorageImpl*>(storage_impl)->data_ptr();
  if (data.get_deleter() != &free_any || data.get_context() != data.get()) return 0;  // it is only lent
  std::lock_guard lock(pool().mutex);
  Pool::Chunk* chunk = pool().find(data.get_context());
  if (!chunk) return 0;
  *serial = chunk->serial;
  return chunk->length;
}

// Moves a storage's data to a chunk; all tensors that share the storage follow. Nobody may be using the data.
int teraio_adopt(void* storage_impl) {
  auto* storage = static_cast<c10::StorageImpl*>(storage_impl);
  size_t bytes = storage->nbytes();
  void* address = new_chunk(bytes);
  if (!address) return ENOMEM;
  std::memcpy(address, storage->data(), bytes);
  c10::profiledCPUMemoryReporter().New(address, bytes);
  storage->set_data_ptr_noswap({address, address, &free_any, c10::Device(c10::DeviceType::CPU)});
  malloc_trim(0);  // the heap would keep what has just been freed
  return 0;
}

// Maps file ranges, together as long as the chunk, over the chunk at `address`, in place of its pages.
// keep_pages: for later chunks; a thread that reads the chunk in that very moment may then see zeros. Otherwise each page
// is exchanged for its part of the file at once and goes back to the system.
// poison: the byte that pages which are kept are filled with, -1 for none.
int teraio_map_files(void* address, size_t count, const int* files, const size_t* offsets, const size_t* lengths,
                     int keep_pages, int poison) {
  std::lock_guard lock(pool().mutex);
  Pool::Chunk* chunk = pool().find(address);
  if (!chunk) return EINVAL;
  char* target = static_cast<char*>(address);
  Range saved;
  if (keep_pages && pool().serving && chunk->pages.address) {
    saved = Range{reserve(chunk->length), chunk->pages.pieces};
    if (saved.address) {
      size_t moved = move_pages(chunk->pages, saved.address, MREMAP_DONTUNMAP);
      if (moved < chunk->length) {  // the rest is simply replaced below
        munmap(saved.address + moved, chunk->length - moved);
        saved.split(moved);
      }
    }
  }
  char* at = target;
  for (size_t i = 0; i < count; ++i) {
    if (mmap(at, lengths[i], kReadWrite, MAP_SHARED | MAP_FIXED, files[i], offsets[i]) == MAP_FAILED) {
      int error = errno;
      size_t back = saved.address ? move_pages(saved, target, 0) : 0;
      Range stuck = saved.split(back);
      if (!stuck.pieces.empty()) std::memcpy(target + back, stuck.address, stuck.length());
      Pool::drop(stuck);
      if ((i > 0 || saved.address) && back < chunk->length) chunk->pages = {};  // pages and files, side by side
      return error;
    }
    at += lengths[i];
  }
  chunk->pages = {};
  if (saved.address) {
    if (poison >= 0) std::memset(saved.address, poison, saved.length());
    pool().keep(std::move(saved));
  }
  return 0;
}

// Pages that belong to no chunk yet, to be filled and then installed or dropped; nullptr if there are none.
void* teraio_take(size_t length) {
  std::lock_guard lock(pool().mutex);
  Range range = pool().take(whole_pages(length));
  void* address = range.address;
  if (address) pool().areas.emplace(address, std::move(range));
  return address;
}

// Puts the pages of an area in place of the files that are mapped over the chunk at `address`; the area is gone then.
int teraio_install_pages(void* area, void* address) {
  std::lock_guard lock(pool().mutex);
  auto found = pool().areas.find(area);
  Range range = std::move(found->second);
  pool().areas.erase(found);
  Pool::Chunk* chunk = pool().find(address);
  if (!chunk || chunk->length != range.length() || chunk->pages.address) {
    pool().keep(std::move(range));
    return EINVAL;
  }
  char* target = static_cast<char*>(address);
  size_t moved = move_pages(range, target, 0);
  Range stuck = range.split(moved);
  if (!stuck.pieces.empty()) {  // too many mappings: the rest is copied into a single new one
    size_t length = stuck.length();
    if (mmap(target + moved, length, kReadWrite, kAnonymous | MAP_FIXED, -1, 0) == MAP_FAILED) {
      int error = errno;
      Pool::drop(stuck);
      return error;
    }
    std::memcpy(target + moved, stuck.address, length);
    Pool::drop(stuck);
    range.pieces.push_back(length);
  }
  range.address = target;
  chunk->pages = std::move(range);
  return 0;
}

// Gives an area up; its pages are kept.
void teraio_drop(void* area) {
  std::lock_guard lock(pool().mutex);
  auto found = pool().areas.find(area);
  pool().keep(std::move(found->second));
  pool().areas.erase(found);
}

// Gives kept pages back to the system until at most `bytes` of them are left.
void teraio_trim(size_t bytes) {
  std::lock_guard lock(pool().mutex);
  pool().trim(bytes);
}

// Bytes of pages that are kept for later.
size_t teraio_kept_bytes() {
  std::lock_guard lock(pool().mutex);
  return pool().kept_bytes;
}

// Bytes that PyTorch has allocated and not freed, those mapped to files included. Only what was allocated here counts.
long teraio_live_bytes() { return live_bytes; }

// The highest teraio_live_bytes since the last reset.
long teraio_peak_bytes() { return peak_bytes; }

void teraio_reset_peak() { peak_bytes = live_bytes.load(); }

}  // extern "C"
