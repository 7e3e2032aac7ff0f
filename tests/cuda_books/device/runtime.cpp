// cudart of one device with an H100's properties: memory is address space, kernels are counted, streams
// and events are names. Copies of at most 1 MiB are carried out, so that what a program writes it reads back.
#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "books.h"

using books::counters;
using books::note;

std::atomic<unsigned long long> books::counters[books::kNumCounters];
std::mutex books::mutex;
FILE* books::trace = nullptr;
unsigned long long books::next_line = 0;
std::atomic<bool> books::hangs{false};

// --- the books themselves, called by name from Python

EXPORT void books_open(const char* path) {
  std::lock_guard<std::mutex> guard(books::mutex);
  books::trace = std::fopen(path, "w");
}
EXPORT void books_close() {
  std::lock_guard<std::mutex> guard(books::mutex);
  if (books::trace) std::fclose(books::trace);
  books::trace = nullptr;
}
EXPORT unsigned long long books_count(int which) { return counters[which]; }
EXPORT void books_hang() { books::hangs = true; }
EXPORT void books_note(const char* text) { note("note\t%s", text); }

// --- memory

static const unsigned long long kDeviceBytes = 80ull * 1000 * 1000 * 1000;
static const unsigned long long kSpan = 1ull << 40;
static const unsigned long long kLargestCopy = 1ull << 20;

static char* reserve(unsigned long long bytes) {
  return static_cast<char*>(
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
}
static char* device_memory() {
  static char* begin = reserve(kSpan);
  return begin;
}
// Leaked on purpose: torch frees memory while static objects are destroyed.
static auto& device_blocks = *new std::map<const void*, unsigned long long>;
static auto& pinned_blocks = *new std::map<const void*, unsigned long long>;
static unsigned long long device_top = 4096;

static bool is_device(const void* p) { return p >= device_memory() && p < device_memory() + kSpan; }
static bool is_pinned(const void* p) {
  std::lock_guard<std::mutex> guard(books::mutex);
  auto after = pinned_blocks.upper_bound(p);
  if (after == pinned_blocks.begin()) return false;
  --after;
  return p < static_cast<const char*>(after->first) + after->second;
}

EXPORT cudaError_t cudaMalloc(void** p, size_t bytes) {
  std::lock_guard<std::mutex> guard(books::mutex);
  bytes = (bytes + 511) / 512 * 512;
  if (counters[books::kUsedBytes] + bytes > kDeviceBytes) return cudaErrorMemoryAllocation;
  *p = device_memory() + device_top;
  device_top += bytes;
  device_blocks[*p] = bytes;
  counters[books::kUsedBytes] += bytes;
  counters[books::kMallocs]++;
  return cudaSuccess;
}
EXPORT cudaError_t cudaFree(void* p) {
  std::lock_guard<std::mutex> guard(books::mutex);
  auto block = device_blocks.find(p);
  if (block == device_blocks.end()) return cudaSuccess;
  counters[books::kUsedBytes] -= block->second;
  device_blocks.erase(block);
  return cudaSuccess;
}
static void pin(void* p, size_t bytes) {
  std::lock_guard<std::mutex> guard(books::mutex);
  pinned_blocks[p] = bytes;
  counters[books::kPinnedBytes] += bytes;
}
static size_t unpin(void* p) {
  std::lock_guard<std::mutex> guard(books::mutex);
  size_t bytes = pinned_blocks[p];
  pinned_blocks.erase(p);
  counters[books::kPinnedBytes] -= bytes;
  return bytes;
}
EXPORT cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
  *p = reserve(bytes);
  pin(*p, bytes);
  note("pin\t%zu", bytes);
  return cudaSuccess;
}
EXPORT cudaError_t cudaFreeHost(void* p) {
  munmap(p, unpin(p));
  return cudaSuccess;
}
EXPORT cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned) {
  pin(p, bytes);
  note("pin\t%zu", bytes);
  return cudaSuccess;
}
EXPORT cudaError_t cudaHostUnregister(void* p) {
  unpin(p);
  return cudaSuccess;
}
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* p) {
  std::memset(found, 0, sizeof *found);
  found->type = is_device(p) ? cudaMemoryTypeDevice : is_pinned(p) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  found->devicePointer = const_cast<void*>(p);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = kDeviceBytes;
  *free = kDeviceBytes - counters[books::kUsedBytes];
  return cudaSuccess;
}

static cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  bool into = is_device(to), out_of = is_device(from);
  const char* kind = into && out_of ? "d2d" : into ? "h2d" : out_of ? "d2h" : "h2h";
  const char* host = into && out_of ? "-" : is_pinned(into ? from : to) ? "pinned" : "pageable";
  note("copy\t%p\t%s\t%zu\t%s\t%p\t%p", (void*)stream, kind, bytes, host, from, to);
  if (bytes <= kLargestCopy) std::memcpy(to, from, bytes);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  counters[books::kSyncs]++;
  note("sync\tcopy");
  return copy(to, from, bytes, nullptr);
}
EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, bytes, stream);
}
EXPORT cudaError_t cudaMemcpy2DAsync(void*, size_t, const void*, size_t, size_t width, size_t height, cudaMemcpyKind,
                                     cudaStream_t stream) {
  note("copy2d\t%p\t%zu", (void*)stream, width * height);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemset(void*, int, size_t) { return cudaSuccess; }
EXPORT cudaError_t cudaMemsetAsync(void*, int, size_t bytes, cudaStream_t stream) {
  counters[books::kLaunches]++;
  note("memset\t%p\t%zu", (void*)stream, bytes);
  return cudaSuccess;
}

// --- kernels: registered by nvcc's start-up code, launched by address

static auto& kernel_names = *new std::unordered_map<const void*, std::string>;
struct LaunchConfig {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
static thread_local std::vector<LaunchConfig> launch_configs;

static cudaError_t launch(const void* kernel, cudaStream_t stream) {
  counters[books::kLaunches]++;
  if (!books::trace) return cudaSuccess;
  std::string name = "?";
  {
    std::lock_guard<std::mutex> guard(books::mutex);
    auto known = kernel_names.find(kernel);
    if (known != kernel_names.end()) name = known->second;
  }
  int status = 0;
  char* plain = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  note("kernel\t%p\t%.300s", (void*)stream, plain ? plain : name.c_str());
  std::free(plain);
  return cudaSuccess;
}

EXPORT void** __cudaRegisterFatBinary(void*) { return static_cast<void**>(std::malloc(8)); }
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT char __cudaInitModule(void**) { return 1; }
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORT void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  std::lock_guard<std::mutex> guard(books::mutex);
  kernel_names[host] = name;
}
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st* stream) {
  launch_configs.push_back({grid, block, shared, stream});
  return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  LaunchConfig last = launch_configs.back();
  launch_configs.pop_back();
  *grid = last.grid, *block = last.block, *shared = last.shared;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch((const void*)kernel, stream);
}
EXPORT cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch(kernel, stream);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void**) {
  return launch(kernel, config->stream);
}
EXPORT cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  function(data);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  std::memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->binaryVersion = found->ptxVersion = 90;
  found->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetSymbolAddress(void** p, const void*) {
  *p = device_memory();
  return cudaSuccess;
}

// --- the device: NVIDIA's H100 SXM data sheet and compute capability 9.0's limits

EXPORT cudaError_t cudaGetDeviceCount(int* number) { return *number = 1, cudaSuccess; }
EXPORT cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
EXPORT cudaError_t cudaSetDevice(int) { return cudaSuccess; }
EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int) {
  std::memset(found, 0, sizeof *found);
  std::strcpy(found->name, "NVIDIA H100 80GB HBM3");
  found->major = 9;
  found->multiProcessorCount = 132;
  found->totalGlobalMem = kDeviceBytes;
  found->warpSize = 32;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerBlockOptin = 232448;
  found->sharedMemPerMultiprocessor = 233472;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->textureAlignment = 512;
  found->l2CacheSize = 52428800;
  found->unifiedAddressing = found->concurrentKernels = 1;
  found->maxBlocksPerMultiProcessor = 32;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  static const std::map<int, int> known = {
      {cudaDevAttrMaxThreadsPerBlock, 1024},
      {cudaDevAttrMaxBlockDimX, 1024},
      {cudaDevAttrMaxBlockDimY, 1024},
      {cudaDevAttrMaxBlockDimZ, 64},
      {cudaDevAttrMaxGridDimX, 2147483647},
      {cudaDevAttrMaxGridDimY, 65535},
      {cudaDevAttrMaxGridDimZ, 65535},
      {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
      {cudaDevAttrWarpSize, 32},
      {cudaDevAttrMaxRegistersPerBlock, 65536},
      {cudaDevAttrClockRate, 1980000},
      {cudaDevAttrMultiProcessorCount, 132},
      {cudaDevAttrL2CacheSize, 52428800},
      {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
      {cudaDevAttrComputeCapabilityMajor, 9},
      {cudaDevAttrComputeCapabilityMinor, 0},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472},
      {cudaDevAttrMaxRegistersPerMultiprocessor, 65536},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
      {cudaDevAttrMaxBlocksPerMultiprocessor, 32}};
  auto found = known.find(attribute);
  *value = found == known.end() ? 0 : found->second;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int) {
  std::snprintf(text, size, "0000:01:00.0");
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
EXPORT cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }
EXPORT const char* cudaGetErrorString(cudaError_t) { return "an error of the device that executes nothing"; }
EXPORT const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheBooks"; }
EXPORT cudaError_t cudaGetLastError() { return cudaSuccess; }
EXPORT cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
static cudaError_t nothing() { return cudaSuccess; }
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
  void* found = dlsym(RTLD_DEFAULT, name);
  *function = found ? found : (void*)nothing;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// --- streams and events

static void wait_for_device() {
  while (books::hangs) usleep(1000);
}
static std::atomic<unsigned long long> next_name{0x1000};
static cudaStream_t new_stream(int priority) {
  auto stream = (cudaStream_t)(next_name += 16);
  note("stream\t%p\tpriority %d", (void*)stream, priority);
  return stream;
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) { return *stream = new_stream(0), cudaSuccess; }
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return *stream = new_stream(0), cudaSuccess; }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  return *stream = new_stream(priority), cudaSuccess;
}
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*,
                                            const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  counters[books::kSyncs]++;
  note("sync\tstream\t%p", (void*)stream);
  wait_for_device();
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceSynchronize() {
  counters[books::kSyncs]++;
  note("sync\tdevice");
  wait_for_device();
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  note("wait\t%p\t%p", (void*)stream, (void*)event);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return *event = (cudaEvent_t)(next_name += 16), cudaSuccess; }
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  note("record\t%p\t%p", (void*)stream, (void*)event);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
// A query orders the host behind the event as a wait does, since it answers "complete"; it holds nobody up.
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  note("query\tevent\t%p", (void*)event);
  return books::hangs ? cudaErrorNotReady : cudaSuccess;
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  counters[books::kSyncs]++;
  note("sync\tevent\t%p", (void*)event);
  wait_for_device();
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  return *milliseconds = 1.0f, cudaSuccess;
}
EXPORT void books_driver_launch(void* stream) {
  counters[books::kLaunches]++;
  note("kernel\t%p\tcompiled", stream);
}
