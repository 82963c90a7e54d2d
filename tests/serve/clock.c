/* Stands between programs and the clock of their machine (LD_PRELOAD), so that a test can set it for them alone.
 *
 * Their clock is ahead of the machine's by as many seconds as the file says that AHEAD names, a 64-bit integer; it may be
 * changed while they run. As for the kernel, who waits until a time of day waits for that clock, also when it jumps
 * meanwhile. What it has in common with the kernel too: CLOCK_MONOTONIC stays as it is.
 *
 *     cc -shared -fPIC -o clock.so clock.c
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* How soon somebody who waits finds out that the clock has jumped. */
static const long LOOK_NANOSECONDS = 20 * 1000 * 1000;

static const volatile int64_t *ahead;

__attribute__((constructor)) static void find_clock(void)
{
    const char *path = getenv("AHEAD");
    int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    void *content = mmap(NULL, sizeof *ahead, PROT_READ, MAP_SHARED, file, 0);
    if (content == MAP_FAILED)
        abort();
    ahead = content;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && ahead != NULL && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *ahead;
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec time;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &time);
    now->tv_sec = time.tv_sec;
    now->tv_usec = time.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *also)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (also != NULL)
        *also = now.tv_sec;
    return now.tv_sec;
}

static int is_over(const struct timespec *deadline)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec > deadline->tv_sec
        || (now.tv_sec == deadline->tv_sec && now.tv_nsec >= deadline->tv_nsec);
}

/* Of CLOCK_MONOTONIC, which does not jump. */
static struct timespec next_look(void)
{
    struct timespec look;
    clock_gettime(CLOCK_MONOTONIC, &look);
    look.tv_nsec += LOOK_NANOSECONDS;
    look.tv_sec += look.tv_nsec / 1000000000;
    look.tv_nsec %= 1000000000;
    return look;
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline)
{
    do {
        struct timespec look = next_look();
        if (sem_clockwait(semaphore, CLOCK_MONOTONIC, &look) == 0)
            return 0;
    } while (errno == ETIMEDOUT && !is_over(deadline));
    return -1;
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict deadline)
{
    int result;
    do {
        struct timespec look = next_look();
        result = pthread_mutex_clocklock(mutex, CLOCK_MONOTONIC, &look);
    } while (result == ETIMEDOUT && !is_over(deadline));
    return result;
}
