//! Link arguments of the simulated driver library.
//!
//! Clients open the library by its SONAME. Unloading it must not remove code that a client's
//! `atexit` handlers or threads still use, so it cannot be unloaded. The real library cannot be
//! unloaded either.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
