//! Which processes are MPS servers, by what the kernel says of them: a daemon that was just started, or does not
//! answer, has told of none.
//!
//! ```text
//! its standard input is the lock of a target, or its parent's is ─► a server of that target's daemon
//! it runs the program of a server, and is no client of MPS ───────► a server of a daemon that is not gpushd's
//! ```

use std::fs;

use gpush_api::ProcessKind;
use gpush_host::proc::{self, FileId};

use super::{place::Place, view};
use crate::agent::Shared;

/// File name of NVIDIA's server.
const SERVER: &str = "nvidia-cuda-mps-server";

/// What servers are known by, as it is now.
#[derive(Debug)]
pub(crate) struct Servers {
    /// The lock of each target, with its label.
    locks: Vec<(FileId, String)>,
    /// Programs that servers run.
    programs: Vec<FileId>,
}

/// A server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Server<'a> {
    /// Of the daemon of a target, by its label.
    Of(&'a str),
    /// Of a daemon that is not gpushd's.
    Foreign,
}

impl Server<'_> {
    /// In words.
    pub(crate) fn words(self) -> String {
        match self {
            Self::Of(target) => format!("MPS server of {target}"),
            Self::Foreign => "MPS server of a daemon that is not gpushd's".to_owned(),
        }
    }
}

impl Servers {
    /// What they are known by now.
    pub(crate) fn of(agent: &Shared) -> Self {
        let entries = agent.mps.entries().clone();
        let label = |target: &str| {
            let entry = entries.iter().find(|(_, entry)| entry.short == target);
            entry.map_or_else(|| target.to_owned(), |(uuid, entry)| view::label(entry, uuid))
        };
        let places = Place::all(&agent.mps.base);
        let locks = places.iter().filter_map(|(place, spec)| Some((place.lock_file()?, label(&spec.target))));
        let started = places.iter().map(|(_, spec)| spec.servers.join(SERVER));
        let configured = agent.settings.config().mps.server.clone();
        let programs =
            started.chain([configured.into()]).filter_map(|path| fs::metadata(path).ok()).map(|meta| FileId::of(&meta));
        Self { locks: locks.collect(), programs: programs.collect() }
    }

    /// The server that a process is, if it is one.
    pub(crate) fn of_process(&self, pid: u32, kind: ProcessKind) -> Option<Server<'_>> {
        let parent = || proc::parent(pid).filter(|parent| *parent > 1);
        if let Some(target) = self.holds(pid).or_else(|| self.holds(parent()?)) {
            return Some(Server::Of(target));
        }
        let runs = proc::executable_id(pid)?;
        (kind != ProcessKind::MpsClient && self.programs.contains(&runs)).then_some(Server::Foreign)
    }

    /// The target whose lock a process holds.
    fn holds(&self, pid: u32) -> Option<&str> {
        let input = FileId::of(&proc::open_file_metadata(pid, 0)?);
        self.locks.iter().find(|(lock, _)| *lock == input).map(|(_, target)| target.as_str())
    }
}
