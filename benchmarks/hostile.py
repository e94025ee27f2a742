"""Submissions that try to break the machine rather than the verdict: what each does, and the codes that may meet it.

They reach for modules that the static rules refuse by a way that these do not see, so every one of them runs. None
computes anything: what is tested is that nothing of it is left when its grading is over.
"""

from __future__ import annotations

from dataclasses import dataclass

_PRELUDE = """\
import warnings
import torch

modules = getattr(warnings.catch_warnings()._module, "".join(["s", "ys"])).modules
os, sys, time, ctypes = (modules[name] for name in ("os", "sys", "time", "ctypes"))
signal, socket, threading, mmap = (modules[name] for name in ("signal", "socket", "_thread", "mmap"))


def child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def daemon(work):
    def leave():
        os.setsid()
        child(work)
    os.waitpid(child(leave), 0)

"""

_DIED, _SLOW, _RAISED, _WRONG = ("worker-died",), ("time-limit",), ("runtime-error",), ("wrong-output",)
_MEMORY = ("memory-limit", "worker-died", "time-limit")


@dataclass(frozen=True)
class Hostile:
    """One way of being hostile."""

    name: str
    body: str
    """What `solve` does, or a module that defines it."""
    codes: tuple[str, ...]
    """Those that may meet it."""
    device: str = ""
    """`cuda` where it makes sense on a GPU only."""

    @property
    def source(self) -> bytes:
        if "def solve" in self.body:
            return (_PRELUDE + self.body).encode()
        lines = "".join(f"    {line}\n" for line in self.body.strip("\n").splitlines())
        return f"{_PRELUDE}\ndef solve(*inputs):\n{lines}    return inputs[0]\n".encode()


HOSTILE = [
    # ways to end
    Hostile("aborts", "os.abort()", _DIED),
    Hostile("reads address 8", "ctypes.string_at(8)", _DIED),
    Hostile("leaves at once", "os._exit(0)", _DIED),
    Hostile("leaves at import", "os._exit(0)\ndef solve(*inputs): pass", _DIED),
    Hostile("kills itself", "os.kill(os.getpid(), 9)", _DIED),
    Hostile("kills all that it may", "os.kill(-1, 9)", (*_DIED, *_WRONG)),
    Hostile("kills its group", "os.killpg(0, 9)", _DIED),
    Hostile("overflows the stack", "sys.setrecursionlimit(10**9)\nf = lambda: f()\nf()",
            (*_RAISED, *_MEMORY)),
    Hostile("becomes another program", "os.execv('/bin/sleep', ['sleep', '1000'])", (*_DIED, *_SLOW)),
    Hostile("becomes one that floods", "os.execv('/usr/bin/yes', ['yes'])", (*_DIED, "output-flood")),
    Hostile("raises what cannot be shown", "class Odd(Exception):\n    def __str__(self): os.abort()\n"
            "raise Odd()", _DIED),
    # ways not to end
    Hostile("stops itself", "os.kill(os.getpid(), signal.SIGSTOP)", _SLOW),
    Hostile("ignores signals", "for n in range(1, 32):\n    n in (9, 19) or signal.signal(n, 1)\n"
            "time.sleep(1000)", _SLOW),
    Hostile("spins", "while True: pass", _SLOW),
    Hostile("spins at import", "while True: pass\ndef solve(*inputs): pass", _SLOW),
    Hostile("sleeps with the interpreter locked", "ctypes.PyDLL(None).sleep(1000)", _SLOW),
    Hostile("matches for ever", "modules['re'].match('(a+)+$', 'a' * 40 + 'b')", _SLOW),
    Hostile("waits for itself", "lock = threading.allocate_lock()\nlock.acquire()\nlock.acquire()", _SLOW),
    # memory
    Hostile("takes tensors", "held = []\nwhile True: held.append(torch.ones(1 << 27))", _MEMORY),
    Hostile("takes text", "text = 'x'\nwhile True: text += text", _MEMORY),
    Hostile("takes memory in children", "[child(lambda: (bytearray(1 << 31), time.sleep(1000))) for _ in range(6)]\n"
            "time.sleep(1000)", _MEMORY),
    Hostile("fills files in memory", "fs = [os.memfd_create(str(i)) for i in range(40)]\n"
            "[os.write(f, bytes(1 << 28)) for f in fs]\ntime.sleep(1000)", (*_MEMORY, *_RAISED)),
    Hostile("fills shared memory", "m = [mmap.mmap(-1, 1 << 28) for _ in range(40)]\n"
            "[x.write(bytes(1 << 28)) for x in m]\ntime.sleep(1000)", (*_MEMORY, *_RAISED)),
    # processes and threads
    Hostile("forks for ever", "while True:\n    try: os.fork()\n    except OSError: time.sleep(0.01)",
            _MEMORY),
    Hostile("forks and leaves", "[child(lambda: time.sleep(1000)) for _ in range(60)]", (*_WRONG, *_SLOW)),
    Hostile("starts threads for ever", "while True:\n    try: threading.start_new_thread(time.sleep, (1000,))\n"
            "    except RuntimeError: time.sleep(0.01)", _MEMORY),
    Hostile("leaves a daemon", "daemon(lambda: time.sleep(1000))", _WRONG),
    Hostile("leaves a daemon that holds on", "daemon(lambda: [signal.signal(n, 1) for n in (1, 2, 15)]\n"
            "        + [time.sleep(1000)])", _WRONG),
    Hostile("leaves a daemon that prints", "daemon(lambda: [os.write(1, b'x' * 4096) for _ in iter(int, 1)])",
            (*_WRONG, "output-flood")),
    Hostile("leaves a daemon that forks", "def work():\n    while True:\n        if os.fork(): os._exit(0)\n"
            "daemon(work)",
            (*_WRONG, *_SLOW)),
    Hostile("answers twice", "os.fork()", (*_WRONG, "broken-channel")),
    Hostile("stopped children", "[os.kill(child(lambda: time.sleep(1000)), 19) for _ in range(20)]", _WRONG),
    Hostile("a name that is no text", "f = os.open('/proc/self/comm', 1)\nos.write(f, b'\\xff\\n) R 1')\ntime.sleep(1)",
            _WRONG),
    # files
    Hostile("one large file", "f = os.open('large', 66)\nwhile True: os.write(f, bytes(1 << 24))",
            (*_RAISED, *_MEMORY, "file-limit")),
    Hostile("many files", "for i in range(10**9):\n    os.write(os.open(f'file-{i}', 66), bytes(4096))",
            (*_RAISED, *_MEMORY, "file-limit")),
    Hostile("deep folders", "for _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')", (*_WRONG, *_RAISED)),
    Hostile("folders without rights", "os.mkdir('d')\nos.close(os.open('d/f', 66))\nos.chmod('d', 0)", _WRONG),
    Hostile("names that are no text", "[os.mkdir(b'\\xff\\n' + bytes([i])) for i in range(128, 200)]", _WRONG),
    Hostile("files in shared memory", "for i in range(10**9):\n"
            "    os.write(os.open(f'/dev/shm/left-{i}', 66), bytes(1 << 20))",
            (*_RAISED, *_MEMORY, *_WRONG)),
    Hostile("files in /tmp", "[os.write(os.open(f'/tmp/mkb-left-{i}', 66), b'x') for i in range(5)]",
            (*_WRONG, *_RAISED)),
    Hostile("shared memory of System V", "[ctypes.CDLL(None).shmget(i + 77, 1 << 20, 0o1666) for i in range(20)]",
            _WRONG),
    Hostile("a listening socket", "s = socket.socket(socket.AF_UNIX)\ns.bind('\\0mkb-left')\ns.listen()", _WRONG),
    # descriptors and output
    Hostile("closes everything", "os.closerange(0, 4096)", _DIED),
    Hostile("closes what it prints to", "os.close(1)\nos.close(2)", _WRONG),
    Hostile("uses up descriptors", "while True: os.dup(0)", _RAISED),
    Hostile("prints a gigabyte", "for _ in range(1024): os.write(1, b'x' * (1 << 20))", ("output-flood", *_WRONG)),
    Hostile("prints without end", "while True: os.write(2, b'x' * (1 << 20))", ("output-flood",)),
    Hostile("raises a gigabyte", "raise ValueError('x' * (1 << 30))", (*_RAISED, *_MEMORY)),
    # outputs
    Hostile("returns a million tensors", "return [inputs[0]] * 1000000", ("wrong-structure",)),
    Hostile("returns an endless view", "return torch.zeros(1).expand(1 << 40)", ("wrong-structure",)),
    Hostile("returns what answers strangely", "class Odd(tuple):\n    def __len__(self): os.abort()\nreturn Odd()",
            ("wrong-structure", *_DIED)),
    # the GPU
    Hostile("takes all of the GPU", "held = []\nwhile True: held.append(torch.ones(1 << 28, device='cuda'))",
            _MEMORY, "cuda"),
    Hostile("asks for more than the GPU has", "torch.empty(1 << 50, device='cuda', dtype=torch.uint8)",
            (*_MEMORY, *_RAISED), "cuda"),
    Hostile("an index out of bounds", "where = torch.tensor([1 << 40], device='cuda')\n"
            "torch.zeros(4, device='cuda')[where].sum().item()", (*_RAISED, *_DIED), "cuda"),
    Hostile("an index out of bounds that nobody waits for", "where = torch.tensor([1 << 40], device='cuda')\n"
            "torch.zeros(4, device='cuda')[where]", (*_RAISED, *_DIED), "cuda"),
    Hostile("an illegal address", "runtime = modules['metakernelbench.grading.cuda_ipc']\n"
            "runtime.as_tensor(1 << 46, 1 << 20).fill_(7)\ntorch.cuda.synchronize()", (*_RAISED, *_DIED), "cuda"),
    Hostile("occupies the GPU", "torch.cuda._sleep(1 << 50)\ntorch.cuda.synchronize()", _SLOW, "cuda"),
    Hostile("occupies the GPU and leaves", "torch.cuda._sleep(1 << 50)\nos._exit(0)", _DIED, "cuda"),
    Hostile("dies with much of the GPU", "held = torch.ones(1 << 33, device='cuda')\nos.abort()", _DIED, "cuda"),
    Hostile("stops with much of the GPU", "held = torch.ones(1 << 33, device='cuda')\nos.kill(os.getpid(), 19)",
            _SLOW, "cuda"),
    Hostile("resets the device", "ctypes.CDLL(modules['metakernelbench.grading.cuda_ipc']._runtime()._name)"
            ".cudaDeviceReset()", (*_RAISED, *_DIED, *_WRONG), "cuda"),
    Hostile("pins host memory", "held = []\nwhile True: held.append(torch.empty(1 << 30).pin_memory())",
            (*_MEMORY, *_RAISED), "cuda"),
    Hostile("a daemon that keeps the GPU's memory", "held = torch.ones(1 << 30, device='cuda')\n"
            "daemon(lambda: time.sleep(1000))", _WRONG, "cuda"),
]  # fmt: skip
