//! What a built program needs, as `objdump` of binutils shows it.

use std::{path::Path, process::Command};

use anyhow::{Result, bail};

use super::output;

/// A version of glibc: major and minor number.
pub(super) type Glibc = (u32, u32);

/// Libraries that a program may need, by file name, each with the library's Debian package.
const LIBRARIES: [(&str, &str); 7] = [
    ("libc.so.6", "libc6"),
    ("libm.so.6", "libc6"),
    ("libdl.so.2", "libc6"),
    ("libpthread.so.0", "libc6"),
    ("ld-linux-x86-64.so.2", "libc6"),
    ("ld-linux-aarch64.so.1", "libc6"),
    ("libgcc_s.so.1", "libgcc-s1"),
];

/// Returns the newest glibc version that a program needs, according to its symbols.
///
/// # Errors
/// If `objdump` fails.
pub(super) fn glibc(program: &Path) -> Result<Glibc> {
    Ok(newest(&output(Command::new("objdump").arg("-T").arg(program))?))
}

/// Returns the Debian packages of the libraries that a program is linked with, sorted.
///
/// # Errors
/// If `objdump` fails, or a library is not in the list.
pub(super) fn packages(program: &Path) -> Result<Vec<&'static str>> {
    let headers = output(Command::new("objdump").arg("-p").arg(program))?;
    let mut packages = Vec::new();
    for library in headers.lines().filter_map(|line| line.trim().strip_prefix("NEEDED").map(str::trim)) {
        match LIBRARIES.iter().find(|(name, _)| *name == library) {
            Some((_, package)) => packages.push(*package),
            None => bail!("{} is linked with {library}, which no dependency of the packages has", program.display()),
        }
    }
    packages.sort_unstable();
    packages.dedup();
    Ok(packages)
}

fn newest(symbols: &str) -> Glibc {
    let versions = symbols.split("GLIBC_").skip(1).filter_map(|rest| {
        let version: String = rest.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
        let mut numbers = version.split('.').map(str::parse);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    });
    versions.max().unwrap_or((0, 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_glibc_version_is_compared_by_number() {
        let symbols = "0000 DF *UND* 0000 (GLIBC_2.4) read\n0000 DF *UND* 0000 (GLIBC_2.17) memcpy\n(GLIBC_PRIVATE)";
        assert_eq!(newest(symbols), (2, 17));
        assert_eq!(newest(""), (0, 0));
    }
}
