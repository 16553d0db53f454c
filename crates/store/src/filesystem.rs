//! File systems that can hold the store.
//!
//! On network file systems, a lock can be lost without a message, and a sync may write the data
//! only to the memory of a server. The type numbers are from `statfs(2)` and the kernel's
//! `include/uapi/linux/magic.h`. The type numbers of parallel file systems are from the headers of
//! these systems.

use std::{io, path::Path};

/// Whether a file system is suitable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Suitable.
    Local,
    /// In memory. A reboot deletes the content.
    Volatile(&'static str),
    /// FUSE, including virtiofs. The storage behind it is unknown.
    Opaque(&'static str),
    /// On a network. Refused.
    Network(&'static str),
}

/// Returns the type number (`f_type`) of a directory's file system.
pub(crate) fn magic(directory: &Path) -> io::Result<i64> {
    let type_ = nix::sys::statfs::statfs(directory)?.filesystem_type();
    #[allow(clippy::unnecessary_cast, reason = "the type differs between architectures and C libraries")]
    Ok(type_.0 as i64)
}

/// Judges a file system by its type number.
pub(crate) fn judge(magic: i64) -> Verdict {
    // Some kernels sign-extend the 32-bit value.
    match magic & 0xffff_ffff {
        0x0102_1994 => Verdict::Volatile("tmpfs"),
        0x8584_58f6 => Verdict::Volatile("ramfs"),
        0x6573_5546 => Verdict::Opaque("FUSE"),
        0x6969 => Verdict::Network("NFS"),
        0x517b => Verdict::Network("SMB"),
        0xff53_4d42 => Verdict::Network("CIFS"),
        0xfe53_4d42 => Verdict::Network("SMB2"),
        0x564c => Verdict::Network("NCP"),
        0x0102_1997 => Verdict::Network("9p"),
        0x5346_414f | 0x6b41_4653 => Verdict::Network("AFS"),
        0x7375_7245 => Verdict::Network("Coda"),
        0x00c3_6400 => Verdict::Network("Ceph"),
        0x0bd0_0bd0 => Verdict::Network("Lustre"),
        0x4750_4653 => Verdict::Network("GPFS"),
        0x1983_0326 => Verdict::Network("BeeGFS"),
        0x0116_1970 => Verdict::Network("GFS2"),
        0x7461_636f => Verdict::Network("OCFS2"),
        0x786f_4256 => Verdict::Network("vboxsf"),
        _ => Verdict::Local,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_and_local_file_systems_are_distinguished() {
        for (magic, name) in [(0x6969, "NFS"), (0xff53_4d42, "CIFS"), (-11_317_950, "CIFS"), (0x0bd0_0bd0, "Lustre")] {
            assert_eq!(judge(magic), Verdict::Network(name), "{magic:#x}");
        }
        // Magic numbers of ext4, xfs, btrfs, zfs and overlayfs.
        for magic in [0xef53, 0x5846_5342, 0x9123_683e, 0x2fc1_2fc1, 0x794c_7630] {
            assert_eq!(judge(magic), Verdict::Local, "{magic:#x}");
        }
        assert_eq!(judge(0x0102_1994), Verdict::Volatile("tmpfs"));
        assert_eq!(judge(0x6573_5546), Verdict::Opaque("FUSE"));
        // The known number of `/proc` shows that the right field is read.
        assert_eq!(magic(Path::new("/proc")).unwrap(), 0x9fa0);
    }
}
