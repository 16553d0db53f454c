//! Processes that the config allows, by the file that they run and by their user, never by their name.
//!
//! ```text
//! the file can be seen:      it is the one that the process runs ────────► allowed
//!                            the process's path of it, "… (deleted)" ────► perhaps: an upgrade has replaced it
//! the file can't be seen:    the process's path is that of the entry ────► perhaps
//! anything else ─────────────────────────────────────────────────────────► not allowed
//! ```
//!
//! Gpushd's unit hides /home, /root and /run/user, and a network file system may keep root out. A path is what
//! the process's own mounts make of it, so it allows nothing; but who has it is not ended.

use std::{fs, io, path::PathBuf};

use gpush_api::{ApiError, Code, StrayPolicy};
use gpush_core::config::{Allowed, Config};
use gpush_host::proc::FileId;

use super::held::Facts;

/// Directories that gpushd's unit hides (`ProtectHome=yes`).
const HIDDEN: [&str; 3] = ["/home", "/root", "/run/user"];

/// Whether the config allows a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    Yes,
    /// It can't be told, for this reason.
    Perhaps(String),
    No,
}

/// The entries of the config, with their files as they are now.
#[derive(Debug, Default)]
pub(super) struct Allow {
    entries: Vec<Entry>,
    /// Whether anything hangs on them.
    matters: bool,
}

#[derive(Debug)]
struct Entry {
    uid: Option<u32>,
    exe: Option<Exe>,
}

#[derive(Debug)]
struct Exe {
    path: PathBuf,
    /// Device and inode, or why they can't be seen.
    file: Result<FileId, io::Error>,
}

impl Allow {
    /// The entries of a config. A file system that hangs blocks only a separate thread.
    pub(super) async fn of(config: &Config) -> Option<Self> {
        let matters = config.processes.stray == StrayPolicy::End;
        let entries = config.processes.allow.clone();
        tokio::task::spawn_blocking(move || Self { entries: entries.into_iter().map(Entry::of).collect(), matters })
            .await
            .ok()
    }

    /// Whether a process is allowed.
    pub(super) fn verdict(&self, facts: &Facts) -> Verdict {
        let by_user = self.entries.iter().filter(|entry| entry.uid.is_none_or(|uid| uid == facts.uid()));
        let mut perhaps = None;
        for entry in by_user {
            match entry.exe.as_ref().map_or(Verdict::Yes, |exe| exe.verdict(facts)) {
                Verdict::Yes => return Verdict::Yes,
                Verdict::Perhaps(why) => perhaps = Some(why),
                Verdict::No => {}
            }
        }
        perhaps.map_or(Verdict::No, Verdict::Perhaps)
    }

    /// Files of entries that gpushd can't see, though they may well be there.
    pub(super) fn unseen(&self) -> Vec<ApiError> {
        let exes = self.entries.iter().filter_map(|entry| entry.exe.as_ref()).filter(|_| self.matters);
        exes.filter_map(Exe::unseen).collect()
    }
}

impl Entry {
    fn of(allowed: Allowed) -> Self {
        let exe = allowed.exe.map(|path| {
            let path = PathBuf::from(path);
            Exe { file: fs::metadata(&path).map(|meta| FileId::of(&meta)), path }
        });
        Self { uid: allowed.uid, exe }
    }
}

impl Exe {
    fn verdict(&self, facts: &Facts) -> Verdict {
        let path = self.path.display();
        let replaced = facts.path.as_os_str() == format!("{path} (deleted)").as_str();
        match &self.file {
            Ok(file) if *file == facts.file => Verdict::Yes,
            Ok(_) | Err(_) if replaced => {
                Verdict::Perhaps(format!("it may be allowed: it began before {path} was replaced or removed"))
            }
            Err(_) if facts.path == self.path => {
                Verdict::Perhaps(format!("it may be allowed: gpushd can't see {path}, and that is its path"))
            }
            Ok(_) | Err(_) => Verdict::No,
        }
    }

    /// What isn't there is no trouble: not every host has every program.
    fn unseen(&self) -> Option<ApiError> {
        let error = self.file.as_ref().err()?;
        let hidden = HIDDEN.iter().any(|dir| self.path.starts_with(dir));
        if error.kind() == io::ErrorKind::NotFound && !hidden {
            return None;
        }
        let path = self.path.display();
        let mut told =
            ApiError::new(Code::ConfigInvalid, format!("processes.allow names {path}, which gpushd can't see"))
                .cause(error.to_string());
        if hidden {
            told = told.cause(format!("gpushd's unit hides {}", HIDDEN.join(", ")));
        }
        Some(told.hint("nobody who runs a file of that path is ended; put the program elsewhere, or allow its user"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_compared_and_a_path_only_keeps_from_the_end() {
        let me = super::super::held::Held::take(std::process::id()).unwrap().facts;
        let verdict = |path: &str| Entry::of(Allowed { exe: Some(path.into()), uid: None }).exe.unwrap().verdict(&me);
        assert_eq!(verdict("/proc/self/exe"), Verdict::Yes);
        assert_eq!(verdict("/bin/sh"), Verdict::No);
        let gone = Facts { path: "/home/gone (deleted)".into(), ..me.clone() };
        let hidden = Facts { path: "/home/gone".into(), ..me.clone() };
        let entry = Entry::of(Allowed { exe: Some("/home/gone".into()), uid: Some(me.uid()) });
        let allow = Allow { entries: vec![entry], matters: true };
        assert!(matches!(allow.verdict(&gone), Verdict::Perhaps(_)));
        assert!(matches!(allow.verdict(&hidden), Verdict::Perhaps(_)));
        assert_eq!(allow.verdict(&me), Verdict::No);
        assert_eq!(allow.unseen().len(), 1);
        let other = Entry::of(Allowed { exe: Some("/opt/not/here".into()), uid: None });
        assert!(Allow { entries: vec![other], matters: true }.unseen().is_empty());
    }
}
