/* A driver of two GPUs, of which the test says who is on them and what their memory holds. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { char legacy[16]; unsigned domain, bus, device, pci_id, subsystem; char bus_id[32]; } pci_info;
typedef struct { unsigned long long total, free, used; } memory_info;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process_info;

static const char *uuids[] = {"GPU-aaaa", "GPU-bbbb"};
static int index_of(void *handle) { return (int)(size_t)handle - 1; }

/* How a GPU is: lines of "<index> <name> <value>" in the file FAKE_GPUS, read anew each time. */
static long condition(void *handle, const char *name, long otherwise) {
    const char *path = getenv("FAKE_GPUS");
    FILE *file = path ? fopen(path, "r") : NULL;
    char key[32];
    int gpu;
    long value;
    while (file && fscanf(file, "%d %31s %ld", &gpu, key, &value) == 3)
        if (gpu == index_of(handle) && strcmp(key, name) == 0) otherwise = value;
    if (file) fclose(file);
    return otherwise;
}
/* MIG: GPU instances, each with at most one compute instance; the handle of a MIG device is 1000 and where it is. */
typedef struct { int used, id, profile, compute; } instance;
typedef struct { const char *name; unsigned id, slices, count, megabytes; } mig_profile;
static const mig_profile mig_profiles[] = {
    {"1g.10gb", 19, 1, 7, 9856}, {"2g.20gb", 14, 2, 3, 19968}, {"3g.40gb", 9, 3, 2, 40192}, {0}, {"7g.80gb", 0, 7, 1, 80000},
};
static instance instances[2][7];
static int mig_mode[2], made;
static int is_mig(void *handle) { return (size_t)handle >= 1000 && (size_t)handle < 1200; }
static int parent_of(void *handle) { return ((int)(size_t)handle - 1000) / 100; }
static instance *instance_of(void *handle) { return &instances[parent_of(handle)][((int)(size_t)handle - 1000) % 100]; }
static void *mig_handle(int gpu, int place) { return (void *)(size_t)(1000 + gpu * 100 + place); }
static void mig_uuid(void *handle, char *out, unsigned n) {
    snprintf(out, n, "MIG-%d-%d", parent_of(handle), instance_of(handle)->id);
}

static int lost(void *handle) { return (int)condition(handle, "lost", 0); }

int nvmlInitWithFlags(unsigned flags) { (void)flags; return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { (void)code; return "fake error"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlSystemGetDriverVersion(char *out, unsigned n) { strncpy(out, "999.1", n); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = (void *)(size_t)(index + 1); return lost(*handle);
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    for (int i = 0; i < 2; i++)
        if (strcmp(uuid, uuids[i]) == 0) { *handle = (void *)(size_t)(i + 1); return lost(*handle); }
    for (int i = 0; i < 14; i++) {
        char own[32];
        *handle = mig_handle(i / 7, i % 7);
        mig_uuid(*handle, own, sizeof own);
        if (instance_of(*handle)->compute && strcmp(uuid, own) == 0) return 0;
    }
    return 6;
}
int nvmlDeviceGetUUID(void *handle, char *out, unsigned n) {
    if (is_mig(handle)) mig_uuid(handle, out, n);
    else strncpy(out, uuids[index_of(handle)], n);
    return 0;
}
int nvmlDeviceGetName(void *handle, char *out, unsigned n) {
    if (is_mig(handle)) snprintf(out, n, "Fake H100 MIG %s", mig_profiles[instance_of(handle)->profile].name);
    else strncpy(out, "Fake H100", n);
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, memory_info *out) {
    out->total = is_mig(handle) ? (unsigned long long)mig_profiles[instance_of(handle)->profile].megabytes << 20 : 1ull << 30;
    out->free = out->total; out->used = 0; return 0;
}
int nvmlDeviceGetPciInfo_v3(void *handle, pci_info *out) {
    memset(out, 0, sizeof *out);
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", 0x10 + index_of(handle));
    return 0;
}
int nvmlDeviceGetMinorNumber(void *handle, unsigned *minor) { *minor = 7 - index_of(handle); return 0; }
int nvmlDeviceGetTotalEccErrors(void *handle, int type, int counter, unsigned long long *count) {
    (void)counter;
    *count = condition(handle, type ? "uncorrected" : "corrected", type && index_of(handle) == 1 ? 3 : 0);
    return lost(handle);
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, process_info *out) {
    int busy = getenv("FAKE_BUSY") != NULL && index_of(handle) == 0;
    if (is_mig(handle) && getenv("FAKE_BUSY_MIG")) {
        char own[32];
        mig_uuid(handle, own, sizeof own);
        busy = strcmp(getenv("FAKE_BUSY_MIG"), own) == 0;
    }
    if (busy && *count < 1) { *count = 1; return 7; }
    if (busy) { memset(out, 0, sizeof *out); out->pid = 4242; }
    *count = busy;
    return 0;
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, process_info *out) {
    (void)out; *count = 0; return is_mig(handle) ? 3 : 0;
}

typedef struct { unsigned version, id, p2p, slices, count, sm, copy, decode, encode, jpeg, ofa; unsigned long long mb;
                 char name[96]; } gpu_profile_info;
typedef struct { unsigned version, id, slices, count, sm, copy, decode, encode, jpeg, ofa; char name[96]; } compute_profile_info;
int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    *current = *pending = (unsigned)mig_mode[index_of(handle)];
    return 0;
}
int nvmlDeviceSetMigMode(void *handle, unsigned mode, unsigned *status) {
    *status = getenv("FAKE_MIG_RESET") ? 16 : 0;
    if (!*status) mig_mode[index_of(handle)] = (int)mode;
    return 0;
}
int nvmlDeviceGetGpuInstanceProfileInfoV(void *handle, unsigned number, gpu_profile_info *out) {
    (void)handle;
    if (number >= 5 || !mig_profiles[number].name) return 3;
    out->id = mig_profiles[number].id;
    out->slices = mig_profiles[number].slices;
    out->count = mig_profiles[number].count;
    out->mb = mig_profiles[number].megabytes;
    snprintf(out->name, sizeof out->name, "MIG %s", mig_profiles[number].name);
    return 0;
}
int nvmlDeviceCreateGpuInstance(void *handle, unsigned id, void **out) {
    unsigned slices = 0;
    int gpu = index_of(handle), profile = 0;
    while (mig_profiles[profile].id != id || !mig_profiles[profile].name) profile++;
    for (int i = 0; i < 7; i++) if (instances[gpu][i].used) slices += mig_profiles[instances[gpu][i].profile].slices;
    if (!mig_mode[gpu] || slices + mig_profiles[profile].slices > 7) return 23;
    for (int i = 0; i < 7; i++)
        if (!instances[gpu][i].used) {
            instances[gpu][i] = (instance){1, ++made, profile, 0};
            *out = &instances[gpu][i];
            return 0;
        }
    return 23;
}
int nvmlDeviceGetGpuInstances(void *handle, unsigned id, void **out, unsigned *count) {
    *count = 0;
    for (int i = 0; i < 7; i++) {
        instance *each = &instances[index_of(handle)][i];
        if (each->used && mig_profiles[each->profile].id == id) out[(*count)++] = each;
    }
    return 0;
}
int nvmlGpuInstanceDestroy(instance *each) { if (each->compute) return 19; each->used = 0; return 0; }
int nvmlGpuInstanceGetComputeInstanceProfileInfoV(instance *each, unsigned number, unsigned engine, compute_profile_info *out) {
    (void)engine;
    if (number >= 5 || !mig_profiles[number].name || mig_profiles[number].slices > mig_profiles[each->profile].slices) return 3;
    out->id = number;
    out->slices = mig_profiles[number].slices;
    out->count = 1;
    return 0;
}
int nvmlGpuInstanceCreateComputeInstance(instance *each, unsigned id, void **out) {
    if ((int)id != each->profile) return 2;
    each->compute = 1;
    *out = each;
    return 0;
}
int nvmlGpuInstanceGetComputeInstances(instance *each, unsigned id, void **out, unsigned *count) {
    *count = each->compute && (int)id == each->profile;
    if (*count) out[0] = each;
    return 0;
}
int nvmlComputeInstanceDestroy(instance *each) { each->compute = 0; return 0; }
int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) { (void)handle; *count = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned place, void **out) {
    *out = mig_handle(index_of(handle), (int)place);
    return instance_of(*out)->compute ? 0 : 6;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *handle, void **out) {
    *out = (void *)(size_t)(parent_of(handle) + 1);
    return 0;
}
int nvmlDeviceGetGpuInstanceId(void *handle, unsigned *id) { *id = (unsigned)instance_of(handle)->id; return 0; }
int nvmlDeviceGetComputeInstanceId(void *handle, unsigned *id) { (void)handle; *id = 0; return 0; }

/* FAKE_NVLINK: `direct` joins the two GPUs, `switch` joins both to one; `alone` is a link that leads elsewhere. */
int nvmlDeviceGetNvLinkState(void *handle, unsigned link, unsigned *active) {
    const char *kind = getenv("FAKE_NVLINK");
    if (!kind || link > 1) return 3;
    *active = link == 0 && (strcmp(kind, "alone") != 0 || index_of(handle) == 0);
    return 0;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned link, pci_info *out) {
    const char *kind = getenv("FAKE_NVLINK");
    int bus = strcmp(kind, "direct") == 0 ? 0x10 + 1 - index_of(handle) : 0xA0;
    (void)link;
    memset(out, 0, sizeof *out);
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", bus);
    return 0;
}

typedef struct { void *device; unsigned long long type, data; unsigned gi, ci; } event_data;
typedef struct { unsigned gpu, memory; } utilization;
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *out) {
    (void)sensor; *out = (unsigned)condition(handle, "temperature", 40); return lost(handle);
}
int nvmlDeviceGetTemperatureThreshold(void *handle, int kind, unsigned *out) {
    (void)handle; (void)kind; *out = 90; return 0;
}
int nvmlDeviceGetPowerUsage(void *handle, unsigned *out) {
    *out = (unsigned)condition(handle, "milliwatts", 70500); return lost(handle);
}
int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *out) { (void)handle; *out = 700000; return 0; }
int nvmlDeviceGetUtilizationRates(void *handle, utilization *out) {
    out->gpu = (unsigned)condition(handle, "utilization", 12); out->memory = 0; return 0;
}
int nvmlDeviceGetRemappedRows(void *handle, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                              unsigned *failed) {
    *corrected = *uncorrected = 0;
    *pending = (unsigned)condition(handle, "remap_pending", 0);
    *failed = (unsigned)condition(handle, "remap_failed", 0);
    return 0;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *out) {
    *out = (unsigned long long)condition(handle, "throttle", 0); return 0;
}

/* Errors: lines of "<index> <xid>" appended to the file FAKE_XIDS. */
static long told;
int nvmlEventSetCreate(void **set) { *set = &told; return 0; }
int nvmlEventSetFree(void *set) { (void)set; return 0; }
int nvmlDeviceRegisterEvents(void *handle, unsigned long long types, void *set) {
    (void)handle; (void)types; (void)set; return 0;
}
int nvmlEventSetWait_v2(void *set, event_data *out, unsigned timeout_ms) {
    const char *path = getenv("FAKE_XIDS");
    (void)set;
    for (unsigned waited = 0; waited <= timeout_ms; waited += 5) {
        FILE *file = path ? fopen(path, "r") : NULL;
        int gpu;
        unsigned long long xid;
        if (file && fseek(file, told, SEEK_SET) == 0 && fscanf(file, "%d %llu\n", &gpu, &xid) == 2) {
            told = ftell(file);
            fclose(file);
            memset(out, 0, sizeof *out);
            out->device = (void *)(size_t)(gpu + 1);
            out->type = 8;
            out->data = xid;
            return 0;
        }
        if (file) fclose(file);
        usleep(5000);
    }
    return 10;
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
