// Ranges of memory pages, which mremap moves from one address to another.

#ifndef TERAIO_PAGE_RANGE_H
#define TERAIO_PAGE_RANGE_H

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
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

}  // namespace

#endif
