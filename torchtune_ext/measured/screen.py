"""Screen a candidate before compilation, and reject what a computation does not need.

The screen is a filter and not the defense, since an address found by arithmetic needs no name. An
answer that cheats openly is rejected with the line, before it uses a compiler or a core. The
sandbox is the defense: tests/integration/test_bench_hostile.py also runs every exploit with the
screen off.
"""

import re
import time
from collections import Counter
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import PurePath

from torchtune_ext.measured.kernel import Kernel
from torchtune_ext.measured.parsing import (
    MAX_TEXT_CHARS,
    CandidateText,
    Node,
    candidate_text,
    declarators,
    declared_names,
    parse,
    walk,
)

ALLOWED_HEADERS = frozenset(
    "stdlib string math stdint stddef stdbool stdio limits float assert complex tgmath stdalign omp "
    "immintrin x86intrin emmintrin xmmintrin pmmintrin tmmintrin smmintrin nmmintrin mm_malloc arm_neon arm_sve".split()
)
"""Headers that a candidate may include, without their ".h"."""

_SYSTEM_NAMES = {
    "starts, ends or signals processes": (
        "fork vfork _Fork clone clone3 execl execle execlp execv execve execvp execvpe execveat fexecve posix_spawn* "
        "system popen pclose wait waitpid wait3 wait4 waitid kill killpg tgkill tkill raise signal bsd_signal sysv_signal "
        "sigaction sigprocmask sigqueue sigwait sigwaitinfo sigsuspend sigaltstack sigvec sigset _exit quick_exit atexit "
        "on_exit at_quick_exit __cxa_* daemon setsid setpgid setpgrp ptrace prctl arch_prctl setuid setgid seteuid "
        "setegid setreuid setregid setresuid setresgid setgroups setrlimit* prlimit* personality unshare setns sched_* "
        "getpid getppid gettid alarm ualarm setitimer timer_create timer_settime timerfd_* signalfd eventfd setjmp "
        "_setjmp longjmp _longjmp siglongjmp __sigsetjmp getcontext setcontext makecontext swapcontext"
    ),
    "opens or changes files": (
        "fopen fopen64 fopencookie freopen freopen64 fdopen open open64 openat openat64 creat creat64 read write pread* "
        "pwrite* readv writev close dup dup2 dup3 fcntl fcntl64 ioctl pipe pipe2 remove rename renameat renameat2 unlink "
        "unlinkat link linkat symlink symlinkat mkdir mkdirat mkfifo mkfifoat mknod mknodat rmdir opendir fdopendir "
        "readdir* scandir* chdir fchdir chroot chmod fchmod fchmodat chown fchown lchown fchownat truncate* ftruncate* "
        "tmpfile* tmpnam* mkstemp* mkostemp* mkdtemp stat stat64 lstat lstat64 fstat fstat64 fstatat* statx access "
        "faccessat readlink readlinkat realpath mount umount umount2 poll ppoll select pselect epoll_* inotify_* "
        "fanotify_* sendfile sendfile64 splice copy_file_range io_uring_* aio_*"
    ),
    "uses the network": (
        "socket socketpair connect bind listen accept accept4 send sendto sendmsg sendmmsg recv recvfrom recvmsg recvmmsg "
        "getaddrinfo gethostbyname* gethostbyaddr* shutdown setsockopt getsockopt"
    ),
    "loads code while it runs": (
        "dlopen dlmopen dlsym dlvsym dladdr* dlinfo dlclose dl_iterate_phdr _dl_* _r_debug _GLOBAL_OFFSET_TABLE_ _DYNAMIC "
        "__libc_* getauxval"
    ),
    "reads a clock or sleeps": (
        "clock clock_* time gettimeofday ftime times timespec_get* getrusage *rdtsc *rdtscp *readcyclecounter *rdpmc "
        "sleep usleep nanosleep thrd_sleep omp_get_wtime omp_get_wtick"
    ),
    "reads the environment": (
        "getenv secure_getenv setenv putenv unsetenv clearenv environ _environ __environ program_invocation_name "
        "program_invocation_short_name uname gethostname"
    ),
    "calls the operating system": (
        "syscall mmap mmap64 munmap mprotect pkey_* mremap madvise posix_madvise mlock mlock2 mlockall munlock munlockall "
        "memfd_* shm_open shm_unlink shmget shmat shmctl shmdt sem_* semget semop semctl msgget msgsnd msgrcv msgctl mq_* "
        "brk sbrk process_vm_* userfaultfd bpf perf_event_open keyctl"
    ),
    "makes threads without OpenMP": ("pthread_* thrd_* mtx_* cnd_* tss_* call_once"),
    "looks at who called it": (
        "__builtin_return_address __builtin_extract_return_addr __builtin_frame_address __builtin_apply* "
        "__builtin_longjmp __builtin_setjmp __builtin_unwind_init __builtin_eh_return __builtin_dwarf_* backtrace "
        "backtrace_symbols* _Unwind_*"
    ),
}
"""Purpose -> system names with wildcards."""

_EXACT_NAMES = {name: use for use, names in _SYSTEM_NAMES.items() for name in names.split() if "*" not in name}
_NAME_PATTERNS = [(name, use) for use, names in _SYSTEM_NAMES.items() for name in names.split() if "*" in name]
# A program may call these functions, but must not redefine them.
LIBRARY_NAMES = tuple(
    (
        "malloc calloc realloc reallocarray free aligned_alloc posix_memalign memalign valloc malloc_usable_size "
        "memcpy memmove memset memcmp memchr mempcpy strlen strcpy strncpy strcat strcmp strncmp strchr strrchr "
        "strstr strdup strtol strtoull strtod strerror bcopy bzero printf fprintf sprintf snprintf vprintf "
        "vfprintf vsnprintf puts fputs putchar fputc fwrite fread fflush fclose perror atoi qsort bsearch rand "
        "srand exit abort __stack_chk_fail __assert_fail __errno_location stdin stdout stderr omp_* GOMP_* gomp_* "
        "kmp_* __kmpc_* _init _fini _start __*_chk"
    ).split()
)
# Most of these attributes run code without a call, or change the meaning of a name.
FORBIDDEN_ATTRIBUTES = frozenset(
    "constructor destructor init_priority ifunc alias weak weakref section cleanup naked".split()
)
_FORBIDDEN_PRAGMAS = re.compile(r"\b(redefine_extname|weak|init|fini|section|attribute|pch_preprocess)\b")
_ASM_KEYWORDS = frozenset(("asm", "__asm", "__asm__"))
_RAW_STRING_PREFIXES = frozenset(("R", "LR", "uR", "UR", "u8R"))
# A line directive changes the file of the next lines. A comment may precede it, so the whole text
# is searched, including comments and strings. `a##1` is not a directive. A comment before the name
# of the directive is always rejected: honest programs do not have one, and a hostile text could
# make a pattern for comments run for hours.
_SPACE = r"[ \t\v\f\r\0]*"
_LINE_DIRECTIVE = re.compile(rf'(?<![#%:])(?:#|%:){_SPACE}(?:line\b|\d+{_SPACE}(?:"|/\*)|/\*)')
_PATH_INCLUDE = re.compile(rf'(?:#|%:){_SPACE}include{_SPACE}["<](?:/|[^">\n]{{0,200}}?\.\./)')
_LINE_CONTINUATION = re.compile(r"\\[ \t\v\f\r]*\n")
_SCOPE_NODES = ("compound_statement", "for_statement", "function_definition", "parameter_list")


def screen(preprocessed: str, source: str, kernel: Kernel, deadline_s: float = 5.0) -> str:
    """Returns the first forbidden construct of a candidate, with its line, or "".

    Args:
        preprocessed: the output of `gcc -E`, with line markers (# 7 "candidate.c").
        kernel: the kernel to compute. `kernel.forbidden` holds fnmatch patterns of names.

    Raises:
        TimeoutError: the screen exceeds `deadline_s`, for example on a hostile text.
    """
    end = time.monotonic() + deadline_s
    # Line markers separate the candidate's lines from the lines of headers. A directive could forge
    # markers, so the source is searched first.
    for pattern, what in (
        (_LINE_DIRECTIVE, "a directive may claim that its lines are those of another file"),
        (_PATH_INCLUDE, "includes a file by its path"),
    ):
        if match := pattern.search(_LINE_CONTINUATION.sub("", source)):
            line = source.count("\n", 0, source.find(match[0])) + 1 if match[0] in source else 1
            return f"line {line}: {what}"
    # The text has expanded macros. Only the candidate's lines are read, without the headers.
    text = candidate_text(preprocessed)
    if (length := sum(map(len, text.lines))) > MAX_TEXT_CHARS:
        return f"its macros expand to {length} characters; at most {MAX_TEXT_CHARS} are read"
    for line, path, is_system in text.includes:
        if not is_system or PurePath(path).name.removesuffix(".h") not in ALLOWED_HEADERS:
            allowed = ", ".join(f"{name}.h" for name in sorted(ALLOWED_HEADERS))
            return f"line {line}: includes {PurePath(path).name}; allowed are {allowed}"
    for pragma in text.pragmas:
        if match := _FORBIDDEN_PRAGMAS.search(pragma.text):
            return f"line {pragma.line}: #pragma {match[1]} is forbidden, since it changes the meaning of a name"
    # tree-sitter accepts every text, so invalid C is left to the compiler. pycparser would be
    # stricter, but it cannot parse the content of <stdlib.h> and <immintrin.h>.
    return _Screener(text, kernel, end).read()


class _Screener:
    def __init__(self, text: CandidateText, kernel: Kernel, end: float) -> None:
        self.text, self.kernel, self.deadline = text, kernel, end
        self.bytes = b"\n".join(text.lines)
        self.scopes: list[set[str]] = []  # declared names of each open block
        self.local_counts: Counter[str] = Counter()  # name -> number of open blocks that declare it
        self.own_functions: set[str] = set()  # functions that the candidate defines
        self.parentheses: int | None = None  # open parentheses after __attribute__; None outside of an attribute

    def read(self) -> str:
        """Returns the first forbidden construct, or ""."""
        try:
            tree = parse(self.bytes, lambda: time.monotonic() >= self.deadline)
        except ValueError:
            # The parser raises ValueError if the callback stopped it at the timeout.
            self._check_deadline()
            raise
        for node in tree.root_node.children:
            if node.type == "function_definition":
                self.own_functions.update(declared_names(node))
        # A hostile text may be nested arbitrarily deep, so the traversal is iterative.
        for count, (node, leaving) in enumerate(walk(tree.walk())):
            if count % 1000 == 0:
                self._check_deadline()
            if leaving:
                if node.type in _SCOPE_NODES:
                    self.local_counts.subtract(self.scopes.pop())
            elif fault := self._check_node(node):
                return f"line {self.text.line_numbers[node.start_point.row]}: {fault}"
        return ""

    def _check_deadline(self) -> None:
        if time.monotonic() >= self.deadline:
            raise TimeoutError("reading the program took too long")

    def _check_node(self, node: Node) -> str:
        kind = node.type
        fault = ""
        if kind in ("function_definition", "declaration") and not self.scopes:
            fault = self._check_definition(node)
        if kind in _SCOPE_NODES:
            self.scopes.append(set())
        if kind == "function_definition":
            self._declare_names(self._parameter_names(node))
        # In a block, the declaration of a function or of an extern variable still refers to the
        # system name, so neither shadows it.
        elif self.scopes and kind in ("declaration", "parameter_declaration") and not self._is_extern(node):
            self._declare_names({name for name, is_function in declared_names(node).items() if not is_function})
        return fault if fault or node.child_count else self._check_leaf(node)

    def _declare_names(self, names: set[str]) -> None:
        # Until the block ends, these names are local variables.
        self.local_counts.update(names - self.scopes[-1])
        self.scopes[-1] |= names

    def _check_definition(self, node: Node) -> str:
        if node.type == "declaration" and self._is_extern(node):
            return ""
        for name, is_function in declared_names(node).items():
            # A function declaration without a body does not redefine the name.
            if node.type == "declaration" and is_function:
                continue
            if name != self.kernel.name and (_matches(name, LIBRARY_NAMES) or _system_use(name)):
                return f"defines {name}, which is a system name"
        return ""

    def _check_leaf(self, node: Node) -> str:
        word = self._node_text(node)
        if word in _ASM_KEYWORDS:
            return "holds assembly, which is forbidden"
        if self.parentheses is None and word in ("__attribute__", "__attribute", "[["):
            self.parentheses = 2 if word == "[[" else 0
            return ""
        if self.parentheses is not None:
            self.parentheses += word.count("(") + word.count("[") - word.count(")") - word.count("]")
            if self.parentheses <= 0:
                self.parentheses = None
            bare = word.strip("_")
            return f"has the attribute {bare}, which is forbidden" if bare in FORBIDDEN_ATTRIBUTES else ""
        if node.type not in ("identifier", "type_identifier", "ERROR"):
            return ""
        # GNU C has raw strings but the parser does not, so code could hide in an apparent string.
        if word in _RAW_STRING_PREFIXES and self.bytes[node.end_byte : node.end_byte + 1] == b'"':
            return "holds a raw string, which C does not have"
        # A local variable may have the name of a system function, such as `time` or `read`.
        if self.local_counts[word] > 0:
            return ""
        called = self.bytes[node.end_byte : node.end_byte + 80].lstrip().startswith(b"(")
        verb = f"calls {word}()" if called else f"uses {word}"
        if use := _system_use(word):
            return f"{verb}, which {use}: forbidden"
        if word not in self.own_functions and _matches(word, tuple(self.kernel.forbidden)):
            return f"{verb}, which the problem does not allow"
        return ""

    def _node_text(self, node: Node) -> str:
        return self.bytes[node.start_byte : node.end_byte].decode("utf-8", "replace")

    def _is_extern(self, node: Node) -> bool:
        return any(
            each.type == "storage_class_specifier" and self._node_text(each) == "extern" for each in node.children
        )

    def _parameter_names(self, function: Node) -> set[str]:
        names = set()
        for each in declarators(function.child_by_field_name("declarator")):
            if parameters := each.child_by_field_name("parameters"):
                names = {name for parameter in parameters.named_children for name in declared_names(parameter)}
        return names


@lru_cache(maxsize=4096)
def _system_use(name: str) -> str:
    """Returns the purpose of a system name, or "" if the name is harmless or unknown."""
    for each in (name, name.removeprefix("__builtin_")):
        if use := _EXACT_NAMES.get(each) or next(
            (use for pattern, use in _NAME_PATTERNS if fnmatchcase(each, pattern)), ""
        ):
            return use
    return ""


@lru_cache(maxsize=4096)
def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
