/* A meter and a limit for torch's CPU allocator, preloaded into a real training (LD_PRELOAD; glibc).
 *
 * torch takes all CPU tensors from posix_memalign. The meter counts those blocks, and only those, as a GPU's allocator
 * counts tensors; where one would exceed the budget, less what a neighbour holds, posix_memalign fails and torch raises
 * its own error. Counts and limits lie in the file that ALLOCATOR_METER names, mapped shared: other processes read
 * them and change the limits at any time. Processes that map the same file share its budget, as they would share a GPU.
 *
 * A counted block carries a header right before the address that its owner sees, where glibc keeps the size of its own
 * blocks: no size looks like MARK, so that `free` knows exactly which blocks were counted, without a table.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MARK 0xa110ca7ed0b10c65ULL
#define SMALL 4096 /* below it nothing is refused: allocators serve small blocks from what they hold already */

extern void *__libc_memalign(size_t alignment, size_t size);
extern void *__libc_realloc(void *block, size_t size);
extern void __libc_free(void *block);

typedef _Atomic int64_t count_t;

/* The file; `_Control` in allocator_meter.py is the same. Bytes, except refusals (a count); a budget of 0 is none. */
struct control {
    count_t live, peak, budget, neighbour, refusals;
};

struct header {
    void *start; /* of the block as glibc knows it */
    uint64_t size;
    uint64_t unused; /* keeps the mark next to the block, and the block aligned */
    _Atomic uint64_t mark;
};

static struct control private_control; /* of a process that takes no part */
static struct control *_Atomic control = &private_control;
static count_t own; /* live bytes of this process */

/* ---- counting ---- */

static int take(int64_t size) {
    struct control *c = control;
    int64_t live = c->live, peak;
    do {
        if (c->budget > 0 && size >= SMALL && live + size + c->neighbour > c->budget) {
            c->refusals++;
            return 0;
        }
    } while (!atomic_compare_exchange_weak(&c->live, &live, live + size));
    peak = c->peak;
    while (live + size > peak && !atomic_compare_exchange_weak(&c->peak, &peak, live + size)) {}
    own += size;
    return 1;
}

static void give_back(int64_t size) {
    control->live -= size;
    own -= size;
}

static struct header *header_of(void *block) {
    struct header *header = (struct header *)block - 1;
    return atomic_load_explicit(&header->mark, memory_order_relaxed) == MARK ? header : NULL;
}

/* ---- what is put in glibc's place ---- */

int posix_memalign(void **out, size_t alignment, size_t size) {
    if (alignment % sizeof(void *) || !alignment || alignment & (alignment - 1)) return EINVAL;
    size_t before = alignment > sizeof(struct header) ? alignment : sizeof(struct header);
    if (size > PTRDIFF_MAX - before || !take((int64_t)size)) return ENOMEM;
    char *start = __libc_memalign(before, before + size);
    if (!start) {
        give_back((int64_t)size);
        return ENOMEM;
    }
    *out = start + before;
    struct header *header = (struct header *)*out - 1;
    header->start = start;
    header->size = size;
    header->mark = MARK;
    return 0;
}

void free(void *block) {
    struct header *header = block ? header_of(block) : NULL;
    if (!header) {
        __libc_free(block);
        return;
    }
    header->mark = 0;
    give_back((int64_t)header->size);
    __libc_free(header->start);
}

void *realloc(void *block, size_t size) {
    struct header *header = block ? header_of(block) : NULL;
    if (!header) return __libc_realloc(block, size);
    void *moved = size ? malloc(size) : NULL; /* as glibc's, it keeps no alignment: the new block is an ordinary one */
    if (size && !moved) return NULL;
    if (size) memcpy(moved, block, size < header->size ? size : header->size);
    free(block);
    return moved;
}

void *reallocarray(void *block, size_t count, size_t size) {
    size_t total;
    if (__builtin_mul_overflow(count, size, &total)) {
        errno = ENOMEM;
        return NULL;
    }
    return realloc(block, total);
}

size_t malloc_usable_size(void *block) {
    static size_t (*_Atomic original)(void *);
    struct header *header = block ? header_of(block) : NULL;
    if (header) return header->size;
    if (!original) original = (size_t(*)(void *))dlsym(RTLD_NEXT, "malloc_usable_size");
    return original(block);
}

/* ---- beginning and end of a process ---- */

/* A forked child (a loader worker) holds copies of its parent's blocks and takes no part. */
static void leave(void) { control = &private_control; }

__attribute__((constructor)) static void join(void) {
    const char *path = getenv("ALLOCATOR_METER");
    int file = path ? open(path, O_RDWR) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED) return;
    pthread_atfork(NULL, NULL, leave);
    own = 0;
    control = mapped;
}

__attribute__((destructor)) static void end(void) {
    control->live -= own;
    leave();
}
