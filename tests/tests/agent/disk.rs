//! A disk that a test can fill.

use std::{io::Write, path::PathBuf, process::Command};

/// A small file system for a state directory, mounted at this path. Dropping this value unmounts
/// the file system.
pub(crate) struct Disk(pub(crate) PathBuf);

impl Disk {
    pub(crate) fn mount(at: PathBuf) -> Option<Self> {
        std::fs::create_dir_all(&at).expect("a directory");
        let mount =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=12m,mode=700", "gpush-test"]).arg(&at).output();
        if mount.is_ok_and(|mount| mount.status.success()) {
            return Some(Self(at));
        }
        println!("SKIPPED a full disk: no small file system can be mounted here (needs root)");
        None
    }

    pub(crate) fn fill(&self) {
        let mut file = std::fs::File::create(self.0.join("filler")).expect("a file");
        for size in [1 << 20, 4096] {
            while file.write_all(&vec![1; size]).is_ok() {}
        }
    }

    pub(crate) fn free(&self) {
        std::fs::remove_file(self.0.join("filler")).expect("the filler is there");
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}
