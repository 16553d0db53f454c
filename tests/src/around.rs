//! Scripts that replace the programs that gpushd runs for a change of MIG mode: `systemctl`,
//! `nvidia-smi` and hooks.
//!
//! Each script appends its call to one file, in the order of the calls. A script can kill gpushd
//! before or after its call. The scripts run in helper units, so they survive the kill.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use crate::host::Host;

/// The scripts, and the files that they write.
#[derive(Debug)]
pub struct Around {
    dir: PathBuf,
}

impl Around {
    /// Creates the scripts for a host. At first, no service runs.
    ///
    /// # Panics
    /// If the scripts cannot be written.
    #[must_use]
    pub fn of(host: &Host) -> Self {
        let dir = host.scratch("around");
        fs::create_dir_all(dir.join("running")).expect("a directory");
        let around = Self { dir };
        let (at, smi) = (around.dir.display(), host.dir().join("bin/nvidia-smi"));
        around.script(
            "systemctl",
            "name=${2%.service}
            case $1 in
                is-active) [ -e \"$D/running/$name\" ]; rc=$?; [ $rc = 0 ] || rc=3;;
                stop) rm -f \"$D/running/$name\"; rc=$?;;
                start) [ ! -e \"$D/broken-$name\" ] && : > \"$D/running/$name\"; rc=$?;;
            esac",
        );
        around.script("nvidia-smi", &format!("'{}' \"$@\"; rc=$?", smi.display()));
        around.script("before", ". \"$D/before.body\"; rc=$?");
        around.script("after", "env | grep ^GPUSH_ | sort > \"$D/after.env\"; rc=0");
        around.hook("env | grep ^GPUSH_ | sort > \"$D/before.env\"");
        assert!(fs::metadata(around.dir.join("systemctl")).is_ok(), "{at}");
        around
    }

    fn script(&self, name: &str, body: &str) {
        let at = self.dir.display();
        // The file `kill` says when the scripts kill gpushd: the line `3 before` means before the
        // body of the third call. The parent of the script is `gpushd helper`, and the parent of
        // that process is gpushd.
        let text = format!(
            "#!/bin/sh
D='{at}'
tick() {{
    grep -qsx \"$n $1\" \"$D/kill\" || return 0
    read -r _ _ _ up _ < /proc/$PPID/stat
    [ \"$(cat /proc/$up/comm)\" = gpushd ] && kill -9 \"$up\"
}}
echo \"{name} $*\" >> \"$D/calls\"
n=$(wc -l < \"$D/calls\")
tick before
{body}
tick after
exit $rc
"
        );
        let path = self.dir.join(name);
        fs::write(&path, text).expect("a script can be written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("a script can be made one");
    }

    /// Replaces the body of the hook that runs before a change. The exit code of the last command
    /// in `body` is the exit code of the hook.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn hook(&self, body: &str) {
        fs::write(self.dir.join("before.body"), body).expect("a hook can be written");
    }

    /// Returns the section `[mode_change]` of the config, with the paths of all scripts and the
    /// text `more`.
    #[must_use]
    pub fn config(&self, services: &[&str], more: &str) -> String {
        let at = self.dir.display();
        let services: Vec<String> = services.iter().map(|name| format!("\"{name}\"")).collect();
        format!(
            "[mode_change]\nservices = [{}]\nbefore = \"{at}/before\"\nafter = \"{at}/after\"\n\
             # --constants systemctl={at}/systemctl\nnvidia_smi = \"{at}/nvidia-smi\"\n{more}\n",
            services.join(", ")
        )
    }

    /// Marks a service as running.
    ///
    /// # Panics
    /// If the mark cannot be written.
    pub fn run(&self, service: &str) {
        fs::write(self.dir.join("running").join(service), "").expect("a service can run");
    }

    /// Returns whether a service runs.
    #[must_use]
    pub fn runs(&self, service: &str) -> bool {
        self.dir.join("running").join(service).exists()
    }

    /// Sets whether a service fails to start.
    ///
    /// # Panics
    /// If the file that marks the service as broken cannot be written or removed.
    pub fn break_service(&self, service: &str, broken: bool) {
        let mark = self.dir.join(format!("broken-{service}"));
        if broken { fs::write(mark, "") } else { fs::remove_file(mark) }.expect("a mark");
    }

    /// Makes the scripts kill gpushd at each of these moments: before or after the n-th call,
    /// counted from 1.
    ///
    /// # Panics
    /// If the moments cannot be written.
    pub fn kill_at(&self, moments: &[(usize, &str)]) {
        let lines: Vec<String> = moments.iter().map(|(n, when)| format!("{n} {when}\n")).collect();
        fs::write(self.dir.join("kill"), lines.concat()).expect("moments");
    }

    /// Returns the calls so far.
    #[must_use]
    pub fn calls(&self) -> Vec<String> {
        let text = fs::read_to_string(self.dir.join("calls")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Returns the recorded calls, and deletes the records. If a script records a call at the same
    /// time, this record may be lost.
    #[must_use]
    pub fn take_calls(&self) -> Vec<String> {
        let calls = self.calls();
        let _ = fs::remove_file(self.dir.join("calls"));
        let _ = fs::remove_file(self.dir.join("kill"));
        calls
    }

    /// Returns the path of a file in the directory of the scripts.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Returns the environment of a hook, which the hook has written to the file `name`.
    #[must_use]
    pub fn reported(&self, name: &str) -> String {
        fs::read_to_string(Path::new(&self.file(name))).unwrap_or_default()
    }
}
