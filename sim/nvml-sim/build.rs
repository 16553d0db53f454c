//! Link arguments of the simulated driver library.
//!
//! Clients open the library by its SONAME. A client's `atexit` handlers or threads may still use
//! code of the library, so the library cannot be unloaded. The real library cannot be unloaded
//! either.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
