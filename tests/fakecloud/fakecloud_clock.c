/* A wall clock that one simulated host can be given, preloaded into all its processes by /etc/ld.so.preload.

   libfaketime would be the usual choice, but the 0.9.10 of Debian 12 lets Python's time.sleep() fail with EINVAL
   (clock_nanosleep on the monotonic clock) and ends programs that change their user.

   STEPS is a shared table of clock steps: from the real time `since` on, the clock is `offset` ahead, both in ns.
   Times that programs read are moved by the offset; absolute waits on the wall clock are moved back; times of files
   are moved by the offset that held when they were written. Monotonic clocks are left alone, as by a real step. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define STEPS "/var/lib/fakecloud-clock"
#define COUNT 64
#define SECOND 1000000000LL
#define REAL(name) static __typeof__(name) *real; if (!real) real = (__typeof__(real))dlsym(RTLD_NEXT, #name)

struct step { int64_t since, offset; };
static const volatile struct step *steps;

__attribute__((constructor)) static void map_steps(void)
{
    int saved = errno, fd = open(STEPS, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        void *p = mmap(NULL, COUNT * sizeof(struct step), PROT_READ, MAP_SHARED, fd, 0);
        if (p != MAP_FAILED) steps = p;
        close(fd);
    }
    errno = saved;
}

/* The offset in force at a moment of the real clock. Steps are in order; an unused one has since 0. */
static int64_t offset_at(int64_t real_ns)
{
    int64_t offset = 0;
    for (int i = 0; steps && i < COUNT && steps[i].since && steps[i].since <= real_ns; i++) offset = steps[i].offset;
    return offset;
}

static int64_t offset_now(void) { return offset_at(INT64_MAX); }

static void add(struct timespec *t, int64_t ns)
{
    int64_t total = t->tv_sec * SECOND + t->tv_nsec + ns;
    if (total < 0) total = 0;
    t->tv_sec = total / SECOND;
    t->tv_nsec = total % SECOND;
}

static int is_wall(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI; }

int clock_gettime(clockid_t clock, struct timespec *t)
{
    REAL(clock_gettime);
    int result = real(clock, t);
    if (!result && is_wall(clock)) add(t, offset_now());
    return result;
}

time_t time(time_t *out)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (out) *out = t.tv_sec;
    return t.tv_sec;
}

int gettimeofday(struct timeval *restrict v, void *restrict zone)
{
    struct timespec t;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &t);
    v->tv_sec = t.tv_sec;
    v->tv_usec = t.tv_nsec / 1000;
    return 0;
}

/* Waits until a moment: the kernel is given it on its own clock. */

static const struct timespec *back(const struct timespec *until, struct timespec *room)
{
    if (!until) return NULL; /* a futex without a deadline */
    *room = *until;
    add(room, -offset_now());
    return room;
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *t, struct timespec *left)
{
    REAL(clock_nanosleep);
    struct timespec room;
    return real(clock, flags, is_wall(clock) && (flags & TIMER_ABSTIME) ? back(t, &room) : t, left);
}

int pthread_cond_timedwait(pthread_cond_t *restrict c, pthread_mutex_t *restrict m, const struct timespec *restrict t)
{
    REAL(pthread_cond_timedwait);
    struct timespec room;
    /* A condition variable does not tell its clock, but a host's monotonic clock began at its boot. */
    return real(c, m, t->tv_sec > 1000000000 ? back(t, &room) : t);
}

int pthread_cond_clockwait(pthread_cond_t *c, pthread_mutex_t *m, clockid_t clock, const struct timespec *t)
{
    REAL(pthread_cond_clockwait);
    struct timespec room;
    return real(c, m, clock, is_wall(clock) ? back(t, &room) : t);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict m, const struct timespec *restrict t)
{
    REAL(pthread_mutex_timedlock);
    struct timespec room;
    return real(m, back(t, &room));
}

int sem_timedwait(sem_t *restrict s, const struct timespec *restrict t)
{
    REAL(sem_timedwait);
    struct timespec room;
    return real(s, back(t, &room));
}

int sem_clockwait(sem_t *restrict s, clockid_t clock, const struct timespec *restrict t)
{
    REAL(sem_clockwait);
    struct timespec room;
    return real(s, clock, is_wall(clock) ? back(t, &room) : t);
}

/* gRPC waits through the bare system call. */
long syscall(long number, ...)
{
    static long (*real)(long, ...);
    if (!real) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    long a[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    struct timespec room;
    if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME)) a[3] = (long)back((const struct timespec *)a[3], &room);
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

/* Times of files. */

static int moved(int result, struct stat *s)
{
    if (!result && steps && steps[0].since) {
        struct timespec *times[] = {&s->st_atim, &s->st_mtim, &s->st_ctim};
        for (int i = 0; i < 3; i++) add(times[i], offset_at(times[i]->tv_sec * SECOND + times[i]->tv_nsec));
    }
    return result;
}

int stat(const char *restrict path, struct stat *restrict s) { REAL(stat); return moved(real(path, s), s); }
int lstat(const char *restrict path, struct stat *restrict s) { REAL(lstat); return moved(real(path, s), s); }
int fstat(int fd, struct stat *s) { REAL(fstat); return moved(real(fd, s), s); }
int fstatat(int dir, const char *restrict path, struct stat *restrict s, int flags)
{
    REAL(fstatat);
    return moved(real(dir, path, s, flags), s);
}

/* The names that programs built for large files know them by; on 64-bit machines the structures are the same. */
int stat64(const char *restrict path, struct stat64 *restrict s) { return stat(path, (struct stat *)s); }
int lstat64(const char *restrict path, struct stat64 *restrict s) { return lstat(path, (struct stat *)s); }
int fstat64(int fd, struct stat64 *s) { return fstat(fd, (struct stat *)s); }
int fstatat64(int dir, const char *restrict path, struct stat64 *restrict s, int flags)
{
    return fstatat(dir, path, (struct stat *)s, flags);
}

int statx(int dir, const char *restrict path, int flags, unsigned mask, struct statx *restrict s)
{
    REAL(statx);
    int result = real(dir, path, flags, mask, s);
    if (!result && steps && steps[0].since) {
        struct statx_timestamp *times[] = {&s->stx_atime, &s->stx_mtime, &s->stx_ctime, &s->stx_btime};
        for (int i = 0; i < 4; i++) {
            struct timespec t = {times[i]->tv_sec, times[i]->tv_nsec};
            add(&t, offset_at(t.tv_sec * SECOND + t.tv_nsec));
            times[i]->tv_sec = t.tv_sec;
            times[i]->tv_nsec = t.tv_nsec;
        }
    }
    return result;
}
