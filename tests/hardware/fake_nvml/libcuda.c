/* A libcuda.so.1 that counts the devices whose 32 hexadecimal digits FAKE_CUDA lists, with commas between them.
 *
 * For a process with a mask, it counts those in FAKE_CUDA_MASKED.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS, INVALID_VALUE, NO_DEVICE = 100 };

static const char *devices(void) {
    const char *order = getenv("CUDA_DEVICE_ORDER");
    if (getenv("CUDA_VISIBLE_DEVICES")) return getenv("FAKE_CUDA_MASKED");
    return order && !strcmp(order, "FASTEST_FIRST") ? getenv("FAKE_CUDA") : NULL;
}

int cuInit(unsigned flags) { (void)flags; return devices() ? SUCCESS : NO_DEVICE; }
int cuDeviceGetCount(int *out) { *out = (int)((strlen(devices()) + 1) / 33); return SUCCESS; }
int cuDeviceGet(int *out, int index) { *out = index; return SUCCESS; }
int cuDeviceGetUuid_v2(unsigned char *out, int device) {
    const char *digits = devices() + 33 * device;
    int i;
    for (i = 0; i < 16; i++)
        if (sscanf(digits + 2 * i, "%2hhx", out + i) != 1) return INVALID_VALUE;
    return SUCCESS;
}
