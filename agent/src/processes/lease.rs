//! The lease that a process runs with: by its environment, that of its ancestors, and what was seen of it before.
//!
//! ```text
//! its own environment names a lease of its user's ─┐
//! it was seen with one before ─────────────────────┼─► that one, which is remembered
//! so does that of one of its ancestors, or was ────┘
//! none of these, and its environment is whole ───────► none, or another
//!                    it is empty, overwritten, unreadable ─► it can't be told
//! ```
//!
//! The kernel shows the memory in which a program found its environment. Programs that give themselves a
//! title (`setproctitle`) write over it, so what is not there says nothing by itself; a program that is just
//! being executed has no environment for a moment. The process itself sets the name. So the name counts only among the
//! leases of its user, and grants nothing.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use gpush_api::LeaseId;
use gpush_host::proc::{self, Environment, Image};

use crate::mps;

/// How many ancestors are looked at.
const ANCESTORS: usize = 64;

/// What is known of the lease that a process runs with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Told {
    /// This one, of its user's.
    Lease(String),
    /// For certain none of its user's: it names another.
    Another(String),
    /// For certain none.
    Nothing,
    /// It can't be told.
    Unsure,
}

/// What an environment says.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Named {
    Lease(String),
    Nothing,
    Unsure,
}

/// What is remembered of processes, by pid.
#[derive(Debug, Default)]
pub(crate) struct SeenLeases {
    /// Leases that they were seen with: each with the start of its process.
    leases: Mutex<HashMap<u32, (u64, String)>>,
    /// What their environments say: a large one is read once, and not at each look.
    read: Mutex<HashMap<u32, (Image, Named)>>,
}

impl SeenLeases {
    fn all(&self) -> MutexGuard<'_, HashMap<u32, (u64, String)>> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read(&self) -> MutexGuard<'_, HashMap<u32, (Image, Named)>> {
        self.read.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the lease that a process's environment names, for any holder. Reads files that may be large.
    pub(crate) fn named_lease(&self, pid: u32) -> Option<String> {
        match self.named(pid) {
            Named::Lease(name) => Some(name),
            Named::Nothing | Named::Unsure => None,
        }
    }

    fn named(&self, pid: u32) -> Named {
        let Some(image) = proc::image(pid) else { return named(pid) };
        if let Some((_, known)) = self.read().get(&pid).filter(|(of, _)| *of == image) {
            return known.clone();
        }
        let found = named(pid);
        // What it was executed with is read: another image has another place for it.
        if proc::image(pid) == Some(image) {
            self.read().insert(pid, (image, found.clone()));
        }
        found
    }

    /// The lease that a process runs with; `is_own` says whether a name is that of one of its user's.
    pub(super) fn lease_of(&self, pid: u32, is_own: impl Fn(&str) -> bool) -> Told {
        let Some(start) = proc::start(pid) else { return Told::Unsure };
        let own = self.named(pid);
        let before = |pid: u32, start: u64| {
            self.all()
                .get(&pid)
                .filter(|(of, _)| *of == start)
                .map(|(_, name)| name.clone())
                .filter(|name| is_own(name))
        };
        let found = match &own {
            Named::Lease(name) if is_own(name) => Some(name.clone()),
            Named::Lease(_) | Named::Nothing | Named::Unsure => before(pid, start),
        };
        let inherited = || {
            ancestors(pid).find_map(|pid| match self.named(pid) {
                Named::Lease(name) if is_own(&name) => Some(name),
                Named::Lease(_) | Named::Nothing | Named::Unsure => before(pid, proc::start(pid)?),
            })
        };
        match found.or_else(inherited) {
            Some(name) => {
                self.all().insert(pid, (start, name.clone()));
                Told::Lease(name)
            }
            None => match own {
                Named::Lease(name) => Told::Another(name),
                Named::Nothing => Told::Nothing,
                Named::Unsure => Told::Unsure,
            },
        }
    }

    /// Forgets those that have ended.
    pub(super) fn forget_ended(&self) {
        self.all().retain(|pid, (start, _)| proc::start(*pid) == Some(*start));
        self.read().retain(|pid, (image, _)| proc::image(*pid) == Some(*image));
    }
}

/// Processes that one comes from, nearest first.
pub(super) fn ancestors(pid: u32) -> impl Iterator<Item = u32> {
    std::iter::successors(proc::parent(pid), |pid| proc::parent(*pid)).take_while(|pid| *pid > 1).take(ANCESTORS)
}

fn named(pid: u32) -> Named {
    match proc::environment(pid, mps::LEASE_VARIABLE) {
        Environment::Set(name) => {
            String::from_utf8(name).ok().filter(|name| is_name(name)).map_or(Named::Unsure, Named::Lease)
        }
        Environment::Unset => Named::Nothing,
        Environment::Unknown => Named::Unsure,
    }
}

/// Whether it is the name of a lease: what others read has no other words of the process's own in it.
fn is_name(text: &str) -> bool {
    text.starts_with('L') && text.parse::<LeaseId>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lease_is_named_by_its_id() {
        assert!(is_name("L12") && !is_name("L0"));
        for name in ["", "L", "12", "l12", "s12", "L1\n", "L123456789012345678901"] {
            assert!(!is_name(name), "{name:?}");
        }
    }

    #[test]
    fn an_environment_is_read_once_for_each_program_that_a_process_becomes() {
        use std::io::{BufRead, BufReader, Write};
        let remembered = SeenLeases::default();
        let script = format!("echo up; read x; {}=L8 exec sh -c 'echo again; read x'", mps::LEASE_VARIABLE);
        let mut child = std::process::Command::new("sh")
            .args(["-c", &script])
            .env(mps::LEASE_VARIABLE, "L7")
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap()).lines();
        let pid = child.id();
        assert_eq!(said.next().unwrap().unwrap(), "up");
        assert_eq!(remembered.named(pid), Named::Lease("L7".to_owned()));
        let first = remembered.read()[&pid].0;
        assert_eq!((remembered.named(pid), remembered.read()[&pid].0), (Named::Lease("L7".to_owned()), first));
        writeln!(child.stdin.as_ref().unwrap(), "go on").unwrap();
        assert_eq!(said.next().unwrap().unwrap(), "again");
        assert_eq!(remembered.named(pid), Named::Lease("L8".to_owned()));
        assert_ne!(remembered.read()[&pid].0, first);
        drop(child.stdin.take());
        child.wait().unwrap();
        remembered.forget_ended();
        assert!(remembered.read().is_empty());
    }

    #[test]
    fn what_was_seen_once_is_remembered_of_the_process_and_of_no_other() {
        let remembered = SeenLeases::default();
        let me = std::process::id();
        let start = proc::start(me).unwrap();
        remembered.all().insert(me, (start, "L7".to_owned()));
        assert_eq!(remembered.lease_of(me, |name| name == "L7"), Told::Lease("L7".to_owned()));
        assert_ne!(remembered.lease_of(me, |name| name == "L8"), Told::Lease("L7".to_owned()));
        remembered.all().insert(me, (start + 1, "L7".to_owned()));
        assert_ne!(remembered.lease_of(me, |name| name == "L7"), Told::Lease("L7".to_owned()));
        remembered.forget_ended();
        assert!(remembered.all().is_empty());
    }
}
