/* A libnvidia-ml.so.1 whose machine is the text file that FAKE_NVML names, a line for each fact:
 *
 *   init CODE                    every init call returns CODE
 *   driver VERSION CUDA          the driver's version, and the newest CUDA that it supports (12040 is 12.4)
 *   refuse FUNCTION CODE         FUNCTION returns CODE: for all GPUs, or below a "gpu" line for that one
 *   gpu UUID                     the lines that follow describe this GPU
 *   name TEXT
 *   memory TOTAL FREE            bytes
 *   capability MAJOR MINOR
 *   speed CORES MHZ
 *   pci DOMAIN BUS DEVICE        hexadecimal
 *   compute MODE                 as nvmlComputeMode_t
 *   process PID BYTES            a process with a compute context; BYTES -1: the driver does not report the memory
 *   ecc VOLATILE AGGREGATE       uncorrectable memory errors since the driver was loaded, and ever
 *   retiring PENDING             1: memory pages wait to be retired
 *   remapped PENDING FAILED      1: rows of memory wait to be replaced; a row could not be replaced
 *   nvlink GPU                   one NVLink to the GPU with that index
 *   ancestor GPU LEVEL           nearest common ancestor with the GPU of that index, as nvmlGpuTopologyLevel_t
 *   mig SLOT UUID TOTAL NAME     the GPU is in MIG mode and has this instance; SLOT -1: it has none
 *
 * "process" below a "mig" line belongs to that instance. If a fact is missing, its function returns NOT_SUPPORTED;
 * without "process", no process uses the GPU.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, UNKNOWN = 999 };
enum { GPUS = 16, PROCESSES = 8, SLOTS = 7, REFUSALS = 32, NO_LEVEL = -1 };

typedef struct Gpu {
    char uuid[96], name[96];
    int has_memory, has_capability, has_speed, has_pci, has_compute, in_mig;
    unsigned long long total, free;
    int major, minor;
    unsigned cores, clock, domain, bus, device;
    int compute, nvlinks[GPUS], levels[GPUS];
    int has_ecc, has_retiring, has_remapped, retiring, remap_pending, remap_failed, users;
    unsigned long long ecc[2], used[PROCESSES];
    unsigned pids[PROCESSES];
    struct Gpu *slots[SLOTS];
} Gpu;

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;

static Gpu gpus[GPUS], *latest;
static struct { int gpu, code; char function[64]; } refusals[REFUSALS];
static int count, refused, init_code = UNINITIALIZED, cuda;
static char driver[96];

static void read_line(const char *line) {
    Gpu *gpu = count ? &gpus[count - 1] : NULL;
    char word[96], uuid[96];
    int number, link;
    unsigned long long total;
    long long used;
    if (sscanf(line, "init %d", &init_code) == 1) return;
    if (sscanf(line, "driver %95s %d", driver, &cuda) == 2) return;
    if (sscanf(line, "refuse %63s %d", word, &number) == 2) {
        refusals[refused].gpu = count - 1;
        refusals[refused].code = number;
        strcpy(refusals[refused++].function, word);
    } else if (sscanf(line, "gpu %95s", word) == 1) {
        latest = gpu = &gpus[count++];
        strcpy(gpu->uuid, word);
        for (number = 0; number < GPUS; number++) gpu->levels[number] = NO_LEVEL;
    } else if (gpu == NULL) {
        return;
    } else if (sscanf(line, "name %95[^\n]", gpu->name) == 1) {
    } else if (sscanf(line, "memory %llu %llu", &gpu->total, &gpu->free) == 2) {
        gpu->has_memory = 1;
    } else if (sscanf(line, "capability %d %d", &gpu->major, &gpu->minor) == 2) {
        gpu->has_capability = 1;
    } else if (sscanf(line, "speed %u %u", &gpu->cores, &gpu->clock) == 2) {
        gpu->has_speed = 1;
    } else if (sscanf(line, "pci %x %x %x", &gpu->domain, &gpu->bus, &gpu->device) == 3) {
        gpu->has_pci = 1;
    } else if (sscanf(line, "compute %d", &gpu->compute) == 1) {
        gpu->has_compute = 1;
    } else if (latest->users < PROCESSES && sscanf(line, "process %d %lld", &number, &used) == 2) {
        latest->pids[latest->users] = number;
        latest->used[latest->users++] = used;
    } else if (sscanf(line, "ecc %llu %llu", &gpu->ecc[0], &gpu->ecc[1]) == 2) {
        gpu->has_ecc = 1;
    } else if (sscanf(line, "retiring %d", &gpu->retiring) == 1) {
        gpu->has_retiring = 1;
    } else if (sscanf(line, "remapped %d %d", &gpu->remap_pending, &gpu->remap_failed) == 2) {
        gpu->has_remapped = 1;
    } else if (sscanf(line, "nvlink %d", &number) == 1) {
        gpu->nvlinks[number]++;
    } else if (sscanf(line, "ancestor %d %d", &number, &link) == 2) {
        gpu->levels[number] = link;
    } else if (sscanf(line, "mig %d", &number) == 1) {
        gpu->in_mig = 1;
        if (number >= 0 && sscanf(line, "mig %*d %95s %llu %95[^\n]", uuid, &total, word) == 3) {
            Gpu *part = calloc(1, sizeof(Gpu));
            strcpy(part->uuid, uuid);
            strcpy(part->name, word);
            part->has_memory = 1;
            part->total = part->free = total;
            latest = gpu->slots[number] = part;
        }
    }
}

int nvmlInitWithFlags(unsigned flags) {
    char line[256];
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    (void)flags;
    count = refused = cuda = driver[0] = 0;
    memset(gpus, 0, sizeof gpus);
    if (file == NULL) return UNKNOWN;
    init_code = SUCCESS;
    while (fgets(line, sizeof line, file)) read_line(line);
    fclose(file);
    return init_code;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) {
    int code = init_code == SUCCESS ? SUCCESS : UNINITIALIZED;
    init_code = UNINITIALIZED;
    return code;
}
const char *nvmlErrorString(int code) { (void)code; return "an error of the fake driver"; }

static int refusal(const Gpu *gpu, const char *function) {
    int i, index = gpu >= gpus && gpu < gpus + GPUS ? (int)(gpu - gpus) : -1;
    if (init_code != SUCCESS) return UNINITIALIZED;
    for (i = 0; i < refused; i++)
        if (!strcmp(refusals[i].function, function) && (refusals[i].gpu == -1 || refusals[i].gpu == index))
            return refusals[i].code;
    return SUCCESS;
}
#define ALLOWED(gpu)                              \
    do {                                          \
        int code = refusal((gpu), __func__);      \
        if (code != SUCCESS) return code;         \
    } while (0)

int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    ALLOWED(NULL);
    snprintf(out, size, "%s", driver);
    return driver[0] ? SUCCESS : NOT_SUPPORTED;
}
int nvmlSystemGetCudaDriverVersion_v2(int *out) { ALLOWED(NULL); *out = cuda; return cuda ? SUCCESS : NOT_SUPPORTED; }
int nvmlDeviceGetCount_v2(unsigned *out) { ALLOWED(NULL); *out = count; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **out) {
    if (index >= (unsigned)count) return INVALID_ARGUMENT;
    ALLOWED(&gpus[index]);
    *out = &gpus[index];
    return SUCCESS;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, Gpu **out) {
    int index, slot;
    ALLOWED(NULL);
    for (index = 0; index < count; index++) {
        if (!strcmp(gpus[index].uuid, uuid)) { *out = &gpus[index]; return SUCCESS; }
        for (slot = 0; slot < SLOTS; slot++)
            if (gpus[index].slots[slot] && !strcmp(gpus[index].slots[slot]->uuid, uuid)) {
                *out = gpus[index].slots[slot];
                return SUCCESS;
            }
    }
    return NOT_FOUND;
}
int nvmlDeviceGetTotalEccErrors(Gpu *gpu, int type, int counter, unsigned long long *out) {
    ALLOWED(gpu);
    if (!gpu->has_ecc) return NOT_SUPPORTED;
    *out = type == 1 ? gpu->ecc[counter] : 0; /* NVML_MEMORY_ERROR_TYPE_UNCORRECTED; NVML_VOLATILE_ECC is 0 */
    return SUCCESS;
}
int nvmlDeviceGetRetiredPagesPendingStatus(Gpu *gpu, int *out) {
    ALLOWED(gpu);
    *out = gpu->retiring;
    return gpu->has_retiring ? SUCCESS : NOT_SUPPORTED;
}
int nvmlDeviceGetUUID(Gpu *gpu, char *out, unsigned size) { ALLOWED(gpu); snprintf(out, size, "%s", gpu->uuid); return SUCCESS; }
int nvmlDeviceGetName(Gpu *gpu, char *out, unsigned size) {
    ALLOWED(gpu);
    if (!gpu->name[0]) return NOT_SUPPORTED;
    snprintf(out, size, "%s", gpu->name);
    return SUCCESS;
}
int nvmlDeviceGetPciInfo_v3(Gpu *gpu, Pci *out) {
    ALLOWED(gpu);
    if (!gpu->has_pci) return NOT_SUPPORTED;
    memset(out, 0, sizeof *out);
    out->domain = gpu->domain;
    out->bus = gpu->bus;
    out->device = gpu->device;
    snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:%02X.0", gpu->domain & 0xffff, gpu->bus & 0xff, gpu->device & 0xff);
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo(Gpu *gpu, unsigned long long *out) {
    ALLOWED(gpu);
    if (!gpu->has_memory) return NOT_SUPPORTED;
    out[0] = gpu->total;
    out[1] = gpu->free;
    out[2] = gpu->total - gpu->free;
    return SUCCESS;
}
int nvmlDeviceGetCudaComputeCapability(Gpu *gpu, int *major, int *minor) {
    ALLOWED(gpu);
    if (!gpu->has_capability) return NOT_SUPPORTED;
    *major = gpu->major;
    *minor = gpu->minor;
    return SUCCESS;
}
int nvmlDeviceGetMaxClockInfo(Gpu *gpu, int type, unsigned *out) {
    ALLOWED(gpu);
    (void)type;
    *out = gpu->clock;
    return gpu->has_speed ? SUCCESS : NOT_SUPPORTED;
}
int nvmlDeviceGetComputeMode(Gpu *gpu, int *out) {
    ALLOWED(gpu);
    *out = gpu->compute;
    return gpu->has_compute ? SUCCESS : NOT_SUPPORTED;
}

typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;
static int list_processes(const Gpu *gpu, unsigned *size, Process *out) {
    unsigned room = *size, index;
    *size = gpu->users;
    if (room < *size) return INSUFFICIENT_SIZE;
    for (index = 0; index < *size; index++) {
        memset(&out[index], 0, sizeof out[index]);
        out[index].pid = gpu->pids[index];
        out[index].used = gpu->used[index];
    }
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Gpu *gpu, unsigned *size, Process *out) { ALLOWED(gpu); return list_processes(gpu, size, out); }
int nvmlDeviceGetRemappedRows(Gpu *gpu, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    ALLOWED(gpu);
    *corrected = *uncorrected = 0;
    *pending = gpu->remap_pending;
    *failed = gpu->remap_failed;
    return gpu->has_remapped ? SUCCESS : NOT_SUPPORTED;
}
int nvmlDeviceGetNumGpuCores(Gpu *gpu, unsigned *out) {
    ALLOWED(gpu);
    *out = gpu->cores;
    return gpu->has_speed ? SUCCESS : NOT_SUPPORTED;
}
int nvmlDeviceGetMigMode(Gpu *gpu, unsigned *current, unsigned *pending) {
    ALLOWED(gpu);
    *current = *pending = gpu->in_mig;
    return SUCCESS;
}
int nvmlDeviceGetMaxMigDeviceCount(Gpu *gpu, unsigned *out) { ALLOWED(gpu); *out = gpu->in_mig ? SLOTS : 0; return SUCCESS; }
int nvmlDeviceGetMigDeviceHandleByIndex(Gpu *gpu, unsigned slot, Gpu **out) {
    ALLOWED(gpu);
    if (slot >= SLOTS || !gpu->slots[slot]) return NOT_FOUND;
    *out = gpu->slots[slot];
    return SUCCESS;
}
int nvmlDeviceGetP2PStatus(Gpu *one, Gpu *other, int capability, int *out) {
    ALLOWED(one);
    /* NVML_P2P_CAPS_INDEX_NVLINK; NVML_P2P_STATUS_OK or _NOT_SUPPORTED */
    *out = capability == 2 && (one->nvlinks[other - gpus] || other->nvlinks[one - gpus]) ? 0 : 5;
    return SUCCESS;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(Gpu *gpu, unsigned link, Pci *out) {
    unsigned last = 0;
    Gpu *peer;
    ALLOWED(gpu);
    for (peer = gpus; peer < gpus + count; peer++)
        if (link < (last += gpu->nvlinks[peer - gpus] + peer->nvlinks[gpu - gpus])) return nvmlDeviceGetPciInfo_v3(peer, out);
    return NOT_SUPPORTED;
}
int nvmlDeviceGetTopologyCommonAncestor(Gpu *one, Gpu *other, int *out) {
    int level = one->levels[other - gpus];
    ALLOWED(one);
    *out = level == NO_LEVEL ? other->levels[one - gpus] : level;
    return *out == NO_LEVEL ? NOT_SUPPORTED : SUCCESS;
}
