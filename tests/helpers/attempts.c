/* What a locked-in program may try. Each function writes into out[0] what came of it: 0, or the number of the error. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;
#define TRY(name, expression)                                                                                          \
    void name(int n, double *out) {                                                                                    \
        (void)n;                                                                                                       \
        errno = 0;                                                                                                     \
        out[0] = (long)(expression) == -1 ? errno : 0;                                                                 \
    }

/* files */
TRY(read_secret, open("/etc/passwd", O_RDONLY))
TRY(read_own_environment, open("/proc/self/environ", O_RDONLY))
TRY(read_parents_memory, ({ char path[64]; snprintf(path, sizeof path, "/proc/%d/mem", n); open(path, O_RDONLY); }))
TRY(list_root, open("/", O_RDONLY | O_DIRECTORY))
TRY(create_file, open("/tmp/torchtune-ext-was-here", O_WRONLY | O_CREAT, 0600))
TRY(create_folder, mkdir("/tmp/torchtune-ext-was-here", 0700))
TRY(shared_memory, open("/dev/shm/torchtune-ext-was-here", O_RDWR | O_CREAT, 0600))
TRY(change_mode, chmod("/tmp", 0777))
TRY(see_secret, ({ struct stat s; stat("/etc/passwd", &s); }))
/* the network */
TRY(make_socket, socket(AF_INET, SOCK_STREAM, 0))
TRY(connect_tcp, ({
        struct sockaddr_in to = {AF_INET, htons((uint16_t)n), {htonl(INADDR_LOOPBACK)}, {0}};
        connect(socket(AF_INET, SOCK_STREAM, 0), (struct sockaddr *)&to, sizeof to);
    }))
/* processes */
TRY(call_fork, ({ pid_t child = fork(); if (child == 0) _exit(0); child; }))
TRY(call_vfork, ({ pid_t child = vfork(); if (child == 0) _exit(0); child; }))
TRY(clone_process, syscall(__NR_clone, SIGCHLD, 0, 0, 0, 0))
TRY(clone3_process, ({ char arguments[88] = {0}; syscall(435, arguments, sizeof arguments); }))
TRY(call_exec, execl("/bin/true", "true", (char *)NULL))
TRY(call_setsid, setsid())
TRY(signal_parent, kill(n, 0))
TRY(signal_all, kill(-1, SIGTERM))
TRY(signal_thread_of_parent, syscall(__NR_tgkill, n, n, 0))
TRY(trace_parent, ptrace(PTRACE_ATTACH, n, 0, 0))
TRY(read_process, ({
        char byte;
        struct iovec ours = {&byte, 1}, theirs = {(void *)0x400000, 1};
        process_vm_readv(n, &ours, 1, &theirs, 1, 0);
    }))
TRY(make_memfd, syscall(__NR_memfd_create, "x", 0))
TRY(call_unshare, syscall(__NR_unshare, 0x10000000))
TRY(call_bpf, syscall(__NR_bpf, 0, 0, 0))
TRY(call_io_uring, syscall(425, 1, 0))
TRY(call_keyctl, syscall(__NR_keyctl, 0, 0))
TRY(call_sysinfo, ({ char info[256]; syscall(__NR_sysinfo, info); }))
TRY(change_cores, ({ unsigned long all = ~0ul; syscall(__NR_sched_setaffinity, 0, sizeof all, &all); }))
TRY(raise_limit, ({ struct rlimit limit = {1 << 20, 1 << 20}; setrlimit(RLIMIT_CORE, &limit); }))
TRY(read_limit, ({ struct rlimit limit; getrlimit(RLIMIT_CORE, &limit); }))
TRY(new_filter, syscall(__NR_seccomp, SECCOMP_SET_MODE_STRICT, 0, 0))
#ifdef __x86_64__
TRY(x32_call, syscall(0x40000000 + __NR_getpid))
TRY(call_of_32_bits, ({ long result; __asm__ volatile("int $0x80" : "=a"(result) : "a"(20) : "memory"); result; }))
#endif
/* limits */
TRY(much_memory, ({ char *p = malloc(3ul << 30); if (p) memset(p, 1, 3ul << 30); p ? 0 : -1; }))
TRY(endless, ({ for (volatile long i = 0;; i++) ; 0; }))
TRY(endless_deaf, ({ signal(SIGXCPU, SIG_IGN); for (volatile long i = 0;; i++) ; 0; }))
TRY(much_output, ({ static char text[1 << 16]; for (long i = 0; i < 1 << 18; i++) write(2, text, sizeof text); 0; }))
TRY(deep_recursion, ({ extern int deeper(int); deeper(1 << 30); }))
int deeper(int n) { volatile char room[4096]; room[0] = (char)n; return n ? deeper(n - 1) + room[0] : 0; }
static void *sleeper(void *nothing) { sleep(100); return nothing; }
void many_threads(int n, double *out) {
    (void)n;
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 1 << 15);
    pthread_t thread;
    for (out[0] = 0; out[0] < 5000 && pthread_create(&thread, &small, sleeper, NULL) == 0; out[0]++)
        ;
}

/* what it can see */
void own_number(int n, double *out) { (void)n; out[0] = getpid(); }
void environment_size(int n, double *out) { (void)n; out[0] = 0; for (char **word = environ; *word; word++) out[0] += 1; }
void knows_secret(int n, double *out) { (void)n; out[0] = getenv("TORCHTUNE_EXT_TEST_SECRET") != NULL; }
void open_files(int n, double *out) {
    (void)n;
    struct stat s;
    out[0] = 0;
    for (int file = 0; file < 1024; file++)
        out[0] += fstat(file, &s) == 0;
}
