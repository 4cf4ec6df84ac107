// Streams are threads: each takes its work in order, and the host runs ahead of it. Events are points that a stream passes.
//
// Everything that the device does goes through `enqueue`: copies, fills, kernels that compute on the processor, waits that stand
// for kernels. So computation lags behind the host, and what the host does to memory too early is seen.
#pragma once
#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "memory.hpp"

namespace made_up {

using Clock = std::chrono::steady_clock;

// A moment in the work of a stream. Once passed, it stays so.
class Point {
 public:
  void pass(Clock::time_point at);
  void wait();
  bool passed();
  Clock::time_point at();  // when it was passed, by the stream's clock

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool passed_ = false;
  Clock::time_point at_;
};
using PointRef = std::shared_ptr<Point>;

// One operation in a stream. All parts are optional, and happen in this order.
struct Work {
  const char* what = "";            // its name in messages; must live as long as the process
  std::vector<Range> uses = {};     // memory that must be there from now until the work has ended
  PointRef waits_for = nullptr;     // a point of another stream
  std::function<void()> run = {};   // what is done in the stream's thread
  double seconds = 0;               // how long it takes at least, see `Stream`
  PointRef passes = nullptr;
};

// The errors below are those of the real runtime; misuse that it would not notice ends the process.
cudaError_t create_stream(cudaStream_t* stream, unsigned flags, int priority);
cudaError_t destroy_stream(cudaStream_t stream);  // what is queued still runs
bool is_idle(cudaStream_t stream);
int priority_of(cudaStream_t stream);
unsigned flags_of(cudaStream_t stream);

// Queue work. The NULL stream and blocking streams wait for each other (legacy-stream rules); non-blocking ones do not take part.
void enqueue(cudaStream_t stream, Work work);
PointRef mark(cudaStream_t stream);
void synchronize(cudaStream_t stream);
void synchronize_device();

struct Event;
cudaError_t create_event(cudaEvent_t* event, unsigned flags);
cudaError_t destroy_event(cudaEvent_t event);
cudaError_t record_event(cudaEvent_t event, cudaStream_t stream);
cudaError_t wait_for_event(cudaStream_t stream, cudaEvent_t event);
cudaError_t query_event(cudaEvent_t event);
cudaError_t synchronize_event(cudaEvent_t event);
cudaError_t milliseconds_between(float* milliseconds, cudaEvent_t begin, cudaEvent_t end);

}  // namespace made_up
