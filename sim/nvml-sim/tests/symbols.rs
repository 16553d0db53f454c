//! The library exports exactly the symbols of driver 550, `gpush_sim`, and those of newer drivers that gpushd probes.
//!
//! If a symbol is missing, clients that resolve all symbols at their start fail (nvtop). If the
//! library had a symbol of a newer driver, some clients would choose this call, which then fails
//! (nvitop).

#![allow(unsafe_code)] // calls C functions of the library under test
#![allow(clippy::unwrap_used)] // tests only

#[macro_use]
mod client;

use std::collections::BTreeSet;
use std::process::Command;

const WANTED: &str = include_str!("../symbols-550.txt");

/// Symbols of newer drivers. While the simulated host has an older driver, they return `FUNCTION_NOT_FOUND`.
const NEWER: [&str; 1] = ["nvmlDeviceGetMemoryLimits_v1"];

#[test]
fn exported_symbols_are_those_of_driver_550_and_few_others() {
    let others = NEWER.into_iter().chain(["gpush_sim"]);
    let wanted: BTreeSet<String> = WANTED.lines().chain(others).map(str::to_owned).collect();
    assert_eq!(wanted.len(), 352, "350 of the driver's");
    let exported = exported(&std::fs::read(client::library()).unwrap());
    let missing: Vec<_> = wanted.difference(&exported).collect();
    let surplus: Vec<_> = exported.difference(&wanted).collect();
    println!("{} symbols exported", exported.len());
    assert!(missing.is_empty() && surplus.is_empty(), "missing {missing:?}, surplus {surplus:?}");
}

#[test]
fn soname_is_the_drivers_and_library_stays_loaded() {
    let Ok(output) = Command::new("readelf").arg("-d").arg(client::library()).output() else {
        println!("SKIPPED readelf: not installed; mend with `apt-get install binutils`");
        return;
    };
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("Library soname: [libnvidia-ml.so.1]"), "{text}");
    assert!(text.contains("NODELETE"), "{text}");
}

/// Returns the defined dynamic symbols of a 64-bit little-endian ELF file.
fn exported(elf: &[u8]) -> BTreeSet<String> {
    let number = |at: usize, size: usize| -> usize {
        let mut bytes = [0; 8];
        bytes[..size].copy_from_slice(&elf[at..at + size]);
        usize::try_from(u64::from_le_bytes(bytes)).unwrap()
    };
    assert_eq!(&elf[..6], b"\x7fELF\x02\x01", "a 64-bit little-endian ELF file");
    let (sections, size, count) = (number(0x28, 8), number(0x3a, 2), number(0x3c, 2));
    const DYNSYM: usize = 11;
    let header = |index: usize| sections + index * size;
    let table = (0..count).map(header).find(|at| number(at + 4, 4) == DYNSYM).expect("a dynamic symbol table");
    let (begin, length, link) = (number(table + 0x18, 8), number(table + 0x20, 8), number(table + 0x28, 4));
    let strings = number(header(link) + 0x18, 8);
    let mut names = BTreeSet::new();
    for at in (begin..begin + length).step_by(24) {
        let (name, section) = (number(at, 4), number(at + 6, 2));
        if section != 0 {
            let text = &elf[strings + name..];
            let end = text.iter().position(|byte| *byte == 0).unwrap();
            names.insert(String::from_utf8(text[..end].to_vec()).unwrap());
        }
    }
    names
}

#[test]
fn every_function_accepts_zero_arguments() {
    // Each function has at most eight arguments, which are pointers or numbers. The test passes
    // zeros. Depending on the argument, a zero means NULL, an empty buffer, GPU 0, or an invalid
    // handle.
    type Zeros = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize, usize, usize) -> u32;
    const SESSION: [&str; 4] = ["nvmlInit", "nvmlInit_v2", "nvmlInitWithFlags", "nvmlShutdown"];
    const NO_SESSION: [&str; 2] = ["nvmlErrorString", "nvmlSystemGetNVMLVersion"];
    let client = client::Client::fresh("[[gpu]]\nmodel = \"h100-80-sxm\"\n");
    let call = |name: &str| {
        // SAFETY: each name belongs to a C function that has at most eight arguments, each of one
        // machine word. A function with fewer arguments ignores the extra ones.
        let function: Zeros = unsafe { std::mem::transmute(client.symbol(&client::c(name))) };
        // SAFETY: a zero is a valid value for every argument type of these functions.
        unsafe { function(0, 0, 0, 0, 0, 0, 0, 0) }
    };
    let names = || WANTED.lines().filter(|name| !SESSION.contains(name) && !NO_SESSION.contains(name));
    let mut tried = 0;
    for name in names() {
        assert_eq!(call(name), 1, "{name} without a session");
        tried += 1;
    }
    ok!(client, nvmlInit_v2());
    let before = client.host.read().unwrap().state().clone();
    for name in names() {
        let code = call(name);
        assert!([2, 3, 25].contains(&code), "{name}: {code}");
        tried += 1;
    }
    println!("{tried} calls of zeros");
    assert_eq!(client.host.read().unwrap().state(), &before, "none changed anything");
}
