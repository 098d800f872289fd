/* A scripted libnvidia-ml.so.1, for the real pynvml bindings on a machine without a GPU.
 *
 * NVML_STUB_SCRIPT names a text file of lines "<key> <value>", read again at every call, so that a test (or another
 * process) changes the GPU under a running program; replace the file atomically. Keys:
 *
 *   count                     number of GPUs (1)
 *   error.<function>          NVML return code of a function, on every device
 *   <device>.error.<function> the same on one device
 *   <device>.delay_ms.<function>  the function blocks this long first
 *   <device>.<quantity>       a value, see the functions below
 *
 * A device is a GPU's index, or "mig<index>" for the one MIG slice that a GPU has when "mig<index>.uuid" is set.
 * Types, constants and struct layouts are those of nvml.h; only what swiftcruise uses is here.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_DEVICES 8
#define MAX_PROCESSES 64
#define NOT_AVAILABLE (~0ULL)

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    ARGUMENT_VERSION_MISMATCH = 25,
};

typedef struct device {
    char name[16];
    int index;
    unsigned limit_mw; /* the power limit that was set, 0 before */
} *device_t;

static struct device gpus[MAX_DEVICES], slices[MAX_DEVICES];
static int initialized;
static char script_path[4096];
static __thread char script[16384];

/* ---- the script ---- */

static void load_script(void) {
    script[0] = '\n';
    int file = open(script_path, O_RDONLY);
    ssize_t length = file < 0 ? 0 : read(file, script + 1, sizeof script - 2);
    if (file >= 0) close(file);
    script[length > 0 ? length + 1 : 1] = 0;
}

/* The text after "<device>.<key> ", NULL if the script has no such line. */
static const char *find(device_t device, const char *key) {
    char line[256];
    if (device)
        snprintf(line, sizeof line, "\n%s.%s ", device->name, key);
    else
        snprintf(line, sizeof line, "\n%s ", key);
    const char *found = strstr(script, line);
    return found ? found + strlen(line) : NULL;
}

static double number(device_t device, const char *key, double fallback) {
    const char *text = find(device, key);
    return text ? strtod(text, NULL) : fallback;
}

static void copy_text(device_t device, const char *key, const char *fallback, char *out, unsigned size) {
    const char *text = find(device, key);
    if (!text) text = fallback;
    snprintf(out, size, "%.*s", (int)strcspn(text, "\n"), text);
}

/* What every function does first: read the script, block, fail. */
static int enter(device_t device, const char *function) {
    char key[128];
    load_script();
    snprintf(key, sizeof key, "delay_ms.%s", function);
    double delay_ms = device ? number(device, key, 0) : 0;
    if (delay_ms > 0) {
        struct timespec delay = {(time_t)(delay_ms / 1e3), (long)(1e6 * (delay_ms - 1e3 * (time_t)(delay_ms / 1e3)))};
        nanosleep(&delay, NULL);
    }
    if (!initialized && strcmp(function, "nvmlInitWithFlags")) return UNINITIALIZED;
    snprintf(key, sizeof key, "error.%s", function);
    double everywhere = number(NULL, key, SUCCESS);
    return (int)(device ? number(device, key, everywhere) : everywhere);
}

#define ENTER(device)                          \
    do {                                       \
        int code_ = enter(device, __func__);   \
        if (code_ != SUCCESS) return code_;    \
    } while (0)

/* ---- library ---- */

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    const char *path = getenv("NVML_STUB_SCRIPT");
    snprintf(script_path, sizeof script_path, "%s", path ? path : "");
    ENTER(NULL);
    for (int i = 0; i < MAX_DEVICES; i++) {
        snprintf(gpus[i].name, sizeof gpus[i].name, "%d", i);
        snprintf(slices[i].name, sizeof slices[i].name, "mig%d", i);
        gpus[i].index = slices[i].index = i;
    }
    initialized++;
    return SUCCESS;
}

int nvmlShutdown(void) {
    ENTER(NULL);
    initialized--;
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    static __thread char text[32];
    snprintf(text, sizeof text, "stub error %d", code);
    return text;
}

/* For tests: how many nvmlInit await their nvmlShutdown; and a fresh start. */
int stub_open_count(void) { return initialized; }
void stub_reset(void) {
    initialized = 0;
    memset(gpus, 0, sizeof gpus);
}

/* ---- finding devices ---- */

int nvmlDeviceGetCount_v2(unsigned *count) {
    ENTER(NULL);
    *count = (unsigned)number(NULL, "count", 1);
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t *device) {
    ENTER(NULL);
    if (index >= (unsigned)number(NULL, "count", 1)) return INVALID_ARGUMENT;
    *device = &gpus[index];
    return SUCCESS;
}

int nvmlDeviceGetUUID(device_t device, char *out, unsigned size) {
    ENTER(device);
    char fallback[64];
    snprintf(fallback, sizeof fallback, "GPU-%08d-0000-0000-0000-000000000000", device->index);
    copy_text(device, "uuid", fallback, out, size);
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, device_t *device) {
    ENTER(NULL);
    char own[96];
    for (int i = 0; i < (int)number(NULL, "count", 1); i++) {
        device_t candidates[] = {&gpus[i], &slices[i]};
        for (int j = 0; j < 2; j++) {
            if (nvmlDeviceGetUUID(candidates[j], own, sizeof own) == SUCCESS && !strcmp(own, uuid)) {
                *device = candidates[j];
                return SUCCESS;
            }
        }
    }
    return NOT_FOUND;
}

int nvmlDeviceIsMigDeviceHandle(device_t device, unsigned *is_mig) {
    ENTER(device);
    *is_mig = device >= slices && device < slices + MAX_DEVICES;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(device_t device, unsigned *count) {
    ENTER(device);
    *count = 1;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(device_t device, unsigned index, device_t *slice) {
    ENTER(device);
    if (index > 0 || !find(&slices[device->index], "uuid")) return NOT_FOUND;
    *slice = &slices[device->index];
    return SUCCESS;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device_t slice, device_t *device) {
    ENTER(slice);
    *device = &gpus[slice->index];
    return SUCCESS;
}

/* ---- quantities ---- */

int nvmlDeviceGetUtilizationRates(device_t device, unsigned *rates /* gpu, memory */) {
    ENTER(device);
    rates[0] = (unsigned)number(device, "utilization", 0);
    rates[1] = 0;
    return SUCCESS;
}

typedef struct {
    unsigned long long total, free, used;
} memory_v1;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} memory_v2;

int nvmlDeviceGetMemoryInfo_v2(device_t device, memory_v2 *memory) {
    ENTER(device);
    if (memory->version != (sizeof *memory | 2 << 24)) return ARGUMENT_VERSION_MISMATCH;
    memory->total = (unsigned long long)number(device, "memory_total", 80e9);
    memory->reserved = (unsigned long long)number(device, "memory_reserved", 0);
    memory->used = (unsigned long long)number(device, "memory_used", 0);
    memory->free = memory->total - memory->reserved - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(device_t device, memory_v1 *memory) {
    ENTER(device);
    memory->total = (unsigned long long)number(device, "memory_total", 80e9);
    memory->used =
        (unsigned long long)(number(device, "memory_used", 0) + number(device, "memory_reserved", 0));
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(device_t device, unsigned *milliwatts) {
    ENTER(device);
    *milliwatts = (unsigned)(long long)(1e3 * number(device, "power_w", 0)); /* negative wraps, as in real drivers */
    return SUCCESS;
}

int nvmlDeviceGetTotalEnergyConsumption(device_t device, unsigned long long *millijoules) {
    ENTER(device);
    *millijoules = (unsigned long long)(1e3 * number(device, "energy_j", 0));
    return SUCCESS;
}

int nvmlDeviceGetTemperature(device_t device, int sensor, unsigned *celsius) {
    (void)sensor;
    ENTER(device);
    *celsius = (unsigned)number(device, "temperature_c", 0);
    return SUCCESS;
}

int nvmlDeviceGetClockInfo(device_t device, int domain, unsigned *mhz) {
    ENTER(device);
    if (domain != 1) return INVALID_ARGUMENT; /* 1 = SM */
    *mhz = (unsigned)number(device, "clock_mhz", 0);
    return SUCCESS;
}

int nvmlDeviceGetMaxClockInfo(device_t device, int domain, unsigned *mhz) {
    ENTER(device);
    if (domain != 1) return INVALID_ARGUMENT;
    *mhz = (unsigned)number(device, "maximum_clock_mhz", 2000);
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(device_t device, unsigned long long *reasons) {
    ENTER(device);
    *reasons = (unsigned long long)number(device, "clock_reasons", 0);
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(device_t device, unsigned long long *reasons) {
    ENTER(device);
    *reasons = (unsigned long long)number(device, "clock_reasons", 0);
    return SUCCESS;
}

typedef struct {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
} process;

/* "<device>.processes pid:bytes,pid:bytes"; without ":bytes" the memory is not available. */
int nvmlDeviceGetComputeRunningProcesses_v3(device_t device, unsigned *count, process *out) {
    ENTER(device);
    process found[MAX_PROCESSES];
    unsigned n = 0;
    const char *text = find(device, "processes");
    while (text && n < MAX_PROCESSES) {
        char *end;
        found[n] = (process){.pid = (unsigned)strtoul(text, &end, 10), .memory = NOT_AVAILABLE};
        if (end == text) break;
        if (*end == ':') found[n].memory = strtoull(end + 1, &end, 10);
        n++;
        text = *end == ',' ? end + 1 : NULL;
    }
    unsigned capacity = *count;
    *count = n;
    if (capacity < n) return INSUFFICIENT_SIZE;
    if (n) memcpy(out, found, n * sizeof *found);
    return SUCCESS;
}

/* ---- power limit ---- */

int nvmlDeviceGetPowerManagementLimit(device_t device, unsigned *milliwatts) {
    ENTER(device);
    *milliwatts = device->limit_mw ? device->limit_mw : (unsigned)(1e3 * number(device, "power_limit_w", 700));
    return SUCCESS;
}

int nvmlDeviceGetEnforcedPowerLimit(device_t device, unsigned *milliwatts) {
    ENTER(device);
    *milliwatts = device->limit_mw ? device->limit_mw : (unsigned)(1e3 * number(device, "power_limit_w", 700));
    return SUCCESS;
}

int nvmlDeviceGetPowerManagementLimitConstraints(device_t device, unsigned *low, unsigned *high) {
    ENTER(device);
    *low = (unsigned)(1e3 * number(device, "power_limit_min_w", 200));
    *high = (unsigned)(1e3 * number(device, "power_limit_max_w", 700));
    return SUCCESS;
}

int nvmlDeviceSetPowerManagementLimit(device_t device, unsigned milliwatts) {
    ENTER(device);
    if (milliwatts < 1e3 * number(device, "power_limit_min_w", 200) ||
        milliwatts > 1e3 * number(device, "power_limit_max_w", 700))
        return INVALID_ARGUMENT;
    device->limit_mw = milliwatts;
    return SUCCESS;
}
