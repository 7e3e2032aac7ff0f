/* libcuda.so.1 as far as torch and Triton ask for it: one device, modules that load, launches that are counted. */
#include <dlfcn.h>

typedef unsigned long long u64;

static void count_launch(void* stream) {
  static void (*count)(void*) = 0;
  if (!count) count = (void (*)(void*))dlsym(RTLD_DEFAULT, "books_driver_launch");
  if (count) count(stream);
}

int cuCtxGetCurrent(void** context) { return *context = (void*)16, 0; }
int cuDeviceGet(int* device, int index) { return *device = 0, 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  switch (attribute) {
    case 1: *value = 1024; break;     /* threads in a block */
    case 8: *value = 49152; break;    /* shared memory of a block */
    case 10: *value = 32; break;      /* threads in a warp */
    case 12: *value = 65536; break;   /* registers of a block */
    case 16: *value = 132; break;     /* multiprocessors */
    case 39: *value = 2048; break;    /* threads of a multiprocessor */
    case 75: *value = 9; break;       /* compute capability */
    case 81: *value = 233472; break;  /* shared memory of a multiprocessor */
    case 97: *value = 232448; break;  /* shared memory that a block may ask for */
    default: *value = 0;
  }
  return 0;
}
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* is_active) { return *flags = 0, *is_active = 1, 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = (void*)16, 0; }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuFuncGetAttribute(int* value, int attribute, void* function) {
  return *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0, 0;
}
int cuGetErrorString(int error, const char** text) { return *text = "an error of the driver that does nothing", 0; }
int cuModuleGetFunction(void** function, void* module, const char* name) { return *function = (void*)48, 0; }
int cuModuleLoadData(void** module, const void* image) { return *module = (void*)32, 0; }
int cuPointerGetAttribute(void* value, int attribute, u64 pointer) { return *(u64*)value = pointer, 0; }

int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** arguments, void** extra) {
  return count_launch(stream), 0;
}
struct launch_config {
  unsigned gx, gy, gz, bx, by, bz, shared;
  void* stream;
};
int cuLaunchKernelEx(const struct launch_config* config, void* function, void** arguments, void** extra) {
  return count_launch(config->stream), 0;
}

#define SUCCEEDS(name) \
  int name() { return 0; }
SUCCEEDS(cuCtxGetLimit)
SUCCEEDS(cuCtxSetCurrent)
SUCCEEDS(cuCtxSetLimit)
SUCCEEDS(cuFuncSetAttribute)
SUCCEEDS(cuFuncSetCacheConfig)
SUCCEEDS(cuLaunchCooperativeKernel)
SUCCEEDS(cuLaunchKernelExHandle)
SUCCEEDS(cuLinkAddData_v2)
SUCCEEDS(cuLinkComplete)
SUCCEEDS(cuLinkCreate_v2)
SUCCEEDS(cuModuleLoad)
SUCCEEDS(cuModuleLoadDataEx)
SUCCEEDS(cuModuleUnload)
SUCCEEDS(cuOccupancyMaxActiveBlocksPerMultiprocessor)
SUCCEEDS(cuOccupancyMaxActiveClusters)
SUCCEEDS(cuPointerGetAttributes)
SUCCEEDS(cuTensorMapEncodeIm2col)
SUCCEEDS(cuTensorMapEncodeTiled)
