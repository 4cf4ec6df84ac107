// Tells the emulated GPU how long each operator of PyTorch takes, by the shapes of its inputs.
//
// The formula is Python's: it is asked once for each operator and shape, and the answer is kept. An operator counts if it has
// a kernel of its own; what it calls is a part of it. Operators that only call others (`aten::linear`) do not count.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <ATen/record_function.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/extension.h>

#include <chrono>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "timeline.hpp"

namespace {

py::object* formula;  // (name, overload, arguments, results) to seconds
std::mutex mutex;
std::unordered_map<size_t, double> known;
size_t asked = 0;

size_t mix(size_t hash, size_t value) { return (hash ^ value) * 0x9E3779B97F4A7C15ull + (hash >> 29); }

size_t key_of(size_t hash, const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) return mix(hash, 1);
    hash = mix(hash, (size_t)tensor.scalar_type() + 64 * (size_t)tensor.device().type() + 2);
    if (tensor.layout() != c10::kStrided) return mix(hash, 3);
    for (int64_t size : tensor.sizes()) hash = mix(hash, (size_t)size);
    for (int64_t stride : tensor.strides()) hash = mix(hash, (size_t)stride + 7);
    return hash;
  }
  if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) hash = key_of(hash, tensor);
    return mix(hash, 5);
  }
  if (value.isBool()) return mix(hash, value.toBool() + 11);
  if (value.isInt()) return mix(hash, (size_t)value.toInt());
  if (value.isIntList()) {
    for (int64_t number : value.toIntVector()) hash = mix(hash, (size_t)number);
    return mix(hash, 13);
  }
  if (value.isList()) {
    for (const c10::IValue& each : value.toListRef()) hash = key_of(hash, each);
    return mix(hash, 17);
  }
  return mix(hash, 19);  // numbers with a point and names change nothing
}

// What is known of an operator. counts: it has a kernel for GPUs or for all devices, and is not only made of others.
struct Known {
  bool counts = false;
  size_t hash = 0;
};

const Known& operator_of(const at::RecordFunction& record) {
  // The name's address tells one operator from another: looking up the text would take as long as a small operator does.
  thread_local std::unordered_map<const char*, Known> all;
  auto [found, is_new] = all.try_emplace(record.name());
  if (!is_new) return found->second;
  auto name = record.operator_name();
  auto handle = name ? c10::Dispatcher::singleton().findSchema(*name) : std::nullopt;
  if (!handle) return found->second;
  bool composite = handle->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  found->second.counts = handle->hasKernelForDispatchKey(c10::DispatchKey::CUDA) || !composite;
  found->second.hash = std::hash<std::string>()(name->name) ^ (std::hash<std::string>()(name->overload_name) << 1);
  return found->second;
}

struct Running : at::ObserverContext {
  size_t key = 0;
  bool unknown = false;
  c10::OperatorName name{"", ""};
  std::vector<c10::IValue> arguments;
};

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& record) {
  if (emulated_depth()) return nullptr;  // a part of another one
  const Known& known_operator = operator_of(record);
  if (!known_operator.counts) return nullptr;
  auto running = std::make_unique<Running>();
  size_t key = known_operator.hash;
  for (const c10::IValue& value : record.inputs()) key = key_of(key, value);
  running->key = key;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = known.find(key);
    if (found != known.end()) {
      emulated_begin(found->second);
      return running;
    }
  }
  running->unknown = true;
  running->name = *record.operator_name();
  running->arguments.assign(record.inputs().begin(), record.inputs().end());
  emulated_begin(-1);
  return running;
}

void end(const at::RecordFunction& record, at::ObserverContext* context) {
  if (!context) return;
  auto& running = *static_cast<Running*>(context);
  if (!running.unknown || !emulated_launched()) {
    emulated_end(0);
    return;
  }
  double seconds = 0;
  {
    py::gil_scoped_acquire lock;
    py::list arguments, results;
    for (const c10::IValue& value : running.arguments) arguments.append(torch::jit::toPyObject(value));
    for (const c10::IValue& value : record.outputs()) results.append(torch::jit::toPyObject(value));
    running.arguments.clear();
    seconds = (*formula)(running.name.name, running.name.overload_name, arguments, results).cast<double>();
  }
  {
    std::lock_guard<std::mutex> lock(mutex);
    known[running.key] = seconds;
    ++asked;
  }
  emulated_end(seconds);
}

// ---- the host's processor

double host_elements_per_second = 1e9;
std::mutex processor;  // all updates share it
std::chrono::steady_clock::time_point free_at;

void update_on_host(at::TensorList parameters) {
  double elements = 0;
  for (const at::Tensor& parameter : parameters) elements += (double)parameter.numel();
  std::chrono::nanoseconds length((long long)(1e9 * elements / host_elements_per_second));
  std::chrono::steady_clock::time_point end;
  {
    std::lock_guard<std::mutex> lock(processor);
    end = free_at = std::max(free_at, std::chrono::steady_clock::now()) + length;
  }
  emulated_sleep_until(end.time_since_epoch().count());
}

using Numbers = at::TensorList;
using Number = const std::optional<at::Tensor>&;

void adamw(
    Numbers parameters, Numbers, Numbers, Numbers, Numbers, Numbers, double, double, double, double, double, bool, bool, Number,
    Number) {
  update_on_host(parameters);
}
void adamw_with_tensor(
    Numbers parameters, Numbers, Numbers, Numbers, Numbers, Numbers, const at::Tensor&, double, double, double, double, bool,
    bool, Number, Number) {
  update_on_host(parameters);
}

// Tensors from this size on are neither cleared nor copied: nobody looks at their numbers.
constexpr size_t UNTOUCHED_BYTES = 1 << 20;

at::Tensor& copy(at::Tensor& target, const at::Tensor& source, bool non_blocking) {
  if (target.nbytes() >= UNTOUCHED_BYTES && source.is_cpu() && target.sizes() == source.sizes()) return target;
  return at::native::copy_(target, source, non_blocking);
}

at::Tensor& zero(at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense() && tensor.nbytes() < UNTOUCHED_BYTES)
    memset(tensor.mutable_data_ptr(), 0, tensor.nbytes());
  return tensor;
}

TORCH_LIBRARY_IMPL(aten, CPU, library) {
  library.impl("_fused_adamw_", adamw);
  library.impl("_fused_adam_", adamw);
  library.impl("_fused_adamw_.tensor_lr", adamw_with_tensor);
  library.impl("_fused_adam_.tensor_lr", adamw_with_tensor);
  library.impl("zero_", zero);
  library.impl("copy_", copy);
}

void observe(py::object seconds_of, double elements_per_second) {
  host_elements_per_second = elements_per_second;
  formula = new py::object(std::move(seconds_of));
  auto callback = at::RecordFunctionCallback(begin, end).needsInputs(true).needsOutputs(true);
  at::addGlobalCallback(callback.scopes({at::RecordScope::FUNCTION}));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("observe", &observe, "Ask `seconds_of(name, overload, arguments, results)` from now on.");
  module.def("asked", [] { return asked; }, "How often it was asked.");
}
