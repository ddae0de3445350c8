// A stand-in for libcuda: memory is host memory, kernels do nothing, and every call is checked for a current context.
// Built by the tests of `cuda_driver.rs`, which count what is pushed and popped.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
typedef int Code;
enum { OK = 0, INVALID_CONTEXT = 201, REFUSED = 700 };

static _Thread_local void* stack[16];
static _Thread_local int depth = 0;
static int launches = 0, dependent = 0, fails = 0, pageable = 0;
static char *pinned = 0, *pinned_end = 0;
static int context;

EXPORT int fake_depth(void) { return depth; }
EXPORT int fake_launches(void) { return launches; }
EXPORT int fake_dependent(void) { return dependent; }
EXPORT int fake_pageable(void) { return pageable; }
EXPORT void fake_fail(int on) { fails = on; }

#define NEEDS_CONTEXT \
    if (depth == 0 || stack[depth - 1] != &context) return INVALID_CONTEXT; \
    if (fails) return REFUSED;

static int is_pinned(const void* at, size_t bytes) {
    return (char*)at >= pinned && (char*)at + bytes <= pinned_end;
}

EXPORT Code cuInit(unsigned flags) { return flags == 0 ? OK : REFUSED; }
EXPORT Code cuDeviceGetCount(int* count) { *count = 1; return OK; }
EXPORT Code cuDeviceGet(int* device, int number) { *device = number; return OK; }
EXPORT Code cuDeviceGetName(char* name, int length, int device) { strncpy(name, "fake H200", length); return OK; }
EXPORT Code cuDeviceGetAttribute(int* value, int which, int device) {
    *value = which == 75 ? 9 : which == 76 ? 0 : which == 16 ? 132 : which == 97 ? 232448 : -1;
    return OK;
}
EXPORT Code cuDeviceTotalMem_v2(size_t* bytes, int device) { *bytes = 1 << 20; return OK; }
EXPORT Code cuDriverGetVersion(int* version) { *version = 13000; return OK; }
EXPORT Code cuDevicePrimaryCtxRetain(void** to, int device) { *to = &context; return OK; }
EXPORT Code cuCtxPushCurrent_v2(void* pushed) { stack[depth++] = pushed; return OK; }
EXPORT Code cuCtxPopCurrent_v2(void** popped) {
    if (depth == 0) return INVALID_CONTEXT;
    *popped = stack[--depth];
    return OK;
}
EXPORT Code cuMemAlloc_v2(uint64_t* to, size_t bytes) { NEEDS_CONTEXT *to = (uint64_t)malloc(bytes); return OK; }
EXPORT Code cuMemFree_v2(uint64_t at) { NEEDS_CONTEXT free((void*)at); return OK; }
EXPORT Code cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
    NEEDS_CONTEXT pageable += !is_pinned(from, bytes); memcpy((void*)to, from, bytes); return OK;
}
EXPORT Code cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
    NEEDS_CONTEXT pageable += !is_pinned(to, bytes); memcpy(to, (void*)from, bytes); return OK;
}
EXPORT Code cuMemAllocHost_v2(void** to, size_t bytes) {
    NEEDS_CONTEXT *to = pinned = malloc(bytes); pinned_end = pinned + bytes; return OK;
}
EXPORT Code cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
    NEEDS_CONTEXT memcpy((void*)to, (void*)from, bytes); return OK;
}
EXPORT Code cuMemsetD8Async(uint64_t at, unsigned char x, size_t bytes, void* stream) {
    NEEDS_CONTEXT memset((void*)at, x, bytes); return OK;
}
EXPORT Code cuStreamSynchronize(void* stream) { NEEDS_CONTEXT return OK; }
EXPORT Code cuStreamIsCapturing(void* stream, int* status) { NEEDS_CONTEXT *status = stream == (void*)7; return OK; }
EXPORT Code cuStreamCreate(void** stream, unsigned flags) { NEEDS_CONTEXT *stream = malloc(1); return OK; }
EXPORT Code cuStreamBeginCapture_v2(void* stream, int mode) { NEEDS_CONTEXT return OK; }
EXPORT Code cuStreamEndCapture(void* stream, void** graph) { NEEDS_CONTEXT *graph = malloc(1); return OK; }
EXPORT Code cuGraphInstantiateWithFlags(void** to, void* graph, uint64_t flags) { NEEDS_CONTEXT *to = malloc(1); return OK; }
EXPORT Code cuGraphLaunch(void* graph, void* stream) { NEEDS_CONTEXT return OK; }
EXPORT Code cuGraphDestroy(void* graph) { NEEDS_CONTEXT free(graph); return OK; }
EXPORT Code cuGraphExecDestroy(void* graph) { NEEDS_CONTEXT free(graph); return OK; }
EXPORT Code cuModuleLoadData(void** to, const void* image) { NEEDS_CONTEXT *to = &context; return OK; }
EXPORT Code cuModuleGetFunction(void** to, void* module, const char* name) {
    NEEDS_CONTEXT *to = (void*)0x1000; return OK;
}
EXPORT Code cuModuleGetGlobal_v2(uint64_t* to, size_t* bytes, void* module, const char* name) {
    NEEDS_CONTEXT *to = 0; *bytes = 0; return OK;
}
EXPORT Code cuFuncSetAttribute(void* function, int which, int value) { NEEDS_CONTEXT return which == 8 ? OK : REFUSED; }

// As cuda.h declares them.
typedef struct { unsigned id; char pad[4]; union { char pad[64]; int allowed; } value; } Attribute;
typedef struct {
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared;
    void* stream;
    Attribute* attributes;
    unsigned count;
} Config;
EXPORT Code cuLaunchKernelEx(const Config* config, void* function, void** parameters, void** extra) {
    NEEDS_CONTEXT
    if (config->grid_x != 3 || config->grid_y != 2 || config->grid_z != 1 || config->block_x != 64) return REFUSED;
    if (config->shared != 50000 || config->stream != (void*)7 || function != (void*)0x1000 || extra) return REFUSED;
    if (*(uint64_t*)parameters[0] != 42 || parameters[1]) return REFUSED;
    if (config->count == 1 && (config->attributes[0].id != 6 || config->attributes[0].value.allowed != 1)) return REFUSED;
    launches++, dependent += config->count;
    return OK;
}
EXPORT Code cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* at, const uint64_t* dims,
                                   const uint64_t* strides, const unsigned* box, const unsigned* steps, int interleave,
                                   int swizzle, int promotion, int fill) {
    NEEDS_CONTEXT
    if ((uintptr_t)map % 64 || type != 9 || rank != 4 || box[0] != 64 || box[1] != 16 || swizzle != 3) return REFUSED;
    memset(map, 1, 128);
    return OK;
}
EXPORT Code cuEventCreate(void** event, unsigned flags) { NEEDS_CONTEXT *event = malloc(1); return OK; }
EXPORT Code cuEventRecord(void* event, void* stream) { NEEDS_CONTEXT return OK; }
EXPORT Code cuEventSynchronize(void* event) { NEEDS_CONTEXT return OK; }
EXPORT Code cuEventElapsedTime(float* ms, void* start, void* end) { NEEDS_CONTEXT *ms = 1.5f; return OK; }
EXPORT Code cuEventDestroy_v2(void* event) { free(event); return OK; }
EXPORT Code cuGetErrorName(Code code, const char** name) { *name = "CUDA_ERROR_FAKE"; return OK; }
EXPORT Code cuGetErrorString(Code code, const char** text) { *text = "refused by the fake"; return OK; }
