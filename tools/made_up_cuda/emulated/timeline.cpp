// Streams in emulated time: they have no threads, and nothing waits but the host.
//
// How long each operation takes is known when it is queued, and so is what it waits for. So its begin and its end are known, too:
// a stream is the moment at which all its work ends. Events are moments. The host sleeps until a moment where it would wait for
// the device; all else is arithmetic. This takes the place of streams.cpp, for streams.hpp. No byte of device memory is touched.
#include "timeline.hpp"

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <queue>
#include <set>
#include <thread>

#include "api.hpp"
#include "hooks.h"
#include "kernels.hpp"
#include "settings.hpp"
#include "streams.hpp"

namespace made_up {
namespace {

using Time = Clock::time_point;

Clock::duration lasting(double seconds) { return std::chrono::nanoseconds((long long)(1e9 * seconds)); }
double seconds_of(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

// Work of one kind that runs one after another: kernels, copies to main memory, copies from there. Work that is queued early but
// has to wait for its stream leaves a hole, which work of other streams fills.
class Engine {
 public:
  // Return when work that is ready at `ready` begins, and take that time.
  Time take(Time ready, Clock::duration length, Time now) {
    while (!busy_.empty() && busy_.begin()->second <= now && busy_.size() > 1) busy_.erase(busy_.begin());
    Time begin = ready;
    auto after = busy_.upper_bound(begin);
    if (after != busy_.begin()) begin = std::max(begin, std::prev(after)->second);
    while (after != busy_.end() && after->first < begin + length) begin = std::max(begin, (after++)->second);
    Time end = begin + length;
    if (after != busy_.begin() && std::prev(after)->second == begin) std::prev(after)->second = end;
    else after = std::next(busy_.emplace(begin, end).first);
    return begin;
  }

  Time last() const { return busy_.empty() ? Time{} : busy_.rbegin()->second; }

 private:
  std::map<Time, Time> busy_;  // begin to end
};

struct Stream {
  unsigned flags;
  int priority;
  Time ends;              // of all that is queued
  Clock::duration waits;  // for copies and other streams, since its last kernel
};

struct Device {
  std::mutex mutex;
  std::set<Stream*> known;
  Stream legacy{0, 0, {}, {}};
  Engine computing, outward, inward;
  EmulatedMachine machine{5e-6, 2e12, 25e9, 1e-5, 25e9, 1e-5};
  EmulatedTimes times{};

  Device() { known.insert(&legacy); }
};

Device& device() {
  static auto& made = *new Device;
  return made;
}

Stream& stream_of(cudaStream_t handle) {
  if (!handle || handle == cudaStreamLegacy || handle == cudaStreamPerThread) return device().legacy;
  if (!device().known.count((Stream*)handle)) misuse("stream %p is used, but it was destroyed or never made", (void*)handle);
  return *(Stream*)handle;
}

bool blocks(const Stream& stream) { return !(stream.flags & cudaStreamNonBlocking); }

// Return when the next work of a stream is ready, by what is queued before it.
Time ready_time(Stream& stream) {
  Time ready = stream.ends;
  if (&stream == &device().legacy) {
    for (Stream* other : device().known)
      if (blocks(*other)) ready = std::max(ready, other->ends);
  } else if (blocks(stream)) {
    ready = std::max(ready, device().legacy.ends);
  }
  return ready;
}

// ---- what the host waited for

// The last waits of this thread, for telling why nothing was queued.
struct Waits {
  std::deque<std::pair<Time, Time>> spans;
};
thread_local Waits waits;

void sleep_until(Time end) {
  static thread_local bool precise = [] { return prctl(PR_SET_TIMERSLACK, 1000), true; }();
  (void)precise;
  Time begin = Clock::now();
  if (begin >= end) return;
  std::this_thread::sleep_until(end);
  waits.spans.emplace_back(begin, Clock::now());
  if (waits.spans.size() > 64) waits.spans.pop_front();
}

double waited_between(Time begin, Time end) {
  double total = 0;
  for (auto& [from, to] : waits.spans)
    if (to > begin && from < end) total += seconds_of(std::min(to, end) - std::max(from, begin));
  return total;
}

// ---- the three kinds of work; with the lock held

Time queue_kernel(Stream& stream, double seconds, Time now) {
  Device& all = device();
  Time before = all.computing.last(), ready = ready_time(stream);
  Time begin = all.computing.take(std::max(ready, now), lasting(seconds), now);
  if (before != Time{} && begin > before) {  // the engine was idle from `before` to `begin`
    // What was queued late is the host's part, also where it waits for a copy then.
    double gap = seconds_of(begin - before), copies = std::min(seconds_of(stream.waits), gap), late = gap - copies;
    double host = std::min(waited_between(before, begin), late);
    all.times.awaited_copies += copies;
    all.times.awaited_host += host;
    all.times.awaited_python += late - host;
  }
  all.times.computed += seconds;
  ++all.times.kernels;
  stream.waits = {};
  return stream.ends = begin + lasting(seconds);
}

double filling(size_t size) {
  const EmulatedMachine& machine = device().machine;
  return machine.launch_seconds + (double)size / machine.device_bytes_per_second;
}

Time queue_copy(Stream& stream, const Work& work, Time now) {
  Device& all = device();
  // Ranges are the target's and the source's, without those of pageable memory, of which only small copies are made.
  bool from_device = is_device_address(work.uses.back().begin), to_device = is_device_address(work.uses.front().begin);
  double size = (double)work.uses.front().size;
  if (from_device && to_device && work.uses.size() == 2)
    return queue_kernel(stream, all.machine.launch_seconds + 2 * size / all.machine.device_bytes_per_second, now);
  bool out = from_device;
  double seconds = out ? all.machine.out_latency_seconds + size / all.machine.out_bytes_per_second
                       : all.machine.in_latency_seconds + size / all.machine.in_bytes_per_second;
  Time begin = (out ? all.outward : all.inward).take(std::max(ready_time(stream), now), lasting(seconds), now);
  (out ? all.times.out_seconds : all.times.in_seconds) += seconds;
  (out ? all.times.out_bytes : all.times.in_bytes) += (unsigned long long)size;
  ++all.times.copies;
  Time end = begin + lasting(seconds);
  stream.waits += end - std::max(now, stream.ends);  // if kernels follow in this stream
  return stream.ends = end;
}

// ---- functions of the host that a stream calls

struct Call {
  Time at;
  std::function<void()> run;
  bool operator<(const Call& other) const { return at > other.at; }
};

struct Calls {
  std::mutex mutex;
  std::condition_variable changed;
  std::priority_queue<Call> waiting;

  Calls() {
    std::thread([this] { work(); }).detach();
  }

  void put(Call call) {
    std::lock_guard lock(mutex);
    waiting.push(std::move(call));
    changed.notify_one();
  }

  void work() {
    std::unique_lock lock(mutex);
    for (;;) {
      if (waiting.empty()) changed.wait(lock);
      else if (Time at = waiting.top().at; at > Clock::now()) changed.wait_until(lock, at);
      else {
        auto run = waiting.top().run;
        waiting.pop();
        lock.unlock();
        run();
        lock.lock();
      }
    }
  }
};

// ---- operators

struct Operator {
  int depth = 0;
  double seconds = -1;
  bool launched = false;
  cudaStream_t stream = nullptr;
};
thread_local Operator running;

__attribute__((constructor)) void stand_in_for_kernels();

cudaError_t launched(const MadeUpLaunch* launch) {
  Device& all = device();
  if (running.depth && running.launched) return cudaSuccess;
  double seconds = all.machine.launch_seconds;
  if (running.depth) {
    running.launched = true;
    running.stream = launch->stream;
    if (running.seconds < 0) return cudaSuccess;  // `emulated_end` will tell
    seconds = running.seconds;
  }
  std::lock_guard lock(all.mutex);
  queue_kernel(stream_of(launch->stream), seconds, Clock::now());
  return cudaSuccess;
}

void stand_in_for_kernels() { made_up_on_launch(launched); }

}  // namespace

struct Event {
  unsigned flags;
  bool recorded = false;
  Time at = {};    // when it was reached
  Time work = {};  // when what was queued before it ended; earlier if the stream was idle
};

// ---- points: moments that are known beforehand

void Point::pass(Time at) { passed_ = true, at_ = at; }
void Point::wait() { sleep_until(at_); }
bool Point::passed() { return Clock::now() >= at_; }
Time Point::at() { return at_; }

// ---- streams

cudaError_t create_stream(cudaStream_t* stream, unsigned flags, int priority) {
  std::lock_guard lock(device().mutex);
  *stream = (cudaStream_t)*device().known.insert(new Stream{flags, priority, {}, {}}).first;
  return cudaSuccess;
}

cudaError_t destroy_stream(cudaStream_t stream) {
  std::lock_guard lock(device().mutex);
  device().known.erase((Stream*)stream);
  return cudaSuccess;
}

bool is_idle(cudaStream_t stream) {
  std::lock_guard lock(device().mutex);
  return Clock::now() >= ready_time(stream_of(stream));
}
int priority_of(cudaStream_t stream) { return stream_of(stream).priority; }
unsigned flags_of(cudaStream_t stream) { return stream_of(stream).flags; }

void enqueue(cudaStream_t handle, Work work) {
  static auto& calls = *new Calls;
  Time now = Clock::now(), end;
  bool is_copy = !strcmp(work.what, "copy"), is_fill = !strcmp(work.what, "fill");
  {
    std::lock_guard lock(device().mutex);
    Stream& stream = stream_of(handle);
    if (is_copy) end = queue_copy(stream, work, now);
    else if (is_fill) end = queue_kernel(stream, filling(work.uses[0].size), now);
    else if (work.seconds > 0) end = queue_kernel(stream, work.seconds, now);
    else end = std::max(ready_time(stream), now);
  }
  if (is_copy && work.uses.front().size <= 4096) work.run();  // such as a loss that the host reads
  else if (!is_copy && !is_fill && work.run) calls.put({end, std::move(work.run)});
}

PointRef mark(cudaStream_t handle) {
  auto point = std::make_shared<Point>();
  std::lock_guard lock(device().mutex);
  point->pass(std::max(ready_time(stream_of(handle)), Clock::now()));
  return point;
}

void synchronize(cudaStream_t stream) {
  Time end;
  {
    std::lock_guard lock(device().mutex);
    end = ready_time(stream_of(stream));
  }
  sleep_until(end);
}

void synchronize_device() {
  Time end{};
  {
    std::lock_guard lock(device().mutex);
    for (Stream* stream : device().known) end = std::max(end, stream->ends);
  }
  sleep_until(end);
}

// ---- events

cudaError_t create_event(cudaEvent_t* handle, unsigned flags) {
  *handle = (cudaEvent_t) new Event{flags};
  return cudaSuccess;
}

cudaError_t destroy_event(cudaEvent_t handle) {
  delete (Event*)handle;
  return cudaSuccess;
}

cudaError_t record_event(cudaEvent_t handle, cudaStream_t stream) {
  std::lock_guard lock(device().mutex);
  auto& event = *(Event*)handle;
  event.recorded = true;
  event.work = ready_time(stream_of(stream));
  event.at = std::max(event.work, Clock::now());
  return cudaSuccess;
}

cudaError_t wait_for_event(cudaStream_t stream, cudaEvent_t handle) {
  std::lock_guard lock(device().mutex);
  auto& event = *(Event*)handle;
  Stream& waiting = stream_of(stream);
  Time now = Clock::now();
  if (!event.recorded || event.work <= now || event.work <= waiting.ends) return cudaSuccess;
  waiting.waits += event.work - std::max(now, waiting.ends);
  waiting.ends = event.work;
  return cudaSuccess;
}

cudaError_t query_event(cudaEvent_t handle) {
  std::lock_guard lock(device().mutex);
  auto& event = *(Event*)handle;
  return !event.recorded || Clock::now() >= event.at ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t synchronize_event(cudaEvent_t handle) {
  Time at;
  {
    std::lock_guard lock(device().mutex);
    at = ((Event*)handle)->at;
  }
  sleep_until(at);
  return cudaSuccess;
}

cudaError_t milliseconds_between(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  std::lock_guard lock(device().mutex);
  auto &first = *(Event*)begin, &last = *(Event*)end;
  bool untimed = (first.flags | last.flags) & cudaEventDisableTiming;
  if (untimed || !first.recorded || !last.recorded) return cudaErrorInvalidResourceHandle;
  if (Clock::now() < std::max(first.at, last.at)) return cudaErrorNotReady;
  *milliseconds = (float)(1e3 * seconds_of(last.at - first.at));
  return cudaSuccess;
}

}  // namespace made_up

using namespace made_up;

EXPORTED void emulated_machine(const EmulatedMachine* machine) {
  std::lock_guard lock(device().mutex);
  device().machine = *machine;
}

EXPORTED void emulated_times(EmulatedTimes* times, int reset) {
  std::lock_guard lock(device().mutex);
  *times = device().times;
  if (reset) device().times = {};
}

EXPORTED void emulated_begin(double seconds) {
  if (running.depth++) return;
  running.seconds = seconds;
  running.launched = false;
}

EXPORTED void emulated_sleep_until(long long nanoseconds) { sleep_until(Time(std::chrono::nanoseconds(nanoseconds))); }

EXPORTED int emulated_depth() { return running.depth; }
EXPORTED int emulated_launched() { return running.launched; }

EXPORTED int emulated_end(double seconds) {
  if (--running.depth) return 0;
  if (running.launched && running.seconds < 0) {
    std::lock_guard lock(device().mutex);
    queue_kernel(stream_of(running.stream), seconds, Clock::now());
  }
  return running.launched;
}
