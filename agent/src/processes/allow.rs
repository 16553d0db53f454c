//! Processes that the config allows (`processes.allow`). An entry selects processes by their user and by the file that
//! they execute.
//!
//! ```text
//! gpushd can see the file:    the process executes it ─────────────────────► allowed
//!                             the process's path is "FILE (deleted)" ──────► uncertain: an upgrade replaced the file
//! gpushd cannot see the file: the process's path is the entry's path ──────► uncertain
//! the process's file cannot be read ───────────────────────────────────────► not allowed
//! the process's file system hangs: its path is the entry's path ───────────► uncertain
//! otherwise ───────────────────────────────────────────────────────────────► not allowed
//! ```
//!
//! gpushd's unit hides /home, /root and /run/user, and a network file system may deny access to root. A process can
//! choose its mounts, and so the path of its program. So if only the path of a process matches, the process is not
//! allowed, but gpushd does not end it.

use std::{io, path::PathBuf, sync::Arc};

use futures_util::future::join_all;
use gpush_api::{ApiError, Code};
use gpush_core::config::Allowed;
use gpush_host::{
    proc::{self, FileId},
    subtask,
};

use super::identity::Identity;

/// Directories that gpushd's unit hides (`ProtectHome=yes`).
const HIDDEN: [&str; 3] = ["/home", "/root", "/run/user"];

/// Whether the config allows a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Match {
    Yes,
    /// gpushd cannot tell, for this reason.
    Uncertain(String),
    No,
}

/// The entries of `processes.allow`, with their files as gpushd saw them when it created this value.
#[derive(Debug, Default)]
pub(super) struct AllowList {
    entries: Vec<AllowedProcess>,
}

#[derive(Debug)]
struct AllowedProcess {
    uid: Option<u32>,
    exe: Option<AllowedFile>,
}

#[derive(Debug)]
struct AllowedFile {
    path: PathBuf,
    /// The device and inode of the file; an error if gpushd cannot see the file.
    file: Result<FileId, io::Error>,
}

impl AllowList {
    /// Looks up the files of the entries, in at most half a second. If a file system does not answer in this time, gpushd
    /// treats the file as one that it cannot see. Returns `None` if gpushd is stopping.
    pub(super) async fn look_up(allow: Vec<Allowed>) -> Option<Arc<Self>> {
        // Look up all files at the same time, so that several file systems that hang take no longer than one.
        let lookups = allow.into_iter().map(|one| subtask::blocking(move || AllowedProcess::of(one)));
        let entries = join_all(lookups).await.into_iter().collect::<Option<Vec<_>>>()?;
        Some(Arc::new(Self { entries }))
    }

    /// Returns whether an entry matches a process.
    pub(super) fn matches(&self, process: &Identity) -> Match {
        let mut uncertain = None;
        for entry in self.entries.iter().filter(|entry| entry.uid.is_none_or(|uid| uid == process.uid())) {
            match entry.exe.as_ref().map_or(Match::Yes, |exe| exe.matches(process)) {
                Match::Yes => return Match::Yes,
                Match::Uncertain(why) => uncertain = Some(why),
                Match::No => {}
            }
        }
        uncertain.map_or(Match::No, Match::Uncertain)
    }

    /// Returns an error for each file that gpushd cannot see although it may exist.
    pub(super) fn invisible(&self) -> Vec<ApiError> {
        self.entries.iter().filter_map(|entry| entry.exe.as_ref()?.invisible()).collect()
    }
}

impl AllowedProcess {
    fn of(allowed: Allowed) -> Self {
        let exe = allowed.exe.map(|path| {
            let path = PathBuf::from(path);
            AllowedFile { file: proc::file_id_in_time(&path), path }
        });
        Self { uid: allowed.uid, exe }
    }
}

impl AllowedFile {
    fn matches(&self, process: &Identity) -> Match {
        let path = self.path.display();
        // The path counts only if the process is in the namespaces of the host: see `Identity::is_on_host`.
        let reported = process.path.as_deref().filter(|_| process.is_on_host);
        let is_same_path = reported == Some(&*self.path);
        let Some(executed) = process.file else {
            return match process.file_hangs && is_same_path {
                true => Match::Uncertain(format!(
                    "the config may allow it, because its path is {path}, and the file system there does not answer"
                )),
                false => Match::No,
            };
        };
        let is_replaced = reported.is_some_and(|reported| reported.as_os_str() == format!("{path} (deleted)").as_str());
        match &self.file {
            Ok(file) if *file == executed => Match::Yes,
            Ok(_) | Err(_) if is_replaced => Match::Uncertain(format!(
                "the config may allow it, because it was started before the program {path} was replaced or removed"
            )),
            Err(_) if is_same_path => Match::Uncertain(format!(
                "the config may allow it, because the path of the process is {path}, and gpushd cannot see that file"
            )),
            Ok(_) | Err(_) => Match::No,
        }
    }

    /// Returns an error if gpushd cannot see the file. If the file does not exist, returns no error, because not every
    /// host has every program.
    fn invisible(&self) -> Option<ApiError> {
        let error = self.file.as_ref().err()?;
        let is_hidden = HIDDEN.iter().any(|dir| self.path.starts_with(dir));
        if error.kind() == io::ErrorKind::NotFound && !is_hidden {
            return None;
        }
        let message = format!("processes.allow: gpushd cannot see {}", self.path.display());
        let mut reported = ApiError::new(Code::ConfigInvalid, message).cause(error.to_string());
        if is_hidden {
            reported = reported
                .cause(format!("gpushd's systemd unit hides these directories from gpushd: {}", HIDDEN.join(", ")));
        }
        Some(reported.hint("move the program to another directory, or allow its user. Until then, gpushd does not end processes with this path"))
    }
}

#[cfg(test)]
mod tests {
    use super::{super::identity::OpenedProcess, *};

    #[test]
    fn file_allows_and_path_alone_is_uncertain() {
        let me = OpenedProcess::open(std::process::id()).unwrap().identity;
        let exe = |path: &str| AllowedProcess::of(Allowed { exe: Some(path.into()), uid: None }).exe.unwrap();
        assert_eq!(exe("/proc/self/exe").matches(&me), Match::Yes);
        assert_eq!(exe("/bin/sh").matches(&me), Match::No);
        let at = |path: &str| Identity { path: Some(path.into()), ..me.clone() };
        let (deleted, hidden) = (at("/home/gone (deleted)"), at("/home/gone"));
        let entry = AllowedProcess::of(Allowed { exe: Some("/home/gone".into()), uid: Some(me.uid()) });
        let list = AllowList { entries: vec![entry] };
        assert!(matches!(list.matches(&deleted), Match::Uncertain(_)));
        assert!(matches!(list.matches(&hidden), Match::Uncertain(_)));
        // Fault: a process in another user namespace could show the path of an entry as its own path, and gpushd did
        // not end the process.
        for elsewhere in [deleted, hidden] {
            assert_eq!(list.matches(&Identity { is_on_host: false, ..elsewhere }), Match::No);
        }
        assert_eq!(list.matches(&Identity { path: None, ..me.clone() }), Match::No);
        for path in ["/home/gone", "/home/gone (deleted)"] {
            let unread = Identity { file: None, ..at(path) };
            assert_eq!(list.matches(&unread), Match::No, "the path alone proves nothing");
        }
        let unread = |path: &str| Identity { file: None, file_hangs: true, ..at(path) };
        assert!(matches!(list.matches(&unread("/home/gone")), Match::Uncertain(_)), "the network may be down");
        assert_eq!(list.matches(&unread("/home/other")), Match::No);
        assert_eq!(list.matches(&me), Match::No);
        assert_eq!(list.invisible().len(), 1);
        // Fault: gpushd waited for a network file system that did not answer, and ended no unleased process any more.
        let hanging = AllowedFile { path: "/net/agent".into(), file: Err(io::ErrorKind::TimedOut.into()) };
        assert!(matches!(hanging.matches(&at("/net/agent")), Match::Uncertain(_)));
        assert_eq!(hanging.matches(&me), Match::No);
        assert!(hanging.invisible().is_some());
        let missing = AllowedProcess::of(Allowed { exe: Some("/opt/not/here".into()), uid: None });
        assert!(AllowList { entries: vec![missing] }.invisible().is_empty());
    }
}
