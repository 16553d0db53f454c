//! munged, which signs the messages of Slurm.

use std::{
    fs,
    os::unix::{
        fs::{PermissionsExt, chown},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Instant,
};

use crate::agent::PATIENCE;

/// A running munged. Dropping this value ends it.
#[derive(Debug)]
pub(super) struct Munge {
    child: Child,
}

impl Munge {
    /// Starts munged in the new directory `dir`, with a new key.
    pub(super) fn start(dir: &Path) -> Self {
        let user = nix::unistd::User::from_name("munge").ok().flatten().expect("munge has a user");
        fs::create_dir(dir).expect("a directory");
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).expect("an open directory");
        let mut key = [0; 128];
        std::io::Read::read_exact(&mut fs::File::open("/dev/urandom").expect("random bytes"), &mut key)
            .expect("random bytes");
        let own = |path: &Path| chown(path, Some(user.uid.as_raw()), Some(user.gid.as_raw())).expect("an owner");
        let key_file = dir.join("key");
        fs::write(&key_file, key).expect("a key");
        fs::set_permissions(&key_file, fs::Permissions::from_mode(0o400)).expect("a private key");
        own(&key_file);
        own(dir);
        let mut command = Command::new("/usr/sbin/munged");
        command.arg("--foreground").arg("--num-threads=4");
        for (flag, file) in
            [("--key-file", "key"), ("--socket", "sock"), ("--pid-file", "pid"), ("--seed-file", "seed")]
        {
            command.arg(format!("{flag}={}", dir.join(file).display()));
        }
        let log = fs::File::create(dir.join("output")).expect("a log");
        command.arg(format!("--log-file={}", dir.join("log").display()));
        command.uid(user.uid.as_raw()).gid(user.gid.as_raw()).current_dir("/");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let mut child = command.spawn().expect("munged can be started");
        let until = Instant::now() + PATIENCE;
        while !Self::socket(dir).exists() {
            let ended = child.try_wait().expect("a child can be waited for");
            let output = || fs::read_to_string(dir.join("output")).unwrap_or_default();
            assert!(ended.is_none() && Instant::now() < until, "munged is not ready ({ended:?}): {}", output());
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        Self { child }
    }

    /// Returns the path of the socket of the munged in this directory.
    pub(super) fn socket(dir: &Path) -> PathBuf {
        dir.join("sock")
    }
}

impl Drop for Munge {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
