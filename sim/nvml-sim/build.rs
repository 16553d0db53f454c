//! Link arguments of the simulated driver library.
//!
//! Clients open the library by its SONAME. Like the real library, it cannot be unloaded, because
//! `atexit` handlers or threads of a client may still use its code.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
