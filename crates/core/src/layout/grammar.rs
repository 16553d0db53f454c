//! The parser of layouts, and its errors.
//!
//! The parser does not use a parser generator, because each error needs a position in the text and
//! a suggested correction.

use std::{fmt, ops::Range, sync::Arc};

use gpush_api::{ApiError, Code};

use crate::quote::Quoted;

use super::{DYNAMIC, Entry, LONGEST, Layout, MOST, MOST_IN_ALL, NONE, Share};

/// A problem in a layout, with its position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayoutError {
    /// Index of the text in the list; the first index is 0.
    pub item: usize,
    /// The text, unchanged. All errors in one text share one copy.
    pub text: Arc<str>,
    /// Position in `text`, in bytes.
    pub span: Range<usize>,
    /// The problem, in one sentence without a full stop.
    pub message: String,
    /// A correction, if there is one.
    pub hint: Option<String>,
    /// The entry that the user probably meant. The hint names this entry.
    pub meant: Option<String>,
    /// Whether the text is correct, but uses a feature that is not implemented yet.
    pub not_built: bool,
}

impl fmt::Display for LayoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for LayoutError {}

impl From<LayoutError> for ApiError {
    fn from(error: LayoutError) -> Self {
        let code = if error.not_built { Code::Unsupported } else { Code::BadRequest };
        let mut answer = Self::new(code, format!("layout: {}", error.message));
        if !error.text.trim().is_empty() {
            let before = error.text[..error.span.start].chars().count();
            answer = answer.cause(format!("in {}, at character {}", Quoted(&error.text), before + 1));
        }
        match error.hint {
            Some(hint) => answer.hint(hint),
            None => answer,
        }
    }
}

const SHAPE: &str =
    "an entry is [Nc.]PROFILE[@START][*COUNT][:mps], such as 3g.40gb, 1g.10gb*2, 1g.10gb@4 or 1c.3g.40gb";

const PROFILE_ID: &str = "if the number is a profile id of nvidia-smi, write the name of the profile, such as 1g.10gb; \
`gpushctl mig profiles` shows the names and ids";

/// Parses a list of texts. If there are problems, returns all of them.
pub(super) fn layout<S: AsRef<str>>(texts: &[S]) -> Result<Layout, Vec<LayoutError>> {
    let mut entries = Vec::new();
    let mut errors = Vec::new();
    let mut none = None;
    let mut instances = 0;
    let pieces = pieces(texts)?;
    if pieces.iter().all(|piece| piece.content().is_empty()) && pieces.len() <= texts.len() {
        // The whole text is empty. A superfluous comma is a different error.
        let text: Arc<str> = texts.first().map_or("", AsRef::as_ref).into();
        let span = 0..text.len();
        return Err(vec![LayoutError {
            item: 0,
            text,
            span,
            message: "the layout is empty".to_owned(),
            hint: Some(format!("to have no instance at all, write the reserved layout `{NONE}`")),
            meant: None,
            not_built: false,
        }]);
    }
    for piece in &pieces {
        match piece.content().to_ascii_lowercase().as_str() {
            NONE => none = none.or(Some(piece)),
            DYNAMIC => errors.push(LayoutError {
                not_built: true,
                ..piece.error(
                    piece.span.clone(),
                    format!("the layout `{DYNAMIC}` is for config rules only"),
                    "list the instances, such as 3g.40gb,1g.10gb*2; only a rule with layout = \"dynamic\" creates \
                    instances on demand",
                )
            }),
            _ => match entry(piece) {
                Ok(entry) => {
                    let before = instances;
                    instances += usize::from(entry.count);
                    // The error is reported only once, at the first entry above the maximum.
                    if instances > MOST_IN_ALL && before <= MOST_IN_ALL {
                        errors.push(piece.error(
                            piece.span.clone(),
                            format!("with this entry the layout has more than {MOST_IN_ALL} instances"),
                            FEWER,
                        ));
                    }
                    entries.push(entry);
                }
                Err(error) => errors.push(error),
            },
        }
    }
    if let Some(piece) = none.filter(|_| pieces.len() > 1) {
        errors.push(piece.error(
            piece.span.clone(),
            format!("`{NONE}` cannot be combined with other entries: it means no instance"),
            format!("leave out `{NONE}`, or leave out all other entries"),
        ));
    }
    if errors.is_empty() {
        Ok(Layout { entries })
    } else {
        errors.sort_by_key(|error| (error.item, error.span.start));
        Err(errors)
    }
}

/// The hint for a layout that is larger than any GPU.
const FEWER: &str = "no GPU has room for so many instances: write the layout of one GPU; each GPU that you name gets \
this layout";

/// One entry of a layout, and where it is in the texts that a user gave.
struct Piece<'a> {
    item: usize,
    text: &'a str,
    /// The whole text that contains the entry. Errors refer to this whole text.
    shared: Arc<str>,
    span: Range<usize>,
}

/// Splits the texts at commas and trims spaces.
///
/// Any user of the socket can send the texts. A text that is too large for any GPU is therefore
/// refused by its size, before its entries are parsed.
fn pieces<S: AsRef<str>>(texts: &[S]) -> Result<Vec<Piece<'_>>, Vec<LayoutError>> {
    let mut pieces = Vec::new();
    let mut bytes = 0;
    for (item, text) in texts.iter().enumerate() {
        let text = text.as_ref();
        bytes += text.len();
        let at = pieces.len();
        if bytes <= LONGEST {
            split(&mut pieces, item, text);
        }
        let too_much = if bytes > LONGEST {
            Some((0..0, format!("the layout is longer than {LONGEST} bytes")))
        } else {
            let first = pieces.get(MOST_IN_ALL.max(at)).filter(|_| pieces.len() > MOST_IN_ALL);
            first.map(|piece| (piece.span.clone(), format!("the layout has more than {MOST_IN_ALL} entries")))
        };
        if let Some((span, message)) = too_much {
            return Err(vec![LayoutError {
                item,
                text: text.into(),
                span,
                message,
                hint: Some(FEWER.to_owned()),
                meant: None,
                not_built: false,
            }]);
        }
    }
    Ok(pieces)
}

fn split<'a>(pieces: &mut Vec<Piece<'a>>, item: usize, text: &'a str) {
    let shared: Arc<str> = text.into();
    let mut from = 0;
    for part in text.split(',') {
        let start = from + (part.len() - part.trim_start().len());
        let end = (from + part.trim_end().len()).max(start);
        from += part.len() + 1;
        pieces.push(Piece { item, text, shared: Arc::clone(&shared), span: start.min(end)..end });
    }
}

impl Piece<'_> {
    fn content(&self) -> &str {
        &self.text[self.span.clone()]
    }

    fn error(&self, span: Range<usize>, message: impl Into<String>, hint: impl Into<String>) -> LayoutError {
        LayoutError {
            item: self.item,
            text: Arc::clone(&self.shared),
            span,
            message: message.into(),
            hint: Some(hint.into()),
            meant: None,
            not_built: false,
        }
    }

    fn slice(&self, span: &Range<usize>) -> &str {
        &self.text[span.clone()]
    }

    /// Returns the span of a part of the entry.
    fn at(&self, from: usize, to: usize) -> Range<usize> {
        self.span.start + from..self.span.start + to
    }
}

/// Parses `[Nc.]PROFILE[@START][*COUNT][:SHARE]`.
fn entry(piece: &Piece<'_>) -> Result<Entry, LayoutError> {
    let content = piece.content();
    if content.is_empty() {
        return Err(piece.error(piece.span.clone(), "an entry is empty", "remove the extra comma"));
    }
    let body = content.find(['@', '*', ':']).unwrap_or(content.len());
    let (compute_slices, profile) = profile(piece, &content[..body])?;
    let mut entry = Entry { compute_slices, profile, start: None, count: 1, share: None };
    let mut counted = false;
    let mut at = body;
    while at < content.len() {
        let mark = content[at..].chars().next().unwrap_or('@');
        let from = at + mark.len_utf8();
        let to = content[from..].find(['@', '*', ':']).map_or(content.len(), |length| from + length);
        let value = content[from..to].trim();
        let span = piece.at(at, to);
        let twice = |what: &str| piece.error(span.clone(), format!("{what} is given twice"), "give it once");
        if entry.share.is_some() {
            return Err(piece.error(
                span,
                format!(
                    "{} comes after the suffix \
                `:mps`",
                    Quoted(&content[at..to])
                ),
                SHAPE,
            ));
        }
        match mark {
            '@' if entry.start.is_some() => return Err(twice("the start")),
            '@' => entry.start = Some(start(piece, value, span)?),
            '*' if counted => return Err(twice("the count")),
            '*' => {
                entry.count = count(piece, value, span)?;
                counted = true;
            }
            _ => entry.share = Some(share(piece, value, span)?),
        }
        at = to;
    }
    match entry.start {
        Some(start) if entry.count > 1 && !is_shared(&entry) => Err(piece.error(
            piece.span.clone(),
            format!("{} instances can't all start at slice {start}", entry.count),
            format!("give each instance a different start, or leave the start out: {}", Entry { start: None, ..entry }),
        )),
        Some(_) | None => Ok(entry),
    }
}

/// Returns whether one GPU instance can contain several compute instances of this entry. This is
/// the case if each compute instance uses only some slices of the GPU instance.
fn is_shared(entry: &Entry) -> bool {
    entry.compute_slices.is_some_and(|slices| gpu_slices(&entry.profile) != Some(slices))
}

/// Parses `[Nc.]PROFILE`.
fn profile(piece: &Piece<'_>, written: &str) -> Result<(Option<u8>, String), LayoutError> {
    let trimmed = written.trim_end();
    let span = piece.at(0, trimmed.len().max(1).min(piece.content().len()));
    if trimmed.is_empty() {
        return Err(piece.error(piece.span.clone(), "the profile is missing", SHAPE));
    }
    let word = trimmed.to_ascii_lowercase();
    let (compute, name) = match word.split_once("c.") {
        Some((slices, name)) if digits(slices) => (Some(slices), name),
        Some(_) | None => (None, word.as_str()),
    };
    // Separators of other tools; `+` also begins the suffix of a profile. A correction of the first entry alone would leave
    // the others out.
    let joined: Vec<&str> = word.split(['+', '/', ';', '|']).map(str::trim).collect();
    if joined.len() > 1 && joined.iter().all(|one| gpu_slices(one).is_some()) {
        let message = format!("{} is not a MIG profile name", Quoted(trimmed));
        return Err(piece.error(span, message, format!("separate the instances with commas: `{}`", joined.join(","))));
    }
    let Some(slices) = gpu_slices(name) else {
        let message = format!("{} is not a MIG profile name", Quoted(trimmed));
        let meant = suggest_entry(&word);
        let hint = match &meant {
            Some(meant) => format!("did you mean `{meant}`?"),
            None if digits(trimmed) => PROFILE_ID.to_owned(),
            None => SHAPE.to_owned(),
        };
        return Err(LayoutError { meant, ..piece.error(span, message, hint) });
    };
    let Some(compute) = compute else { return Ok((None, name.to_owned())) };
    match compute.parse::<u8>() {
        // `n` may equal `slices`: `1c.1g.20gb` and `1g.20gb` have one slice each, but are two
        // different profiles on Hopper and newer GPUs.
        Ok(n) if n > 0 && n <= slices => Ok((Some(n), name.to_owned())),
        Ok(_) | Err(_) => Err(piece.error(
            piece.at(0, compute.len() + 1),
            format!("a compute instance of {name} can't have {} slices", figure(compute)),
            format!("write 1c to {slices}c, or `{name}` for all slices"),
        )),
    }
}

/// Returns the number of compute slices in the name of a GPU instance profile; `None` if the text
/// is not such a name. Refuses leading zeros and very long numbers or suffixes, because no driver
/// reports them.
fn gpu_slices(name: &str) -> Option<u8> {
    let (slices, rest) = name.split_once("g.")?;
    let (memory, suffix) = rest.split_once("gb")?;
    let figure = |text: &str, most: usize| digits(text) && text.len() <= most && !text.starts_with('0');
    let suffixes = suffix.is_empty()
        || (suffix.len() <= LONGEST_SUFFIX
            && suffix.starts_with(['+', '-'])
            && suffix[1..]
                .split(['+', '-', '.'])
                .all(|part| !part.is_empty() && part.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit())));
    (figure(slices, 2) && figure(memory, 4) && suffixes).then(|| slices.parse().ok()).flatten()
}

/// Maximum length of the suffix of a profile name, in bytes. The longest known suffix is `+me.all`.
const LONGEST_SUFFIX: usize = 32;

/// Returns a number for a message; "that many" if the number is very long.
fn figure(digits: &str) -> &str {
    const LONGEST: usize = 20;
    if digits.len() > LONGEST { "that many" } else { digits }
}

fn digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

/// Returns the entry that the user probably meant. The text must contain the right numbers in the
/// right order. Between the numbers, the text may contain common typing errors.
fn suggest_entry(word: &str) -> Option<String> {
    // Accept other notations too: NVML writes `MIG 3g.40gb`, Kubernetes `nvidia.com/mig-1g.10gb.me`, and users write
    // `1g.10gb x2` or `2x1g.10gb`.
    let word = word.strip_prefix("nvidia.com/").unwrap_or(word);
    let word = word.strip_prefix("mig").map_or(word, |rest| rest.trim_start_matches([' ', '-', '_', '.']));
    let squeezed: String = word.chars().filter(|c| !c.is_whitespace()).collect();
    let (body, count) = match squeezed.split_once(['x', '×']) {
        Some((body, count)) if is_count(count) => (body.to_owned(), Some(count.to_owned())),
        Some((count, body)) if is_count(count) => (body.to_owned(), Some(count.to_owned())),
        Some(_) | None => (squeezed, None),
    };
    let mut figures: Vec<String> = Vec::new();
    let mut letters = String::new();
    let mut fresh = true;
    let dotted = || DOTTED.iter().find_map(|(dotted, suffix)| Some((body.strip_suffix(dotted)?, *suffix)));
    let (core, suffix) = match body.find(['+']) {
        Some(at) => body.split_at(at),
        None => dotted().unwrap_or((body.as_str(), "")),
    };
    for c in core.chars() {
        match c {
            '0'..='9' if fresh => {
                figures.push(c.to_string());
                fresh = false;
            }
            '0'..='9' => figures.last_mut()?.push(c),
            'a'..='z' => {
                letters.push(c);
                fresh = true;
            }
            '.' | '-' | '_' | ' ' | '/' => fresh = true,
            _ => return None,
        }
    }
    let figure = |text: &String| text.trim_start_matches('0').to_owned();
    let (compute, slices, memory) = match (letters.as_str(), figures.as_slice()) {
        ("ggb" | "gb" | "gg" | "g" | "ggib" | "gib" | "ggbs", [slices, memory]) => (None, slices, memory),
        ("cggb" | "cgg" | "cgb", [compute, slices, memory]) => (Some(figure(compute)), slices, memory),
        _ => return None,
    };
    let name = format!("{}g.{}gb{suffix}", figure(slices), figure(memory));
    gpu_slices(&name)?;
    let compute = compute.map(|n| format!("{n}c.")).unwrap_or_default();
    let count = count.map(|n| format!("*{n}")).unwrap_or_default();
    Some(format!("{compute}{name}{count}"))
}

/// Suffixes as Kubernetes writes them, where `+` is not allowed, and the suffixes of the driver.
const DOTTED: [(&str, &str); 3] = [(".me.all", "+me.all"), (".me", "+me"), (".gfx", "+gfx")];

fn is_count(text: &str) -> bool {
    matches!(text.parse::<u8>(), Ok(1..=MOST)) && digits(text)
}

fn start(piece: &Piece<'_>, value: &str, span: Range<usize>) -> Result<u8, LayoutError> {
    match value.parse::<u8>() {
        Ok(start) if digits(value) => Ok(start),
        Ok(_) | Err(_) => Err(piece.error(
            span.clone(),
            format!(
                "{} is not a start position: the number of a memory slice must follow `@`",
                Quoted(piece.slice(&span))
            ),
            "write a number, as in 1g.10gb@4; `gpushctl mig profiles` lists where each profile may start",
        )),
    }
}

fn count(piece: &Piece<'_>, value: &str, span: Range<usize>) -> Result<u8, LayoutError> {
    let hint = format!("write a number from 1 to {MOST}, such as 1g.10gb*2");
    match value.parse::<u8>() {
        Ok(0) => Err(piece.error(span, "with a count of 0, the entry requests nothing", "leave the entry out")),
        Ok(count) if count <= MOST && digits(value) => Ok(count),
        Ok(_) | Err(_) if digits(value) => {
            Err(piece.error(span, format!("a count of {} is more than a GPU can hold", figure(value)), hint))
        }
        Ok(_) | Err(_) => {
            Err(piece.error(span.clone(), format!("{} is not a count", Quoted(piece.slice(&span))), hint))
        }
    }
}

fn share(piece: &Piece<'_>, value: &str, span: Range<usize>) -> Result<Share, LayoutError> {
    if value.eq_ignore_ascii_case("mps") {
        Ok(Share::Mps)
    } else {
        Err(piece.error(
            span.clone(),
            format!("{} is not a suffix of a layout entry", Quoted(piece.slice(&span))),
            "the only suffix is `:mps`",
        ))
    }
}
