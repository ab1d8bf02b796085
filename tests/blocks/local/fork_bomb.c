/* A fork bomb: `fork_bomb KIND NAME END`. Each process starts a new session and forks for as long as it runs.
 *
 * Two things bound it: the limit on processes of its caller, and END, in seconds of the monotonic clock.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    char kind = argv[1][0]; /* (s)tays, (l)eaves after a fork, (m)ixes the two, (a)dopts orphans */
    double end = atof(argv[3]);
    unsigned dice = getpid();
    int is_first = 1;
    prctl(PR_SET_NAME, argv[2], 0, 0, 0);
    prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0);
    signal(SIGCHLD, SIG_IGN); /* the kernel reaps the children */
    signal(SIGINT, SIG_IGN);
    signal(SIGTERM, SIG_IGN);
    for (int fd = 0; fd < 100; fd++)
        close(fd);
    while (now() < end) {
        pid_t pid = fork();
        if (pid == 0) {
            setsid();
            dice ^= getpid();
            is_first = 0;
            if (kind == 'a' && dice % 4 == 0)
                prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        } else if (pid > 0 && !is_first) {
            dice = dice * 1103515245 + 12345;
            if (kind == 'l' || ((kind == 'm' || kind == 'a') && dice >> 16 & 1))
                _exit(0);
        }
    }
    return 0;
}
