/* A driver of two GPUs, of which the test says who is on them and what their memory holds. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char legacy[16]; unsigned domain, bus, device, pci_id, subsystem; char bus_id[32]; } pci_info;
typedef struct { unsigned long long total, free, used; } memory_info;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process_info;

static const char *uuids[] = {"GPU-aaaa", "GPU-bbbb"};
static int index_of(void *handle) { return (int)(size_t)handle - 1; }

int nvmlInitWithFlags(unsigned flags) { (void)flags; return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { (void)code; return "fake error"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlSystemGetDriverVersion(char *out, unsigned n) { strncpy(out, "999.1", n); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)(size_t)(index + 1); return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    for (int i = 0; i < 2; i++)
        if (strcmp(uuid, uuids[i]) == 0) { *handle = (void *)(size_t)(i + 1); return 0; }
    return 6;
}
int nvmlDeviceGetUUID(void *handle, char *out, unsigned n) { strncpy(out, uuids[index_of(handle)], n); return 0; }
int nvmlDeviceGetName(void *handle, char *out, unsigned n) { (void)handle; strncpy(out, "Fake H100", n); return 0; }
int nvmlDeviceGetMemoryInfo(void *handle, memory_info *out) {
    (void)handle; out->total = 1ull << 30; out->free = 1ull << 30; out->used = 0; return 0;
}
int nvmlDeviceGetPciInfo_v3(void *handle, pci_info *out) {
    memset(out, 0, sizeof *out);
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", 0x10 + index_of(handle));
    return 0;
}
int nvmlDeviceGetMinorNumber(void *handle, unsigned *minor) { *minor = 7 - index_of(handle); return 0; }
int nvmlDeviceGetTotalEccErrors(void *handle, int type, int counter, unsigned long long *count) {
    (void)type; (void)counter; *count = index_of(handle) == 1 ? 3 : 0; return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, process_info *out) {
    int busy = getenv("FAKE_BUSY") != NULL && index_of(handle) == 0;
    if (busy && *count < 1) { *count = 1; return 7; }
    if (busy) { memset(out, 0, sizeof *out); out->pid = 4242; }
    *count = busy;
    return 0;
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, process_info *out) {
    (void)handle; (void)out; *count = 0; return 0;
}

static unsigned char *pool;
static size_t taken;
#define POOL (256u << 20)
int cuInit(unsigned flags) { (void)flags; pool = malloc(POOL); memset(pool, 0xAA, POOL); return pool == NULL; }
int cuDeviceGet(int *device, int n) { *device = n; return 0; }
int cuCtxCreate_v2(void **context, unsigned flags, int device) { (void)flags; (void)device; *context = pool; return 0; }
int cuCtxDestroy_v2(void *context) { (void)context; return 0; }
int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { *free_bytes = POOL; *total = POOL; return 0; }
int cuMemAlloc_v2(unsigned long long *pointer, size_t size) {
    if (taken + size > POOL) return 2;
    *pointer = (unsigned long long)(size_t)(pool + taken);
    taken += size;
    return 0;
}
int cuMemsetD8_v2(unsigned long long pointer, unsigned char value, size_t size) {
#ifndef BROKEN
    memset((void *)(size_t)pointer, value, size);
#else
    (void)pointer; (void)value; (void)size;
#endif
    return 0;
}
int cuMemcpyDtoH_v2(void *out, unsigned long long pointer, size_t size) {
    memcpy(out, (void *)(size_t)pointer, size);
    return 0;
}
