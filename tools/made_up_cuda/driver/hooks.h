/* What other libraries may ask of the made-up GPU beyond CUDA: to do something in a stream, and to stand in for kernels.
 *
 * All of this returns at once. `what` names the operation in messages and must live as long as the process. */
#pragma once
#include <cuda_runtime_api.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const void* begin;
  size_t size;
} MadeUpRange;

/* Call `run(argument)` in the stream's thread, once all that was queued in the stream before has ended. The ranges are device
 * memory or pinned memory: that one of them is unmapped, freed or unregistered before `run` has returned ends the process. */
void made_up_queue(
    cudaStream_t stream, const char* what, const MadeUpRange* uses, size_t uses_count, void (*run)(void*), void* argument);

/* Keep the stream busy for so many seconds, by the stream's clock: the time begins when the operation before has ended, or when
 * this one was queued if that is later. Touches no memory. */
void made_up_wait(cudaStream_t stream, const char* what, double seconds);

/* A kernel that is launched, by the runtime or the driver. name: mangled. arguments: pointers to the arguments' values. */
typedef struct {
  const char* name;
  unsigned grid[3], block[3];
  size_t shared_bytes;
  cudaStream_t stream;
  void** arguments;
} MadeUpLaunch;

/* Called in the launching thread for each launch; it may call made_up_queue or made_up_wait. What it returns is what the launch
 * returns; cudaErrorNotSupported hands the launch back to the settings. Null removes the hook. */
typedef cudaError_t (*MadeUpLaunchHook)(const MadeUpLaunch* launch);
void made_up_on_launch(MadeUpLaunchHook hook);

/* Bytes of pinned host memory now. How often functions of the API were called: writes "name count" lines, returns the length. */
size_t made_up_pinned_bytes(void);
size_t made_up_calls(char* text, size_t size);

#ifdef __cplusplus
}
#endif
