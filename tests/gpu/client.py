"""Computes on a GPU with PyTorch, and prints how fast: the client of the checks in tests/gpu.

Each line that it prints is a JSON object with a "state":

    ready      memory is allocated, and the kernel has run: pid, device, number of multiprocessors it can use
    computing  at the first iteration, then twice a second: iterations so far
    ended      after --seconds or SIGTERM: iterations, seconds, iterations_per_second, longest_pause_ms, and with --duty
               busy_seconds: the time in which its kernels ran, by the clock of the GPU
    failed     the error, such as "out of memory"; the exit status is 1

An iteration multiplies two matrices and waits for the result. With --small, most of the GPU stays idle. With --duty, the
program pauses after each iteration, so that its kernels run in this part of the time.
"""

import argparse
import json
import os
import select
import signal
import sys
import time


def say(state, **figures):
    print(json.dumps({"state": state, **figures}), flush=True)


def fail(error):
    say("failed", error=error)
    sys.exit(1)


def compute(arguments, ended):
    size = 512 if arguments.small else 4096
    # PyTorch frees the memory when no reference to it remains.
    _held = torch.empty(arguments.allocate << 20, dtype=torch.uint8, device="cuda")
    left, right = (torch.randn(size, size, device="cuda") for _ in range(2))
    product = torch.empty_like(left)

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def iterate():
        """Runs one kernel. Returns its time in seconds."""
        begin.record()
        torch.mm(left, right, out=product)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    # The first iterations choose and load the kernel.
    for _ in range(3):
        iterate()
    device = torch.cuda.get_device_properties(0)
    say("ready", pid=os.getpid(), device=device.name, multiprocessors=device.multi_processor_count)
    while arguments.wait and not ended and not select.select([sys.stdin], [], [], 0.2)[0]:
        pass

    began = last = printed = time.monotonic()
    iterations, longest, busy = 0, 0.0, 0.0
    while not ended and (arguments.seconds is None or last - began < arguments.seconds):
        busy += iterate()
        if arguments.duty:
            # The pause depends on all times since the begin, so that errors of single pauses do not add up.
            time.sleep(max(0.0, began + busy / arguments.duty - time.monotonic()))
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        iterations += 1
        if iterations == 1 or now - printed >= 0.5:
            say("computing", iterations=iterations)
            printed = now
    seconds = last - began
    per_second = iterations / seconds if iterations else 0.0
    figures = {"iterations": iterations, "seconds": seconds, "iterations_per_second": per_second}
    if arguments.duty:
        figures["busy_seconds"] = busy
    say("ended", **figures, longest_pause_ms=longest * 1e3)


def duty(text):
    part = float(text)
    if not 0.0 < part <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0 and up to 1, such as 0.3")
    return part


parser = argparse.ArgumentParser(description="computes on a GPU, and says how fast")
parser.add_argument("--seconds", type=float, help="for so long; without, until SIGTERM")
parser.add_argument("--allocate", type=int, default=0, metavar="MIB", help="device memory to allocate before")
parser.add_argument("--small", action="store_true", help="kernels that leave most of the GPU idle")
parser.add_argument("--duty", type=duty, metavar="PART", help="part of the time in which kernels run, such as 0.3")
parser.add_argument("--wait", action="store_true", help="begin with a line on standard input")
arguments = parser.parse_args()

# The handler only sets a flag. An exception in the middle of a kernel would end the program abruptly.
ended = []
signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
try:
    import torch
except ImportError as error:
    fail(f"{sys.executable} has no PyTorch: {error}")
if not torch.cuda.is_available():
    fail(f"PyTorch {torch.__version__} sees no CUDA device")
try:
    compute(arguments, ended)
except torch.cuda.OutOfMemoryError:
    fail("out of memory")
except RuntimeError as error:
    fail(str(error).partition("\n")[0])
