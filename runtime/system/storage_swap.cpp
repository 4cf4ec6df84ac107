// Gives storages other memory. Tensors that share a storage keep their sizes, views and identity.
//
// Built against c10 only, so it serves every device. Nobody may be using a storage's data during a call.

#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace {

c10::StorageImpl* storage(void* impl) { return static_cast<c10::StorageImpl*>(impl); }

void keep(void*) {}

// PyTorch 2.11 has a function that closes a storage, but none that opens it again. The flag that it sets is private. C++
// allows a private name only in an explicit instantiation of a template. Newer versions of PyTorch have the same flag.
template <bool c10::StorageImpl::* Flag>
struct Reach {
  friend bool& closed(c10::StorageImpl* impl) { return impl->*Flag; }
};
bool& closed(c10::StorageImpl* impl);
template struct Reach<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

}  // namespace

extern "C" {

// Gives a storage memory that it does not own, on its device. Frees the memory that it had.
void teraio_lend(void* impl, void* address) {
  c10::Device device = storage(impl)->device();
  storage(impl)->set_data_ptr_noswap(c10::DataPtr(address, nullptr, &keep, device));
}

// Gives an empty storage, which has no memory, a size.
void teraio_size(void* impl, size_t bytes) { storage(impl)->set_nbytes(bytes); }

// Lets every access to the storage's data raise an error with this message.
void teraio_close(void* impl, const char* message) {
  storage(impl)->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(message));
}

// Lets the storage's data be accessed again, or not, with the message of before. Returns whether it could not.
int teraio_set_closed(void* impl, int value) {
  bool before = closed(storage(impl));
  closed(storage(impl)) = value;
  storage(impl)->set_data_ptr_noswap(std::move(storage(impl)->_mutable_data_ptr_no_checks()));  // it reads its flags again here
  return before;
}

// Opens a storage, and exchanges its memory with another one's. Each memory takes its own deleter along. Returns where its data
// lies then.
void* teraio_install(void* impl, void* fresh) {
  closed(storage(impl)) = false;
  c10::DataPtr before = std::move(storage(impl)->_mutable_data_ptr_no_checks());
  storage(impl)->set_data_ptr_noswap(std::move(storage(fresh)->_mutable_data_ptr_no_checks()));  // it reads its flags again here
  storage(fresh)->_mutable_data_ptr_no_checks() = std::move(before);
  return storage(impl)->_mutable_data_ptr_no_checks().get();
}

// Returns where the data lies, also of a closed storage.
void* teraio_address(void* impl) { return storage(impl)->_mutable_data_ptr_no_checks().get(); }

// Writes the positions of those of `count` storages to `changed` that have another address or size than given. Returns how many.
size_t teraio_changed(size_t count, const uint64_t* impls, const uint64_t* addresses, const uint64_t* sizes, uint32_t* changed) {
  size_t found = 0;
  for (size_t i = 0; i < count; ++i) {
    c10::StorageImpl* one = storage(reinterpret_cast<void*>(impls[i]));
    auto address = reinterpret_cast<uint64_t>(one->_mutable_data_ptr_no_checks().get());
    if (address != addresses[i] || one->nbytes() != sizes[i]) changed[found++] = static_cast<uint32_t>(i);
  }
  return found;
}

}  // extern "C"
