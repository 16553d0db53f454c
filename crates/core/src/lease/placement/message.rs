//! Error messages for requests that cannot be placed.

use gpush_api::{ApiError, Code, LeaseKind};

use super::{Closed, LargestFree, NoAssignment, Obstacle, PlacementRequest, Unoffered};

/// Maximum number of GPUs that a message names.
const MOST_NAMED: usize = 16;

impl NoAssignment {
    /// Returns the error for the caller. gpushd adds the leases and processes that hold the
    /// capacity.
    #[must_use]
    pub fn error(&self, wanted: &PlacementRequest) -> ApiError {
        let what = match (wanted.share.kind(), wanted.count) {
            (LeaseKind::Mig, 1) => "a MIG device".to_owned(),
            (LeaseKind::Mig, count) => format!("{count} MIG devices"),
            (LeaseKind::Mps, _) => "an MPS share".to_owned(),
            (LeaseKind::Timeslice, _) => "a time-slice replica".to_owned(),
            (LeaseKind::Whole, 1) => "a whole GPU".to_owned(),
            (LeaseKind::Whole, count) => format!("{count} whole GPUs"),
        };
        let error = |code, why: String| ApiError::new(code, format!("cannot grant {what}: {why}"));
        let (gpus, is_one) = named_gpus(wanted);
        let verb = |one: &str, several: &str| format!("{gpus} {}", if is_one { one } else { several });
        match self {
            Self::NotOffered { offered, unoffered, .. } if offered.is_empty() => {
                let mut error = error(Code::Unsupported, verb("cannot be leased", "cannot be leased"));
                error.causes.extend(unoffered.iter().take(MOST_NAMED).map(|(gpu, why)| unoffered_cause(*gpu, *why)));
                let differ = |(gpu, why): &(u32, Unoffered)| match why {
                    Unoffered::OtherMode(_) => Some(gpu.to_string()),
                    Unoffered::NoRule | Unoffered::Unmanaged | Unoffered::NotReady(_) => None,
                };
                let differ: Vec<String> = unoffered.iter().filter_map(differ).collect();
                error.hint(match differ.as_slice() {
                    [] => "choose other GPUs: `gpushctl status` shows the modes".to_owned(),
                    gpus => format!(
                        "to bring the GPUs to the mode of their rules: `gpushctl apply {}` (administrator)",
                        gpus.join(",")
                    ),
                })
            }
            Self::NotOffered { offered, .. } => {
                let kinds: Vec<&str> = offered.iter().map(|(kind, _)| kind.name()).collect();
                let examples: Vec<String> = offered.iter().map(|(_, request)| format!("`{request}`")).collect();
                let first = offered.first().map_or("", |(_, request)| request);
                let offer = format!("{} only leases of kind {}", verb("offers", "offer"), kinds.join(", "));
                error(Code::Unsupported, offer).hint(format!(
                    "request {}, as with `gpushctl run --request {first} -- COMMAND`",
                    examples.join(" or ")
                ))
            }
            Self::UnknownProfile { profile, nearest } => {
                let has_not = match wanted.gpus {
                    Some(_) => format!("{} not have the profile {profile}", verb("does", "do")),
                    None => format!("no GPU has the profile {profile}"),
                };
                let error = error(Code::UnknownProfile, has_not);
                match nearest.as_slice() {
                    [] => error.hint("list the profiles with `gpushctl mig profiles`"),
                    nearest => error.hint(format!(
                        "did you mean {}? List the profiles with `gpushctl mig profiles`",
                        nearest.join(" or ")
                    )),
                }
            }
            Self::TooLarge { most: 0 } => {
                let too_small = match wanted.gpus {
                    Some(_) => format!("{} not meet the request, even when idle", verb("does", "do")),
                    None => "no GPU meets the request, not even an idle one".to_owned(),
                };
                error(Code::BadRequest, too_small).hint("request less; `gpushctl status` shows what the GPUs have")
            }
            Self::TooLarge { most } => {
                error(Code::BadRequest, format!("{} room for only {most}, even when idle", verb("has", "have")))
                    .hint(format!("request {most} or fewer"))
            }
            Self::Busy { obstacles, largest } => {
                let mut error = error(Code::Blocked, "the capacity is in use".to_owned()).retryable();
                for (gpu, obstacle) in obstacles.iter().take(MOST_NAMED) {
                    error = error.cause(cause(*gpu, *obstacle, wanted.count));
                }
                if let Some(more) = obstacles.len().checked_sub(MOST_NAMED).filter(|more| *more > 0) {
                    error = error.cause(format!("{more} more GPUs are in use"));
                }
                match largest {
                    None => error,
                    Some(LargestFree::Percentage { gpu, tenths }) => {
                        let percent = percent(*tenths);
                        error
                            .cause(format!("GPU {gpu} has the most free capacity: {percent} %"))
                            .hint(format!("request {percent} % or less"))
                    }
                    Some(LargestFree::Device { gpu, profile }) if wanted.count == 1 => error
                        .cause(format!("the largest free MIG device is {profile}, on GPU {gpu}"))
                        .hint(format!("request {profile}")),
                    Some(LargestFree::Device { .. }) => error.hint("request fewer MIG devices"),
                }
            }
        }
    }
}

impl NoAssignment {
    /// Returns the hint for the user of a Slurm job, if it differs from the hint of [`Self::error`].
    #[must_use]
    pub fn hint_for_job(&self) -> Option<String> {
        let Self::NotOffered { offered, .. } = self else { return None };
        let options = offered.iter().map(|(_, request)| format!("`--comment=gpush:{request}`")).collect::<Vec<_>>();
        (!options.is_empty()).then(|| format!("submit the job with {}", options.join(" or ")))
    }
}

/// Returns the names of the GPUs that a request may use, and whether there is exactly one such GPU.
fn named_gpus(wanted: &PlacementRequest) -> (String, bool) {
    let indexes: Vec<String> = wanted.gpus.iter().flatten().map(u32::to_string).collect();
    match indexes.as_slice() {
        [one] => (format!("GPU {one}"), true),
        [] => ("the GPUs".to_owned(), false),
        several if several.len() <= MOST_NAMED => (format!("GPUs {}", several.join(", ")), false),
        _ => ("the selected GPUs".to_owned(), false),
    }
}

/// Formats tenths of a percent as users write them: `12.5`.
fn percent(tenths: u32) -> String {
    match tenths % 10 {
        0 => (tenths / 10).to_string(),
        rest => format!("{}.{rest}", tenths / 10),
    }
}

/// Returns why a GPU offers no lease.
fn unoffered_cause(gpu: u32, why: Unoffered) -> String {
    match why {
        Unoffered::NotReady(_) => format!("GPU {gpu} is not ready"),
        Unoffered::NoRule => format!("no rule of the config claims GPU {gpu}"),
        Unoffered::Unmanaged => format!("GPU {gpu} has mode `unmanaged`: gpushd grants no leases on it"),
        Unoffered::OtherMode(mode) => format!("GPU {gpu} is not in mode `{}`, which its rule requires", mode.name()),
    }
}

fn cause(gpu: u32, obstacle: Obstacle, count: usize) -> String {
    match obstacle {
        Obstacle::Closed(Closed::Cordoned) => format!("GPU {gpu} is cordoned"),
        Obstacle::Closed(Closed::Claimed) => format!("an operation is changing GPU {gpu}"),
        Obstacle::Closed(Closed::NotReady) => format!("GPU {gpu} is not ready"),
        Obstacle::InUse => format!("GPU {gpu} has no room"),
        Obstacle::OtherUser(uid) => format!("the MPS daemon of GPU {gpu} serves another user (uid {uid})"),
        Obstacle::Partly(room) => format!("GPU {gpu} has room for only {room} of the {count} devices"),
    }
}
