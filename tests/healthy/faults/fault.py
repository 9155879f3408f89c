"""Faults of a rank. Errors of libraries are raised with their original messages; all other faults are real."""

import ctypes
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import warnings

LIBC = ctypes.CDLL(None, use_errno=True)


def happen(name):
    """Causes the fault with this name in `faults.json`."""
    if os.environ.get("FAULT_WARNING"):
        warnings.warn("The given NumPy array is not writable, and PyTorch does not support non-writable tensors.", UserWarning, stacklevel=2)
        print("WARNING: retrying upload of metrics (attempt 1 of 5): connection timed out", file=sys.stderr, flush=True)
    globals()[f"fault_{name}"]()


def from_outside():
    """Waits for a fault that is caused from outside."""
    marks = os.environ["FAULT_MARKS"]
    with open(f"{marks}/.ready", "w") as mark:
        mark.write(str(os.getpid()))
    os.rename(f"{marks}/.ready", f"{marks}/ready")
    time.sleep(600)


fault_sigkill = fault_sigterm = fault_sigsegv = fault_sigabrt = from_outside


def fault_oom():
    group = f"/sys/fs/cgroup/memory/mainstay-matrix-{os.getpid()}"
    limit = "memory.limit_in_bytes"
    if not os.path.isdir("/sys/fs/cgroup/memory"):
        group, limit = f"/sys/fs/cgroup/mainstay-matrix-{os.getpid()}", "memory.max"
    os.mkdir(group)
    with open(f"{group}/{limit}", "w") as file:
        file.write("64M")
    with open(f"{group}/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
    held = []
    while True:
        held.append(b"x" * (16 << 20))


def mount(kind, where, options, flags=0):
    os.makedirs(where, exist_ok=True)
    if LIBC.mount(kind.encode(), where.encode(), kind.encode(), flags, options.encode()) != 0:
        raise SystemExit(f"the bench cannot mount a {kind}: errno {ctypes.get_errno()}")


def save(path):
    if "torch" in sys.modules:
        import torch

        torch.save({"weight": torch.zeros(1 << 20)}, path)
    else:
        with open(path, "wb") as file:
            file.write(b"0" * (4 << 20))


def fault_disk_full():
    place = tempfile.mkdtemp(prefix="checkpoints-")
    mount("tmpfs", place, "size=256k")
    save(f"{place}/step_100.pt")


def fault_disk_read_only():
    place = tempfile.mkdtemp(prefix="checkpoints-")
    mount("tmpfs", place, "size=16m", flags=1)
    save(f"{place}/step_100.pt")


class Batches:
    """Batches that are passed through shared memory."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        import torch

        return torch.zeros(1 << 19)


def fault_shm_full():
    mount("tmpfs", "/dev/shm", "size=512k")
    from torch.utils.data import DataLoader

    for _ in DataLoader(Batches(), batch_size=4, num_workers=1):
        pass


def fault_worker_killed():
    from torch.utils.data import DataLoader

    class Slow(Batches):
        def __getitem__(self, index):
            if index == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    for _ in DataLoader(Slow(), batch_size=1, num_workers=1):
        pass


def fault_missing_file():
    with open("/data/train/shard-00042.bin", "rb") as file:
        file.read()


def fault_broken_record():
    record = '{"id": 40211, "text": "a record that was cut o'
    return json.loads(record)


def fault_key_error():
    batch = {"input_ids": [1, 2], "attention_mask": [1, 1]}
    return batch["labels"]


def fault_shape_error():
    if "torch" in sys.modules:
        import torch

        return torch.randn(16, 10) @ torch.randn(12, 4)
    import numpy

    return numpy.zeros((16, 10)) @ numpy.zeros((12, 4))


def fault_nan_loss():
    raise FloatingPointError("loss is nan at step 118, stopping training")


def fault_cuda_ecc():
    raise RuntimeError(
        "CUDA error: uncorrectable ECC error encountered\n"
        "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    )


def fault_nccl_remote():
    raise RuntimeError(
        "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2251, remote process exited or there was a network error,"
        " NCCL version 2.27.3\n"
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
        "Last error:\n"
        "NET/IB: Got completion from peer 10.0.0.7<52411> with status=12 opcode=0 len=0 vendor err 129 (Recv) localGid fe80::1 hca mlx5_3"
    )


def fault_cudnn_version():
    raise RuntimeError(
        "cuDNN version incompatibility: PyTorch was compiled  against (9, 10, 2) but found runtime version (8, 9, 7)."
        " PyTorch already comes bundled with cuDNN. One option to resolving this error is to ensure PyTorch can find the bundled cuDNN."
    )


def connections(to_port=None):
    """The connected TCP sockets of this process."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6):
                    peer = found.getpeername()
                    if to_port is None or peer[1] == to_port:
                        yield found
        except OSError:
            continue


def fault_peer_lost():
    import torch.distributed as dist

    for found in connections():
        found.shutdown(socket.SHUT_RDWR)
    dist.barrier()


def fault_store_lost():
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    for found in connections(int(os.environ["MASTER_PORT"])):
        found.shutdown(socket.SHUT_RDWR)
    store.get("bench/never-set")


def fault_stuck_fs():
    place = tempfile.mkdtemp(prefix="dataset-")
    server = os.path.join(os.path.dirname(__file__), "stuck_fs.py")
    with subprocess.Popen([sys.executable, "-S", server, place], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        with open(f"{place}/shard-00007.bin", "rb") as file:
            file.read()


def fault_dns():
    socket.getaddrinfo("storage.datasets.invalid", 443)


def fault_proxy_503():
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Busy(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(503)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Busy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/shards/shard-00042.tar", timeout=10)


def fault_import_error():
    import fused_attention_kernels  # noqa: F401


def fault_exit_3():
    sys.exit(3)


def fault_os_exit_1():
    os._exit(1)


def fault_cpp_terminate():
    ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()


def fault_native_assert():
    LIBC.__assert_fail(b"index >= 0 && index < size", b"csrc/gather.cpp", 217, b"void gather(const long*, long)")


def fault_thread_dies():
    batches = queue.Queue()

    def prefetch():
        sample = {"tokens": [1, 2, 3]}
        batches.put(sample["length"])

    threading.Thread(target=prefetch, name="prefetch").start()
    batches.get(timeout=2)


def fault_deadlock():
    lock = threading.Lock()
    with lock:
        lock.acquire()


def fault_spin():
    while True:
        pass


if __name__ == "__main__":
    if len(sys.argv) != 2 or f"fault_{sys.argv[1]}" not in globals():
        raise SystemExit("usage: fault.py NAME")
    happen(sys.argv[1])
