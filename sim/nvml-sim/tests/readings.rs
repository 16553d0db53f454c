//! Readings, processes, events, fields and performance monitoring, on several kinds of GPUs.

#![allow(unsafe_code)] // calls C functions of the library under test
#![allow(clippy::unwrap_used)] // tests only

#[macro_use]
mod client;

use std::mem::zeroed;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use client::{Client, c, text};
use nvml_wrapper_sys::bindings::*;
use silicon::machine::{Pid, Process, ProcessKind};

const NOT_SUPPORTED: u32 = 3;
const NOT_FOUND: u32 = 6;
const INSUFFICIENT_SIZE: u32 = 7;
const TIMEOUT: u32 = 10;
const NO_DATA: u32 = 21;
const GPU_IS_LOST: u32 = 15;
const NO_INSTANCE: u32 = u32::MAX;
const MIB: u64 = 1 << 20;

/// An A100 in MIG mode, an H100 in MIG mode, and a T4.
const THREE: &str = "[[gpu]]\nmodel = \"a100-80\"\n[[gpu]]\nmodel = \"h100-80-sxm\"\n[[gpu]]\nmodel = \"t4\"\n";

impl Client {
    /// Registers this test process on a GPU or in a GPU instance.
    fn attach(&self, gpu: u32, kind: ProcessKind, at: Option<(u32, Option<u32>)>, memory_mib: u64) {
        let process = Process {
            pid: Pid::own(),
            kind,
            memory_mib,
            gpu_instance: at.map(|(gi, _)| gi),
            compute_instance: at.and_then(|(_, ci)| ci),
        };
        self.change(|m| m.attach(gpu, process));
    }

    /// Changes the simulated host directly, without the library.
    fn change(&self, change: impl FnOnce(&mut silicon::Machine) -> Result<(), silicon::Return>) {
        self.host.update(change).unwrap();
    }
}

#[test]
fn every_gpu_is_found_by_every_lookup() {
    let mut found = 0;
    for preset in ["dgx-a100", "dgx-h100", "dgx-b200", "a30x4", "rtx-pro-6000x2", "mixed"] {
        let described = silicon::Description::preset(preset).unwrap();
        let client = Client::of(&toml(&described));
        let mut count = 0;
        ok!(client, nvmlDeviceGetCount_v2(&mut count));
        for index in 0..count {
            let gpu = client.gpu(index);
            let uuid = client.uuid(gpu).unwrap();
            // SAFETY: all zeros are a valid value of this plain struct.
            let mut pci: nvmlPciInfo_t = unsafe { zeroed() };
            ok!(client, nvmlDeviceGetPciInfo_v3(gpu, &mut pci));
            assert_ne!(pci.pciSubSystemId, pci.pciDeviceId, "{preset} {index}");
            let (mut by_uuid, mut by_pci, mut by_serial) = (null_mut(), null_mut(), null_mut());
            ok!(client, nvmlDeviceGetHandleByUUID(c(&uuid).as_ptr(), &mut by_uuid));
            ok!(client, nvmlDeviceGetHandleByPciBusId_v2(pci.busId.as_ptr(), &mut by_pci));
            assert_eq!(rc!(client, nvmlDeviceGetHandleByPciBusId_v2(pci.busIdLegacy.as_ptr(), &mut by_pci)), 0);
            let mut serial = [0; 32];
            ok!(client, nvmlDeviceGetSerial(gpu, serial.as_mut_ptr(), 32));
            ok!(client, nvmlDeviceGetHandleBySerial(serial.as_ptr(), &mut by_serial));
            assert!(by_uuid == gpu && by_pci == gpu && by_serial == gpu, "{preset} {index}");
            let (mut own, mut minor, mut name) = (99, 99, [0; 96]);
            ok!(client, nvmlDeviceGetIndex(gpu, &mut own));
            ok!(client, nvmlDeviceGetMinorNumber(gpu, &mut minor));
            ok!(client, nvmlDeviceGetName(gpu, name.as_mut_ptr(), 96));
            assert_eq!((own, minor), (index, index));
            assert!(!text(&name).is_empty());
            assert_eq!(rc!(client, nvmlDeviceGetName(gpu, name.as_mut_ptr(), 4)), INSUFFICIENT_SIZE);
            found += 1;
        }
        let mut none = null_mut();
        assert_eq!(rc!(client, nvmlDeviceGetHandleByIndex_v2(count, &mut none)), 2);
        let stranger = c("GPU-00000000-0000-0000-0000-000000000000");
        assert_eq!(rc!(client, nvmlDeviceGetHandleByUUID(stranger.as_ptr(), &mut none)), NOT_FOUND);
        assert_eq!(rc!(client, nvmlDeviceGetHandleByUUID(c("nonsense").as_ptr(), &mut none)), 2);
        assert_eq!(rc!(client, nvmlDeviceGetHandleByPciBusId_v2(c("0000:ff:1f.0").as_ptr(), &mut none)), NOT_FOUND);
        assert_eq!(rc!(client, nvmlDeviceGetHandleByPciBusId_v2(c("what").as_ptr(), &mut none)), 2);
    }
    println!("{found} GPUs found by index, UUID, PCI address and serial number");
}

fn toml(description: &silicon::Description) -> String {
    description
        .gpus
        .iter()
        .fold(String::new(), |text, gpu| format!("{text}[[gpu]]\nmodel = \"{}\"\ncount = {}\n", gpu.model, gpu.count))
}

#[test]
fn load_is_unsupported_with_mig_on() {
    let client = Client::of(THREE);
    let (a100, t4) = (client.gpu(0), client.gpu(2));
    let mut rates = nvmlUtilization_t { gpu: 0, memory: 0 };
    let (mut percent, mut period) = (0, 0);
    assert_eq!(rc!(client, nvmlDeviceGetUtilizationRates(a100, &mut rates)), NOT_SUPPORTED);
    assert_eq!(rc!(client, nvmlDeviceGetEncoderUtilization(a100, &mut percent, &mut period)), NOT_SUPPORTED);
    ok!(client, nvmlDeviceGetUtilizationRates(t4, &mut rates));
    assert_eq!(rates.gpu, 0, "nothing runs");
    client.attach(2, ProcessKind::Compute, None, 700);
    ok!(client, nvmlDeviceGetUtilizationRates(t4, &mut rates));
    assert!((30..=100).contains(&rates.gpu), "{}", rates.gpu);
    let (mut samples, mut count): ([nvmlProcessUtilizationSample_t; 4], u32) = (unsafe_zeroed(), 0);
    client.host.advance(Duration::from_secs(3)).unwrap();
    assert_eq!(rc!(client, nvmlDeviceGetProcessUtilization(t4, null_mut(), &mut count, 0)), INSUFFICIENT_SIZE);
    assert_eq!(count, 1);
    ok!(client, nvmlDeviceGetProcessUtilization(t4, samples.as_mut_ptr(), &mut count, 0));
    assert_eq!(samples[0].pid, std::process::id());
    assert!((30..=100).contains(&samples[0].smUtil), "{}", samples[0].smUtil);
    let later = samples[0].timeStamp + 3_600_000_000;
    assert_eq!(rc!(client, nvmlDeviceGetProcessUtilization(t4, null_mut(), &mut count, later)), NOT_FOUND);
}

fn unsafe_zeroed<T>() -> T {
    // SAFETY: the type is a plain C struct, for which all zeros are a valid value.
    unsafe { zeroed() }
}

#[test]
fn process_lists_have_three_generations() {
    let client = Client::of(THREE);
    let (a100, t4) = (client.gpu(0), client.gpu(2));
    let gi = client.create(a100, 9, 4, 4).unwrap();
    client.create_compute(gi, 2).unwrap();
    let other = client.create(a100, 14, 0, 2).unwrap();
    client.create_compute(other, 1).unwrap();
    client.attach(0, ProcessKind::Compute, Some((2, Some(0))), 300);
    client.attach(2, ProcessKind::Mps, None, 200);
    let own = std::process::id();

    let mut count = 0;
    ok!(client, nvmlDeviceGetGraphicsRunningProcesses_v3(a100, &mut count, null_mut()));
    assert_eq!(count, 0, "an empty list is a success");
    assert_eq!(rc!(client, nvmlDeviceGetComputeRunningProcesses_v3(a100, &mut count, null_mut())), INSUFFICIENT_SIZE);
    assert_eq!(count, 1);
    let mut entries: [nvmlProcessInfo_t; 3] = unsafe_zeroed();
    count = 3;
    ok!(client, nvmlDeviceGetComputeRunningProcesses_v3(a100, &mut count, entries.as_mut_ptr()));
    let first = &entries[0];
    assert_eq!((count, first.pid, first.gpuInstanceId, first.computeInstanceId), (1, own, 2, 0));
    assert_eq!(first.usedGpuMemory, 300 * MIB);
    count = 3;
    ok!(client, nvmlDeviceGetMPSComputeRunningProcesses_v3(t4, &mut count, entries.as_mut_ptr()));
    assert_eq!((count, entries[0].gpuInstanceId, entries[0].computeInstanceId), (1, NO_INSTANCE, NO_INSTANCE));
    count = 3;
    ok!(client, nvmlDeviceGetComputeRunningProcesses_v3(t4, &mut count, entries.as_mut_ptr()));
    assert_eq!((count, entries[0].pid), (1, own), "an MPS client is of type M+C: in both lists");

    // The process must appear in the first MIG device, and not in the second one.
    let (here, there) = (client.mig_device(a100, 0).unwrap(), client.mig_device(a100, 1).unwrap());
    count = 3;
    ok!(client, nvmlDeviceGetComputeRunningProcesses_v3(here, &mut count, entries.as_mut_ptr()));
    assert_eq!(count, 1);
    ok!(client, nvmlDeviceGetComputeRunningProcesses_v3(there, &mut count, entries.as_mut_ptr()));
    assert_eq!(count, 0);

    // The function without a version suffix writes entries of 16 bytes. It must not change the
    // bytes after its last entry.
    type List = unsafe extern "C" fn(nvmlDevice_t, *mut u32, *mut nvmlProcessInfo_v1_t) -> u32;
    // SAFETY: this is the type of the function.
    let unversioned: List = unsafe { std::mem::transmute(client.symbol(c"nvmlDeviceGetComputeRunningProcesses")) };
    let mut small = [nvmlProcessInfo_v1_t { pid: 7, usedGpuMemory: 7 }; 2];
    count = 2;
    // SAFETY: `small` has room for two entries.
    assert_eq!(unsafe { unversioned(a100, &mut count, small.as_mut_ptr()) }, 0);
    assert_eq!((count, small[0].pid, small[0].usedGpuMemory), (1, own, 300 * MIB));
    assert_eq!((small[1].pid, small[1].usedGpuMemory), (7, 7));

    // The memory of a MIG device is that of its GPU instance.
    let (mut memory, mut second): (nvmlMemory_t, nvmlMemory_v2_t) = (unsafe_zeroed(), unsafe_zeroed());
    second.version = 0x0200_0028;
    ok!(client, nvmlDeviceGetMemoryInfo(here, &mut memory));
    ok!(client, nvmlDeviceGetMemoryInfo_v2(here, &mut second));
    assert_eq!((memory.total, memory.used), (second.total, second.used + second.reserved));
    assert_eq!((memory.free, memory.total), (second.free, memory.used + memory.free));
    assert_eq!(second.used, 300 * MIB);
}

#[test]
fn event_set_gets_every_later_event_once() {
    let client = Client::of(THREE);
    let (a100, h100) = (client.gpu(0), client.gpu(1));
    let gi = client.create(a100, 9, 4, 4).unwrap();
    client.change(|m| m.xid(0, 31, None, None));
    let (mut early, mut late, mut types) = (null_mut(), null_mut(), 0);
    ok!(client, nvmlDeviceGetSupportedEventTypes(a100, &mut types));
    assert_eq!(types, 0x108, "Xid and MIG configuration");
    ok!(client, nvmlEventSetCreate(&mut early));
    ok!(client, nvmlEventSetCreate(&mut late));
    ok!(client, nvmlDeviceRegisterEvents(a100, 0x108, early));
    assert_eq!(rc!(client, nvmlDeviceRegisterEvents(a100, 0x10, late)), NOT_SUPPORTED);
    ok!(client, nvmlDeviceRegisterEvents(h100, 0x8, late));
    let mut data: nvmlEventData_t = unsafe_zeroed();
    assert_eq!(rc!(client, nvmlEventSetWait_v2(early, &mut data, 0)), TIMEOUT, "nothing since it registered");

    let ci = client.create_compute(gi, 2).unwrap();
    client.change(|m| m.xid(0, 43, Some(2), Some(0)));
    client.change(|m| m.xid(1, 79, None, None));
    let mut next = |set| {
        // SAFETY: a valid set and a pointer to a local struct.
        match unsafe { client.lib.nvmlEventSetWait_v2(set, &mut data, 0) } {
            0 => Ok((data.device, data.eventType, data.eventData, data.gpuInstanceId, data.computeInstanceId)),
            code => Err(code),
        }
    };
    assert_eq!(next(early), Ok((a100, 0x100, 0, 2, 0)));
    assert_eq!(next(early), Ok((a100, 0x8, 43, 2, 0)));
    assert_eq!(next(early), Err(TIMEOUT), "the other GPU's is not its own");
    assert_eq!(next(late), Ok((h100, 0x8, 79, NO_INSTANCE, NO_INSTANCE)));
    assert_eq!(next(late), Err(TIMEOUT));
    ok!(client, nvmlComputeInstanceDestroy(ci));
    ok!(client, nvmlEventSetFree(late));
    assert_eq!(rc!(client, nvmlEventSetFree(late)), 2);
    assert_eq!(rc!(client, nvmlEventSetWait_v2(late, &mut data, 0)), 2);
}

#[test]
fn waiting_ends_with_the_event_and_not_with_the_timeout() {
    let client = Client::of(THREE);
    let mut set = null_mut();
    ok!(client, nvmlEventSetCreate(&mut set));
    ok!(client, nvmlDeviceRegisterEvents(client.gpu(0), 0x8, set));
    let mut data: nvmlEventData_t = unsafe_zeroed();
    let dir = client.host.dir().to_owned();
    let began = Instant::now();
    let other = std::thread::spawn(move || {
        let host = silicon::Host::open(&dir).unwrap();
        host.update(|m| m.xid(0, 13, None, None)).unwrap();
    });
    ok!(client, nvmlEventSetWait_v2(set, &mut data, 60_000));
    assert_eq!(data.eventData, 13);
    assert!(began.elapsed() < Duration::from_secs(60), "the event ended it");
    other.join().unwrap();
}

#[test]
fn lost_gpu_returns_lost_until_next_boot() {
    let client = Client::of(THREE);
    let gpu = client.gpu(0);
    let mut set = null_mut();
    ok!(client, nvmlEventSetCreate(&mut set));
    ok!(client, nvmlDeviceRegisterEvents(gpu, 0x8, set));
    client.change(|m| m.xid(0, 79, None, None).and_then(|()| m.lose(0)));
    let (mut handle, mut value, mut other, mut data) = (null_mut(), 0, 0, unsafe_zeroed::<nvmlEventData_t>());
    let codes = [
        rc!(client, nvmlDeviceGetHandleByIndex_v2(0, &mut handle)),
        rc!(client, nvmlDeviceGetMigMode(gpu, &mut value, &mut other)),
        rc!(client, nvmlDeviceGetPowerUsage(gpu, &mut value)),
        rc!(client, nvmlDeviceGetMaxMigDeviceCount(gpu, &mut value)),
        rc!(client, nvmlDeviceCreateGpuInstance(gpu, 9, &mut null_mut())),
        rc!(client, nvmlDeviceSetMigMode(gpu, 0, &mut value)),
    ];
    assert_eq!(codes, [GPU_IS_LOST; 6]);
    ok!(client, nvmlEventSetWait_v2(set, &mut data, 0));
    assert_eq!(data.eventData, 79, "its last words first");
    assert_eq!(rc!(client, nvmlEventSetWait_v2(set, &mut data, 60_000)), GPU_IS_LOST);
    ok!(client, nvmlDeviceGetCount_v2(&mut value));
    assert_eq!(value, 3, "it keeps its index");
    ok!(client, nvmlDeviceGetHandleByIndex_v2(1, &mut handle));
    client.host.reboot().unwrap();
    assert_eq!(client.uuid(gpu), Err(2), "a handle of before the boot");
    ok!(client, nvmlDeviceGetHandleByIndex_v2(0, &mut handle));
}

#[test]
fn fields_have_separate_return_codes() {
    let client = Client::of(THREE);
    let mut fields: [nvmlFieldValue_t; 3] = unsafe_zeroed();
    (fields[0].fieldId, fields[1].fieldId, fields[2].fieldId) = (186, 9999, 91);
    ok!(client, nvmlDeviceGetFieldValues(client.gpu(0), 3, fields.as_mut_ptr()));
    assert_eq!(fields.map(|field| field.nvmlReturn), [0, NOT_SUPPORTED, 0]);
    // SAFETY: the type field shows that both values are unsigned numbers.
    let (power, links) = unsafe { (fields[0].value.uiVal, fields[2].value.uiVal) };
    assert!(power > 10_000 && links == 12, "{power} mW, {links} links");
    assert_eq!(rc!(client, nvmlDeviceGetFieldValues(client.gpu(0), 0, fields.as_mut_ptr())), 2);
}

#[test]
fn gpm_reports_activity_of_an_instance_on_hopper() {
    let client = Client::of(THREE);
    let (a100, h100) = (client.gpu(0), client.gpu(1));
    let mut support = nvmlGpmSupport_t { version: 1, isSupportedDevice: 9 };
    ok!(client, nvmlGpmQueryDeviceSupport(a100, &mut support));
    assert_eq!(support.isSupportedDevice, 0);
    ok!(client, nvmlGpmQueryDeviceSupport(h100, &mut support));
    assert_eq!(support.isSupportedDevice, 1);

    let busy = client.create(h100, 9, 0, 4).unwrap();
    client.create_compute(busy, 2).unwrap();
    client.create(h100, 9, 4, 4).unwrap();
    let instances = client.host.read().unwrap().gpus()[1].instances.iter().map(|gi| gi.id).collect::<Vec<_>>();
    let mut info: nvmlGpuInstanceInfo_t = unsafe_zeroed();
    ok!(client, nvmlGpuInstanceGetInfo(busy, &mut info));
    client.attach(1, ProcessKind::Compute, Some((info.id, Some(0))), 100);
    let mut measured = Vec::new();
    for id in instances {
        let (mut first, mut second) = (null_mut(), null_mut());
        ok!(client, nvmlGpmSampleAlloc(&mut first));
        ok!(client, nvmlGpmSampleAlloc(&mut second));
        ok!(client, nvmlGpmMigSampleGet(h100, id, first));
        client.host.advance(Duration::from_secs(1)).unwrap();
        ok!(client, nvmlGpmMigSampleGet(h100, id, second));
        let mut request: Box<nvmlGpmMetricsGet_t> = Box::new(unsafe_zeroed());
        (request.version, request.numMetrics, request.sample1, request.sample2) = (1, 2, first, second);
        (request.metrics[0].metricId, request.metrics[1].metricId) = (2, 5000);
        // The call must not change entries beyond the count.
        request.metrics[2].value = 77.0;
        ok!(client, nvmlGpmMetricsGet(&mut *request));
        // The second instance has no compute instance, so it has no data.
        let expected = if id == info.id { (0, 2) } else { (NO_DATA, NO_DATA) };
        assert_eq!((request.metrics[0].nvmlReturn, request.metrics[1].nvmlReturn), expected);
        assert!((request.metrics[2].value - 77.0).abs() < f64::EPSILON);
        measured.push((id == info.id, request.metrics[0].value));
        ok!(client, nvmlGpmSampleFree(first));
        ok!(client, nvmlGpmSampleFree(second));
        assert_eq!(rc!(client, nvmlGpmSampleFree(second)), 2);
    }
    for (works, percent) in measured {
        assert_eq!(works, percent > 20.0, "{percent} %");
    }
    let mut sample = null_mut();
    ok!(client, nvmlGpmSampleAlloc(&mut sample));
    assert_eq!(rc!(client, nvmlGpmMigSampleGet(h100, 14, sample)), NOT_FOUND);
    assert_eq!(rc!(client, nvmlGpmSampleGet(a100, sample)), NOT_SUPPORTED);
}

#[test]
fn accounting_stays_off_with_mig_on() {
    let client = Client::of(THREE);
    let (a100, t4) = (client.gpu(0), client.gpu(2));
    let (mut mode, mut count, mut pids, mut stats) = (9, 4, [0; 4], unsafe_zeroed::<nvmlAccountingStats_t>());
    assert_eq!(rc!(client, nvmlDeviceSetAccountingMode(a100, 1)), NOT_SUPPORTED);
    for mode in [0, 2, 3] {
        assert_eq!(rc!(client, nvmlDeviceSetComputeMode(a100, mode)), NOT_SUPPORTED, "nor has it a compute mode");
    }
    ok!(client, nvmlDeviceGetComputeMode(a100, &mut mode));
    assert_eq!(mode, 0, "but it is read");
    assert_eq!(rc!(client, nvmlDeviceGetAccountingPids(t4, &mut count, pids.as_mut_ptr())), NOT_SUPPORTED);
    ok!(client, nvmlDeviceSetAccountingMode(t4, 1));
    ok!(client, nvmlDeviceGetAccountingMode(t4, &mut mode));
    assert_eq!(mode, 1);
    client.attach(2, ProcessKind::Compute, None, 50);
    count = 4;
    ok!(client, nvmlDeviceGetAccountingPids(t4, &mut count, pids.as_mut_ptr()));
    assert_eq!((count, pids[0]), (1, std::process::id()));
    ok!(client, nvmlDeviceGetAccountingStats(t4, pids[0], &mut stats));
    assert_eq!((stats.maxMemoryUsage, stats.isRunning), (50 * MIB, 1));
    assert_eq!(rc!(client, nvmlDeviceGetAccountingStats(t4, 1, &mut stats)), NOT_FOUND);
    ok!(client, nvmlDeviceSetComputeMode(t4, 3));
    ok!(client, nvmlDeviceGetComputeMode(t4, &mut mode));
    assert_eq!(mode, 3);
}

#[test]
fn row_remap_waits_for_reset_or_is_unsupported() {
    let client = Client::of(THREE);
    let rows = |gpu: u32| {
        let device = client.gpu(gpu);
        let (mut correctable, mut uncorrectable, mut pending, mut failed) = (9, 9, 9, 9);
        let code = rc!(
            client,
            nvmlDeviceGetRemappedRows(device, &mut correctable, &mut uncorrectable, &mut pending, &mut failed)
        );
        (code, [correctable, uncorrectable, pending, failed])
    };
    assert_eq!(rows(0), (0, [0; 4]));
    client.change(|m| m.remap_row(0, false, true));
    client.change(|m| m.remap_row(0, true, true));
    assert_eq!(rows(0), (0, [1, 1, 1, 0]));
    assert_eq!(rows(1), (0, [0; 4]));
    client.change(|m| m.remap_row(1, true, false));
    assert_eq!(rows(1), (0, [0, 0, 0, 1]));
    assert_eq!(rows(2).0, NOT_SUPPORTED);
}

/// Makes the calls that btop, slurmd's AutoDetect and codecarbon make.
#[test]
fn old_names_clocks_and_energy_are_supported() {
    let client = Client::of(THREE);
    let t4 = client.gpu(2);
    let (mut now, mut by_old_name) = (u32::MAX, u32::MAX - 1);
    ok!(client, nvmlDeviceGetPerformanceState(t4, &mut now));
    ok!(client, nvmlDeviceGetPowerState(t4, &mut by_old_name));
    assert_eq!(now, by_old_name);

    let (mut before, mut after) = (0, 0);
    ok!(client, nvmlDeviceGetTotalEnergyConsumption(t4, &mut before));
    client.host.advance(Duration::from_secs(1)).unwrap();
    ok!(client, nvmlDeviceGetTotalEnergyConsumption(t4, &mut after));
    assert!(before + 8400 <= after, "{before} {after}");

    for index in 0..3 {
        let gpu = client.gpu(index);
        let mut most = 0;
        ok!(client, nvmlDeviceGetMaxClockInfo(gpu, 2, &mut most));
        let (mut count, mut memory) = (0, [0; 8]);
        assert_eq!(rc!(client, nvmlDeviceGetSupportedMemoryClocks(gpu, &mut count, null_mut())), INSUFFICIENT_SIZE);
        assert_eq!(count, 1);
        ok!(client, nvmlDeviceGetSupportedMemoryClocks(gpu, &mut count, memory.as_mut_ptr()));
        assert_eq!(memory[0], most);

        let (mut count, mut core) = (0, [0; 256]);
        let asked = rc!(client, nvmlDeviceGetSupportedGraphicsClocks(gpu, most, &mut count, null_mut()));
        assert!(asked == INSUFFICIENT_SIZE && (10..=256).contains(&count), "{asked} {count}");
        ok!(client, nvmlDeviceGetSupportedGraphicsClocks(gpu, most, &mut count, core.as_mut_ptr()));
        let clocks = &core[..count as usize];
        assert!(clocks.windows(2).all(|two| two[0] > two[1]) && clocks[0] > 1000, "{clocks:?}");
        let other = rc!(client, nvmlDeviceGetSupportedGraphicsClocks(gpu, 1, &mut count, core.as_mut_ptr()));
        assert_eq!(other, NOT_FOUND);
    }
}
