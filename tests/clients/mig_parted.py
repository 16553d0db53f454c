"""Creates and destroys the MIG devices of a mig-parted label with the driver calls that mig-parted makes.

Arguments: a GPU index, then labels as PROFILE=COUNT[,PROFILE=COUNT]. For each label: clears the GPU, creates the
devices, and checks that the driver lists the same number. Like mig-parted, this program finds a profile by slices and
memory: it takes the first match over GPU instance indexes and compute instance indexes. So `1g.20gb` on an H100
becomes compute profile 0, not 7. Leaves the devices of the last label. For each label, prints one line of JSON with
`[GPU instance, compute instance, compute profile]` of each device.
"""

import json
import sys

import pynvml as nv

SKIPPED = (nv.NVMLError_NotSupported, nv.NVMLError_InvalidArgument)
COMPUTE_SLICES = {0: 1, 1: 2, 2: 3, 3: 4, 4: 7, 5: 8, 6: 6, 7: 1}
MEDIA = {7, 8}


def gpu_profiles(gpu):
    for index in range(10):
        try:
            yield index, nv.nvmlDeviceGetGpuInstanceProfileInfo(gpu, index, version=1)
        except SKIPPED:
            continue


def name(gpu, index, profile):
    """Returns mig-parted's name of a profile. The memory is rounded to eighths of the board's memory."""
    total = nv.nvmlDeviceGetMemoryInfo(gpu).total
    eighths = -(-profile.memorySizeMB * 1024 * 1024 * 8 // total)
    gigabytes = int(eighths / 8 * -(-total // 1024**3) + 0.5)
    return f"{profile.sliceCount}g.{gigabytes}gb" + ("+me" if index in MEDIA else "")


def clear(gpu):
    for _, profile in gpu_profiles(gpu):
        instances = (nv.c_nvmlGpuInstance_t * profile.instanceCount)()
        count = nv.c_uint(0)
        nv.nvmlDeviceGetGpuInstances(gpu, profile.id, instances, nv.byref(count))
        for gi in list(instances)[: count.value]:
            for index in COMPUTE_SLICES:
                try:
                    compute = nv.nvmlGpuInstanceGetComputeInstanceProfileInfo(gi, index, 0, version=1)
                except SKIPPED:
                    continue
                computes = (nv.c_nvmlComputeInstance_t * compute.instanceCount)()
                number = nv.c_uint(0)
                nv.nvmlGpuInstanceGetComputeInstances(gi, compute.id, computes, nv.byref(number))
                for ci in list(computes)[: number.value]:
                    nv.nvmlComputeInstanceDestroy(ci)
            nv.nvmlGpuInstanceDestroy(gi)


def create(gpu, wanted):
    """Creates a device. Its compute instance index is the first with as many slices as the GPU instance."""
    known = {name(gpu, index, profile): (index, profile) for index, profile in reversed(list(gpu_profiles(gpu)))}
    assert wanted in known, f"no profile {wanted}; there are: {sorted(known)}"
    index, profile = known[wanted]
    gi = nv.nvmlDeviceCreateGpuInstance(gpu, profile.id)
    compute_index = next(i for i, slices in COMPUTE_SLICES.items() if slices == profile.sliceCount)
    compute = nv.nvmlGpuInstanceGetComputeInstanceProfileInfo(gi, compute_index, 0, version=1)
    ci = nv.nvmlGpuInstanceCreateComputeInstance(gi, compute.id)
    info = nv.nvmlComputeInstanceGetInfo_v2(ci)
    return nv.nvmlGpuInstanceGetInfo(gi).id, info.id, info.profileId


nv.nvmlInit()
gpu = nv.nvmlDeviceGetHandleByIndex(int(sys.argv[1]))
for label in sys.argv[2:]:
    clear(gpu)
    counts = [entry.split("=") for entry in label.split(",")]
    wanted = [profile for profile, count in counts for _ in range(int(count))]
    made = sorted(create(gpu, profile) for profile in sorted(wanted, key=lambda p: -int(p.split("g")[0])))
    devices = []
    for at in range(nv.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            devices.append(nv.nvmlDeviceGetMigDeviceHandleByIndex(gpu, at))
        except nv.NVMLError_NotFound:
            break
    assert len(devices) == len(wanted), (label, made, len(devices))
    print(json.dumps(made), flush=True)
nv.nvmlShutdown()
