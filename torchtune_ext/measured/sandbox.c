/* Sandboxes itself, then runs a compiler or calls a function of an untrusted library.

     sandbox probe                                         prints one line for each layer: "landlock 7", "seccomp 1"
     sandbox enter OPTIONS -- COMMAND ARGUMENT...          runs a command (bubblewrap) as another user,
                                                           without a sandbox
     sandbox exec OPTIONS -- COMMAND ARGUMENT...           runs a command (a compiler)
     sandbox call OPTIONS -- LIBRARY FUNCTION ARENA_BYTES TALK INPUTS OUTPUTS
                                                           calls a function at each request on the socket TALK

   Options: --read PATH, --write PATH (a file, or a folder and all below it), --memory BYTES, --seconds CPU_SECONDS,
   --file BYTES, --processes COUNT, --started FD (exec writes a byte there once all layers are active),
   --cores FIRST,SECOND,..., --user UID (only as root), --without LAYER (for the tests).

   The program is written in C and not in Python, since it starts in a millisecond, holds no secrets in memory, and is
   compiled with the system call numbers of the machine. The layers:

     limits     memory, CPU seconds, file size, number of processes and open files; no core dump
     user       root switches to a user without files
     landlock   only the named files and folders; no TCP; no signal to a process outside
     seccomp    exec: no sockets, no debugging, no mounts.  call: only the system calls of a computation with threads;
                a dangerous call kills the process

   After the library is loaded, all output may be forged by the library. The exit status is 125 if a layer failed; no
   untrusted code has run in that case.

   Messages of `call` (see child.py): it sends the number 0 with the address of the arena, loads the library, sends the
   number 0 again, and then answers each message with the message's number. The file descriptor INPUTS holds the
   read-only arrays, OUTPUTS the writable arrays. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define REFUSED 125  /* exit status: a layer of the sandbox failed */
#define UNLOADED 126 /* exit status: the library could not be loaded, or lacks the function */
#define MAX_PATHS 64
#define STACK_BYTES (8u << 20) /* stack of the main thread, for variable-length arrays */

/* ---------------------------------------------------------------- options */

struct options {
    const char *readable[MAX_PATHS], *writable[MAX_PATHS];
    int readables, writables;
    uint64_t memory, seconds, file, processes;
    long user;
    int started;
    const char *cores;
    int without_landlock, without_seccomp;
};

static void refuse(const char *what) {
    fprintf(stderr, "sandbox: %s: %s\n", what, strerror(errno));
    exit(REFUSED);
}

static int read_options(int count, char **words, struct options *options) {
    memset(options, 0, sizeof *options);
    options->user = options->started = -1;
    int i = 0;
    for (; i + 1 < count && strcmp(words[i], "--") != 0; i += 2) {
        const char *name = words[i], *value = words[i + 1];
        errno = EINVAL;
        if (strcmp(name, "--read") == 0 && options->readables < MAX_PATHS)
            options->readable[options->readables++] = value;
        else if (strcmp(name, "--write") == 0 && options->writables < MAX_PATHS)
            options->writable[options->writables++] = value;
        else if (strcmp(name, "--memory") == 0)
            options->memory = strtoull(value, NULL, 10);
        else if (strcmp(name, "--seconds") == 0)
            options->seconds = strtoull(value, NULL, 10);
        else if (strcmp(name, "--file") == 0)
            options->file = strtoull(value, NULL, 10);
        else if (strcmp(name, "--processes") == 0)
            options->processes = strtoull(value, NULL, 10);
        else if (strcmp(name, "--cores") == 0)
            options->cores = value;
        else if (strcmp(name, "--user") == 0)
            options->user = strtol(value, NULL, 10);
        else if (strcmp(name, "--started") == 0)
            options->started = atoi(value);
        else if (strcmp(name, "--without") == 0 && strcmp(value, "landlock") == 0)
            options->without_landlock = 1;
        else if (strcmp(name, "--without") == 0 && strcmp(value, "seccomp") == 0)
            options->without_seccomp = 1;
        else
            refuse(name);
    }
    errno = EINVAL;
    if (i >= count || strcmp(words[i], "--") != 0)
        refuse("no -- after the options");
    return i + 1;
}

/* ---------------------------------------------------------------- Landlock
   The headers of the machine may be older than its kernel, so the constants of <linux/landlock.h> are repeated here. */

#ifndef __NR_landlock_create_ruleset
#define __NR_landlock_create_ruleset 444
#define __NR_landlock_add_rule 445
#define __NR_landlock_restrict_self 446
#endif
#define FS_EXECUTE (1ull << 0)
#define FS_WRITE_FILE (1ull << 1)
#define FS_READ_FILE (1ull << 2)
#define FS_READ_DIR (1ull << 3)
#define FS_TRUNCATE (1ull << 14)
#define FS_IOCTL_DEV (1ull << 15)

struct ruleset {
    uint64_t files, network, scopes;
};
struct below_path {
    uint64_t rights;
    int32_t folder;
} __attribute__((packed));

static int landlock_version(void) { return (int)syscall(__NR_landlock_create_ruleset, NULL, 0, 1); }

/* Returns all file rights that this version of Landlock can restrict. */
static uint64_t all_rights(int version) {
    int rights = version >= 5 ? 16 : version >= 3 ? 15 : version == 2 ? 14 : 13;
    return (1ull << rights) - 1;
}

static void grant(int rules, const char *path, uint64_t rights) {
    int folder = open(path, O_PATH | O_CLOEXEC);
    if (folder < 0) {
        if (errno == ENOENT) /* a missing path needs no rule */
            return;
        refuse(path);
    }
    struct stat found;
    if (fstat(folder, &found) != 0)
        refuse(path);
    if (!S_ISDIR(found.st_mode)) /* a rule for a file may contain only file rights */
        rights &= FS_EXECUTE | FS_WRITE_FILE | FS_READ_FILE | FS_TRUNCATE | FS_IOCTL_DEV;
    struct below_path rule = {rights, folder};
    if (syscall(__NR_landlock_add_rule, rules, 1, &rule, 0) != 0)
        refuse(path);
    close(folder);
}

static int landlock_rules(const struct options *options) {
    int version = landlock_version();
    if (version < 1)
        refuse("Landlock");
    struct ruleset attributes = {all_rights(version), version >= 4 ? 3 : 0, version >= 6 ? 3 : 0};
    size_t size = version >= 6 ? 24 : version >= 4 ? 16 : 8;
    int rules = (int)syscall(__NR_landlock_create_ruleset, &attributes, size, 0);
    if (rules < 0)
        refuse("Landlock");
    for (int i = 0; i < options->readables; i++)
        grant(rules, options->readable[i], FS_EXECUTE | FS_READ_FILE | FS_READ_DIR);
    for (int i = 0; i < options->writables; i++)
        grant(rules, options->writable[i], attributes.files);
    return rules;
}

/* ---------------------------------------------------------------- seccomp */

#if defined(__x86_64__)
#define ARCHITECTURE AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCHITECTURE AUDIT_ARCH_AARCH64
#else
#error "unsupported architecture: the sandbox supports only x86-64 and aarch64"
#endif
#ifndef SECCOMP_RET_KILL_PROCESS
#define SECCOMP_RET_KILL_PROCESS 0x80000000u
#endif
#define LOW_HALF(i) (offsetof(struct seccomp_data, args) + 8 * (i))
#define HIGH_HALF(i) (LOW_HALF(i) + 4)
#ifndef CLONE_THREAD
#define CLONE_THREAD 0x00010000
#endif

/* System calls that neither a computation nor a compiler needs. */
static const int dangerous[] = {
    __NR_ptrace, __NR_process_vm_readv, __NR_process_vm_writev, __NR_socket, __NR_socketpair, __NR_connect, __NR_bind,
    __NR_listen, __NR_accept, __NR_accept4, __NR_unshare, __NR_setns, __NR_mount, __NR_umount2, __NR_pivot_root,
    __NR_chroot, __NR_bpf, __NR_perf_event_open, __NR_userfaultfd, __NR_keyctl, __NR_add_key, __NR_request_key,
    __NR_kexec_load, __NR_init_module, __NR_finit_module, __NR_delete_module, __NR_reboot, __NR_swapon, __NR_swapoff,
    __NR_clock_settime, __NR_settimeofday, __NR_sethostname, __NR_setdomainname, __NR_open_by_handle_at, __NR_acct,
    __NR_quotactl, 425 /* io_uring_setup */, 434 /* pidfd_open */, 438 /* pidfd_getfd */, 428 /* open_tree */,
    429 /* move_mount */, 430 /* fsopen */, 442 /* mount_setattr */,
};

/* System calls that a computation does not need, but a compiler does to start other programs. */
static const int of_programs[] = {
#ifdef __NR_fork
    __NR_fork, __NR_vfork,
#endif
    __NR_execve, __NR_execveat, __NR_kill, __NR_tkill, __NR_rt_sigqueueinfo, __NR_rt_tgsigqueueinfo,
    424 /* pidfd_send_signal */, __NR_setsid, __NR_setpgid, __NR_memfd_create, __NR_setuid, __NR_setgid,
    __NR_setreuid, __NR_setregid, __NR_setresuid, __NR_setresgid, __NR_capset,
};

/* System calls of a computation with threads, and of loading its library. Landlock restricts the files. */
static const int needed[] = {
#ifdef __NR_open
    __NR_open, __NR_stat, __NR_access, __NR_readlink, __NR_arch_prctl, __NR_time,
#endif
    __NR_read, __NR_write, __NR_writev, __NR_close, __NR_fstat, __NR_newfstatat, __NR_lseek, __NR_openat, __NR_pread64,
    __NR_faccessat, __NR_readlinkat, __NR_mmap, __NR_munmap, __NR_mprotect, __NR_mremap, __NR_madvise, __NR_brk,
    __NR_futex, __NR_rt_sigaction, __NR_rt_sigprocmask, __NR_rt_sigreturn, __NR_sigaltstack, __NR_set_robust_list,
    __NR_set_tid_address, __NR_rseq, __NR_sched_yield, __NR_sched_getaffinity, __NR_getpid, __NR_gettid,
    __NR_clock_gettime, __NR_clock_getres, __NR_clock_nanosleep, __NR_nanosleep, __NR_gettimeofday, __NR_getrandom,
    __NR_getcpu, __NR_exit, __NR_exit_group, __NR_restart_syscall, __NR_uname,
};

#define LENGTH(list) (sizeof(list) / sizeof(list)[0])

static struct sock_filter filter[512];
static unsigned short filter_length;

static void statement(uint16_t code, uint32_t value) {
    filter[filter_length++] = (struct sock_filter)BPF_STMT(code, value);
}

/* Continues if the accumulator has this value; otherwise skips the next `skipped` statements. */
static void unless_equal_skip(uint32_t value, uint8_t skipped) {
    filter[filter_length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, skipped);
}

static void load(size_t offset) { statement(BPF_LD | BPF_W | BPF_ABS, (uint32_t)offset); }

static void decide(uint32_t action) { statement(BPF_RET | BPF_K, action); }

static void decide_for(const int *numbers, size_t count, uint32_t action) {
    for (size_t i = 0; i < count; i++) {
        unless_equal_skip((uint32_t)numbers[i], 1);
        decide(action);
    }
}

static void build_filter(int of_function) {
    load(offsetof(struct seccomp_data, arch));
    filter[filter_length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ARCHITECTURE, 1, 0);
    decide(SECCOMP_RET_KILL_PROCESS); /* 32-bit programs have other system call numbers */
    load(offsetof(struct seccomp_data, nr));
#ifdef __x86_64__
    filter[filter_length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 0x40000000, 0, 1);
    decide(SECCOMP_RET_KILL_PROCESS); /* the x32 ABI has other numbers, too */
#endif
    decide_for(dangerous, LENGTH(dangerous), SECCOMP_RET_KILL_PROCESS);
    if (!of_function) {
        decide(SECCOMP_RET_ALLOW);
        return;
    }
    decide_for(of_programs, LENGTH(of_programs), SECCOMP_RET_KILL_PROCESS);
    decide_for(needed, LENGTH(needed), SECCOMP_RET_ALLOW);
    /* clone may start a thread, but not a process. This filter cannot read the flags of clone3, so ENOSYS makes glibc
       fall back to clone. */
    unless_equal_skip(435 /* clone3 */, 1);
    decide(SECCOMP_RET_ERRNO | ENOSYS);
    unless_equal_skip(__NR_clone, 4);
    load(LOW_HALF(0));
    filter[filter_length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, CLONE_THREAD, 0, 1);
    decide(SECCOMP_RET_ALLOW);
    decide(SECCOMP_RET_KILL_PROCESS);
    /* abort() sends a signal to its own process. A signal to another process kills this one. */
    unless_equal_skip(__NR_tgkill, 4);
    load(LOW_HALF(0));
    unless_equal_skip((uint32_t)getpid(), 1);
    decide(SECCOMP_RET_ALLOW);
    decide(SECCOMP_RET_KILL_PROCESS);
    /* Limits may be read, but not set. */
    unless_equal_skip(__NR_prlimit64, 6);
    load(LOW_HALF(2));
    unless_equal_skip(0, 3);
    load(HIGH_HALF(2));
    unless_equal_skip(0, 1);
    decide(SECCOMP_RET_ALLOW);
    decide(SECCOMP_RET_ERRNO | EPERM);
    decide(SECCOMP_RET_ERRNO | EPERM);
}

/* ---------------------------------------------------------------- all layers */

/* Keeps a lower limit of the machine. `above` is the distance from the soft to the hard limit. */
static void limit(int resource, uint64_t value, uint64_t above) {
    struct rlimit both;
    if (getrlimit(resource, &both) != 0)
        refuse("getrlimit");
    if (value + above < both.rlim_max)
        both.rlim_max = value + above;
    both.rlim_cur = value < both.rlim_max ? value : both.rlim_max;
    if (setrlimit(resource, &both) != 0)
        refuse("setrlimit");
}

static void become(long user) {
    uid_t id = (uid_t)user;
    if (setgroups(0, NULL) != 0 || setresgid(id, id, id) != 0 || setresuid(id, id, id) != 0)
        refuse("another user");
}

static void stay_on(const char *cores) {
    cpu_set_t set;
    CPU_ZERO(&set);
    while (*cores) {
        char *end;
        CPU_SET(strtoul(cores, &end, 10), &set);
        cores = *end ? end + 1 : end;
    }
    if (sched_setaffinity(0, sizeof set, &set) != 0)
        refuse("sched_setaffinity");
}

static void lock_in(const struct options *options, int of_function) {
    pid_t parent = getppid();
    int rules = options->without_landlock ? -1 : landlock_rules(options); /* opens paths before the user switch */
    if (options->memory)
        limit(RLIMIT_AS, options->memory, 0);
    if (options->seconds)
        limit(RLIMIT_CPU, options->seconds, 1); /* SIGXCPU names the cause; a second later, SIGKILL cannot be caught */
    limit(RLIMIT_FSIZE, options->file, 0);
    limit(RLIMIT_STACK, STACK_BYTES, 0);
    limit(RLIMIT_CORE, 0, 0);
    limit(RLIMIT_NOFILE, 256, 0);
    limit(RLIMIT_MEMLOCK, 0, 0);
    if (options->user >= 0)
        become(options->user);
    if (options->processes)
        limit(RLIMIT_NPROC, options->processes, 0);
    /* The kernel kills this process when the caller ends. A user switch resets this setting, so it comes after. */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) != 0 || getppid() != parent)
        refuse("PR_SET_PDEATHSIG");
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0)
        refuse("no_new_privs");
    if (!options->without_landlock && syscall(__NR_landlock_restrict_self, rules, 0) != 0)
        refuse("Landlock");
    if (!options->without_landlock)
        close(rules);
    if (!options->without_seccomp) {
        build_filter(of_function);
        struct sock_fprog program = {filter_length, filter};
        if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) != 0)
            refuse("seccomp");
    }
}

/* ---------------------------------------------------------------- commands */

static int probe(void) {
    printf("landlock %d\n", landlock_version());
    /* An unknown action returns EOPNOTSUPP; a kernel without filters returns ENOSYS or EINVAL. */
    uint32_t action = SECCOMP_RET_KILL_PROCESS;
    printf("seccomp %d\n", syscall(__NR_seccomp, SECCOMP_GET_ACTION_AVAIL, 0, &action) == 0);
    return 0;
}

static int execute(char **words, const struct options *options) {
    lock_in(options, 0);
    if (options->started >= 0 && (write(options->started, "1", 1) != 1 || close(options->started) != 0))
        refuse("--started");
    execv(words[0], words);
    refuse(words[0]);
    return REFUSED;
}

static int enter(char **words, const struct options *options) {
    if (options->user >= 0)
        become(options->user);
    execv(words[0], words);
    refuse(words[0]);
    return REFUSED;
}

enum { PLACE = 1, CALL = 2 }; /* message kinds */
enum { MAX_ARRAYS = 8 };

struct message {
    uint32_t kind, count;
    uint64_t number;
    uint64_t words[3 * MAX_ARRAYS];
};

static int talk; /* the socket to the caller */

static void answer(uint64_t number, uint64_t word) {
    struct message message = {.number = number, .words = {word}};
    if (write(talk, &message, sizeof message) != sizeof message)
        _exit(REFUSED);
}

/* Maps each array at the caller's position: (offset in the arena and in its file, bytes, 1 if writable). The rest of
   the arena is inaccessible. */
static void place(char *arena, size_t arena_bytes, const int files[2], const struct message *message) {
    mmap(arena, arena_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    for (uint32_t i = 0; i < message->count && i < MAX_ARRAYS; i++) {
        const uint64_t *array = message->words + 3 * i;
        int writable = array[2] == 1, protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
        void *found = mmap(arena + array[0], array[1], protection, MAP_SHARED | MAP_FIXED | MAP_POPULATE, files[writable],
                           (off_t)array[0]);
        if (found == MAP_FAILED)
            _exit(REFUSED);
    }
}

typedef void function_of_words(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);

/* Both architectures pass int and pointer arguments alike, so one function type serves all signatures. */
static int call(char **words, const struct options *options) {
    size_t arena_bytes = strtoull(words[2], NULL, 10);
    const int files[2] = {atoi(words[4]), atoi(words[5])};
    talk = atoi(words[3]);
    if (options->cores)
        stay_on(options->cores); /* before libgomp counts the cores */
    /* The library may need these. They are loaded while files can still be opened, and none of them has a BLAS. */
    static const char *const known[] = {"libm.so.6", "libmvec.so.1", "libgcc_s.so.1", "libgomp.so.1", "libomp.so.5"};
    for (size_t i = 0; i < LENGTH(known); i++)
        dlopen(known[i], RTLD_NOW | RTLD_GLOBAL);
    char *arena = mmap(NULL, arena_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (arena == MAP_FAILED)
        refuse("the arena of the arrays");
    lock_in(options, 1);
    answer(0, (uint64_t)(uintptr_t)arena);
    void *library = dlopen(words[0], RTLD_NOW | RTLD_LOCAL);
    function_of_words *function = library ? (function_of_words *)(uintptr_t)dlsym(library, words[1]) : NULL;
    if (function == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return UNLOADED;
    }
    answer(0, 0);
    struct message message;
    while (read(talk, &message, sizeof message) == sizeof message) {
        const uint64_t *w = message.words;
        if (message.kind == PLACE)
            place(arena, arena_bytes, files, &message);
        else if (message.kind == CALL)
            function(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]);
        answer(message.number, 0);
    }
    return 0;
}

int main(int count, char **words) {
    if (count == 2 && strcmp(words[1], "probe") == 0)
        return probe();
    errno = EINVAL;
    if (count < 4)
        refuse("usage: sandbox probe|enter|exec|call OPTIONS -- WORDS");
    struct options options;
    int first = 2 + read_options(count - 2, words + 2, &options);
    if (strcmp(words[1], "enter") == 0 && first < count)
        return enter(words + first, &options);
    if (strcmp(words[1], "exec") == 0 && first < count)
        return execute(words + first, &options);
    if (strcmp(words[1], "call") == 0 && count - first == 6)
        return call(words + first, &options);
    errno = EINVAL;
    refuse(words[1]);
}
