// libnvidia-ml, as far as PyTorch asks it: how many devices there are, and whether they are linked to others. They are not.
#include <cstdio>

#include "api.hpp"

namespace {

constexpr int SUCCESS = 0, NOT_SUPPORTED = 3;  // of nvmlReturn_t
int the_device;

}  // namespace

EXPORTED int nvmlInit() { return SUCCESS; }
EXPORTED int nvmlInit_v2() { return SUCCESS; }
EXPORTED int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = 1;
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetHandleByIndex_v2(unsigned, void** device) {
  *device = &the_device;
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  *device = &the_device;
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetUUID(void*, char* text, unsigned size) {
  snprintf(text, size, "GPU-6d616465-2d75-7020-4750-552030303030");  // the bytes of cudaDeviceProp::uuid
  return SUCCESS;
}
// The state is the byte behind a version, a UUID of 16 bytes, a status and a number of the clique. PyTorch warns if this fails.
EXPORTED int nvmlDeviceGetGpuFabricInfoV(void*, unsigned char* information) {
  information[28] = 0;  // NVML_GPU_FABRIC_STATE_NOT_SUPPORTED
  return SUCCESS;
}
EXPORTED int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, void*) { return NOT_SUPPORTED; }
EXPORTED int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return NOT_SUPPORTED; }
EXPORTED int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return SUCCESS;
}
EXPORTED int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = CUDART_VERSION;
  return SUCCESS;
}
