//! Memory, load, temperature, power, clocks and PCIe: the readings that monitors show.
//!
//! For a MIG device, only the memory can be read. All other functions return `NOT_SUPPORTED` for a
//! MIG device. As with real drivers, the functions for the load also return `NOT_SUPPORTED` for a
//! GPU in MIG mode.

use nvml_wrapper_sys::bindings::{nvmlBAR1Memory_t, nvmlMemory_t, nvmlMemory_v2_t, nvmlUtilization_t};
use silicon::fault::Sensor;
use silicon::machine::{Board, Memory, Reading};
use silicon::{Machine, Return};

use crate::caller::{Opaque, Outcome, Ptr, version_word};
use crate::entry::{Device, exports};

const MIB: u64 = 1 << 20;

/// Sampling period of the encoder's and decoder's counters, in µs.
const SAMPLING_PERIOD_US: u32 = 167_000;

exports! {
    /// Returns the memory in bytes. The used memory includes the reserved memory.
    fn nvmlDeviceGetMemoryInfo(device: Opaque, info: Ptr<nvmlMemory_t>) |call| {
        let memory = call.device(device, memory)?;
        let used = memory.used_mib + memory.reserved_mib;
        info.put(nvmlMemory_t {
            total: memory.total_mib * MIB,
            free: memory.total_mib.saturating_sub(used) * MIB,
            used: used * MIB,
        })
    }

    /// Returns the memory in bytes. The reserved memory is a separate value.
    fn nvmlDeviceGetMemoryInfo_v2(device: Opaque, info: Ptr<nvmlMemory_v2_t>) |call| {
        let version = info.cast::<u32>().get()?;
        if version != version_word::<nvmlMemory_v2_t>(2) {
            return Err(Return::ArgumentVersionMismatch);
        }
        let memory = call.device(device, memory)?;
        info.put(nvmlMemory_v2_t {
            version,
            total: memory.total_mib * MIB,
            reserved: memory.reserved_mib * MIB,
            free: memory.total_mib.saturating_sub(memory.used_mib + memory.reserved_mib) * MIB,
            used: memory.used_mib * MIB,
        })
    }

    /// Returns the size and the use in bytes of the BAR1 window, through which the host accesses
    /// the GPU's memory.
    fn nvmlDeviceGetBAR1MemoryInfo(device: Opaque, info: Ptr<nvmlBAR1Memory_t>) |call| {
        let memory = call.device(device, memory)?;
        // The BAR1 window of a board covers all memory of the board. A MIG device has a part of the
        // window.
        let total = memory.total_mib.next_power_of_two() * MIB;
        let used = memory.total_mib.min(1) * MIB;
        info.put(nvmlBAR1Memory_t { bar1Total: total, bar1Free: total - used, bar1Used: used })
    }

    /// Returns the load in percent.
    fn nvmlDeviceGetUtilizationRates(device: Opaque, rates: Ptr<nvmlUtilization_t>) |call| {
        let now = call.gpu(device, |m, gpu| without_mig(m, gpu).and_then(|()| reading(m, gpu)))?;
        let (gpu, memory) = match call.sensor() {
            Some(Sensor::Zero) => (0, 0),
            Some(Sensor::Excess) => (now.gpu_percent + EXCESS, now.memory_percent + EXCESS),
            Some(Sensor::Nan | Sensor::Foreign | Sensor::Stale) | None => (now.gpu_percent, now.memory_percent),
        };
        rates.put(nvmlUtilization_t { gpu, memory })
    }

    /// Returns the load of the video encoders in percent, and the sampling period. The load is
    /// always 0.
    fn nvmlDeviceGetEncoderUtilization(device: Opaque, percent: Ptr<u32>, period: Ptr<u32>) |call| {
        call.gpu(device, without_mig)?;
        percent.put(0)?;
        period.put(SAMPLING_PERIOD_US)
    }

    /// Returns the load of the video decoders in percent, and the sampling period. The load is
    /// always 0.
    fn nvmlDeviceGetDecoderUtilization(device: Opaque, percent: Ptr<u32>, period: Ptr<u32>) |call| {
        call.gpu(device, without_mig)?;
        percent.put(0)?;
        period.put(SAMPLING_PERIOD_US)
    }

    /// Returns the core temperature in °C. There is only one sensor, number 0.
    fn nvmlDeviceGetTemperature(device: Opaque, sensor: u32, celsius: Ptr<u32>) |call| {
        if sensor != 0 {
            return Err(Return::InvalidArgument);
        }
        let celsius_now = call.gpu(device, reading)?.temperature_c;
        celsius.put(unless_zero(call.sensor(), celsius_now))
    }

    /// Returns the temperatures in °C at which the board reacts.
    fn nvmlDeviceGetTemperatureThreshold(device: Opaque, threshold: u32, celsius: Ptr<u32>) |call| {
        call.gpu(device, |_, _| Ok(()))?;
        celsius.put(match threshold {
            0 => 92, // shutdown
            1 => 89, // slowdown
            2 => 95, // memory, maximum in operation
            3 => 85, // core, maximum in operation
            4..=7 => return Err(Return::NotSupported),
            _ => return Err(Return::InvalidArgument),
        })
    }

    /// Always fails, because data-centre boards have no fan.
    fn nvmlDeviceGetFanSpeed(device: Opaque, _percent: Ptr<u32>) |call| {
        call.gpu(device, |_, _| Err(Return::NotSupported))
    }

    /// Returns the power draw in mW.
    fn nvmlDeviceGetPowerUsage(device: Opaque, milliwatts: Ptr<u32>) |call| {
        let power_mw = call.gpu(device, reading)?.power_mw;
        milliwatts.put(unless_zero(call.sensor(), power_mw))
    }

    /// Returns the effective power limit, in mW.
    fn nvmlDeviceGetEnforcedPowerLimit(device: Opaque, milliwatts: Ptr<u32>) |call| {
        milliwatts.put(call.gpu(device, reading)?.power_limit_mw)
    }

    /// Returns the configured power limit, in mW.
    fn nvmlDeviceGetPowerManagementLimit(device: Opaque, milliwatts: Ptr<u32>) |call| {
        milliwatts.put(call.gpu(device, reading)?.power_limit_mw)
    }

    /// Returns the current clock of a clock domain, in MHz.
    fn nvmlDeviceGetClockInfo(device: Opaque, domain: u32, megahertz: Ptr<u32>) |call| {
        let now = call.gpu(device, reading)?;
        megahertz.put(clock(domain, now.sm_clock_mhz, now.memory_clock_mhz)?)
    }

    /// Returns the maximum clock of a clock domain, in MHz.
    fn nvmlDeviceGetMaxClockInfo(device: Opaque, domain: u32, megahertz: Ptr<u32>) |call| {
        let most = call.gpu(device, board)?;
        megahertz.put(clock(domain, most.max_sm_clock_mhz, most.max_memory_clock_mhz)?)
    }

    /// Returns the current PCIe generation.
    fn nvmlDeviceGetCurrPcieLinkGeneration(device: Opaque, generation: Ptr<u32>) |call| {
        generation.put(call.gpu(device, board)?.pcie_generation)
    }

    /// Returns the current number of PCIe lanes.
    fn nvmlDeviceGetCurrPcieLinkWidth(device: Opaque, lanes: Ptr<u32>) |call| {
        lanes.put(call.gpu(device, board)?.pcie_width)
    }

    /// Returns the maximum PCIe generation that both board and slot support.
    fn nvmlDeviceGetMaxPcieLinkGeneration(device: Opaque, generation: Ptr<u32>) |call| {
        generation.put(call.gpu(device, board)?.pcie_generation)
    }

    /// Returns the maximum number of PCIe lanes that both board and slot support.
    fn nvmlDeviceGetMaxPcieLinkWidth(device: Opaque, lanes: Ptr<u32>) |call| {
        lanes.put(call.gpu(device, board)?.pcie_width)
    }

    /// Returns the PCIe traffic in KiB/s. Counter 0 is the traffic to the host, and counter 1 is
    /// the traffic from the host.
    fn nvmlDeviceGetPcieThroughput(device: Opaque, counter: u32, rate: Ptr<u32>) |call| {
        let now = call.gpu(device, reading)?;
        rate.put(match counter {
            0 => now.pcie_tx_kib_s,
            1 => now.pcie_rx_kib_s,
            _ => return Err(Return::InvalidArgument),
        })
    }

    /// Returns the performance state, which is 0 when the GPU is busy and 8 when it is idle.
    fn nvmlDeviceGetPerformanceState(device: Opaque, state: Ptr<u32>) |call| {
        state.put(call.gpu(device, reading)?.performance_state)
    }

    /// Old name of `nvmlDeviceGetPerformanceState`. Returns the performance state.
    fn nvmlDeviceGetPowerState(device: Opaque, state: Ptr<u32>) |call| {
        state.put(call.gpu(device, reading)?.performance_state)
    }

    /// Returns the energy in mJ since the driver was loaded. A GPU older than Volta has no such
    /// counter.
    fn nvmlDeviceGetTotalEnergyConsumption(device: Opaque, millijoules: Ptr<u64>) |call| {
        let energy_mj = call.now(device, Machine::energy_mj)?;
        millijoules.put(unless_zero(call.sensor(), energy_mj))
    }

    /// Returns the memory clocks that applications can choose, in MHz, highest first. With a count
    /// of 0, a caller gets only the number of clocks.
    fn nvmlDeviceGetSupportedMemoryClocks(device: Opaque, count: Ptr<u32>, megahertz: Ptr<u32>) |call| {
        let most = call.gpu(device, board)?;
        megahertz.put_list(count, vec![most.max_memory_clock_mhz])
    }

    /// Returns the core clocks that applications can choose with this memory clock, in MHz, highest
    /// first.
    fn nvmlDeviceGetSupportedGraphicsClocks(
        device: Opaque, memory: u32, count: Ptr<u32>, megahertz: Ptr<u32>,
    ) |call| {
        let most = call.gpu(device, board)?;
        if memory != most.max_memory_clock_mhz {
            return Err(Return::NotFound);
        }
        megahertz.put_list(count, most.core_clocks_mhz())
    }
}

/// What a sensor that reads too much adds to a percentage.
pub(crate) const EXCESS: u32 = 2000;

/// Returns the value, or 0 if a fault rule demands it.
pub(crate) fn unless_zero<T: Default>(sensor: Option<Sensor>, value: T) -> T {
    match sensor {
        Some(Sensor::Zero) => T::default(),
        Some(Sensor::Nan | Sensor::Foreign | Sensor::Excess | Sensor::Stale) | None => value,
    }
}

/// Returns the current sensor values.
pub(crate) fn reading(m: &Machine, gpu: u32) -> Outcome<Reading> {
    m.reading(gpu)
}

/// Returns the board's limits. Fails if the GPU is lost.
pub(crate) fn board(m: &Machine, gpu: u32) -> Outcome<Board> {
    m.gpu(gpu)?;
    m.model(gpu).map(Board::of)
}

/// Returns `NOT_SUPPORTED` if the GPU is in MIG mode.
pub(crate) fn without_mig(m: &Machine, gpu: u32) -> Outcome {
    if m.gpu(gpu)?.mig { Err(Return::NotSupported) } else { Ok(()) }
}

fn memory(m: &Machine, at: Device) -> Outcome<Memory> {
    match at {
        Device::Gpu(gpu) => m.memory(gpu),
        Device::Mig(ci) => m.gpu_instance_memory(ci.gpu, ci.gpu_instance),
    }
}

fn clock(domain: u32, sm: u32, memory: u32) -> Outcome<u32> {
    match domain {
        0 | 1 => Ok(sm),
        2 => Ok(memory),
        // Use about nine tenths of the core clock as the clock of the video engines.
        3 => Ok(sm * 9 / 10),
        _ => Err(Return::InvalidArgument),
    }
}
