//! Results of lease commands, and what a lease waits for.

use gpush_api::{Gpu, Lease, LeaseGrant, LeaseState, text::local_time};
use jiff::Timestamp;

use super::{end, enforced_by, list::list, place, reason, share, show, usage::Surroundings};
use crate::render::{
    Appearance,
    appearance::{NOTE, QUIET, paint},
    listing::Listing,
};

/// Draws the result of `gpushctl lease request`: the lease, and the commands that can use it.
pub(crate) fn granted(granted: &LeaseGrant, gpus: &[Gpu], look: &Appearance) -> Listing {
    let lease = &granted.lease;
    let id = lease.id;
    let mut drawn = show::one(lease, gpus, &Surroundings::default(), look) + "\n";
    for (command, what) in [
        (format!("gpushctl run --lease {id} -- COMMAND"), "run a command in the lease"),
        (format!("eval \"$(gpushctl lease env {id})\""), "or use the lease in this shell"),
        (format!("gpushctl lease end {id}"), "end the lease"),
    ] {
        drawn += &format!("{command:<40}  {}\n", paint(QUIET, what));
    }
    list(std::slice::from_ref(lease), gpus, look).drawn(drawn)
}

/// Draws the line that `run` and `lease env` print on stderr: the granted share, and what enforces it.
pub(crate) fn started(lease: &Lease, look: &Appearance) -> String {
    let text = format!(
        "granted {}, ends {}. Enforced by {}",
        share(lease, look),
        end(lease, look),
        enforced_by(lease.enforcement)
    );
    lines(lease, &text, look)
}

/// Draws the line that a command prints while its lease waits in the queue.
pub(crate) fn waits(lease: &Lease, look: &Appearance) -> String {
    let text = match (lease.state, &lease.operation) {
        (LeaseState::Granting, Some(operation)) => format!("being granted by operation {operation}"),
        (LeaseState::Granting, None) => "being granted".to_owned(),
        _ => {
            let why = lease.queue.iter().flat_map(|queue| &queue.reasons).next();
            let why = why.map_or_else(String::new, |why| format!(": {}", look.clean(why)));
            format!("waiting, {}{why}", place(lease, look).unwrap_or_else(|| "in the queue".to_owned()))
        }
    };
    lines(lease, &text, look)
}

/// Draws the result of `gpushctl lease renew`.
/// `before` is the end before the change, if it is known.
pub(crate) fn renewed(lease: &Lease, before: Option<Timestamp>, look: &Appearance) -> String {
    let at = lease.expires_at.map_or_else(String::new, |at| format!(" ({})", local_time(at)));
    let mut out = lines(lease, &format!("ends {}{at}", end(lease, look)), look);
    // The duration counts from now, so a lease can also become shorter.
    if let Some(before) = before.filter(|before| lease.expires_at.is_some_and(|now| now < *before)) {
        let text = format!("earlier than before, which was {}: --for counts from now", local_time(before));
        out.extend(look.wrap("! ", &text).into_iter().map(|line| paint(NOTE, &line) + "\n"));
    }
    out
}

/// Draws the result of `gpushctl lease end` and `revoke`. `began` is the time at which the command began.
pub(crate) fn ended(lease: &Lease, began: Timestamp, look: &Appearance) -> String {
    let why = lease.reason.map_or("ends", reason);
    // Times of gpushd have whole seconds.
    let earlier = lease.ended_at.filter(|at| at.as_second() < began.as_second());
    let mut out = match (lease.state, earlier) {
        (LeaseState::Ended, Some(at)) => lines(lease, &format!("has ended already: {why}, {}", look.ago(at)), look),
        (LeaseState::Ended, None) => lines(lease, why, look),
        (LeaseState::Queued | LeaseState::Granting | LeaseState::Active | LeaseState::Releasing, _) => {
            lines(lease, &format!("{why}; its capacity becomes free when its processes have ended"), look)
        }
    };
    for what in &lease.waits_for {
        let text = look.wrap("  waits: ", &look.clean(what)).join("\n");
        out += &(paint(NOTE, &text) + "\n");
    }
    if let Some(at) = lease.revocation.as_ref().and_then(|revocation| revocation.processes_end_at) {
        out += &match lease.state {
            LeaseState::Ended => "  it had no processes\n".to_owned(),
            LeaseState::Queued | LeaseState::Granting | LeaseState::Active | LeaseState::Releasing => {
                format!("  gpushd ends its processes {}\n", look.ahead(at))
            }
        };
    }
    out
}

fn lines(lease: &Lease, text: &str, look: &Appearance) -> String {
    look.wrap(&format!("{}: ", lease.id), text).join("\n") + "\n"
}
