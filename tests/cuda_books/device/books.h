// Books of a device that executes nothing: counters, and a trace whose lines are
// "number TAB thread TAB kind TAB fields". Shared by the runtime (cudart) and the libraries (cuBLAS, NCCL).
#pragma once
#include <atomic>
#include <cstdio>
#include <mutex>

#include <sys/syscall.h>
#include <unistd.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace books {

enum Counter { kLaunches, kSyncs, kCollectives, kMallocs, kPinnedBytes, kCommunicators, kUsedBytes, kNumCounters };

extern std::atomic<unsigned long long> counters[kNumCounters];
extern std::mutex mutex;
extern FILE* trace;
extern unsigned long long next_line;
// While set, no event completes and the host's waits block; an abort of a communicator clears it.
extern std::atomic<bool> hangs;

// Writes one line of the trace, if one is open.
template <typename... Fields>
void note(const char* format, Fields... fields) {
  if (!trace) return;
  std::lock_guard<std::mutex> guard(mutex);
  if (!trace) return;
  std::fprintf(trace, "%llu\t%ld\t", next_line++, (long)syscall(SYS_gettid));
  std::fprintf(trace, format, fields...);
  std::fputc('\n', trace);
}

}  // namespace books
