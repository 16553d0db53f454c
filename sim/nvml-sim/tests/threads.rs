//! Several threads of one process use one host. Each call is atomic.

#![allow(unsafe_code)] // calls C functions of the library under test
#![allow(clippy::unwrap_used)] // tests only

#[macro_use]
mod client;

use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};

use client::Client;

const THREADS: u32 = 8;
const ROUNDS: u32 = 150;

#[test]
fn threads_get_distinct_placements_and_leave_nothing() {
    let client = Client::of("[[gpu]]\nmodel = \"a100-80\"\ncount = 2\n");
    let (made, refused) = (AtomicU32::new(0), AtomicU32::new(0));
    let library = &client.lib;
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (made, refused) = (&made, &refused);
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let (mut gpu, mut gi, mut ci) = (null_mut(), null_mut(), null_mut());
                    // SAFETY: the pointers are to locals of the types that the bindings name.
                    unsafe {
                        // All threads share one session, which counts their calls of `nvmlInit` together.
                        assert_eq!(library.nvmlInit_v2(), 0);
                        assert_eq!(library.nvmlDeviceGetHandleByIndex_v2((thread + round) % 2, &mut gpu), 0);
                        match library.nvmlDeviceCreateGpuInstance(gpu, 9, &mut gi) {
                            0 => {
                                made.fetch_add(1, Ordering::Relaxed);
                                assert_eq!(library.nvmlGpuInstanceCreateComputeInstance(gi, 2, &mut ci), 0);
                                assert_eq!(library.nvmlGpuInstanceDestroy(gi), 19);
                                assert_eq!(library.nvmlComputeInstanceDestroy(ci), 0);
                                assert_eq!(library.nvmlGpuInstanceDestroy(gi), 0);
                            }
                            23 => {
                                refused.fetch_add(1, Ordering::Relaxed);
                            }
                            code => panic!("creation returned {code}"),
                        }
                        assert_eq!(library.nvmlShutdown(), 0);
                    }
                }
            });
        }
    });
    let (made, refused) = (made.into_inner(), refused.into_inner());
    println!("{made} instances made and removed, {refused} refused for want of room");
    assert_eq!(made + refused, THREADS * ROUNDS);
    assert!(client.host.read().unwrap().gpus().iter().all(|gpu| gpu.instances.is_empty()));
}
