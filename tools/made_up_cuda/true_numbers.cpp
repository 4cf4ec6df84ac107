// True numbers: the kernels that PyTorch's CUDA operators would launch are replaced by PyTorch's own kernels for the processor,
// over the same bytes, in the thread of the stream. Without this the made-up GPU allocates, copies and waits, and cannot compute.
//
// An operator is called as always: the host works out the shapes of the results (by the operator's kernel for the device "meta"),
// takes their memory from PyTorch's CUDA allocator, queues the computation and returns. What is queued holds addresses, no tensors
// of the GPU: who frees or moves memory too early is caught by the driver or sees wrong numbers, as on a real GPU. It needs no GIL,
// so a thread of Python may wait for the device with the GIL held.
//
// An operator whose result is a number for the host, or has a shape that depends on the data, waits for its stream, as on a real
// GPU (nonzero, equal). So does one whose shapes PyTorch cannot tell without computing; `true_numbers_waited` counts both.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_conj.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "driver/hooks.h"

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

// ---- tensors

using Ranges = std::vector<MadeUpRange>;

void add_range(const Tensor& tensor, Ranges& ranges) {
  if (!tensor.numel()) return;
  size_t last = 0;
  for (int64_t dimension = 0; dimension < tensor.dim(); ++dimension)
    last += size_t(tensor.size(dimension) - 1) * size_t(tensor.stride(dimension));
  ranges.push_back({tensor.const_data_ptr(), (last + 1) * tensor.element_size()});
}

// A number that Python has passed takes part in type promotion as such.
Tensor as_number_like(Tensor made, const Tensor& like) {
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

// A tensor of the processor over the same bytes of the GPU. It owns nothing. A tensor in main memory is copied: its content is that
// of now, even if the host changes it before the kernel runs.
Tensor on_host(const Tensor& tensor, Ranges& ranges) {
  if (!tensor.defined()) return tensor;
  TORCH_CHECK(tensor.layout() == at::kStrided, "the made-up GPU computes with strided tensors only");
  if (!tensor.is_cuda()) return as_number_like(tensor.clone(), tensor);
  add_range(tensor, ranges);
  auto options = at::TensorOptions().dtype(tensor.scalar_type());
  if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  Tensor alias = at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) alias = at::_conj(alias);
  if (tensor.is_neg()) alias = at::_neg_view(alias);
  return as_number_like(alias, tensor);
}

Tensor without_content(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kMeta);
  return as_number_like(at::empty_strided(tensor.sizes(), tensor.strides(), options), tensor);
}

Tensor on_gpu_like(const Tensor& tensor, Ranges& ranges) {
  if (!tensor.defined()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCUDA);
  Tensor made = at::empty_strided(tensor.sizes(), tensor.strides(), options);
  add_range(made, ranges);
  return made;
}

// The value with each tensor in it, alone or in a list, replaced by what `each` makes of it.
template <class Each>
IValue with_tensors(const IValue& value, Each each) {
  if (value.isTensor()) return each(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& tensor : value.toTensorVector()) made.push_back(each(tensor));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      made.push_back(tensor ? std::optional(each(*tensor)) : std::nullopt);
    return made;
  }
  return value;
}

std::vector<Tensor> tensors_in(const IValue& value) {
  if (value.isTensorList()) return value.toTensorVector();
  return value.isTensor() ? std::vector<Tensor>{value.toTensor()} : std::vector<Tensor>{};
}

// ---- operators

struct Operator {
  c10::OperatorHandle handle;
  std::string name;
  std::vector<int> same_as;  // for each result: the argument that is given back, or -1 if the result is new
  std::vector<int> outs;     // arguments that the results are written to, and that get their shape (out=...)
  int generator = -1;        // argument
  bool waits = false;        // its results depend on the data
};

// A generator for one kernel, made of the state that the GPU's generator has now: equal states give equal numbers, as on a GPU.
at::Generator generator_from(const IValue& value) {
  auto device = c10::Device(at::kCUDA, 0);
  at::Generator generator = value.isGenerator() ? value.toGenerator() : at::globalContext().defaultGenerator(device);
  std::lock_guard lock(generator.mutex());
  uint64_t offset = generator.get_offset();
  generator.set_offset(offset + 4);
  return at::detail::createCPUGenerator(generator.current_seed() * 0x9E3779B97F4A7C15ull + offset);
}

Stack arguments_on_host(const Operator& what, const Stack& arguments, Ranges& ranges) {
  Stack made;
  for (const IValue& argument : arguments)
    made.push_back(
        argument.isDevice() ? IValue(c10::Device(at::kCPU))
                            : with_tensors(argument, [&](const Tensor& tensor) { return on_host(tensor, ranges); }));
  if (what.generator >= 0) made[what.generator] = generator_from(arguments[what.generator]);
  return made;
}

// The shapes of the results, and of the arguments `outs`, in tensors without content. None if they depend on the data.
std::optional<Stack> shapes_of(const Operator& what, Stack& arguments) {
  if (what.waits) return std::nullopt;
  Stack shapes;
  for (IValue& argument : arguments) {
    argument = argument.isDevice() ? IValue(c10::Device(at::kMeta)) : with_tensors(argument, without_content);
    shapes.push_back(argument);
  }
  if (what.generator >= 0) shapes[what.generator] = IValue();
  try {
    at::AutoDispatchBelowADInplaceOrView guard;
    what.handle.callBoxed(shapes);
  } catch (const std::exception&) {
    return std::nullopt;  // the operator cannot tell; or the call is wrong, then its kernel says so next
  }
  for (size_t i = 0; i < shapes.size(); ++i)
    if (what.same_as[i] < 0 && !shapes[i].isTensor() && !shapes[i].isTensorList()) return std::nullopt;
  return shapes;
}

// Calls that the processor's kernels refuse though those of a GPU compute them. Returns what they compute as well.
void adapt(const std::string& name, Stack& arguments) {
  if ((name == "aten::_softmax" || name == "aten::_log_softmax") && arguments[2].toBool()) {
    arguments[0] = arguments[0].toTensor().to(at::kFloat);
    arguments[2] = false;
  }
  if (name == "aten::_softmax_backward_data" || name == "aten::_log_softmax_backward_data")
    arguments[3] = arguments[0].toTensor().scalar_type();
  if (name == "aten::native_layer_norm_backward" && arguments[3].toTensor().scalar_type() == at::kFloat)
    for (int index : {0, 1, 5, 6})  // a GPU keeps mean and deviation in fp32 whatever the input's type is, and computes so
      arguments[index] = with_tensors(arguments[index], [](const Tensor& tensor) { return tensor.to(at::kFloat); });
}

void compute(const Operator& what, Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  adapt(what.name, stack);
  what.handle.callBoxed(stack);
}

// ---- in the stream's thread

struct Queued {
  std::string what;
  std::function<void()> run;
};

void run(void* argument) {
  std::unique_ptr<Queued> queued((Queued*)argument);
  try {
    queued->run();
  } catch (const std::exception& error) {  // a real GPU would spoil the process, too
    fprintf(stderr, "made-up CUDA: %s failed in its stream: %s\n", queued->what.c_str(), error.what());
    abort();
  }
}

void queue(const std::string& what, const Ranges& ranges, std::function<void()> work) {
  static std::mutex mutex;
  static auto& names = *new std::set<std::string>;  // the driver wants names that stay
  const char* name;
  {
    std::lock_guard lock(mutex);
    name = names.insert(what).first->c_str();
  }
  cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  made_up_queue(stream, name, ranges.data(), ranges.size(), run, new Queued{what, std::move(work)});
}

// ---- on the host

size_t waited = 0;

void call_and_return(const Operator& what, const Stack& arguments, Stack& shapes, const Stack& shaped_arguments, Stack* stack) {
  for (int index : what.outs) {
    auto targets = tensors_in(arguments[index]), shaped = tensors_in(shaped_arguments[index]);
    for (size_t i = 0; i < targets.size(); ++i)
      if (targets[i].sizes() != shaped[i].sizes()) targets[i].resize_(shaped[i].sizes());
  }
  Ranges ranges;
  Stack operands = arguments_on_host(what, arguments, ranges), targets;
  for (size_t i = 0; i < shapes.size(); ++i) {
    if (what.same_as[i] >= 0) {
      stack->push_back(arguments[what.same_as[i]]);
      targets.emplace_back();
      continue;
    }
    IValue made = with_tensors(shapes[i], [&](const Tensor& shape) { return on_gpu_like(shape, ranges); });
    Ranges known;
    targets.push_back(with_tensors(made, [&](const Tensor& tensor) { return on_host(tensor, known); }));
    stack->push_back(std::move(made));
  }
  queue(what.name, ranges, [&what, operands = std::move(operands), targets = std::move(targets)]() mutable {
    compute(what, operands);
    for (size_t i = 0; i < targets.size(); ++i) {
      auto into = tensors_in(targets[i]), from = tensors_in(operands[i]);
      for (size_t j = 0; j < into.size(); ++j)
        if (into[j].defined() && from[j].defined()) into[j].copy_(from[j]);
    }
  });
}

void copy_when_queued(const Tensor& target, const Tensor& source) {
  Ranges ranges;
  Tensor into = on_host(target, ranges);
  queue("a copy of results", ranges, [into, source] { into.copy_(source); });
}

void call_and_wait(const Operator& what, const Stack& arguments, Stack* stack) {
  Ranges ranges;
  Stack operands = arguments_on_host(what, arguments, ranges);
  for (int index : what.outs)  // memory of the GPU does not grow by itself
    operands[index] = with_tensors(operands[index], [](const Tensor& tensor) { return at::empty({0}, tensor.options()); });
  Stack outs = operands;
  std::exception_ptr failure;
  queue(what.name, ranges, [&] {
    try {
      compute(what, operands);
    } catch (...) {
      failure = std::current_exception();
    }
  });
  c10::cuda::getCurrentCUDAStream().synchronize();
  ++waited;
  if (failure) std::rethrow_exception(failure);
  for (int index : what.outs) {
    auto targets = tensors_in(arguments[index]), found = tensors_in(outs[index]);
    for (size_t i = 0; i < targets.size(); ++i) copy_when_queued(targets[i].resize_(found[i].sizes()), found[i]);
  }
  for (size_t i = 0; i < operands.size(); ++i) {
    if (what.same_as[i] >= 0) {
      stack->push_back(arguments[what.same_as[i]]);
      continue;
    }
    stack->push_back(with_tensors(operands[i], [&](const Tensor& found) {
      Ranges ignored;
      Tensor made = on_gpu_like(found, ignored);
      if (made.defined()) copy_when_queued(made, found);
      return made;
    }));
  }
}

std::unordered_map<c10::OperatorName, Operator>& operators() {
  static auto& made = *new std::unordered_map<c10::OperatorName, Operator>;
  return made;
}

void call(const c10::OperatorHandle& handle, Stack* stack) {
  const Operator& what = operators().at(handle.operator_name());
  size_t count = handle.schema().arguments().size();
  Stack arguments(stack->end() - (ptrdiff_t)count, stack->end()), shaped = arguments;
  torch::jit::drop(*stack, count);
  if (std::optional<Stack> shapes = shapes_of(what, shaped))
    call_and_return(what, arguments, *shapes, shaped, stack);
  else
    call_and_wait(what, arguments, stack);
}

// ---- operators that are not made of one kernel

// Copies that change the type or the order of elements are computed; all others, and those to and from main memory, are PyTorch's.
Tensor& copy_(Tensor& target, const Tensor& source, bool non_blocking) {
  bool computes = target.is_cuda() && source.is_cuda() && target.numel() && !target.is_same(source) &&
      !(target.scalar_type() == source.scalar_type() && target.sizes() == source.sizes() && target.is_contiguous() &&
        source.is_contiguous() && target.is_conj() == source.is_conj() && target.is_neg() == source.is_neg());
  if (!computes) return at::native::copy_(target, source, non_blocking);
  Ranges ranges;
  Tensor into = on_host(target, ranges), from = on_host(source, ranges);
  queue("aten::copy_", ranges, [into, from] {
    at::AutoDispatchBelowADInplaceOrView guard;
    Tensor(into).copy_(from);
  });
  return target;
}

void foreach_copy_(at::TensorList targets, at::TensorList sources, bool non_blocking) {
  for (size_t i = 0; i < targets.size(); ++i) targets[i].copy_(sources[i], non_blocking);
}

// It takes its random numbers from the generator of its device, and has no argument for another one.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double rate, std::optional<bool> training) {
  bool drops = training.value_or(true) && rate > 0;
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
  if (!drops) return {input.clone(), mask.fill_(true)};
  mask.bernoulli_(1 - rate);
  return {rate < 1 ? input.mul(mask).mul_(1 / (1 - rate)) : input.mul(mask), mask};
}

// Attention is computed from products of matrices (SDPBackend::math): its fused kernels have no counterpart on the processor.
int64_t fused_sdp_choice(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;
}

// ---- registration

// Operators of the allocator and of views work on the made-up GPU as they are. Those of libraries stay, and fail by their name.
const char* const LEFT[] = {
    "copy_", "_copy_from", "_foreach_copy_", "_fused_sdp_choice", "_local_scalar_dense", "empty", "set_",
    "resize_", "_resize", "as_strided", "view", "_reshape_alias", "record_stream", "is_pinned", "_pin_memory", "is_set_to",
    "_nested", "cudnn", "_cudnn", "miopen", "_flash", "_efficient", "_scaled_dot_product", "_cuda", "_sparse", "sparse", "_to_sparse",
};
// Operators that choose a library by the device: the processor's choice is taken instead.
const char* const CHOOSING[] = {"aten::convolution", "aten::convolution_backward", "aten::convolution_overrideable"};

bool is_left(const std::string& name) {
  if (name == "aten::native_dropout") return true;  // has a kernel of its own below; its backward pass does not
  for (const char* begin : LEFT)
    if (name.rfind(std::string("aten::") + begin, 0) == 0) return true;
  return false;
}

std::optional<Operator> replaced(const c10::OperatorHandle& handle) {
  const auto& schema = handle.schema();
  Operator what{handle, c10::toString(handle.operator_name()), {}, {}};
  for (const auto& result : schema.returns()) {
    const auto* alias = result.alias_info();
    if (alias && !alias->isWrite()) return std::nullopt;  // a view
    what.same_as.push_back(-1);
    for (size_t i = 0; alias && i < schema.arguments().size(); ++i) {
      const auto* of = schema.arguments()[i].alias_info();
      if (of && of->beforeSets() == alias->beforeSets()) what.same_as.back() = (int)i;
    }
  }
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    if (schema.arguments()[i].is_out()) what.outs.push_back((int)i);
    if (schema.arguments()[i].name() == "generator") what.generator = (int)i;
  }
  what.waits = handle.hasTag(at::Tag::dynamic_output_shape) || handle.hasTag(at::Tag::data_dependent_output);
  return what;
}

}  // namespace

// Replace the kernels. Returns how many. To be called once, after PyTorch has been loaded.
extern "C" int true_numbers_install() {
  struct Silent : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;  // PyTorch warns of each kernel that is replaced
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  static auto& library = *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || is_left(name.name)) continue;
    auto handle = c10::Dispatcher::singleton().findOp(name);
    if (!handle || !handle->hasSchema() || !handle->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    bool chooses = std::find(std::begin(CHOOSING), std::end(CHOOSING), name.name) != std::end(CHOOSING);
    if (!chooses && !handle->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    if (auto what = replaced(*handle)) {
      operators().emplace(name, std::move(*what));
      library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<call>());
    }
  }
  library.impl("copy_", TORCH_FN(copy_));
  library.impl("_foreach_copy_", TORCH_FN(foreach_copy_));
  library.impl("native_dropout", TORCH_FN(native_dropout));
  library.impl("_fused_sdp_choice", TORCH_FN(fused_sdp_choice));
  return (int)operators().size();
}

// How often an operator has waited for its stream.
extern "C" size_t true_numbers_waited() { return waited; }
