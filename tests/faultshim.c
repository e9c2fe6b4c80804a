/* LD_PRELOAD: kill the process before its Nth file operation, as a power cut would.
 * arm(n): count from now on, SIGKILL before operation n (0: only count). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static long armed = -1, done;

void arm(long n) { armed = n; done = 0; }
long operations(void) { return done; }

static void step(void)
{
    if (armed < 0)
        return;
    if (++done == armed)
        kill(getpid(), SIGKILL);
}

#define REAL(type, name, ...) ((type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))

#define OPEN(name)                                                                   \
    int name(const char *path, int flags, ...)                                       \
    {                                                                                \
        va_list list;                                                                \
        va_start(list, flags);                                                       \
        int mode = (flags & O_CREAT) ? va_arg(list, int) : 0;                        \
        va_end(list);                                                                \
        if (flags & (O_CREAT | O_WRONLY | O_RDWR))                                   \
            step();                                                                  \
        return REAL(int, name, const char *, int, ...)(path, flags, mode);           \
    }
OPEN(open)
OPEN(open64)

ssize_t write(int fd, const void *data, size_t size) { if (fd > 2) step(); return REAL(ssize_t, write, int, const void *, size_t)(fd, data, size); }
int rename(const char *a, const char *b) { step(); return REAL(int, rename, const char *, const char *)(a, b); }
int unlink(const char *a) { step(); return REAL(int, unlink, const char *)(a); }
int rmdir(const char *a) { step(); return REAL(int, rmdir, const char *)(a); }
int mkdir(const char *a, mode_t m) { step(); return REAL(int, mkdir, const char *, mode_t)(a, m); }
int symlink(const char *a, const char *b) { step(); return REAL(int, symlink, const char *, const char *)(a, b); }
int fsync(int fd) { step(); return REAL(int, fsync, int)(fd); }
int fchmod(int fd, mode_t m) { step(); return REAL(int, fchmod, int, mode_t)(fd, m); }
int chmod(const char *a, mode_t m) { step(); return REAL(int, chmod, const char *, mode_t)(a, m); }
int utimensat(int d, const char *a, const struct timespec t[2], int f) { step(); return REAL(int, utimensat, int, const char *, const struct timespec *, int)(d, a, t, f); }

/* only the process that was armed is killed, not the programs that it starts */
pid_t fork(void)
{
    step();
    pid_t child = REAL(pid_t, fork, void)();
    if (child == 0)
        armed = -1;
    return child;
}
