//! A hint for a refused request: a shorter lease may use capacity that the queue reserves for others.

use std::time::Duration;

use gpush_core::duration;

use super::{demand::LeaseDemand, ends, placement_snapshot::PlacementSnapshot};

/// Time in which the user types the command again, in seconds.
const TYPING_S: u64 = 60;

/// The shortest lease that the hint suggests, in seconds.
const SHORTEST_S: u64 = 300;

/// Returns the hint with the longest duration with which gpushd would grant the request now; `None` if the duration does not
/// matter.
pub(super) fn hint(snapshot: &PlacementSnapshot, demand: &LeaseDemand) -> Option<String> {
    let longest = snapshot.longest_that_fits(&demand.wanted)?;
    let seconds = longest.checked_sub(ends::after_the_end(demand).saturating_add(TYPING_S))? / 60 * 60;
    let text = duration::format(Duration::from_secs(seconds));
    (seconds >= SHORTEST_S)
        .then(|| format!("request at most `--for {text}`, to use what the queue reserves until then"))
}
