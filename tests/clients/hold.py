"""Creates instances with nvidia-ml-py, holds them while other programs read them, and destroys them.

Arguments: a GPU index, then PROFILE@START for each GPU instance. Each gets one compute instance that
occupies all of it. Prints the MIG devices as one line of JSON, and waits for the end of its standard
input with the driver open. Then destroys its instances.
"""

import json
import sys

import pynvml as nv


def text(value):
    return value.decode() if isinstance(value, bytes) else value


def find(count, ask, name):
    """Returns the profile of the driver with this name."""
    for index in range(count):
        try:
            info = ask(index)
        except (nv.NVMLError_NotSupported, nv.NVMLError_InvalidArgument):
            continue
        if text(info.name).removeprefix("MIG ") == name:
            return info
    raise SystemExit(f"no profile {name}")


nv.nvmlInit()
gpu = nv.nvmlDeviceGetHandleByIndex(int(sys.argv[1]))
made, devices = [], []
for entry in sys.argv[2:]:
    name, start = entry.split("@")
    profile = find(
        nv.NVML_GPU_INSTANCE_PROFILE_COUNT, lambda index: nv.nvmlDeviceGetGpuInstanceProfileInfo(gpu, index), name
    )
    spans = (nv.c_nvmlGpuInstancePlacement_t * 16)()
    count = nv.c_uint(0)
    nv.nvmlDeviceGetGpuInstancePossiblePlacements(gpu, profile.id, spans, nv.byref(count))
    span = next(span for span in spans[: count.value] if span.start == int(start))
    gi = nv.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, profile.id, nv.byref(span))
    whole = find(
        nv.NVML_COMPUTE_INSTANCE_PROFILE_COUNT,
        lambda index: nv.nvmlGpuInstanceGetComputeInstanceProfileInfo(gi, index, 0),
        name,
    )
    ci = nv.nvmlGpuInstanceCreateComputeInstance(gi, whole.id)
    made.append((gi, ci))
    info = nv.nvmlComputeInstanceGetInfo_v2(ci)
    devices.append({"uuid": text(nv.nvmlDeviceGetUUID(info.device)), "gi": nv.nvmlGpuInstanceGetInfo(gi).id, "ci": info.id})

print(json.dumps(sorted(devices, key=lambda d: (d["gi"], d["ci"]))), flush=True)
sys.stdin.read()
for gi, ci in reversed(made):
    nv.nvmlComputeInstanceDestroy(ci)
    nv.nvmlGpuInstanceDestroy(gi)
nv.nvmlShutdown()
