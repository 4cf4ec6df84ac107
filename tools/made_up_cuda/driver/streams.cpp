#include "streams.hpp"

#include <pthread.h>
#include <time.h>

#include <deque>
#include <random>
#include <set>
#include <thread>

#include "settings.hpp"

namespace made_up {

// ---- points

void Point::pass(Clock::time_point at) {
  std::lock_guard lock(mutex_);
  passed_ = true;
  at_ = at;
  changed_.notify_all();
}

void Point::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return passed_; });
}

bool Point::passed() {
  std::lock_guard lock(mutex_);
  return passed_;
}

Clock::time_point Point::at() {
  std::lock_guard lock(mutex_);
  return at_;
}

// ---- streams

namespace {

// A sleeping thread wakes up tens of microseconds late, so the end of a timed wait is spent in a loop.
void wait_until(Clock::time_point end) {
  std::this_thread::sleep_until(end - std::chrono::microseconds(60));
  while (Clock::now() < end) __builtin_ia32_pause();
}

// A queue and the thread that works it off.
//
// The stream has a clock of its own, `free_at_`: timed work ends `seconds` after the end of what was before it, or after it was
// queued, whichever is later. So the time that a thread needs to wake up does not add up over many kernels, and events tell the
// times that the device would have had.
class Stream {
 public:
  Stream(unsigned flags, int priority, unsigned number)
      : flags(flags), priority(priority), number(number), draw_(settings().seed * 7919u + number) {
    std::thread([this] { work(); }).detach();
  }

  void put(Work work) {
    std::lock_guard lock(mutex_);
    queue_.push_back({std::move(work), Clock::now()});
    changed_.notify_one();
  }

  bool idle() {
    std::lock_guard lock(mutex_);
    return queue_.empty() && !busy_;
  }

  PointRef mark() {
    auto point = std::make_shared<Point>();
    put({.what = "a point", .passes = point});
    return point;
  }

  // End the thread after what is queued.
  void close() {
    std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_one();
  }

  const unsigned flags;
  const int priority;
  const unsigned number;

 private:
  struct Queued {
    Work work;
    Clock::time_point at;
  };

  void work() {
    pthread_setname_np(pthread_self(), ("stream " + std::to_string(number)).c_str());
    while (next()) {
    }
  }

  bool next() {
    Queued queued;
    {
      std::unique_lock lock(mutex_);
      busy_ = false;
      changed_.wait(lock, [this] { return !queue_.empty() || closed_; });
      if (queue_.empty()) return false;
      queued = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
    }
    Work& work = queued.work;
    if (settings().delay_us && (work.run || work.seconds > 0))
      std::this_thread::sleep_for(std::chrono::microseconds(draw_() % settings().delay_us));
    auto begin = std::max(free_at_, queued.at);
    if (work.waits_for) {
      work.waits_for->wait();
      begin = std::max(begin, work.waits_for->at());
    }
    free_at_ = begin;
    if (work.run) {
      for (const Range& range : work.uses) require_mapped(range, work.what, "when it runs");
      work.run();
      free_at_ = Clock::now();
    }
    if (work.seconds > 0) {
      auto length = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(work.seconds));
      free_at_ = std::max(free_at_, begin + length);
      wait_until(free_at_);
    }
    let_go(work.uses);
    work.run = nullptr;  // what it keeps is freed before anybody hears that it has ended
    if (work.passes) work.passes->pass(free_at_);
    return true;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Queued> queue_;
  bool busy_ = true, closed_ = false;
  Clock::time_point free_at_;
  std::mt19937 draw_;
};

// All streams of the process; destroyed ones are forgotten. It is never destroyed itself: threads outlive static objects.
struct Streams {
  std::mutex mutex;
  std::set<Stream*> known;
  unsigned made = 0;
  Stream* legacy;

  Streams() { legacy = add(0, 0); }

  Stream* add(unsigned flags, int priority) {
    std::lock_guard lock(mutex);
    return *known.insert(new Stream(flags, priority, made++)).first;
  }
};

Streams& streams() {
  static auto& made = *new Streams;
  return made;
}

Stream& stream_of(cudaStream_t handle) {
  Streams& all = streams();
  // The stream of each thread (cudaStreamPerThread) would be one more blocking stream; nothing here asks for it.
  if (!handle || handle == cudaStreamLegacy || handle == cudaStreamPerThread) return *all.legacy;
  auto* stream = (Stream*)handle;
  std::lock_guard lock(all.mutex);
  if (!all.known.count(stream)) misuse("stream %p is used, but it was destroyed or never made", (void*)handle);
  return *stream;
}

bool blocks(const Stream& stream) { return !(stream.flags & cudaStreamNonBlocking); }

// Make `stream` wait for what the legacy rules put before its next work.
void wait_by_legacy_rules(Stream& stream) {
  Streams& all = streams();
  std::vector<PointRef> before;
  if (&stream == all.legacy) {
    std::lock_guard lock(all.mutex);
    for (Stream* other : all.known)
      if (other != &stream && blocks(*other) && !other->idle()) before.push_back(other->mark());
  } else if (blocks(stream) && !all.legacy->idle()) {
    before.push_back(all.legacy->mark());
  }
  for (PointRef& point : before) stream.put({.what = "the legacy rules", .waits_for = std::move(point)});
}

}  // namespace

cudaError_t create_stream(cudaStream_t* stream, unsigned flags, int priority) {
  *stream = (cudaStream_t)streams().add(flags, priority);
  return cudaSuccess;
}

cudaError_t destroy_stream(cudaStream_t handle) {
  Stream& stream = stream_of(handle);
  if (&stream == streams().legacy) return cudaErrorInvalidResourceHandle;
  std::lock_guard lock(streams().mutex);
  streams().known.erase(&stream);  // the object stays: a few hundred bytes for each destroyed stream
  stream.close();
  return cudaSuccess;
}

bool is_idle(cudaStream_t stream) { return stream_of(stream).idle(); }
int priority_of(cudaStream_t stream) { return stream_of(stream).priority; }
unsigned flags_of(cudaStream_t stream) { return stream_of(stream).flags; }

void enqueue(cudaStream_t handle, Work work) {
  Stream& stream = stream_of(handle);
  for (const Range& range : work.uses) require_mapped(range, work.what, "when it is queued");
  hold(work.uses, work.what);
  wait_by_legacy_rules(stream);
  stream.put(std::move(work));
}

PointRef mark(cudaStream_t handle) {
  Stream& stream = stream_of(handle);
  wait_by_legacy_rules(stream);
  return stream.mark();
}

void synchronize(cudaStream_t stream) { mark(stream)->wait(); }

void synchronize_device() {
  std::vector<PointRef> ends;
  {
    std::lock_guard lock(streams().mutex);
    for (Stream* stream : streams().known) ends.push_back(stream->mark());
  }
  for (PointRef& end : ends) end->wait();
}

// ---- events

struct Event {
  unsigned flags;
  PointRef point;  // none before it is recorded for the first time
};

namespace {

struct Events {
  std::mutex mutex;
  std::set<Event*> known;
};

Events& events() {
  static auto& made = *new Events;
  return made;
}

// To be called with the lock of all events held.
Event& event_of(cudaEvent_t handle, const char* use) {
  auto* event = (Event*)handle;
  if (!events().known.count(event)) misuse("%s of event %p, which was destroyed or never made", use, (void*)handle);
  return *event;
}

PointRef point_of(cudaEvent_t handle, const char* use) {
  std::lock_guard lock(events().mutex);
  return event_of(handle, use).point;
}

}  // namespace

cudaError_t create_event(cudaEvent_t* handle, unsigned flags) {
  std::lock_guard lock(events().mutex);
  auto* event = new Event{flags, nullptr};
  events().known.insert(event);
  *handle = (cudaEvent_t)event;
  return cudaSuccess;
}

cudaError_t destroy_event(cudaEvent_t handle) {
  std::lock_guard lock(events().mutex);
  Event& event = event_of(handle, "destruction");
  events().known.erase(&event);
  delete &event;  // streams that wait for it hold its point
  return cudaSuccess;
}

cudaError_t record_event(cudaEvent_t handle, cudaStream_t stream) {
  std::lock_guard lock(events().mutex);
  event_of(handle, "record").point = mark(stream);
  return cudaSuccess;
}

cudaError_t wait_for_event(cudaStream_t stream, cudaEvent_t handle) {
  PointRef point = point_of(handle, "wait");
  if (point && !point->passed()) enqueue(stream, {.what = "a wait for an event", .waits_for = point});
  return cudaSuccess;
}

cudaError_t query_event(cudaEvent_t handle) {
  PointRef point = point_of(handle, "query");
  return !point || point->passed() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t synchronize_event(cudaEvent_t handle) {
  PointRef point = point_of(handle, "synchronization");
  if (point) point->wait();
  return cudaSuccess;
}

cudaError_t milliseconds_between(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  PointRef points[2];
  {
    std::lock_guard lock(events().mutex);
    Event *first = &event_of(begin, "elapsed time"), *last = &event_of(end, "elapsed time");
    if ((first->flags | last->flags) & cudaEventDisableTiming) return cudaErrorInvalidResourceHandle;
    points[0] = first->point, points[1] = last->point;
  }
  if (!points[0] || !points[1]) return cudaErrorInvalidResourceHandle;  // never recorded
  if (!points[0]->passed() || !points[1]->passed()) return cudaErrorNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(points[1]->at() - points[0]->at()).count();
  return cudaSuccess;
}

}  // namespace made_up
