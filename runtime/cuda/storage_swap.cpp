// Gives storages other memory, with all tensors that share them following: their sizes, views and identities stay.
//
// Built against c10 only, so it serves every device. Nobody may be using a storage's data meanwhile.

#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <string>
#include <utility>

namespace {

c10::StorageImpl* storage(void* impl) { return static_cast<c10::StorageImpl*>(impl); }

void keep(void*) {}

// PyTorch 2.11 has a function that closes a storage but none that opens it again: the flag that it sets is private. Naming
// it in an explicit instantiation is the one place where the language lets that pass; newer versions have it too.
template <bool c10::StorageImpl::* Flag>
struct Reach {
  friend bool& closed(c10::StorageImpl* impl) { return impl->*Flag; }
};
bool& closed(c10::StorageImpl* impl);
template struct Reach<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

}  // namespace

extern "C" {

// Two storages exchange their memory; it is freed by whoever allocated it, wherever it lies then.
void teraio_exchange(void* one, void* other) {
  std::swap(storage(one)->_mutable_data_ptr_no_checks(), storage(other)->_mutable_data_ptr_no_checks());
}

// The storage gets memory that is not its own, on the device it is on; what it had is freed.
void teraio_lend(void* impl, void* address) {
  c10::Device device = storage(impl)->device();
  storage(impl)->set_data_ptr_noswap(c10::DataPtr(address, nullptr, &keep, device));
}

// Whoever asks the storage for its data from now on gets an error with this message.
void teraio_close(void* impl, const char* message) {
  storage(impl)->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(message));
}

// The data can be had again.
void teraio_open(void* impl) {
  closed(storage(impl)) = false;
  c10::DataPtr data = std::move(storage(impl)->_mutable_data_ptr_no_checks());
  storage(impl)->set_data_ptr_noswap(std::move(data));  // which makes the storage look at its flags again
}

// Where the data lies, also while it cannot be had.
void* teraio_address(void* impl) { return storage(impl)->_mutable_data_ptr_no_checks().get(); }

}  // extern "C"
