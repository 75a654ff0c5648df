/* clock.c: a host's wall clock that can be set, without any other host's noticing.
 *
 * Decides:   nothing. It adds what the mapped file says (nanoseconds, signed) to the wall clock of the process it is
 *            preloaded into.
 * Flow:      the lab writes the file -> clock_gettime(CLOCK_REALTIME) jumps, as it does when a person or a time server
 *            sets it.
 * Invariants: CLOCK_MONOTONIC and CLOCK_BOOTTIME stay as they are: the kernel never lets them jump either.
 * Source:    clock_gettime(2), ld.so(8). A time namespace cannot do this: it has offsets of the two clocks that do not jump.
 * Not here:  programs that ask the kernel by themselves instead of the C library.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *offset_ns;
static int (*real_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void find(void)
{
    const char *file = getenv("DUNLIN_LAB_CLOCK");
    int fd = file ? open(file, O_RDONLY | O_CLOEXEC) : -1;

    real_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    if (fd < 0)
        return;
    void *at = mmap(NULL, sizeof *offset_ns, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (at != MAP_FAILED)
        offset_ns = at;
}

int clock_gettime(clockid_t which, struct timespec *at)
{
    int failed = real_gettime(which, at);

    if (!failed && offset_ns && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) {
        int64_t ns = (int64_t)at->tv_sec * 1000000000 + at->tv_nsec + *offset_ns;
        at->tv_sec = ns / 1000000000;
        at->tv_nsec = ns % 1000000000;
    }
    return failed;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone)
{
    struct timespec now;

    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now))
        return -1;
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    if (at)
        *at = now.tv_sec;
    return now.tv_sec;
}
