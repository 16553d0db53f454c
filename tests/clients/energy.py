"""Reads the energy counters of all GPUs through codecarbon's own NVIDIA reader.

codecarbon's package imports all of its reporting code. This script needs only `codecarbon.core`, so it does not execute
the package itself. Prints, for each GPU, its UUID and two consecutive readings in kWh, as JSON.
"""

import importlib.util
import json
import sys
import types

root = importlib.util.find_spec("codecarbon").submodule_search_locations
package = types.ModuleType("codecarbon")
package.__path__ = list(root)
sys.modules["codecarbon"] = package

from codecarbon.core.gpu_nvidia import NvidiaGPUDevice, pynvml  # noqa: E402

seen = []
for index in range(pynvml.nvmlDeviceGetCount()):
    device = NvidiaGPUDevice(handle=pynvml.nvmlDeviceGetHandleByIndex(index), gpu_index=index)
    first = device.last_energy.kWh
    device.start()
    seen.append({"uuid": device.get_static_details()["uuid"], "first": first, "then": device.last_energy.kWh})
print(json.dumps(seen))
