// The emulated GPU's engines, and what of their time is counted.
#pragma once
#include <cuda_runtime_api.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The machine: seconds and bytes per second. A copy takes latency + bytes / rate. */
typedef struct {
  double launch_seconds;        /* of a kernel that belongs to no operator */
  double device_bytes_per_second; /* of copies within the device and of fills: they read or write so many bytes */
  double out_bytes_per_second, out_latency_seconds; /* to main memory */
  double in_bytes_per_second, in_latency_seconds;   /* from main memory */
} EmulatedMachine;
void emulated_machine(const EmulatedMachine* machine);

/* Where the time of the engine that computes went, in seconds since the last reset, up to the end of its last kernel.
 * computed: kernels. awaited_copies: its stream waited for another one. awaited_host: nothing was queued, and the thread that
 * queues was in a call that waits for the device, or for an update on the processor. awaited_python: nothing was queued, for any
 * other reason. */
typedef struct {
  double computed, awaited_copies, awaited_host, awaited_python;
  double out_seconds, in_seconds;
  unsigned long long kernels, copies, out_bytes, in_bytes;
} EmulatedTimes;
void emulated_times(EmulatedTimes* times, int reset);

/* An operator begins in the calling thread, and its kernels take so many seconds together; negative: not known before its end.
 * Operators within it do not count. `emulated_end` returns 1 if it has queued kernels, and takes the seconds where they were not
 * known. */
void emulated_begin(double seconds);
int emulated_end(double seconds);
/* Whether the calling thread is within an operator, and whether that has launched a kernel. */
int emulated_depth(void);
int emulated_launched(void);

/* Sleep until a moment of the steady clock, in nanoseconds: the host waits for something else that is emulated. */
void emulated_sleep_until(long long nanoseconds);

#ifdef __cplusplus
}
#endif
