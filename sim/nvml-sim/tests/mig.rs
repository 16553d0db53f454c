//! The MIG calls: their effects, and the return code of each failure.

#![allow(unsafe_code)] // calls C functions of the library under test

#[macro_use]
mod client;

use std::mem::zeroed;
use std::ptr::{null, null_mut};

use client::{Client, text};
use nvml_wrapper_sys::bindings::*;

const OK: u32 = 0;
const INVALID_ARGUMENT: u32 = 2;
const NOT_SUPPORTED: u32 = 3;
const NO_PERMISSION: u32 = 4;
const NOT_FOUND: u32 = 6;
const RESET_REQUIRED: u32 = 16;
const IN_USE: u32 = 19;
const INSUFFICIENT_RESOURCES: u32 = 23;
const ARGUMENT_VERSION_MISMATCH: u32 = 25;

#[test]
fn profile_information_is_equal_in_all_call_generations() {
    let mut compared = 0;
    for model in ["a100-40", "a30-24", "h100-80-sxm", "h200-141", "b200-180", "rtxpro6000-96"] {
        let client = Client::one(model);
        let gpu = client.gpu(0);
        for index in 0..20 {
            // SAFETY: all zeros are valid values of these plain structs.
            let (mut v1, mut v2, mut v3): (
                nvmlGpuInstanceProfileInfo_t,
                nvmlGpuInstanceProfileInfo_v2_t,
                nvmlGpuInstanceProfileInfo_v3_t,
            ) = unsafe { (zeroed(), zeroed(), zeroed()) };
            v2.version = 0x0200_0098;
            v3.version = 0x0300_0098;
            let third = (&raw mut v3).cast::<nvmlGpuInstanceProfileInfo_v2_t>();
            let codes = [
                rc!(client, nvmlDeviceGetGpuInstanceProfileInfo(gpu, index, &mut v1)),
                rc!(client, nvmlDeviceGetGpuInstanceProfileInfoV(gpu, index, &mut v2)),
                rc!(client, nvmlDeviceGetGpuInstanceProfileInfoV(gpu, index, third)),
            ];
            assert!(codes[0] == codes[1] && codes[1] == codes[2], "{model} {index}: {codes:?}");
            if codes[0] != OK {
                continue;
            }
            let first = |i: &nvmlGpuInstanceProfileInfo_t| {
                (i.id, i.sliceCount, i.instanceCount, i.multiprocessorCount, i.copyEngineCount, i.decoderCount)
            };
            let engines = |i: &nvmlGpuInstanceProfileInfo_t| (i.encoderCount, i.jpegCount, i.ofaCount, i.memorySizeMB);
            assert_eq!(
                (first(&v1), engines(&v1)),
                (
                    (
                        v2.id,
                        v2.sliceCount,
                        v2.instanceCount,
                        v2.multiprocessorCount,
                        v2.copyEngineCount,
                        v2.decoderCount
                    ),
                    (v2.encoderCount, v2.jpegCount, v2.ofaCount, v2.memorySizeMB)
                )
            );
            assert_eq!(
                (first(&v1), engines(&v1)),
                (
                    (
                        v3.id,
                        v3.sliceCount,
                        v3.instanceCount,
                        v3.multiprocessorCount,
                        v3.copyEngineCount,
                        v3.decoderCount
                    ),
                    (v3.encoderCount, v3.jpegCount, v3.ofaCount, v3.memorySizeMB)
                )
            );
            assert_eq!(text(&v2.name), text(&v3.name));
            assert!(text(&v2.name).starts_with("MIG "));
            compared += 1;
        }
    }
    println!("{compared} profiles compared in three generations");
    assert!(compared > 35);
}

#[test]
fn profile_indexes_end_where_the_drivers_header_ends() {
    let mut tried = 0;
    for (driver, known) in [("550.163.01", 10), ("575.57.08", 17), ("580.65.06", 18)] {
        let client = Client::of(&format!("driver = \"{driver}\"\n[[gpu]]\nmodel = \"a100-40\"\n"));
        let gpu = client.gpu(0);
        // SAFETY: all zeros are a valid value of this plain struct.
        let mut info: nvmlGpuInstanceProfileInfo_t = unsafe { zeroed() };
        for index in 0..40 {
            let wanted = match index {
                0..=4 | 7 | 9 => OK,
                other if other < known => NOT_SUPPORTED,
                _ => INVALID_ARGUMENT,
            };
            let code = rc!(client, nvmlDeviceGetGpuInstanceProfileInfo(gpu, index, &mut info));
            assert_eq!(code, wanted, "driver {driver} index {index}");
            tried += 1;
        }
    }
    println!("{tried} indexes");
}

#[test]
fn wrong_version_words_are_a_mismatch_and_write_nothing() {
    let client = Client::one("a100-40");
    let gpu = client.gpu(0);
    let gi = client.create(gpu, 9, 0, 4).unwrap();
    let mut tried = 0;
    for word in [0, 1, 2, 0x0100_0030, 0x0200_0097, 0x0400_0098, u32::MAX] {
        // SAFETY: all zeros are valid values of these plain structs.
        let (mut info, mut compute, mut memory): (
            nvmlGpuInstanceProfileInfo_v2_t,
            nvmlComputeInstanceProfileInfo_v2_t,
            nvmlMemory_v2_t,
        ) = unsafe { (zeroed(), zeroed(), zeroed()) };
        (info.version, compute.version, memory.version) = (word, word, word);
        assert_eq!(rc!(client, nvmlDeviceGetGpuInstanceProfileInfoV(gpu, 0, &mut info)), ARGUMENT_VERSION_MISMATCH);
        assert_eq!(
            rc!(client, nvmlGpuInstanceGetComputeInstanceProfileInfoV(gi, 0, 0, &mut compute)),
            ARGUMENT_VERSION_MISMATCH
        );
        assert_eq!(rc!(client, nvmlDeviceGetMemoryInfo_v2(gpu, &mut memory)), ARGUMENT_VERSION_MISMATCH);
        assert_eq!((info.id, info.memorySizeMB, compute.multiprocessorCount, memory.total), (0, 0, 0, 0));
        tried += 3;
    }
    println!("{tried} wrong version words");
}

#[test]
fn placements_are_listed_with_mig_off_and_null_counts() {
    let client = Client::of("[[gpu]]\nmodel = \"a100-40\"\nmig = false\n");
    let gpu = client.gpu(0);
    let mut count = 0;
    ok!(client, nvmlDeviceGetGpuInstancePossiblePlacements_v2(gpu, 19, null_mut(), &mut count));
    assert_eq!(count, 7);
    let mut spans = [nvmlGpuInstancePlacement_t { start: 99, size: 99 }; 7];
    ok!(client, nvmlDeviceGetGpuInstancePossiblePlacements_v2(gpu, 19, spans.as_mut_ptr(), &mut count));
    assert_eq!(spans.map(|s| (s.start, s.size)), [0, 1, 2, 3, 4, 5, 6].map(|start| (start, 1)));
    let (mut made, mut capacity) = (null_mut(), 0);
    assert_eq!(rc!(client, nvmlDeviceCreateGpuInstance(gpu, 19, &mut made)), NOT_SUPPORTED);
    assert_eq!(rc!(client, nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, 19, &mut capacity)), NOT_SUPPORTED);
    assert_eq!(rc!(client, nvmlDeviceGetGpuInstanceById(gpu, 1, &mut made)), NOT_SUPPORTED);
    ok!(client, nvmlDeviceGetMaxMigDeviceCount(gpu, &mut count));
    assert_eq!(count, 0);
}

#[test]
fn creation_fails_like_real_drivers() {
    let client = Client::one("a100-40");
    let gpu = client.gpu(0);
    let full = client.create(gpu, 9, 0, 4).unwrap();
    assert_eq!(client.create(gpu, 9, 0, 4), Err(INSUFFICIENT_RESOURCES), "the placement is occupied");
    assert_eq!(client.create(gpu, 9, 2, 4), Err(INVALID_ARGUMENT), "no such placement");
    assert_eq!(client.create(gpu, 9, 300, 4), Err(INVALID_ARGUMENT));
    assert_eq!(client.create(gpu, 7777, 0, 4), Err(INVALID_ARGUMENT), "no such profile anywhere");
    assert_eq!(client.create(gpu, 47, 0, 1), Err(NOT_SUPPORTED), "a profile of other parts");
    let mut made = null_mut();
    assert_eq!(rc!(client, nvmlDeviceCreateGpuInstance(gpu, 0, &mut made)), INSUFFICIENT_RESOURCES);
    assert!(made.is_null());
    assert_eq!(rc!(client, nvmlDeviceCreateGpuInstanceWithPlacement(gpu, 9, null(), &mut made)), INVALID_ARGUMENT);
    assert_eq!(rc!(client, nvmlDeviceCreateGpuInstance(gpu, 14, null_mut())), INVALID_ARGUMENT);
    assert_eq!(client.host.read().unwrap().gpus()[0].instances.len(), 1, "what failed changed nothing");

    let ci = client.create_compute(full, 2).unwrap();
    assert_eq!(client.create_compute(full, 0), Err(INSUFFICIENT_RESOURCES));
    assert_eq!(client.create_compute(full, 99), Err(INVALID_ARGUMENT));
    assert_eq!(client.create_compute(full, 4), Err(NOT_SUPPORTED), "a 7c profile in a 3g instance");
    assert_eq!(rc!(client, nvmlGpuInstanceDestroy(full)), IN_USE);
    ok!(client, nvmlComputeInstanceDestroy(ci));
    ok!(client, nvmlGpuInstanceDestroy(full));
}

#[test]
fn stale_handles_are_invalid_after_slot_reuse() {
    let client = Client::one("a100-40");
    let gpu = client.gpu(0);
    let first = client.create(gpu, 9, 4, 4).unwrap();
    let ci = client.create_compute(first, 2).unwrap();
    let mig = client.mig_device(gpu, 0).unwrap();
    let uuid = client.uuid(mig).unwrap();
    ok!(client, nvmlComputeInstanceDestroy(ci));
    ok!(client, nvmlGpuInstanceDestroy(first));
    let second = client.create(gpu, 9, 4, 4).unwrap();
    let again = client.create_compute(second, 2).unwrap();
    // SAFETY: all zeros are a valid value of this plain struct.
    let mut info: nvmlGpuInstanceInfo_t = unsafe { zeroed() };
    assert_eq!(rc!(client, nvmlGpuInstanceGetInfo(first, &mut info)), INVALID_ARGUMENT);
    assert_eq!(rc!(client, nvmlGpuInstanceDestroy(first)), INVALID_ARGUMENT);
    assert_eq!(rc!(client, nvmlComputeInstanceDestroy(ci)), INVALID_ARGUMENT);
    assert_eq!(client.uuid(mig), Err(INVALID_ARGUMENT));
    assert_eq!(client.uuid(client.mig_device(gpu, 0).unwrap()).unwrap(), uuid, "the same slot, the same UUID");
    assert_ne!(first, second);
    ok!(client, nvmlComputeInstanceDestroy(again));

    // A handle of one kind is not valid as a handle of another kind. A value that the library never
    // returned is not valid either.
    let local = 5_u64;
    let strangers = [null_mut(), gpu.cast(), (&raw const local).cast_mut().cast(), usize::MAX as *mut _];
    for stranger in strangers {
        assert_eq!(rc!(client, nvmlGpuInstanceGetInfo(stranger, &mut info)), INVALID_ARGUMENT);
    }
    assert_eq!(client.uuid(second.cast()), Err(INVALID_ARGUMENT));
    ok!(client, nvmlGpuInstanceDestroy(second));
}

#[test]
fn ci_info_generations_respect_struct_sizes() {
    let client = Client::one("a100-40");
    let gpu = client.gpu(0);
    let gi = client.create(gpu, 9, 4, 4).unwrap();
    let mut ci = null_mut();
    let at = nvmlComputeInstancePlacement_t { start: 1, size: 1 };
    ok!(client, nvmlGpuInstanceCreateComputeInstanceWithPlacement(gi, 0, &at, &mut ci));
    // SAFETY: all zeros are valid values of this plain struct.
    let (mut v1, mut v2): (nvmlComputeInstanceInfo_t, nvmlComputeInstanceInfo_t) = unsafe { (zeroed(), zeroed()) };
    v1.placement = nvmlComputeInstancePlacement_t { start: 77, size: 78 };
    type GetInfo = unsafe extern "C" fn(nvmlComputeInstance_t, *mut nvmlComputeInstanceInfo_t) -> u32;
    // SAFETY: the function has this type, except that its real struct is smaller than the struct in
    // this type.
    let first: GetInfo = unsafe { std::mem::transmute(client.symbol(c"nvmlComputeInstanceGetInfo")) };
    // SAFETY: a valid handle and a pointer to a local struct.
    assert_eq!(unsafe { first(ci, &mut v1) }, OK);
    ok!(client, nvmlComputeInstanceGetInfo_v2(ci, &mut v2));
    assert_eq!((v1.device, v1.gpuInstance, v1.id, v1.profileId), (v2.device, v2.gpuInstance, v2.id, v2.profileId));
    assert_eq!((v1.placement.start, v1.placement.size), (77, 78), "the first struct ended before");
    assert_eq!((v2.placement.start, v2.placement.size), (1, 1));
    assert_eq!(v2.gpuInstance, gi);
    assert_eq!(v2.device, client.mig_device(gpu, 0).unwrap(), "the MIG device that it is");
}

#[test]
fn mig_devices_are_compute_instances_in_dense_order() {
    let client = Client::one("a100-40");
    let gpu = client.gpu(0);
    let late = client.create(gpu, 9, 4, 4).unwrap();
    let early = client.create(gpu, 14, 0, 2).unwrap();
    assert_eq!(client.mig_device(gpu, 0), Err(NOT_FOUND), "GPU instances alone are no devices");
    client.create_compute(late, 0).unwrap();
    client.create_compute(late, 0).unwrap();
    client.create_compute(early, 1).unwrap();
    let mut seen = Vec::new();
    for index in 0..3 {
        let device = client.mig_device(gpu, index).unwrap();
        let (mut own, mut gi, mut ci, mut is_mig, mut parent) = (99, 99, 99, 99, null_mut());
        ok!(client, nvmlDeviceGetIndex(device, &mut own));
        ok!(client, nvmlDeviceGetGpuInstanceId(device, &mut gi));
        ok!(client, nvmlDeviceGetComputeInstanceId(device, &mut ci));
        ok!(client, nvmlDeviceIsMigDeviceHandle(device, &mut is_mig));
        ok!(client, nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device, &mut parent));
        assert_eq!((own, is_mig, parent), (index, 1, gpu));
        seen.push((gi, ci));
    }
    assert_eq!(seen, [(2, 0), (2, 1), (3, 0)]);
    assert_eq!(client.mig_device(gpu, 3), Err(NOT_FOUND));
    assert_eq!(client.mig_device(gpu, 7), Err(INVALID_ARGUMENT), "beyond the most that there can be");
    let (mut id, mut is_mig) = (0, 9);
    assert_eq!(rc!(client, nvmlDeviceGetGpuInstanceId(gpu, &mut id)), INVALID_ARGUMENT);
    ok!(client, nvmlDeviceIsMigDeviceHandle(gpu, &mut is_mig));
    assert_eq!(is_mig, 0);
}

#[test]
fn mode_change_needs_reset_on_ampere_not_on_hopper() {
    let client = Client::of(
        "[[gpu]]\nmodel = \"a100-40\"\nmig = false\n[[gpu]]\nmodel = \"h100-80-sxm\"\nmig = false\n[[gpu]]\nmodel = \"t4\"\n",
    );
    let (mut now, mut then, mut status) = (9, 9, 9);
    ok!(client, nvmlDeviceSetMigMode(client.gpu(0), 1, &mut status));
    assert_eq!(status, RESET_REQUIRED, "a success that is not in force");
    ok!(client, nvmlDeviceGetMigMode(client.gpu(0), &mut now, &mut then));
    assert_eq!((now, then), (0, 1));
    ok!(client, nvmlDeviceSetMigMode(client.gpu(1), 1, &mut status));
    ok!(client, nvmlDeviceGetMigMode(client.gpu(1), &mut now, &mut then));
    assert_eq!((status, now, then), (0, 1, 1));
    assert_eq!(rc!(client, nvmlDeviceSetMigMode(client.gpu(2), 1, &mut status)), NOT_SUPPORTED);
    assert_eq!(rc!(client, nvmlDeviceGetMigMode(client.gpu(2), &mut now, &mut then)), NOT_SUPPORTED);
    assert_eq!(rc!(client, nvmlDeviceSetMigMode(client.gpu(1), 2, &mut status)), INVALID_ARGUMENT);
    assert_eq!(rc!(client, nvmlDeviceSetMigMode(client.gpu(1), 1, null_mut())), INVALID_ARGUMENT);
}

#[test]
fn null_pointers_are_invalid_arguments_and_change_nothing() {
    let client = Client::one("a100-40");
    let gpu = client.gpu(0);
    let gi = client.create(gpu, 9, 4, 4).unwrap();
    let ci = client.create_compute(gi, 2).unwrap();
    let mig = client.mig_device(gpu, 0).unwrap();
    let before = client.host.read().unwrap().state().clone();
    let mut any = 0;
    let codes = [
        rc!(client, nvmlDeviceGetCount_v2(null_mut())),
        rc!(client, nvmlDeviceGetHandleByIndex_v2(0, null_mut())),
        rc!(client, nvmlDeviceGetHandleByUUID(null(), null_mut())),
        rc!(client, nvmlDeviceGetHandleByPciBusId_v2(null(), null_mut())),
        rc!(client, nvmlDeviceGetName(gpu, null_mut(), 96)),
        rc!(client, nvmlDeviceGetUUID(gpu, null_mut(), 96)),
        rc!(client, nvmlDeviceGetIndex(gpu, null_mut())),
        rc!(client, nvmlDeviceGetPciInfo_v3(gpu, null_mut())),
        rc!(client, nvmlDeviceGetMemoryInfo(gpu, null_mut())),
        rc!(client, nvmlDeviceGetMemoryInfo_v2(gpu, null_mut())),
        rc!(client, nvmlDeviceGetMigMode(gpu, null_mut(), &mut any)),
        rc!(client, nvmlDeviceGetMigMode(gpu, &mut any, null_mut())),
        rc!(client, nvmlDeviceGetMaxMigDeviceCount(gpu, null_mut())),
        rc!(client, nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0, null_mut())),
        rc!(client, nvmlDeviceGetGpuInstanceProfileInfo(gpu, 0, null_mut())),
        rc!(client, nvmlDeviceGetGpuInstanceProfileInfoV(gpu, 0, null_mut())),
        rc!(client, nvmlDeviceGetGpuInstancePossiblePlacements_v2(gpu, 9, null_mut(), null_mut())),
        rc!(client, nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, 9, null_mut())),
        rc!(client, nvmlDeviceGetGpuInstances(gpu, 9, null_mut(), &mut any)),
        rc!(client, nvmlDeviceCreateGpuInstance(gpu, 14, null_mut())),
        rc!(client, nvmlDeviceGetGpuInstanceById(gpu, 1, null_mut())),
        rc!(client, nvmlGpuInstanceGetInfo(gi, null_mut())),
        rc!(client, nvmlGpuInstanceCreateComputeInstance(gi, 0, null_mut())),
        rc!(client, nvmlGpuInstanceGetComputeInstances(gi, 2, null_mut(), &mut any)),
        rc!(client, nvmlGpuInstanceGetComputeInstanceById(gi, 0, null_mut())),
        rc!(client, nvmlGpuInstanceGetComputeInstanceProfileInfo(gi, 0, 0, null_mut())),
        rc!(client, nvmlComputeInstanceGetInfo_v2(ci, null_mut())),
        rc!(client, nvmlDeviceGetAttributes_v2(mig, null_mut())),
        rc!(client, nvmlDeviceGetGpuInstanceId(mig, null_mut())),
        rc!(client, nvmlDeviceGetComputeRunningProcesses_v3(gpu, null_mut(), null_mut())),
        rc!(client, nvmlEventSetCreate(null_mut())),
        rc!(client, nvmlDeviceGetFieldValues(gpu, 1, null_mut())),
        rc!(client, nvmlSystemGetDriverVersion(null_mut(), 80)),
        rc!(client, nvmlGpmSampleAlloc(null_mut())),
    ];
    println!("{} calls with a NULL", codes.len());
    for (position, code) in codes.into_iter().enumerate() {
        assert_eq!(code, INVALID_ARGUMENT, "call {position}");
    }
    assert_eq!(client.host.read().unwrap().state(), &before);
}

#[test]
fn only_root_and_the_owner_can_change_the_host() {
    // The library checks the effective uid of the caller. So let a child process change its uid to
    // `nobody` and call the library.
    for (description, wanted) in [("owner_is_root = false\n", NO_PERMISSION), ("", OK)] {
        let client = Client::of(&format!("{description}[[gpu]]\nmodel = \"a100-40\"\n"));
        // SAFETY: a plain system call.
        if unsafe { libc::geteuid() } != 0 {
            println!("SKIPPED permissions: needs root to become another user; mend with `sudo cargo test -p nvml-sim`");
            return;
        }
        let gpu = client.gpu(0);
        let dir = client.host.dir().to_owned();
        let mut pipe = [0; 2];
        // SAFETY: the array has room for two descriptors.
        assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
        let nobody = 65_534;
        if wanted == OK {
            std::os::unix::fs::chown(&dir, Some(nobody), None).unwrap();
        }
        for entry in [dir.parent().unwrap(), &dir].into_iter().chain([dir.join("state").as_path()]) {
            use std::os::unix::fs::PermissionsExt;
            std::fs::set_permissions(entry, std::fs::Permissions::from_mode(0o777)).unwrap();
        }
        // SAFETY: the child only makes system calls, calls the library, and exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: a system call without pointers.
            unsafe { libc::setuid(nobody) };
            // The library checks the owner of the host only when a session begins. So begin a new
            // session.
            rc!(client, nvmlShutdown());
            let begun = rc!(client, nvmlInit_v2());
            let mut made = null_mut();
            let code =
                if begun == OK { rc!(client, nvmlDeviceCreateGpuInstance(gpu, 9, &mut made)) } else { 1000 + begun };
            // SAFETY: the descriptor is valid, and `code` has four bytes. The child ends
            // immediately afterwards.
            unsafe {
                libc::write(pipe[1], (&raw const code).cast(), 4);
                libc::_exit(0);
            }
        }
        let (mut code, mut status) = (0_u32, 0);
        // SAFETY: `child` is a child of this process, and `code` has room for the four bytes.
        unsafe {
            libc::waitpid(child, &mut status, 0);
            assert_eq!(libc::read(pipe[0], (&raw mut code).cast(), 4), 4);
            libc::close(pipe[0]);
            libc::close(pipe[1]);
        }
        assert_eq!(code, wanted, "{description}");
        assert_eq!(client.host.read().unwrap().gpus()[0].instances.len(), usize::from(wanted == OK));
    }
}
