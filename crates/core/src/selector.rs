//! Selectors, which name GPUs in commands and config rules.
//!
//! ```text
//! 3                     index in this driver session
//! 0-3                   indexes, both ends included
//! all                   every GPU
//! GPU-3ad1…             UUID, or a unique prefix of a UUID
//! 0000:07:00.0          PCI address; the domain and the function are optional
//! 0x20B210DE            PCI device id and vendor id, as mig-parted writes them; 0x20B210DE:0x147F10DE selects one board
//! *A100*                product name, `*` and `?` as in a shell, case ignored
//! A100-SXM4-80GB        full product name from `gpushctl status`; the prefix `NVIDIA ` is optional
//! ```
//!
//! In a config rule, a selector may match no GPU, because a host may lose a GPU. In a command, a
//! selector that matches no GPU is an error, which lists the GPUs of the host.

mod alternative;
mod device_id;
mod ranges;

use std::{
    borrow::Borrow,
    fmt::{self, Write as _},
    str::FromStr,
};

use gpush_api::{ApiError, Code, Gpu, GpuIndex, LeaseId, Remedy};

pub use self::{alternative::Alternative, device_id::DeviceId, ranges::ranges};
use crate::quote::Quoted;

/// Maximum number of selectors in one request. Even the largest host needs far fewer.
pub const MOST: usize = 256;

/// A selector of GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Selector {
    /// `all`
    All,
    /// Indexes, both ends included. A single index is a range with equal ends.
    Indexes(u32, u32),
    /// `GPU-`, followed by a UUID or a prefix of a UUID, in lower case.
    Uuid(String),
    /// PCI address.
    Pci {
        /// Domain; 0 if omitted.
        domain: u32,
        /// Bus.
        bus: u8,
        /// Device.
        device: u8,
        /// Function; 0 if omitted.
        function: u8,
    },
    /// PCI ids of the GPU model, or of one of its boards.
    DeviceId(DeviceId),
    /// Product name with `*` and `?`, in lower case.
    Model(String),
}

/// A problem with the text of a selector.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SelectorError {
    /// The problem in one sentence, without a full stop.
    pub message: String,
    /// The correction.
    pub hint: String,
}

impl fmt::Display for SelectorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for SelectorError {}

const SHAPES: &str = "an index (0), a range (0-3), `all`, a UUID (GPU-…), a PCI address (0000:07:00.0), a PCI device id \
                      (0x20B210DE) or a product name with wildcards (*A100*)";

/// Returns the forms of selectors, with the product name of a GPU of the host as the example.
fn shapes<G: Borrow<Gpu>>(gpus: &[G]) -> String {
    let is_model = |word: &&str| word.contains(|c: char| c.is_ascii_digit()) && !word.ends_with("GB");
    let model = |gpu: &G| gpu.borrow().name.split([' ', '-']).find(is_model).map(str::to_owned);
    match gpus.iter().find_map(model) {
        Some(model) => SHAPES.replace("*A100*", &format!("*{model}*")),
        None => SHAPES.to_owned(),
    }
}

fn error(message: impl Into<String>, hint: impl Into<String>) -> SelectorError {
    SelectorError { message: message.into(), hint: hint.into() }
}

impl FromStr for Selector {
    type Err = SelectorError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        let lower = text.to_ascii_lowercase();
        let garbage = || error(format!("{} names no GPU", Quoted(text)), format!("write {SHAPES}"));
        if text.is_empty() {
            return Err(error("a GPU selector is empty", format!("write {SHAPES}")));
        }
        if text.chars().any(char::is_control) || text.contains(',') || text.chars().count() > 128 {
            return Err(garbage());
        }
        if lower == "all" {
            return Ok(Self::All);
        }
        if lower.starts_with("mig-") {
            return Err(error(
                format!("{} is a MIG device, not a GPU", Quoted(text)),
                "name the GPU of this MIG device: `gpushctl mig list` shows it",
            ));
        }
        if let Some(rest) = lower.strip_prefix("gpu-") {
            return uuid(rest).ok_or_else(|| {
                error(
                    format!("{} is not a GPU UUID", Quoted(text)),
                    "write GPU- and hexadecimal digits, as `gpushctl gpu list` shows; a unique prefix is enough",
                )
            });
        }
        if lower.len() == 36 && uuid(&lower).is_some() {
            return uuid(&lower).ok_or_else(garbage);
        }
        if lower.contains(['*', '?']) {
            return Ok(Self::Model(lower));
        }
        if lower.starts_with("0x") {
            return lower
                .parse()
                .map(Self::DeviceId)
                .map_err(|hint: String| error(format!("{} is not a PCI device id", Quoted(text)), hint));
        }
        if lower.contains(':') {
            return pci(&lower).ok_or_else(|| {
                error(
                    format!("{} is not a PCI address", Quoted(text)),
                    "write [DOMAIN:]BUS:DEVICE[.FUNCTION] in hexadecimal, such as 0000:07:00.0 or 07:00.0",
                )
            });
        }
        if lower.starts_with(|c: char| c.is_ascii_digit() || c == '-') {
            return indexes(text);
        }
        if lower.starts_with(|c: char| c.is_ascii_alphabetic()) { Ok(Self::Model(lower)) } else { Err(garbage()) }
    }
}

/// Parses a prefix of a UUID: hexadecimal digits with hyphens in the right places.
fn uuid(rest: &str) -> Option<Selector> {
    let well = !rest.is_empty()
        && rest.len() <= 36
        && rest.bytes().enumerate().all(|(at, b)| match at {
            8 | 13 | 18 | 23 => b == b'-',
            _ => b.is_ascii_hexdigit(),
        });
    well.then(|| Selector::Uuid(format!("GPU-{rest}")))
}

fn hex(text: &str, digits: std::ops::RangeInclusive<usize>) -> Option<u32> {
    let well = digits.contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit());
    well.then(|| u32::from_str_radix(text, 16).ok()).flatten()
}

fn pci(text: &str) -> Option<Selector> {
    let (address, function) = match text.split_once('.') {
        Some((address, function)) => (address, hex(function, 1..=1)?),
        None => (text, 0),
    };
    let parts: Vec<&str> = address.split(':').collect();
    let (domain, bus, device) = match parts.as_slice() {
        [bus, device] => (0, hex(bus, 1..=2)?, hex(device, 1..=2)?),
        [domain, bus, device] => (hex(domain, 1..=8)?, hex(bus, 1..=2)?, hex(device, 1..=2)?),
        _ => return None,
    };
    (device < 32 && function < 8).then_some(Selector::Pci {
        domain,
        bus: u8::try_from(bus).ok()?,
        device: u8::try_from(device).ok()?,
        function: u8::try_from(function).ok()?,
    })
}

fn indexes(text: &str) -> Result<Selector, SelectorError> {
    let figure = |part: &str| {
        let part = part.trim();
        (!part.is_empty() && part.bytes().all(|b| b.is_ascii_digit())).then(|| part.parse::<u32>().ok()).flatten()
    };
    let shape = || error(format!("{} is not a GPU index", Quoted(text)), format!("write {SHAPES}"));
    match text.split_once('-') {
        None => figure(text).map(|index| Selector::Indexes(index, index)).ok_or_else(shape),
        Some((first, last)) => {
            let (Some(first), Some(last)) = (figure(first), figure(last)) else { return Err(shape()) };
            if first > last {
                return Err(error(format!("the range {first}-{last} runs backwards"), format!("write {last}-{first}")));
            }
            Ok(Selector::Indexes(first, last))
        }
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Indexes(first, last) if first == last => write!(f, "{first}"),
            Self::Indexes(first, last) => write!(f, "{first}-{last}"),
            Self::Uuid(uuid) => f.write_str(uuid),
            Self::Pci { domain, bus, device, function } => write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function}"),
            Self::DeviceId(id) => id.fmt(f),
            Self::Model(glob) => f.write_str(glob),
        }
    }
}

impl Selector {
    /// Returns whether the selector matches this GPU. A prefix of a UUID matches every GPU whose
    /// UUID begins with that prefix; [`Selector::matching`] checks that there is only one such GPU.
    #[must_use]
    pub fn matches(&self, gpu: &Gpu) -> bool {
        match self {
            Self::All => true,
            Self::Indexes(first, last) => (*first..=*last).contains(&gpu.index.0),
            Self::Uuid(prefix) => {
                gpu.uuid.as_str().get(..prefix.len()).is_some_and(|beginning| beginning.eq_ignore_ascii_case(prefix))
            }
            Self::Pci { .. } => pci(&gpu.pci.to_ascii_lowercase()).as_ref() == Some(self),
            Self::DeviceId(id) => id.matches(gpu) == Some(true),
            Self::Model(glob) => is_model(glob, &gpu.name.to_ascii_lowercase()),
        }
    }

    /// Returns the positions in `gpus` that the selector matches. Returns no positions if the
    /// selector is a prefix of several UUIDs.
    #[must_use]
    pub fn matching<G: Borrow<Gpu>>(&self, gpus: &[G]) -> Vec<usize> {
        let found: Vec<usize> = (0..gpus.len()).filter(|at| self.matches(gpus[*at].borrow())).collect();
        if matches!(self, Self::Uuid(_)) && found.len() > 1 { Vec::new() } else { found }
    }

    /// Returns the first index in the selector for which no GPU exists.
    #[must_use]
    pub fn absent<G: Borrow<Gpu>>(&self, gpus: &[G]) -> Option<GpuIndex> {
        match self {
            Self::Indexes(first, last) => {
                let mut indexes = (*first..=*last).take(gpus.len() + 1).map(GpuIndex);
                indexes.find(|index| !gpus.iter().any(|gpu| gpu.borrow().index == *index))
            }
            Self::All | Self::Uuid(_) | Self::Pci { .. } | Self::DeviceId(_) | Self::Model(_) => None,
        }
    }

    /// Returns whether the selector is a prefix of several UUIDs.
    #[must_use]
    pub fn is_ambiguous<G: Borrow<Gpu>>(&self, gpus: &[G]) -> bool {
        matches!(self, Self::Uuid(_)) && gpus.iter().filter(|gpu| self.matches((*gpu).borrow())).count() > 1
    }

    /// Returns the positions in `gpus` that any of the texts matches, in ascending order and
    /// without repetition. A text may contain several selectors, separated by commas.
    ///
    /// # Errors
    /// A text is not a selector or matches no GPU; the error lists the GPUs. More than [`MOST`]
    /// selectors are also an error, because any user can send selectors, and each selector is
    /// compared with every GPU.
    pub fn resolve<S: AsRef<str>, G: Borrow<Gpu>>(texts: &[S], gpus: &[G]) -> Result<Vec<usize>, ApiError> {
        let count: usize = texts.iter().map(|text| 1 + text.as_ref().matches(',').count()).sum();
        if count > MOST {
            let message = format!("{count} GPU selectors are too many: the limit is {MOST}");
            return Err(ApiError::new(Code::BadRequest, message)
                .hint("name many GPUs by a range (0-63), by product name (*A100*), or as `all`"));
        }
        let mut found = Vec::new();
        for text in texts.iter().flat_map(|text| text.as_ref().split(',')) {
            let selector: Self = text.parse().map_err(|error: SelectorError| {
                ApiError::new(Code::BadRequest, error.message).cause(inventory(gpus)).hint(error.hint)
            })?;
            found.extend(selector.resolve_one(text.trim(), gpus)?);
        }
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }

    /// Returns the first index in the texts for which no GPU exists. Ignores texts that are not
    /// selectors.
    #[must_use]
    pub fn first_absent<S: AsRef<str>, G: Borrow<Gpu>>(texts: &[S], gpus: &[G]) -> Option<GpuIndex> {
        let parts = texts.iter().flat_map(|text| text.as_ref().split(','));
        parts.filter_map(|text| text.parse::<Self>().ok()).find_map(|selector| selector.absent(gpus))
    }

    fn resolve_one<G: Borrow<Gpu>>(&self, text: &str, gpus: &[G]) -> Result<Vec<usize>, ApiError> {
        let found = self.matching(gpus);
        let missing = |message: String| {
            let error = ApiError::new(Code::NotFound, message).cause(inventory(gpus));
            Err(error.remedy(
                Remedy::ChooseGpus,
                "run `gpushctl gpu list` to see the index, UUID, PCI address and product name of each GPU",
            ))
        };
        if let Some(index) = self.absent(gpus) {
            return match self {
                Self::Indexes(first, last) if first != last => {
                    missing(format!("{}, which is in the range {text}", no_gpu(index)))
                }
                Self::Indexes(..)
                | Self::All
                | Self::Uuid(_)
                | Self::Pci { .. }
                | Self::DeviceId(_)
                | Self::Model(_) => missing(no_gpu(index)),
            };
        }
        if self.is_ambiguous(gpus) {
            let those = gpus.iter().map(Borrow::borrow).filter(|gpu| self.matches(gpu));
            let those: Vec<String> = those.map(|gpu| format!("{} (GPU {})", gpu.uuid, gpu.index)).collect();
            let message = format!("{} is the beginning of several UUIDs: {}", Quoted(text), those.join(", "));
            return Err(ApiError::new(Code::BadRequest, message).hint("write more characters of the UUID"));
        }
        if !found.is_empty() {
            return Ok(found);
        }
        match self {
            Self::All => missing("there is no GPU".to_owned()),
            Self::Model(glob) if !glob.contains(['*', '?']) => {
                let wider = format!("*{text}*");
                let error = ApiError::new(Code::NotFound, format!("no GPU is named {}", Quoted(text)));
                let error = error.cause(inventory(gpus));
                if wider.parse::<Self>().is_ok_and(|wider| !wider.matching(gpus).is_empty()) {
                    Err(error.hint(format!("did you mean '{wider}'?")))
                } else if let Ok(lease) = text.parse::<LeaseId>() {
                    Err(error.hint(format!("for a lease, use `gpushctl lease show {lease}`")))
                } else {
                    Err(error.hint(format!("write {}", shapes(gpus))))
                }
            }
            Self::Model(_) => missing(format!("no product name matches {}", Quoted(text))),
            Self::Uuid(_) => missing(format!("no GPU has the UUID {}", Quoted(text))),
            Self::DeviceId(id) => missing(format!("no GPU has the PCI device id {id}")),
            Self::Pci { .. } => missing(format!("no GPU is at PCI address {}", Quoted(text))),
            Self::Indexes(..) => missing(format!("there is no GPU {text}")),
        }
    }
}

fn no_gpu(index: GpuIndex) -> String {
    format!("there is no GPU {index}")
}

/// Lists the GPUs in one sentence. Combines consecutive equal GPUs.
#[must_use]
pub fn inventory<G: Borrow<Gpu>>(gpus: &[G]) -> String {
    let gpus: Vec<&Gpu> = gpus.iter().map(Borrow::borrow).collect();
    let mut text = match gpus.len() {
        0 => return "the driver shows no GPU on this host".to_owned(),
        1 => "there is one GPU:".to_owned(),
        n => format!("there are {n} GPUs:"),
    };
    let mut at = 0;
    while at < gpus.len() {
        let run = gpus[at..]
            .iter()
            .enumerate()
            .take_while(|(n, gpu)| {
                gpu.name == gpus[at].name
                    && u32::try_from(*n).is_ok_and(|n| gpu.index == gpus[at].index.0.wrapping_add(n))
            })
            .count();
        let last = &gpus[at + run - 1];
        let separator = if at == 0 { "" } else { "," };
        let _ = if run > 1 {
            write!(text, "{separator} {}-{} {}", gpus[at].index, last.index, last.name)
        } else {
            write!(text, "{separator} {} {}", last.index, last.name)
        };
        at += run;
    }
    text
}

/// Returns whether a product name matches the pattern. The prefix `NVIDIA ` is optional, because
/// users often omit it.
fn is_model(glob: &str, name: &str) -> bool {
    let bare = |text: &'_ str| text.strip_prefix("nvidia ").unwrap_or(text).to_owned();
    if glob.contains(['*', '?']) {
        return glob_matches(glob, name) || glob_matches(glob, &bare(name));
    }
    bare(glob) == bare(name)
}

/// Returns whether a pattern with the wildcards `*` and `?` matches the whole text. The time is at
/// most proportional to the product of the lengths.
fn glob_matches(glob: &str, text: &str) -> bool {
    let glob: Vec<char> = glob.chars().collect();
    let text: Vec<char> = text.chars().collect();
    let (mut g, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        if g < glob.len() && glob[g] == '*' {
            star = Some((g, t));
            g += 1;
        } else if g < glob.len() && (glob[g] == '?' || glob[g] == text[t]) {
            g += 1;
            t += 1;
        } else if let Some((after, eaten)) = star {
            star = Some((after, eaten + 1));
            g = after + 1;
            t = eaten + 1;
        } else {
            return false;
        }
    }
    glob[g..].iter().all(|c| *c == '*')
}

#[cfg(test)]
mod tests;
