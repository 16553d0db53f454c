//! Who has come to a daemon and has no server yet. The daemon tells of nobody whom no server has, but it keeps each
//! of them connected until there is one, and nobody else for long: the kernel tells who that is.
//!
//! ```text
//! connected, of no server, no client ─► waits
//! from another network namespace ─────► waits whom the log names, of the user whom it names, if he is in another
//!                                       one; are there more than those, nobody can tell
//! of another pid namespace ───────────► nobody can tell
//! ```
//!
//! Where the kernel does not tell, the log does, as far as it is not mute.

use std::path::Path;

use gpush_host::proc;
use gpush_mps::holder::{self, Guests};

/// Who waits at a daemon's doors.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Door {
    /// Those who wait.
    pub(super) waiting: Vec<i32>,
    /// Whether others may.
    pub(super) others: bool,
}

/// Looks at the doors of a daemon with these servers and clients. `named`: who waits by the word of its log, with
/// their users; nothing where it is mute.
pub(super) async fn look(daemon: i32, pipe: &Path, known: Vec<i32>, named: Option<&[(i32, u32)]>) -> Door {
    let (pipe, inside) = (pipe.to_owned(), known.clone());
    let found = tokio::task::spawn_blocking(move || holder::guests(daemon, &pipe, &inside)).await;
    let named_ones = named.unwrap_or_default().iter().filter(|(pid, uid)| proc::owner(*pid) == Some(*uid));
    let named_ones: Vec<i32> = named_ones.map(|(pid, _)| *pid).filter(|pid| !known.contains(pid)).collect();
    match found.map_err(std::io::Error::other).and_then(|found| found) {
        Ok(guests) => at(guests, named_ones.into_iter().filter(|pid| is_elsewhere(*pid))),
        Err(error) => {
            tracing::debug!(daemon, "who waits at its doors can't be told: {error}");
            Door { waiting: named_ones, others: named.is_none() }
        }
    }
}

fn at(guests: Guests, named: impl Iterator<Item = i32>) -> Door {
    let elsewhere: Vec<i32> = if guests.elsewhere > 0 { named.collect() } else { Vec::new() };
    let others = guests.unseen || guests.elsewhere > elsewhere.len();
    Door { waiting: guests.pids.into_iter().chain(elsewhere).collect(), others }
}

/// Whether a process is in another network namespace than we.
fn is_elsewhere(pid: i32) -> bool {
    proc::is_in_our_network(pid) == Some(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_can_not_be_seen_may_be_anybody() {
        let guests = |unseen, elsewhere| Guests { pids: [5].into(), unseen, elsewhere };
        let door = |waiting: &[i32], others| Door { waiting: waiting.to_vec(), others };
        assert_eq!(at(guests(false, 0), [7].into_iter()), door(&[5], false), "nobody came from elsewhere");
        assert_eq!(at(guests(true, 0), [].into_iter()), door(&[5], true));
        assert_eq!(at(guests(false, 1), [].into_iter()), door(&[5], true));
        assert_eq!(at(guests(false, 1), [7].into_iter()), door(&[5, 7], false));
    }

    #[test]
    fn we_are_where_we_are() {
        assert!(!is_elsewhere(std::process::id().cast_signed()) && !is_elsewhere(i32::MAX));
    }
}
