//! The words of a denial: one clause, or an error with the sums and a command that helps.

use std::{collections::BTreeSet, fmt, time::Duration};

use gpush_api::{ApiError, Code, GpuIndex, LeaseId, LeaseKind};

use super::{Denial, Exceeded, HeldLease, MemoryAmount, Subject, denial::Sum};
use crate::duration;

/// Maximum number of leases in one message.
const MOST_NAMED: usize = 8;

/// A denied request, as its error names it.
#[derive(Debug, Clone, Copy)]
pub struct DeniedRequest<'a> {
    /// What the request asks for: `2g.20gb`, `a whole GPU`.
    pub what: &'a str,
    /// Name of the holder; `None` if the caller is the holder.
    pub holder: Option<&'a str>,
    /// What the user may request instead. If the quota does not allow the kind, requests of other kinds, in backticks.
    /// Otherwise the flags of a smaller request: `--mig 1g.10gb`.
    pub instead: Option<&'a str>,
}

impl DeniedRequest<'_> {
    fn leases(&self) -> String {
        self.holder.map_or_else(|| "your leases".to_owned(), |name| format!("the leases of {name}"))
    }

    fn holds(&self) -> String {
        self.holder.map_or_else(|| "you hold".to_owned(), |name| format!("{name} holds"))
    }

    fn has(&self) -> String {
        self.holder.map_or_else(|| "you have".to_owned(), |name| format!("{name} has"))
    }
}

impl fmt::Display for Denial {
    /// Writes one clause, for lists of what a user may lease.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.subject {
            Some(Subject::User(name)) => write!(f, "user {name} may ")?,
            Some(Subject::Group(name)) => write!(f, "group {name} may ")?,
            Some(Subject::Everybody) | None => f.write_str("each user may ")?,
        }
        match &self.exceeded {
            Exceeded::Kind { kind, .. } => write!(f, "not hold leases of kind {kind}")?,
            Exceeded::Leases { most } => write!(f, "hold {}", leases(*most))?,
            Exceeded::Queued { most: 0 } => f.write_str("not wait for leases")?,
            Exceeded::Queued { most } => write!(f, "wait for {}", leases(*most))?,
            Exceeded::Memory { most, wanted } => {
                let unit = Unit::of(*most);
                let (most, wanted) = (unit.text(most.number()), unit.text(wanted.number()));
                match unit {
                    Unit::Gpus => write!(f, "hold the memory of {most}; the request adds {wanted}")?,
                    _ => write!(f, "hold {most} of GPU memory; the request adds {wanted}")?,
                }
            }
            Exceeded::MpsPercentage { most_tenths, wanted_tenths } => {
                let text = |tenths: u32| Unit::Percent.text(tenths.into());
                write!(f, "hold MPS shares of {} in total; ", text(*most_tenths))?;
                write!(f, "the request adds {}", text(*wanted_tenths))?;
            }
            Exceeded::Gpus { allowed } if allowed.is_empty() => f.write_str("hold no lease on GPUs of this host")?,
            Exceeded::Gpus { allowed } => write!(f, "hold leases on {} only", gpus(allowed))?,
            Exceeded::Duration { longest_s, wanted_s } => {
                write!(f, "hold a lease for at most {}; the request ", span(*longest_s))?;
                match wanted_s {
                    Some(wanted_s) => write!(f, "is for {}", span(*wanted_s))?,
                    None => f.write_str("has no end")?,
                }
            }
        }
        // An administrator or a hook of Slurm may request the lease of another user, so do not write "you".
        let verb = if matches!(self.exceeded, Exceeded::Queued { .. }) { "waits for" } else { "holds" };
        if self.held.is_empty() { Ok(()) } else { write!(f, "; the user {verb} {}", self.names()) }
    }
}

impl std::error::Error for Denial {}

fn leases(number: u32) -> String {
    match number {
        0 => "no lease".to_owned(),
        1 => "1 lease".to_owned(),
        number => format!("{number} leases"),
    }
}

/// Returns the hint for a user whose own lease is in the way of a request.
#[must_use]
pub fn use_or_release(lease: LeaseId) -> String {
    format!("use {lease}: `gpushctl run --lease {lease} -- COMMAND`, or release it: `gpushctl lease end {lease}`")
}

/// Returns the time that a renewal may request if `left_s` seconds of the limit are left. Rounds down to minutes, because
/// time passes until the user has typed the command.
fn renewable(left_s: u64) -> u64 {
    if left_s < 120 { left_s / 2 } else { (left_s - 60) / 60 * 60 }
}

fn counted(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// Formats GPU indexes: `GPU 3`, or `GPUs 0, 2`.
fn gpus(indexes: &BTreeSet<GpuIndex>) -> String {
    let names: Vec<String> = indexes.iter().map(GpuIndex::to_string).collect();
    format!("GPU{} {}", if names.len() == 1 { "" } else { "s" }, names.join(", "))
}

fn span(seconds: u64) -> String {
    duration::format(Duration::from_secs(seconds))
}

/// The unit of amounts in a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unit {
    /// GiB, from MiB.
    Gib,
    Mib,
    /// GPUs, from thousandths of a GPU.
    Gpus,
    /// Percent, from tenths of a percent.
    Percent,
}

impl Unit {
    /// Returns the unit for a limit. A limit in whole GiB is shown in GiB.
    fn of(limit: MemoryAmount) -> Self {
        match limit {
            MemoryAmount::Gpus(_) => Self::Gpus,
            MemoryAmount::Mib(mib) if mib.is_multiple_of(1024) => Self::Gib,
            MemoryAmount::Mib(_) => Self::Mib,
        }
    }

    /// Formats an amount. Rounds it up, so that it never looks smaller than it is.
    fn text(self, amount: u64) -> String {
        let tenths = |tenths: u64| match tenths % 10 {
            0 => (tenths / 10).to_string(),
            rest => format!("{}.{rest}", tenths / 10),
        };
        match self {
            Self::Gib => format!("{} GiB", tenths(amount.saturating_mul(10).div_ceil(1024))),
            Self::Mib => format!("{amount} MiB"),
            Self::Percent => format!("{} %", tenths(amount)),
            Self::Gpus if amount == 1000 => "1 GPU".to_owned(),
            Self::Gpus => {
                let fraction = format!("{:03}", amount % 1000);
                let fraction = fraction.trim_end_matches('0');
                let point = if fraction.is_empty() { "" } else { "." };
                format!("{}{point}{fraction} GPUs", amount / 1000)
            }
        }
    }

    /// Formats the amount that is left of a limit. Rounds it down, so that a request for it fits.
    fn text_of_rest(self, amount: u64) -> String {
        self.text(if self == Self::Gib { amount / 1024 * 1024 } else { amount })
    }
}

impl MemoryAmount {
    fn number(self) -> u64 {
        match self {
            Self::Gpus(thousandths) => thousandths.into(),
            Self::Mib(mib) => mib,
        }
    }
}

impl Denial {
    /// Returns the error for a denied request. The request can succeed only after the user has done something, so the error
    /// is not retryable.
    #[must_use]
    pub fn error(&self, request: DeniedRequest<'_>) -> ApiError {
        let verb = if matches!(self.exceeded, Exceeded::Queued { .. }) { "wait for" } else { "grant" };
        let message = format!("cannot {verb} {}: {}", request.what, self.message(request));
        let mut error = ApiError::new(Code::Denied, message);
        error.causes.extend(self.facts());
        error.causes.push(self.origin(request));
        error.hint(self.hint(request.instead))
    }

    /// Returns the error for a denied renewal of a lease that was granted `since_s` seconds ago.
    #[must_use]
    pub fn of_renewal(&self, lease: LeaseId, since_s: u64) -> ApiError {
        let error = ApiError::new(Code::Denied, format!("cannot renew lease {lease}: {self}"));
        let Exceeded::Duration { longest_s, .. } = &self.exceeded else { return error.hint(self.hint(None)) };
        let error = error.cause(format!("the quota counts from the grant of the lease, {} ago", span(since_s)));
        error.hint(match renewable(longest_s.saturating_sub(since_s)) {
            0 => "request another lease, such as `gpushctl lease request --for 1h`, when this one has ended".to_owned(),
            left => format!("use `--for {}` or a shorter duration", span(left)),
        })
    }

    fn message(&self, request: DeniedRequest<'_>) -> String {
        let held = self.held.len();
        match &self.exceeded {
            Exceeded::Kind { kind, .. } => format!("the quota does not allow leases of kind {kind}"),
            Exceeded::Leases { most: 0 } => "the quota allows no leases".to_owned(),
            Exceeded::Leases { most } => {
                format!("{} {} of at most {most}", request.holds(), counted(held, "lease"))
            }
            Exceeded::Queued { most: 0 } => "the quota allows no waiting requests".to_owned(),
            Exceeded::Queued { most } => {
                format!("{} {} of at most {most}", request.has(), counted(held, "waiting request"))
            }
            Exceeded::Memory { .. } | Exceeded::MpsPercentage { .. } => self.sum().map_or_else(String::new, |sum| {
                let unit = self.unit();
                let total = unit.text(self.held_amount(sum).saturating_add(sum.wanted));
                let (whose, most) = (request.leases(), unit.text(sum.most));
                match self.exceeded {
                    Exceeded::MpsPercentage { .. } => {
                        format!("{whose} would have MPS shares of {total}, and may have {most}")
                    }
                    _ => format!("{whose} would hold {total} of at most {most}"),
                }
            }),
            Exceeded::Gpus { allowed } if allowed.is_empty() => "the quota allows no GPU of this host".to_owned(),
            Exceeded::Gpus { allowed } => format!("the quota allows only {}", gpus(allowed)),
            Exceeded::Duration { longest_s, wanted_s: Some(wanted_s) } => {
                format!("the quota allows {}, and the request is for {}", span(*longest_s), span(*wanted_s))
            }
            Exceeded::Duration { longest_s, wanted_s: None } => {
                format!("the quota allows {}, and the request has no end", span(*longest_s))
            }
        }
    }

    fn unit(&self) -> Unit {
        match self.exceeded {
            Exceeded::Memory { most, .. } => Unit::of(most),
            _ => Unit::Percent,
        }
    }

    /// Returns the amounts of the leases, or their names.
    fn facts(&self) -> Option<String> {
        if self.held.is_empty() {
            return None;
        }
        let Some(sum) = self.sum() else { return Some(format!("leases: {}", self.names())) };
        let unit = self.unit();
        let amount = |held: &HeldLease| format!("{}: {}", held.id, unit.text((sum.of)(held.size)));
        let named: Vec<String> = self.held.iter().take(MOST_NAMED).map(amount).collect();
        let more = match self.held.len().saturating_sub(MOST_NAMED) {
            0 => String::new(),
            more => format!(", {more} more"),
        };
        let verb = if self.held.len() == 1 { "holds" } else { "hold" };
        Some(format!(
            "{} {verb} {} ({}{more}), and this request adds {}",
            counted(self.held.len(), "lease"),
            unit.text(self.held_amount(sum)),
            named.join(", "),
            unit.text(sum.wanted)
        ))
    }

    /// Says which quota has the limit.
    fn origin(&self, request: DeniedRequest<'_>) -> String {
        match &self.subject {
            Some(subject) => format!("the quota for {} applies", subject.label()),
            None => format!("no quota names {}, so the built-in limits apply", request.holder.unwrap_or("you")),
        }
    }

    /// Returns the names of the leases: `L17, L21`.
    fn names(&self) -> String {
        let ids: Vec<String> = self.held.iter().take(MOST_NAMED).map(|held| held.id.to_string()).collect();
        match self.held.len().saturating_sub(MOST_NAMED) {
            0 => ids.join(", "),
            more => format!("{} and {more} more", ids.join(", ")),
        }
    }

    /// Returns the command that releases leases so that the request fits; `None` if there is none.
    fn release(&self) -> Option<String> {
        let ids: Vec<String> = self.to_release().iter().map(LeaseId::to_string).collect();
        let what = if ids.len() == 1 { "a lease" } else { "leases" };
        (!ids.is_empty()).then(|| format!("release {what}: `gpushctl lease end {}`", ids.join(" ")))
    }

    /// Returns a hint: what the user can do next. `instead` is described in [`DeniedRequest`].
    #[must_use]
    pub fn hint(&self, instead: Option<&str>) -> String {
        let ask = || "ask an administrator to change the quota".to_owned();
        let others = || "try again when one of these leases has ended; the holder or an administrator can end it";
        match &self.exceeded {
            Exceeded::Kind { allowed, .. } if allowed.is_empty() => ask(),
            Exceeded::Kind { allowed, .. } => {
                let flags = || allowed.iter().map(|kind| format!("`{}`", flag(*kind))).collect::<Vec<_>>().join(" or ");
                format!("request an allowed kind, such as {}", instead.map_or_else(flags, str::to_owned))
            }
            Exceeded::Gpus { allowed } if allowed.is_empty() => ask(),
            Exceeded::Gpus { allowed } => {
                let indexes: Vec<String> = allowed.iter().map(GpuIndex::to_string).collect();
                format!("use `-g {}`", indexes.join(","))
            }
            Exceeded::Leases { most: 0 } | Exceeded::Queued { most: 0 } => ask(),
            Exceeded::Leases { .. } => match self.to_release().as_slice() {
                [lease] => use_or_release(*lease),
                _ => self.release().unwrap_or_else(|| others().to_owned()),
            },
            Exceeded::Queued { .. } => self.release().unwrap_or_else(|| others().to_owned()),
            Exceeded::Memory { .. } | Exceeded::MpsPercentage { .. } => {
                let less = match instead {
                    Some(flags) => Some(format!("request less, such as `{flags}`")),
                    None => self.sum().and_then(|sum| self.rest(sum)),
                };
                match (less, self.release()) {
                    (Some(less), Some(release)) => format!("{less}, or {release}"),
                    (Some(less), None) => less,
                    (None, Some(release)) => release,
                    (None, None) if self.held.is_empty() => ask(),
                    (None, None) => others().to_owned(),
                }
            }
            Exceeded::Duration { longest_s, .. } => format!("use `--for {}` or a shorter duration", span(*longest_s)),
        }
    }

    /// Says how much is left of a limit; `None` if nothing is left.
    fn rest(&self, sum: Sum) -> Option<String> {
        let rest = sum.most.saturating_sub(self.held_amount(sum));
        let text = self.unit().text_of_rest(rest);
        (rest > 0 && !text.starts_with("0 ")).then(|| format!("request at most {text}"))
    }

    /// Returns the hint for the user of a Slurm job, who cannot release leases of jobs.
    #[must_use]
    pub fn hint_for_job(&self) -> String {
        match &self.exceeded {
            Exceeded::Kind { allowed, .. } if !allowed.is_empty() => {
                let names: Vec<&str> = allowed.iter().map(|kind| kind.name()).collect();
                format!("request {}", names.join(" or "))
            }
            Exceeded::Leases { .. }
            | Exceeded::Queued { .. }
            | Exceeded::Memory { .. }
            | Exceeded::MpsPercentage { .. }
                if !self.held.is_empty() =>
            {
                "submit the job again when another job or lease of the user has ended".to_owned()
            }
            Exceeded::Memory { .. } | Exceeded::MpsPercentage { .. } => {
                "request less, or ask an administrator to change the quota".to_owned()
            }
            Exceeded::Kind { .. }
            | Exceeded::Leases { .. }
            | Exceeded::Queued { .. }
            | Exceeded::Duration { .. }
            | Exceeded::Gpus { .. } => "ask an administrator to change the quota".to_owned(),
        }
    }
}

/// Returns flags that request a lease of this kind.
fn flag(kind: LeaseKind) -> &'static str {
    match kind {
        LeaseKind::Mig => "--memory 10G",
        LeaseKind::Mps => "--mps 25",
        LeaseKind::Timeslice => "--timeslice",
        LeaseKind::Whole => "--whole",
    }
}
