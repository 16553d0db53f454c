//! Programs of users, as real processes that do nothing. What they use the GPU for is scripted.

use std::{
    os::unix::process::CommandExt,
    process::{Child, Command, Stdio},
};

/// A program of a user. Dropping this value kills the program.
#[derive(Debug)]
pub(super) struct UserProgram {
    child: Child,
    uid: u32,
}

impl UserProgram {
    /// Starts a program as a user.
    pub(super) fn start(command: &mut Command, uid: u32) -> Self {
        Self::start_with_input(command, uid, Stdio::null())
    }

    /// Starts a program as a user, with this input.
    pub(super) fn start_with_input(command: &mut Command, uid: u32, input: impl Into<Stdio>) -> Self {
        if uid != own_uid() {
            command.uid(uid).gid(uid);
        }
        let child = command.stdin(input).current_dir("/").spawn().expect("a program");
        Self { child, uid }
    }

    /// Starts a program that waits.
    pub(super) fn sleep(uid: u32) -> Self {
        Self::start(Command::new("/bin/sleep").arg("1000"), uid)
    }

    /// Starts a program that waits, with this environment.
    pub(super) fn with_environment(uid: u32, environment: &[(String, String)]) -> Self {
        Self::start(Command::new("/bin/sleep").arg("1000").envs(environment.iter().cloned()), uid)
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn uid(&self) -> u32 {
        self.uid
    }

    /// Returns whether the program still runs.
    pub(super) fn lives(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for UserProgram {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _waited = self.child.wait();
    }
}

/// Returns the uid of this test.
pub(super) fn own_uid() -> u32 {
    nix::unistd::geteuid().as_raw()
}

/// Returns whether tests cannot start programs of other users. Says what is not tested.
pub(super) fn skips_other_users(what: &str) -> bool {
    let skips = own_uid() != 0;
    if skips {
        println!("SKIPPED {what}: only root has processes of others");
    }
    skips
}
