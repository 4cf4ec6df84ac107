// Stand-ins for the host's side of cuBLAS and cuBLASLt: each product is one launch. What it costs is its operator's affair.
//
// By the C convention of this processor a function may take fewer arguments than it is given: what does not matter is left out.
#include <cstdlib>
#include <cstring>

#include "api.hpp"
#include "kernels.hpp"

namespace {

enum { SUCCESS = 0 };

struct Handle {
  cudaStream_t stream = nullptr;
  int mode = 0, pointers = 0;
};

int product(const char* name, cudaStream_t stream) {
  made_up::launch({name, {1, 1, 1}, {1, 1, 1}, 0, stream, nullptr});
  return SUCCESS;
}

int descriptor(void** made) {
  *made = calloc(1, 16);
  return SUCCESS;
}

int forget(void* descriptor) {
  free(descriptor);
  return SUCCESS;
}

}  // namespace

EXPORTED int cublasCreate_v2(Handle** handle) {
  *handle = new Handle;
  return SUCCESS;
}
EXPORTED int cublasDestroy_v2(Handle* handle) {
  delete handle;
  return SUCCESS;
}
EXPORTED int cublasSetStream_v2(Handle* handle, cudaStream_t stream) {
  handle->stream = stream;
  return SUCCESS;
}
EXPORTED int cublasSetWorkspace_v2() { return SUCCESS; }
EXPORTED int cublasSetMathMode(Handle* handle, int mode) {
  handle->mode = mode;
  return SUCCESS;
}
EXPORTED int cublasGetMathMode(Handle* handle, int* mode) {
  *mode = handle->mode;
  return SUCCESS;
}
EXPORTED int cublasSetPointerMode_v2(Handle* handle, int mode) {
  handle->pointers = mode;
  return SUCCESS;
}
EXPORTED int cublasGetPointerMode_v2(Handle* handle, int* mode) {
  *mode = handle->pointers;
  return SUCCESS;
}

#define PRODUCT(name) \
  EXPORTED int name(Handle* handle) { return product(#name, handle->stream); }
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasDgemv_v2)
PRODUCT(cublasDotEx)

EXPORTED size_t cublasLtGetVersion() { return 130100; }
EXPORTED int cublasLtMatmulDescCreate(void** made) { return descriptor(made); }
EXPORTED int cublasLtMatmulDescDestroy(void* made) { return forget(made); }
EXPORTED int cublasLtMatmulDescSetAttribute() { return SUCCESS; }
EXPORTED int cublasLtMatmulPreferenceCreate(void** made) { return descriptor(made); }
EXPORTED int cublasLtMatmulPreferenceDestroy(void* made) { return forget(made); }
EXPORTED int cublasLtMatmulPreferenceSetAttribute() { return SUCCESS; }
EXPORTED int cublasLtMatrixLayoutCreate(void** made) { return descriptor(made); }
EXPORTED int cublasLtMatrixLayoutDestroy(void* made) { return forget(made); }
EXPORTED int cublasLtMatrixLayoutSetAttribute() { return SUCCESS; }
EXPORTED int cublasLtMatmulAlgoGetHeuristic(
    void*, void*, void*, void*, void*, void*, void*, int, void* results, int* found) {
  memset(results, 0, 96);  // one cublasLtMatmulHeuristicResult_t: success, no workspace
  *found = 1;
  return SUCCESS;
}
EXPORTED int cublasLtMatmul(
    void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*, void*, void*, const void*,
    void*, size_t, cudaStream_t stream) {
  return product("cublasLtMatmul", stream);
}
