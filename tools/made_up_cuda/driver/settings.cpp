#include "settings.hpp"

#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>

namespace made_up {
namespace {

size_t number(const char* variable, size_t otherwise) {
  const char* text = getenv(variable);
  return text && *text ? strtoull(text, nullptr, 10) : otherwise;
}

// One call of write, so that lines of several threads do not mix.
void write_line(const char* text) {
  std::string line = std::string("made-up CUDA: ") + text + "\n";
  ssize_t written = write(STDERR_FILENO, line.data(), line.size());
  (void)written;
}

}  // namespace

const Settings& settings() {
  static const Settings made = [] {
    const char* kernels = getenv("MADE_UP_CUDA_KERNELS");
    return Settings{
        .device_bytes = number("MADE_UP_CUDA_DEVICE_BYTES", 6ull << 30),
        .host_bytes = number("MADE_UP_CUDA_HOST_BYTES", ~0ull),
        .delay_us = (unsigned)number("MADE_UP_CUDA_DELAY_US", 0),
        .seed = (unsigned)number("MADE_UP_CUDA_SEED", 0),
        .map_us = (unsigned)number("MADE_UP_CUDA_MAP_US", 0),
        .poison = number("MADE_UP_CUDA_POISON", 1) != 0,
        .capability = (unsigned)number("MADE_UP_CUDA_CAPABILITY", 90),
        .multiprocessors = (unsigned)number("MADE_UP_CUDA_MULTIPROCESSORS", 132),
        .refuse_kernels = !kernels || strcmp(kernels, "nothing") != 0,
    };
  }();
  return made;
}

void misuse(const char* format, ...) {
  char text[1024];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  write_line(text);
  abort();
}

void tell(const char* format, const char* name) {
  static std::mutex mutex;
  static auto& told = *new std::set<std::string>;
  char text[1024];
  snprintf(text, sizeof text, format, name);
  std::lock_guard lock(mutex);
  if (told.insert(text).second) write_line(text);
}

}  // namespace made_up
