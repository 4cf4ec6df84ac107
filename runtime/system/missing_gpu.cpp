// Lets PyTorch's autograd take fake tensors on "cuda" where there is no GPU. It asks the guard of the device for streams, and the
// hooks of CUDA whether there is such an accelerator. A build without CUDA has no guard, and its hooks say no.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cstring>
#include <new>

namespace {

const c10::Device GPU(c10::DeviceType::CUDA, 0);

// One device with one stream, on which nothing ever runs.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return GPU; }
  c10::Device getDevice() const override { return GPU; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, GPU); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, GPU); }
};

struct Hooks final : at::CUDAHooksInterface {
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
};
static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface), "hooks have no state, so that one object can become another");

const Guard guard;
const c10::impl::DeviceGuardImplInterface* guard_before = nullptr;
unsigned char hooks_before[sizeof(Hooks)];

auto& registered() {
  return c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)];
}

// PyTorch makes its hooks once and hands out references to them, so the object itself has to change.
void* hooks() {
  return const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
}

}  // namespace

extern "C" void teraio_pretend() {
  guard_before = registered().exchange(&guard);
  std::memcpy(hooks_before, hooks(), sizeof(Hooks));
  new (hooks()) Hooks();
}

extern "C" void teraio_pretend_no_more() {
  std::memcpy(hooks(), hooks_before, sizeof(Hooks));
  registered().store(guard_before);
}
