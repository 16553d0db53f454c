//! Fault rules through the C ABI, errors of the real driver, and the trace of changes.

#![allow(unsafe_code)] // calls C functions of the library under test
#![allow(clippy::unwrap_used)] // tests only

#[macro_use]
mod client;

use std::ptr::null_mut;

use client::Client;

const ONE: &str = "[[gpu]]\nmodel = \"h100-80-sxm\"\n";

/// Runs `body` in a forked child and returns its wait status.
fn in_child(body: impl FnOnce()) -> i32 {
    // SAFETY: the child calls the library and exits. It does not unwind, and uses no locks of the
    // parent.
    let child = unsafe { libc::fork() };
    if child == 0 {
        body();
        // SAFETY: ends the child immediately, without running the parent's destructors.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: waits for a child of this process.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    status
}

#[test]
fn fault_rule_fails_only_its_calls() {
    let client = Client::of(ONE);
    let gpu = client.gpu(0);
    client.fault("function = \"nvmlDeviceCreateGpuInstance*\"\nrc = \"INSUFFICIENT_RESOURCES\"\nafter = 1\ntimes = 2");
    let first = client.create(gpu, 9, 0, 4).unwrap();
    assert_eq!(client.create(gpu, 9, 4, 4), Err(23));
    assert_eq!(client.create(gpu, 9, 4, 4), Err(23));
    assert_eq!(client.host.read().unwrap().gpus()[0].instances.len(), 1, "what failed did nothing");
    client.create(gpu, 9, 4, 4).unwrap();
    client.fault("function = \"nvmlGpuInstanceDestroy\"\ngpu_instance = 1\nrc = 19\ntimes = 1");
    let codes = [rc!(client, nvmlGpuInstanceDestroy(first)), rc!(client, nvmlGpuInstanceDestroy(first))];
    assert_eq!(codes, [19, 0], "once, for the instance that it names");
}

#[test]
fn kill_rule_kills_before_or_after_the_effect() {
    let client = Client::of(ONE);
    let gpu = client.gpu(0);
    let mut killed = 0;
    for (when, left) in [("before", 0), ("after", 1)] {
        client.fault(&format!("function = \"nvmlDeviceCreateGpuInstance\"\nkill = \"{when}\"\ntimes = 1"));
        let status = in_child(|| {
            let mut made = null_mut();
            rc!(client, nvmlDeviceCreateGpuInstance(gpu, 9, &mut made));
        });
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL, "{when}: {status:#x}");
        assert_eq!(client.host.read().unwrap().gpus()[0].instances.len(), left, "{when}");
        killed += 1;
    }
    println!("{killed} clients killed by rules");
}

#[test]
fn mode_change_can_succeed_without_effect() {
    let client = Client::of("[[gpu]]\nmodel = \"h100-80-sxm\"\nmig = false\n");
    let gpu = client.gpu(0);
    client.fault("function = \"nvmlDeviceSetMigMode\"\nactivation_status = \"IN_USE\"\ntimes = 1");
    let (mut status, mut now, mut then) = (0, 9, 9);
    ok!(client, nvmlDeviceSetMigMode(gpu, 1, &mut status));
    ok!(client, nvmlDeviceGetMigMode(gpu, &mut now, &mut then));
    assert_eq!((status, now, then), (19, 0, 1));
    ok!(client, nvmlDeviceSetMigMode(gpu, 1, &mut status));
    ok!(client, nvmlDeviceGetMigMode(gpu, &mut now, &mut then));
    assert_eq!((status, now, then), (0, 1, 1));
}

#[test]
fn stale_enumeration_lasts_until_the_next_init() {
    let client = Client::of(ONE);
    let gpu = client.gpu(0);
    let gi = client.create(gpu, 9, 0, 4).unwrap();
    client.create_compute(gi, 2).unwrap();
    client.fault("function = \"nvmlDeviceGetMigDeviceHandleByIndex\"\nmutate = \"stale\"");
    assert_eq!(client.mig_device(gpu, 0), Err(6), "there was none");
    ok!(client, nvmlShutdown());
    ok!(client, nvmlInit_v2());
    client.mig_device(gpu, 0).unwrap();
}

#[test]
fn leaked_handle_keeps_instance_in_use_until_holder_ends() {
    let client = Client::of(ONE);
    let gpu = client.gpu(0);
    let gi = client.create(gpu, 9, 0, 4).unwrap();
    client.fault("function = \"nvmlGpuInstanceGetInfo\"\nmutate = \"leak\"\ntimes = 1");
    let (mut asks, mut answers) = ([0; 2], [0; 2]);
    // SAFETY: each array has room for two descriptors.
    unsafe { assert_eq!(libc::pipe(asks.as_mut_ptr()) | libc::pipe(answers.as_mut_ptr()), 0) };
    // SAFETY: as in `in_child`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: all zeros are a valid value of this plain struct.
        let mut info = unsafe { std::mem::zeroed() };
        rc!(client, nvmlGpuInstanceGetInfo(gi, &mut info));
        // SAFETY: the descriptors are valid. The child ends afterwards.
        unsafe {
            libc::write(answers[1], [0_u8].as_ptr().cast(), 1);
            libc::read(asks[0], [0_u8].as_mut_ptr().cast(), 1);
            libc::_exit(0);
        }
    }
    let mut status = 0;
    // SAFETY: the descriptors are valid.
    unsafe { libc::read(answers[0], [0_u8].as_mut_ptr().cast(), 1) };
    assert_eq!(rc!(client, nvmlGpuInstanceDestroy(gi)), 19, "a monitor holds it");
    let mut count = 0;
    ok!(client, nvmlDeviceGetComputeRunningProcesses_v3(gpu, &mut count, null_mut()));
    assert_eq!(count, 0, "and is listed nowhere");
    // SAFETY: the descriptors are valid, and `child` is a child of this process.
    unsafe {
        libc::write(asks[1], [0_u8].as_ptr().cast(), 1);
        libc::waitpid(child, &mut status, 0);
    }
    ok!(client, nvmlGpuInstanceDestroy(gi));
}

#[test]
fn trace_has_a_line_per_change_and_none_for_readings() {
    let client = Client::of(ONE);
    let gpu = client.gpu(0);
    std::fs::write(client.host.dir().join("trace"), "").unwrap();
    let gi = client.create(gpu, 9, 4, 4).unwrap();
    let ci = client.create_compute(gi, 2).unwrap();
    client.mig_device(gpu, 0).unwrap();
    assert_eq!(rc!(client, nvmlGpuInstanceDestroy(gi)), 19);
    ok!(client, nvmlComputeInstanceDestroy(ci));
    ok!(client, nvmlGpuInstanceDestroy(gi));
    let mut status = 0;
    ok!(client, nvmlDeviceSetMigMode(gpu, 0, &mut status));
    let trace = std::fs::read_to_string(client.host.dir().join("trace")).unwrap();
    let own = format!("{} ", std::process::id());
    let lines: Vec<&str> = trace.lines().map(|line| line.strip_prefix(&own).unwrap()).collect();
    assert_eq!(
        lines,
        [
            "nvmlDeviceCreateGpuInstanceWithPlacement 0 profile=9 placement=4:4 -> SUCCESS (0)",
            "nvmlGpuInstanceCreateComputeInstance 0 gi=2 profile=2 -> SUCCESS (0)",
            "nvmlGpuInstanceDestroy 0 gi=2 -> IN_USE (19)",
            "nvmlComputeInstanceDestroy 0 gi=2 ci=0 -> SUCCESS (0)",
            "nvmlGpuInstanceDestroy 0 gi=2 -> SUCCESS (0)",
            "nvmlDeviceSetMigMode 0 value=0 -> SUCCESS (0)",
        ]
    );
}

#[test]
fn hung_call_delays_no_other_and_ends_with_its_rule() {
    let client = Client::of("[[gpu]]\nmodel = \"h100-80-sxm\"\ncount = 2\n");
    let gpu = client.gpu(0);
    let gi = client.create(gpu, 9, 0, 4).unwrap();
    client.fault("function = \"nvmlGpuInstanceDestroy\"\ngpu = 0\nhang = true");
    let (library, address) = (&client.lib, gi as usize);
    std::thread::scope(|scope| {
        let hung = scope.spawn(move || {
            // SAFETY: the handle is valid. It is passed to this thread as a number.
            unsafe { library.nvmlGpuInstanceDestroy(address as *mut _) }
        });
        // Wait until the call hangs: the counter of its fault rule is then not 0.
        while client.host.faults().unwrap().iter().all(|(_, counter)| counter.fired == 0) {
            std::thread::yield_now();
        }
        client.create(client.gpu(1), 9, 0, 4).unwrap();
        client.uuid(gpu).unwrap();
        assert!(!hung.is_finished());
        client.host.clear_faults(None).unwrap();
        assert_eq!(hung.join().unwrap(), 0);
    });
    assert!(client.host.read().unwrap().gpus()[0].instances.is_empty());
}
