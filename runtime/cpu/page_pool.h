// The pool: all large allocations, and the pages that are free, in ranges that mremap moves from one address to another.

#ifndef TERAIO_PAGE_POOL_H
#define TERAIO_PAGE_POOL_H

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

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
    Range range = std::move(at->second);
    kept_bytes -= at->first;
    kept_.erase(at);
    return range;
  }
};

// The pool of the process. It is never destroyed, because tensors may outlive everything else.
Pool& pool() {
  static Pool& instance = *new Pool;
  return instance;
}

}  // namespace

#endif
