//! A process with a command line of 32 MiB. The program uses `prctl(PR_SET_MM_MAP)`, which every
//! user may call. It prints `ready`, and sleeps until its standard input is closed.

use std::io::{Read, Write};

use nix::libc;

const LENGTH: usize = 32 << 20;

/// `struct prctl_mm_map` of `<linux/prctl.h>`.
#[repr(C)]
struct MemoryMap {
    start_code: u64,
    end_code: u64,
    start_data: u64,
    end_data: u64,
    start_brk: u64,
    brk: u64,
    start_stack: u64,
    arg_start: u64,
    arg_end: u64,
    env_start: u64,
    env_end: u64,
    auxv: u64,
    auxv_size: u32,
    exe_fd: u32,
}

fn main() {
    // A program that reads the command line needs additional memory for each word. Use the shortest
    // possible words, so that the number of words and the needed memory are as large as possible.
    // The last byte must be 0. Otherwise the kernel shows only one page.
    let words = b"x\0".repeat(LENGTH / 2).leak();
    let stat = std::fs::read_to_string("/proc/self/stat").expect("our own stat");
    let (_, numbers) = stat.rsplit_once(')').expect("a stat line");
    // `numbers[0]` is field 3 of `/proc/PID/stat`.
    let numbers: Vec<&str> = numbers.split_whitespace().collect();
    let field = |number: usize| numbers[number - 3].parse::<u64>().expect("a number");
    let arg_start = words.as_ptr() as u64;
    let map = MemoryMap {
        start_code: field(26),
        end_code: field(27),
        start_data: field(45),
        end_data: field(46),
        start_brk: field(47),
        brk: field(47),
        start_stack: field(28),
        arg_start,
        arg_end: arg_start + LENGTH as u64,
        env_start: field(50),
        env_end: field(51),
        auxv: 0,
        auxv_size: 0,
        exe_fd: u32::MAX,
    };
    #[expect(unsafe_code, reason = "nix has no binding for PR_SET_MM_MAP")]
    // SAFETY: the kernel only reads `map`, and `size_of` gives its size. The call changes what
    // /proc shows, but no memory of this process.
    let done = unsafe { libc::prctl(libc::PR_SET_MM, libc::PR_SET_MM_MAP, &raw const map, size_of::<MemoryMap>(), 0) };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    println!("ready");
    std::io::stdout().flush().expect("standard output");
    let _ = std::io::stdin().read(&mut [0]);
}
