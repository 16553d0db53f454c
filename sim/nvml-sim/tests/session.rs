//! Start and end of sessions, and calls outside a session.

#![allow(unsafe_code)] // calls C functions of the library under test

#[macro_use]
mod client;

use client::{Client, string, text};

const ONE_A100: &str = "[[gpu]]\nmodel = \"a100-80\"\n";

#[test]
fn calls_before_init_are_uninitialized() {
    let client = Client::fresh(ONE_A100);
    let mut count = 77;
    assert_eq!(rc!(client, nvmlDeviceGetCount_v2(&mut count)), 1);
    assert_eq!(count, 77, "nothing is written by a call that fails");
    let mut device = std::ptr::null_mut();
    assert_eq!(rc!(client, nvmlDeviceGetHandleByIndex_v2(0, &mut device)), 1);
    assert_eq!(rc!(client, nvmlDeviceGetMigMode(device, &mut count, &mut count)), 1, "before looking at the handle");
    assert_eq!(rc!(client, nvmlDeviceGetFanSpeed_v2(device, 0, &mut count)), 1, "stubs too");
    assert_eq!(rc!(client, nvmlShutdown()), 0);
    let mut version = [0; 80];
    ok!(client, nvmlSystemGetNVMLVersion(version.as_mut_ptr(), 80));
    assert_eq!(text(&version), "12.550.163.01");
    assert_eq!(string(rc!(client, nvmlErrorString(19))), "In use by another client");
    assert_eq!(string(rc!(client, nvmlErrorString(12345))), "Unknown Error");
}

/// docs/hardware has recordings of driver 580: its NVML is 13.580.
#[test]
fn nvml_version_begins_with_cuda_major_of_driver_branch() {
    for (driver, expected) in
        [("580.159.04", "13.580.159.04"), ("535.183.01", "12.535.183.01"), ("470.57.02", "11.470.57.02")]
    {
        let client = Client::fresh(&format!("driver = \"{driver}\"\n{ONE_A100}"));
        let mut version = [0; 80];
        ok!(client, nvmlSystemGetNVMLVersion(version.as_mut_ptr(), 80));
        assert_eq!(text(&version), expected);
    }
}

#[test]
fn sessions_are_counted_by_their_users() {
    let client = Client::fresh(ONE_A100);
    let mut count = 0;
    ok!(client, nvmlInit_v2());
    ok!(client, nvmlInitWithFlags(0));
    ok!(client, nvmlShutdown());
    ok!(client, nvmlDeviceGetCount_v2(&mut count));
    assert_eq!(count, 1);
    assert_eq!(client.host.read().unwrap().state().clients.len(), 1);
    ok!(client, nvmlShutdown());
    assert_eq!(rc!(client, nvmlDeviceGetCount_v2(&mut count)), 1);
    assert!(client.host.read().unwrap().state().clients.is_empty(), "the driver knows that the client is gone");
}

#[test]
fn missing_host_and_other_layout_fail_at_init() {
    let client = Client::fresh(ONE_A100);
    let state = client.host.dir().join("state");
    let whole = std::fs::read(&state).unwrap();

    // SAFETY: the tests of this program run one at a time.
    unsafe { std::env::remove_var("NVML_SIM_STATE") };
    assert_eq!(rc!(client, nvmlInit_v2()), 9);
    // SAFETY: the tests of this program run one at a time.
    unsafe { std::env::set_var("NVML_SIM_STATE", "/nonexistent") };
    assert_eq!(rc!(client, nvmlInit_v2()), 9);
    // SAFETY: the tests of this program run one at a time.
    unsafe { std::env::set_var("NVML_SIM_STATE", client.host.dir()) };

    let mut tried = 0;
    for (what, content) in
        [("empty", Vec::new()), ("short", whole[..64].to_vec()), ("another magic", [b"x", &whole[1..]].concat())]
    {
        // Use a new file each time: the file that the host has mapped must never become shorter.
        std::fs::remove_file(&state).unwrap();
        std::fs::write(&state, content).unwrap();
        assert_eq!(rc!(client, nvmlInit_v2()), 18, "{what}");
        tried += 1;
    }
    println!("{tried} unusable states");
    std::fs::remove_file(&state).unwrap();
    std::fs::write(&state, whole).unwrap();
    ok!(client, nvmlInit_v2());
}

#[test]
fn fault_rules_at_init_are_seen() {
    let client = Client::fresh(ONE_A100);
    client.fault("function = \"nvmlInit\"\nrc = \"DRIVER_NOT_LOADED\"\ntimes = 1");
    client.fault("function = \"nvmlInit\"\nrc = 18\nafter = 1\ntimes = 1");
    assert_eq!(rc!(client, nvmlInit_v2()), 9);
    assert_eq!(rc!(client, nvmlInit_v2()), 18);
    ok!(client, nvmlInit_v2());
}

#[test]
fn forked_child_is_a_separate_client() {
    let client = Client::of(ONE_A100);
    let device = client.gpu(0);
    let own = std::process::id();
    // SAFETY: the child only calls the library and exits. It does not unwind, and uses no locks of
    // the parent.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let worked = client.uuid(device).is_ok();
        let clients = client.host.read().map_or(0, |m| m.state().clients.len());
        // SAFETY: ends the child immediately, without running the parent's destructors.
        unsafe { libc::_exit(if worked && clients == 2 { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: waits for a child of this process.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child called the library and was registered");
    client.host.update(|_| Ok::<_, silicon::HostError>(())).unwrap();
    let left: Vec<u32> = client.host.read().unwrap().state().clients.iter().map(|c| c.pid.pid).collect();
    assert_eq!(left, [own], "a dead child is no client");
}
