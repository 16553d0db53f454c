"""Prints every GPU and MIG device of the host, as read with nvidia-ml-py, as one JSON list.

A reading that a GPU does not have is null.
"""

import json
import sys

import pynvml as nv


def text(value):
    return value.decode() if isinstance(value, bytes) else value


def read(function, *args):
    try:
        value = function(*args)
    except nv.NVMLError_NotSupported:
        return None
    return text(value)


def processes(device):
    listed = []
    for kind, function in (
        ("compute", nv.nvmlDeviceGetComputeRunningProcesses),
        ("graphics", nv.nvmlDeviceGetGraphicsRunningProcesses),
        ("mps", nv.nvmlDeviceGetMPSComputeRunningProcesses),
    ):
        for process in function(device):
            listed.append([kind, process.pid, process.usedGpuMemory, process.gpuInstanceId, process.computeInstanceId])
    return listed


def mig_devices(gpu):
    for index in range(nv.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            device = nv.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
        except nv.NVMLError_NotFound:
            continue
        yield {
            "uuid": text(nv.nvmlDeviceGetUUID(device)),
            "name": text(nv.nvmlDeviceGetName(device)),
            "gi": nv.nvmlDeviceGetGpuInstanceId(device),
            "ci": nv.nvmlDeviceGetComputeInstanceId(device),
            "memory": nv.nvmlDeviceGetMemoryInfo(device).total,
            "processes": processes(device),
        }


def survey():
    for index in range(nv.nvmlDeviceGetCount()):
        gpu = nv.nvmlDeviceGetHandleByIndex(index)
        utilization = read(nv.nvmlDeviceGetUtilizationRates, gpu)
        yield {
            "index": nv.nvmlDeviceGetIndex(gpu),
            "minor": nv.nvmlDeviceGetMinorNumber(gpu),
            "uuid": text(nv.nvmlDeviceGetUUID(gpu)),
            "name": text(nv.nvmlDeviceGetName(gpu)),
            "pci": text(nv.nvmlDeviceGetPciInfo(gpu).busId),
            "mig": read(nv.nvmlDeviceGetMigMode, gpu),
            "memory": nv.nvmlDeviceGetMemoryInfo(gpu).total,
            "utilization": None if utilization is None else utilization.gpu,
            "temperature": nv.nvmlDeviceGetTemperature(gpu, nv.NVML_TEMPERATURE_GPU),
            "power": nv.nvmlDeviceGetPowerUsage(gpu),
            "devices": list(mig_devices(gpu)),
            "processes": processes(gpu),
        }


nv.nvmlInit()
json.dump(list(survey()), sys.stdout)
nv.nvmlShutdown()
