// cuBLAS and NCCL that count: products with their sizes, collectives with their buffers and communicators.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <map>

#include "books.h"

using books::counters;
using books::note;

// --- cuBLAS: a handle is memory, every product one launch on the handle's stream

static thread_local cudaStream_t blas_stream;
static int product(const char* what, cudaStream_t stream) {
  counters[books::kLaunches]++;
  note("gemm\t%p\t%s", (void*)stream, what);
  return 0;
}
static int sized(const char* what, int m, int n, int k) {
  char text[80];
  std::snprintf(text, sizeof text, "%s %dx%dx%d", what, m, n, k);
  return product(text, blas_stream);
}
static int make_handle(void** handle) { return *handle = std::calloc(1, 64), 0; }
#define SUCCEEDS(name) \
  EXPORT int name(...) { return 0; }

EXPORT int cublasCreate_v2(void** handle) { return make_handle(handle); }
EXPORT int cublasSetStream_v2(void*, cudaStream_t stream) { return blas_stream = stream, 0; }
EXPORT int cublasGetMathMode(void*, int* mode) { return *mode = 0, 0; }
EXPORT int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0, 0; }
SUCCEEDS(cublasDestroy_v2)
SUCCEEDS(cublasSetWorkspace_v2)
SUCCEEDS(cublasSetMathMode)
SUCCEEDS(cublasSetPointerMode_v2)
EXPORT int cublasGemmEx(void*, int, int, int m, int n, int k, ...) { return sized("gemm", m, n, k); }
EXPORT int cublasGemmStridedBatchedEx(void*, int, int, int m, int n, int k, ...) { return sized("batched", m, n, k); }
EXPORT int cublasSgemm_v2(void*, int, int, int m, int n, int k, ...) { return sized("float32", m, n, k); }
EXPORT int cublasDgemm_v2(void*, int, int, int m, int n, int k, ...) { return sized("float64", m, n, k); }
EXPORT int cublasSgemmStridedBatched(void*, ...) { return product("batched", blas_stream); }
EXPORT int cublasDgemmStridedBatched(void*, ...) { return product("batched", blas_stream); }
EXPORT int cublasSgemv_v2(void*, ...) { return product("gemv", blas_stream); }
EXPORT int cublasDgemv_v2(void*, ...) { return product("gemv", blas_stream); }
EXPORT int cublasDotEx(void*, ...) { return product("dot", blas_stream); }
EXPORT int cublasSdot_v2(void*, ...) { return product("dot", blas_stream); }
EXPORT int cublasDdot_v2(void*, ...) { return product("dot", blas_stream); }
EXPORT int cublasLtCreate(void** handle) { return make_handle(handle); }
EXPORT int cublasLtMatmulDescCreate(void** handle, ...) { return make_handle(handle); }
EXPORT int cublasLtMatrixLayoutCreate(void** handle, ...) { return make_handle(handle); }
EXPORT int cublasLtMatmulPreferenceCreate(void** handle) { return make_handle(handle); }
SUCCEEDS(cublasLtMatmulDescDestroy)
SUCCEEDS(cublasLtMatmulDescSetAttribute)
SUCCEEDS(cublasLtMatrixLayoutDestroy)
SUCCEEDS(cublasLtMatrixLayoutSetAttribute)
SUCCEEDS(cublasLtMatmulPreferenceDestroy)
SUCCEEDS(cublasLtMatmulPreferenceSetAttribute)
EXPORT int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* results, int* number) {
  std::memset(results, 0, 96);
  return *number = 1, 0;
}
EXPORT int cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*,
                          void*, void*, const void*, void*, size_t, cudaStream_t stream) {
  return product("lt", stream);
}

// --- NCCL: a communicator is its number of ranks

static const int kBytesOf[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // in the order of ncclDataType_t
struct Communicator {
  int ranks, rank;
};
static auto& communicators = *new std::map<void*, Communicator>;
struct Id {
  char bytes[128];
};

// The start of ncclConfig_t, of which a communicator's trace has the most CTAs.
struct Config {
  size_t size;
  unsigned magic, version;
  int blocking, cluster_size, min_ctas, max_ctas;
};

static int open(void** handle, int ranks, int rank, const void* config = nullptr) {
  *handle = std::malloc(64);
  {
    std::lock_guard<std::mutex> guard(books::mutex);
    communicators[*handle] = {ranks, rank};
  }
  counters[books::kCommunicators]++;
  note("communicator\t%p\t%d\t%d", *handle, ranks, config ? static_cast<const Config*>(config)->max_ctas : 0);
  return 0;
}
// The handle's memory is not given back, so that no later communicator is taken for this one.
static int close(void* handle) { return note("closed\t%p", handle), 0; }
static int transfer(const char* what, const void* from, size_t sent, void* to, size_t received, int type, void* handle,
                    cudaStream_t stream) {
  counters[books::kCollectives]++;
  note("nccl\t%p\t%s\t%p\t%zu\t%p\t%zu\t%p\t%d", (void*)stream, what, from, sent * kBytesOf[type], to,
       received * kBytesOf[type], handle, communicators[handle].ranks);
  return 0;
}
static int ranks_of(void* handle) { return communicators[handle].ranks; }

EXPORT int ncclGetVersion(int* version) { return *version = 22907, 0; }
EXPORT const char* ncclGetErrorString(int) { return "an error of the NCCL that sends nothing"; }
EXPORT const char* ncclGetLastError(void*) { return ""; }
EXPORT int ncclGetUniqueId(void* id) { return std::memset(id, 7, sizeof(Id)), 0; }
EXPORT int ncclCommInitRank(void** handle, int ranks, Id, int rank) { return open(handle, ranks, rank); }
EXPORT int ncclCommInitRankConfig(void** handle, int ranks, Id, int rank, void* config) {
  return open(handle, ranks, rank, config);
}
EXPORT int ncclCommInitRankScalable(void** handle, int ranks, int rank, int, void*, void* config) {
  return open(handle, ranks, rank, config);
}
EXPORT int ncclCommSplit(void* whole, int, int rank, void** handle, void*) { return open(handle, ranks_of(whole), rank); }
// A peer is lost: its messages never come, and every communicator says so (6 is ncclRemoteError).
static std::atomic<bool> is_peer_lost{false};
EXPORT void books_lose_peer() { is_peer_lost = books::hangs = true; }
EXPORT int ncclCommGetAsyncError(void*, int* error) { return *error = is_peer_lost ? 6 : 0, 0; }
// An abort ends the kernels, and leaves what is in their buffers.
EXPORT int ncclCommAbort(void* handle) { return books::hangs = false, close(handle); }
EXPORT int ncclCommCount(void* handle, int* number) { return *number = ranks_of(handle), 0; }
EXPORT int ncclCommUserRank(void* handle, int* rank) { return *rank = communicators[handle].rank, 0; }
SUCCEEDS(ncclCommFinalize)
EXPORT int ncclCommDestroy(void* handle) { return close(handle); }
SUCCEEDS(ncclGroupStart)
SUCCEEDS(ncclGroupEnd)
EXPORT int ncclAllReduce(const void* from, void* to, size_t n, int type, int, void* handle, cudaStream_t stream) {
  return transfer("all_reduce", from, n, to, n, type, handle, stream);
}
EXPORT int ncclBroadcast(const void* from, void* to, size_t n, int type, int, void* handle, cudaStream_t stream) {
  return transfer("broadcast", from, n, to, n, type, handle, stream);
}
EXPORT int ncclBcast(void* buffer, size_t n, int type, int, void* handle, cudaStream_t stream) {
  return transfer("broadcast", buffer, n, buffer, n, type, handle, stream);
}
EXPORT int ncclReduceScatter(const void* from, void* to, size_t n, int type, int, void* handle, cudaStream_t stream) {
  return transfer("reduce_scatter", from, n * ranks_of(handle), to, n, type, handle, stream);
}
EXPORT int ncclAllGather(const void* from, void* to, size_t n, int type, void* handle, cudaStream_t stream) {
  return transfer("all_gather", from, n, to, n * ranks_of(handle), type, handle, stream);
}
EXPORT int ncclAlltoAll(const void* from, void* to, size_t n, int type, void* handle, cudaStream_t stream) {
  return transfer("all_to_all", from, n * ranks_of(handle), to, n * ranks_of(handle), type, handle, stream);
}
EXPORT int ncclSend(const void* from, size_t n, int type, int, void* handle, cudaStream_t stream) {
  return transfer("send", from, n, nullptr, 0, type, handle, stream);
}
EXPORT int ncclRecv(void* to, size_t n, int type, int, void* handle, cudaStream_t stream) {
  return transfer("recv", nullptr, 0, to, n, type, handle, stream);
}
