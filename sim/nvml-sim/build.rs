//! Link arguments of the simulated driver library.
//!
//! Clients open it by SONAME, and unloading it must not pull code from under a client's
//! `atexit` handlers or threads: the real library is not unloadable either.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
