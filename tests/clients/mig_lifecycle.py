"""Creates, reads and destroys GPU and compute instances with nvidia-ml-py.

Runs on GPU 0, which must be in MIG mode and empty, and leaves it empty. Prints its readings as one
JSON object. A failed assertion ends the program with a traceback. The program does not depend on the
simulator and also runs on a real A100 or H100.
"""

import json
import sys

import pynvml as nv


def fails(code, function, *args):
    """Asserts that the call fails with exactly this code."""
    try:
        function(*args)
    except nv.NVMLError as error:
        assert error.value == code, f"{function.__name__}: {error} ({error.value}), wanted {code}"
        return
    raise AssertionError(f"{function.__name__} succeeded, wanted {code}")


def fields(struct):
    return {name: getattr(struct, name) for name, _ in struct._fields_ if name not in ("version", "name", "capabilities")}


def text(value):
    return value.decode() if isinstance(value, bytes) else value


def profiles(gpu):
    """Returns every GPU instance profile of the GPU, queried with both versions of the call."""
    found = {}
    for index in range(nv.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            new = nv.nvmlDeviceGetGpuInstanceProfileInfo(gpu, index, version=2)
        except (nv.NVMLError_NotSupported, nv.NVMLError_InvalidArgument) as error:
            fails(error.value, nv.nvmlDeviceGetGpuInstanceProfileInfo, gpu, index, 1)
            continue
        old = nv.nvmlDeviceGetGpuInstanceProfileInfo(gpu, index, version=1)
        assert fields(old) == fields(new), (index, fields(old), fields(new))
        name = text(new.name)
        assert name.startswith("MIG "), name
        found[name[4:]] = new
    return found


def placements(function, handle, profile_id, struct):
    """Returns the possible placements. A NULL array queries their number."""
    count = nv.c_uint(0)
    function(handle, profile_id, None, nv.byref(count))
    array = (struct * count.value)()
    function(handle, profile_id, array, nv.byref(count))
    return [(p.start, p.size) for p in array[: count.value]]


def gpu_instances(gpu, profile):
    count = nv.c_uint(0)
    array = (nv.c_nvmlGpuInstance_t * profile.instanceCount)()
    nv.nvmlDeviceGetGpuInstances(gpu, profile.id, array, nv.byref(count))
    return list(array)[: count.value]


def compute_instances(gi, profile):
    count = nv.c_uint(0)
    array = (nv.c_nvmlComputeInstance_t * profile.instanceCount)()
    nv.nvmlGpuInstanceGetComputeInstances(gi, profile.id, array, nv.byref(count))
    return list(array)[: count.value]


def mig_devices(gpu):
    found = []
    for index in range(nv.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            found.append(nv.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index))
        except nv.NVMLError_NotFound:
            continue
    return found


def describe(gpu, device):
    """Reads one MIG device in every possible way."""
    assert nv.nvmlDeviceIsMigDeviceHandle(device)
    parent = nv.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)
    assert nv.nvmlDeviceGetUUID(parent) == nv.nvmlDeviceGetUUID(gpu)
    uuid = text(nv.nvmlDeviceGetUUID(device))
    assert uuid.startswith("MIG-"), uuid
    again = nv.nvmlDeviceGetHandleByUUID(uuid)
    gi_id, ci_id = nv.nvmlDeviceGetGpuInstanceId(device), nv.nvmlDeviceGetComputeInstanceId(device)
    assert (nv.nvmlDeviceGetGpuInstanceId(again), nv.nvmlDeviceGetComputeInstanceId(again)) == (gi_id, ci_id)
    gi = nv.nvmlDeviceGetGpuInstanceById(gpu, gi_id)
    ci = nv.nvmlGpuInstanceGetComputeInstanceById(gi, ci_id)
    info = nv.nvmlComputeInstanceGetInfo_v2(ci)
    assert info.id == ci_id
    attributes = nv.nvmlDeviceGetAttributes(device)
    memory = nv.nvmlDeviceGetMemoryInfo(device)
    assert memory.total == memory.used + memory.free
    return {
        "index": nv.nvmlDeviceGetIndex(device),
        "uuid": uuid,
        "name": text(nv.nvmlDeviceGetName(device)),
        "gi": gi_id,
        "ci": ci_id,
        "profile_id": info.profileId,
        "placement": [info.placement.start, info.placement.size],
        "sm": attributes.multiprocessorCount,
        "gi_slices": attributes.gpuInstanceSliceCount,
        "ci_slices": attributes.computeInstanceSliceCount,
        "memory_mib": attributes.memorySizeMB,
        "memory_total": memory.total,
    }


def main():
    nv.nvmlInit()
    gpu = nv.nvmlDeviceGetHandleByIndex(0)
    assert nv.nvmlDeviceGetMigMode(gpu) == [1, 1], nv.nvmlDeviceGetMigMode(gpu)
    assert nv.nvmlDeviceGetMaxMigDeviceCount(gpu) == 7
    known = profiles(gpu)
    assert not mig_devices(gpu)

    three = next(p for name, p in known.items() if name.startswith("3g."))
    two = next(p for name, p in known.items() if name.startswith("2g."))
    one = next(p for name, p in known.items() if name.startswith("1g.") and "+" not in name)
    spans = placements(nv.nvmlDeviceGetGpuInstancePossiblePlacements, gpu, three.id, nv.c_nvmlGpuInstancePlacement_t)
    assert spans == [(0, 4), (4, 4)], spans
    capacity = nv.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, three.id)
    assert capacity == three.instanceCount == 2

    # The first GPU instance is created at a given placement. For the other two, the driver chooses the placement.
    at = nv.c_nvmlGpuInstancePlacement_t(4, 4)
    first = nv.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, three.id, nv.byref(at))
    fails(nv.NVML_ERROR_INSUFFICIENT_RESOURCES, nv.nvmlDeviceCreateGpuInstanceWithPlacement, gpu, three.id, nv.byref(at))
    second = nv.nvmlDeviceCreateGpuInstance(gpu, two.id)
    third = nv.nvmlDeviceCreateGpuInstance(gpu, one.id)
    assert nv.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, three.id) == 0
    assert not mig_devices(gpu), "a GPU instance without a compute instance is no MIG device"

    instances = []
    for handle, profile in ((first, three), (second, two), (third, one)):
        info = nv.nvmlGpuInstanceGetInfo(handle)
        assert info.profileId == profile.id
        assert nv.nvmlDeviceGetUUID(info.device) == nv.nvmlDeviceGetUUID(gpu)
        listed = [nv.nvmlGpuInstanceGetInfo(other).id for other in gpu_instances(gpu, profile)]
        assert listed == [info.id], listed
        instances.append({"id": info.id, "profile_id": info.profileId, "placement": [info.placement.start, info.placement.size]})
    assert instances[0]["placement"] == [4, 4]
    fails(nv.NVML_ERROR_NOT_FOUND, nv.nvmlDeviceGetGpuInstanceById, gpu, 0)

    # The 3g GPU instance gets two compute instances of one slice each, the first at a given placement. Each other
    # GPU instance gets one compute instance of its full size.
    names = {}
    for index in range(nv.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        try:
            new = nv.nvmlGpuInstanceGetComputeInstanceProfileInfo(first, index, 0, version=2)
        except (nv.NVMLError_NotSupported, nv.NVMLError_InvalidArgument) as error:
            fails(error.value, nv.nvmlGpuInstanceGetComputeInstanceProfileInfo, first, index, 0, 1)
            continue
        old = nv.nvmlGpuInstanceGetComputeInstanceProfileInfo(first, index, 0, version=1)
        assert fields(old) == fields(new), (index, fields(old), fields(new))
        names[text(new.name)] = new
    single = next(p for p in names.values() if p.sliceCount == 1)
    spans = placements(
        nv.nvmlGpuInstanceGetComputeInstancePossiblePlacements, first, single.id, nv.c_nvmlComputeInstancePlacement_t
    )
    assert (1, 1) in spans, spans
    at = nv.c_nvmlComputeInstancePlacement_t(1, 1)
    placed = nv.nvmlGpuInstanceCreateComputeInstanceWithPlacement(first, single.id, nv.byref(at))
    fails(
        nv.NVML_ERROR_INSUFFICIENT_RESOURCES,
        nv.nvmlGpuInstanceCreateComputeInstanceWithPlacement, first, single.id, nv.byref(at),
    )
    left = nv.nvmlGpuInstanceGetComputeInstanceRemainingCapacity(first, single.id)
    assert left == single.instanceCount - 1, left
    created = [placed, nv.nvmlGpuInstanceCreateComputeInstance(first, single.id)]
    assert len(compute_instances(first, single)) == 2
    for gi in (second, third):
        for index in range(nv.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
            try:
                profile = nv.nvmlGpuInstanceGetComputeInstanceProfileInfo(gi, index, 0)
            except (nv.NVMLError_NotSupported, nv.NVMLError_InvalidArgument):
                continue
            if profile.instanceCount == 1:
                created.append(nv.nvmlGpuInstanceCreateComputeInstance(gi, profile.id))
                break

    devices = [describe(gpu, device) for device in mig_devices(gpu)]
    assert len(devices) == 4, devices
    assert [d["index"] for d in devices] == [0, 1, 2, 3]
    assert [(d["gi"], d["ci"]) for d in devices] == sorted((d["gi"], d["ci"]) for d in devices)
    seen = {"driver": text(nv.nvmlSystemGetDriverVersion()), "gpu": text(nv.nvmlDeviceGetUUID(gpu)),
            "profiles": sorted(known), "compute_profiles": sorted(names), "instances": instances, "devices": devices}

    # The compute instances are destroyed first: a GPU instance that contains some cannot be destroyed.
    fails(nv.NVML_ERROR_IN_USE, nv.nvmlGpuInstanceDestroy, first)
    stale = nv.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
    for ci in created:
        nv.nvmlComputeInstanceDestroy(ci)
    fails(nv.NVML_ERROR_INVALID_ARGUMENT, nv.nvmlComputeInstanceDestroy, placed)
    fails(nv.NVML_ERROR_INVALID_ARGUMENT, nv.nvmlDeviceGetUUID, stale)
    assert not mig_devices(gpu)
    for gi in (first, second, third):
        nv.nvmlGpuInstanceDestroy(gi)
    fails(nv.NVML_ERROR_INVALID_ARGUMENT, nv.nvmlGpuInstanceGetInfo, first)
    for profile in known.values():
        assert not gpu_instances(gpu, profile)
    assert nv.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, three.id) == 2

    # After the shutdown, calls fail as uninitialized.
    nv.nvmlShutdown()
    fails(nv.NVML_ERROR_UNINITIALIZED, nv.nvmlDeviceGetCount)
    json.dump(seen, sys.stdout)


main()
