//! Finds secrets in texts.
//!
//! [`without_secrets`] recognizes five patterns:
//!
//! | pattern | removed |
//! |---|---|
//! | a name from [`WORDS`], then `=` or `:`; or an option with such a name | the value |
//! | `-u USER:PASSWORD`, `--user USER:PASSWORD` | the password |
//! | `SCHEME://USER:PASSWORD@HOST` | user and password |
//! | a token that begins as [`SHAPES`] says | the token |
//! | a private key in PEM format | the whole block |
//!
//! The patterns cannot find every secret. When in doubt, this module removes more.

use std::ops::Range;

use super::values::{LONGEST, bracketed, end_of_line, is_blank, is_quote, quoted, start_of_value, word};

/// Text that replaces a secret.
pub(super) const SECRET: &str = "(secret)";

/// Where a word must be in a name. `api_key`, `api-key`, `api.key` and `apiKey` have the parts `api` and `key`.
#[derive(Debug, Clone, Copy)]
enum Place {
    /// Anywhere in the name.
    Anywhere,
    /// At the end of a part: `HFTOKEN`, but not `tokenizer`.
    EndOfPart,
    /// A whole part: `db_pass`, but not `bypass`.
    WholePart,
    /// A whole part after the first: `api_key`, and `--key`, whose first part is empty. `key` alone does not match,
    /// because it is a field of gpushd's JSON documents.
    LaterPart,
}

/// A name with one of these words has a secret as its value.
const WORDS: [(&str, Place); 17] = [
    ("password", Place::Anywhere),
    ("passwd", Place::Anywhere),
    ("passphrase", Place::Anywhere),
    ("passcode", Place::Anywhere),
    ("secret", Place::Anywhere),
    ("credential", Place::Anywhere),
    (AUTHORIZATION, Place::Anywhere),
    ("apikey", Place::Anywhere),
    ("accesskey", Place::Anywhere),
    ("privatekey", Place::Anywhere),
    ("token", Place::EndOfPart),
    ("bearer", Place::WholePart),
    ("sshpass", Place::WholePart),
    ("pass", Place::WholePart),
    ("pw", Place::WholePart),
    ("pwd", Place::WholePart),
    ("key", Place::LaterPart),
];

/// The value of this HTTP header contains spaces: `Authorization: Basic eA==`.
const AUTHORIZATION: &str = "authorization";

/// Options whose value is `USER:PASSWORD`.
const USER_OPTIONS: [&str; 4] = ["-u", "-U", "--user", "--proxy-user"];

/// Values that are not secrets.
const PLAIN_VALUES: [&str; 5] = ["true", "false", "null", "none", SECRET];

/// Token formats of well-known services: the prefix, the characters allowed after it in addition to ASCII letters and
/// digits, and their minimum number.
const SHAPES: [(&str, &str, usize); 37] = [
    // A JSON web token, or another JSON object in Base64.
    ("eyJ", "-_.+/=", 16),
    ("ghp_", "", 10),
    ("gho_", "", 10),
    ("ghu_", "", 10),
    ("ghs_", "", 10),
    ("ghr_", "", 10),
    ("github_pat_", "_", 10),
    ("glpat-", "-_.", 10),
    ("gldt-", "-_.", 10),
    ("glrt-", "-_.", 10),
    ("glptt-", "-_.", 10),
    ("glcbt-", "-_.", 10),
    ("AKIA", "", 12),
    ("ASIA", "", 12),
    ("AIza", "-_", 20),
    ("ya29.", "-_", 20),
    ("sk-", "-_", 16),
    ("sk_live_", "", 10),
    ("sk_test_", "", 10),
    ("rk_live_", "", 10),
    ("hf_", "", 16),
    ("nvapi-", "-_", 10),
    ("xoxa-", "-", 10),
    ("xoxb-", "-", 10),
    ("xoxe-", "-", 10),
    ("xoxe.", "-.", 10),
    ("xoxo-", "-", 10),
    ("xoxp-", "-", 10),
    ("xoxr-", "-", 10),
    ("xoxs-", "-", 10),
    ("xapp-", "-", 10),
    ("npm_", "", 20),
    ("pypi-", "-_", 20),
    ("dckr_pat_", "-_", 10),
    ("hvs.", "-_", 16),
    ("tskey-", "-", 10),
    ("AGE-SECRET-KEY-", "", 10),
];

/// The beginning of the first line of a key or certificate in PEM format.
const PEM: &str = "-----BEGIN ";

/// Whether the value of a field, a setting or an option with this name is a secret.
pub(super) fn is_secret_name(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    let parts = parts(name);
    WORDS.iter().any(|(word, place)| match place {
        Place::Anywhere => lower.contains(word),
        Place::EndOfPart => parts.iter().any(|part| part.strip_suffix('s').unwrap_or(part).ends_with(word)),
        Place::WholePart => parts.iter().any(|part| part == word),
        Place::LaterPart => parts.iter().skip(1).any(|part| part == word),
    })
}

/// Returns the parts of a name in lower case, without the digits at their ends.
fn parts(name: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut was_lower = false;
    for c in name.chars() {
        let separates = matches!(c, '_' | '-' | '.');
        if separates || (was_lower && c.is_ascii_uppercase()) {
            parts.push(String::new());
        }
        was_lower = c.is_ascii_lowercase();
        if let Some(part) = parts.last_mut()
            && !separates
        {
            part.push(c.to_ascii_lowercase());
        }
    }
    parts.into_iter().map(|part| part.trim_end_matches(|c: char| c.is_ascii_digit()).to_owned()).collect()
}

/// Replaces the secrets in a text.
pub(super) fn without_secrets(text: &str) -> String {
    let (mut redacted, mut copied) = (String::with_capacity(text.len()), 0);
    let mut before = None;
    for (at, c) in text.char_indices() {
        if at < copied {
            before = Some(c);
            continue;
        }
        if let Some(secret) = secret_at(text, at, before) {
            redacted += &text[copied..secret.start];
            redacted += SECRET;
            copied = secret.end;
        }
        before = Some(c);
    }
    redacted + &text[copied..]
}

/// Returns the secret of a pattern that begins at `at`. `before` is the character before `at`.
fn secret_at(text: &str, at: usize, before: Option<char>) -> Option<Range<usize>> {
    let begins_name = !before.is_some_and(is_in_name);
    let begins_part = !before.is_some_and(char::is_alphanumeric);
    let rest = &text[at..];
    if rest.starts_with("://") {
        return user_of_url(text, at);
    }
    if begins_name && rest.starts_with(PEM) {
        return private_key(text, at);
    }
    let named = if begins_name { named_value(text, at, before) } else { None };
    named.or_else(|| if begins_part { token(rest).map(|length| at..at + length) } else { None })
}

fn is_in_name(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '-' | '.')
}

/// Returns the length of the token with which the text begins.
fn token(text: &str) -> Option<usize> {
    SHAPES.iter().find_map(|(start, further, shortest)| {
        let tail = text.strip_prefix(start)?;
        let end = tail.find(|c: char| !c.is_ascii_alphanumeric() && !further.contains(c)).unwrap_or(tail.len());
        // `sk-learn-something-or-other` is not a token.
        let is_random = tail[..end].contains(|c: char| c.is_ascii_digit() || c.is_ascii_uppercase())
            || !tail[..end].contains(['-', '_', '.']);
        (end >= *shortest && is_random).then_some(start.len() + end)
    })
}

/// Returns user and password of a URL. `at` is the position of `://`.
fn user_of_url(text: &str, at: usize) -> Option<Range<usize>> {
    let start = at + "://".len();
    let url = &text[start..];
    let url =
        &url[..url.find(|c: char| c.is_whitespace() || is_quote(c) || matches!(c, '<' | '>')).unwrap_or(url.len())];
    let authority = &url[..url.find(['/', '?', '#']).unwrap_or(url.len())];
    let end = authority.rfind('@').or_else(|| {
        // A password can contain an unescaped slash. A port is a number.
        let (_, after) = authority.split_once(':')?;
        let is_port = after.chars().all(|c| c.is_ascii_digit());
        if is_port || authority.starts_with('[') { None } else { url.rfind('@') }
    })?;
    let is_http = text[..at].ends_with("http") || text[..at].ends_with("https");
    // A name without a password is a token in `https://TOKEN@host`, but not in `ssh://git@host`.
    let has_secret = url[..end].contains(':') || is_http;
    (end > 0 && has_secret && &url[..end] != SECRET).then_some(start..start + end)
}

/// Returns the private key that begins at `at`, with its first and last line.
fn private_key(text: &str, at: usize) -> Option<Range<usize>> {
    let line_end = end_of_line(text, at);
    if !text[at..line_end].contains("PRIVATE KEY") {
        return None;
    }
    let block = &text[at..text.floor_char_boundary(at + LONGEST)];
    let last = block.find("-----END ").map(|last| last + "-----END ".len());
    if let Some(end) = last.and_then(|last| block[last..].find("-----").map(|end| last + end + "-----".len())) {
        return Some(at..at + end);
    }
    // The end is missing. Remove the lines that can belong to the key.
    let is_key = |line: &&str| {
        let line = line.trim();
        !line.is_empty() && line.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '/' | '='))
    };
    let more = text[line_end..].strip_prefix('\n').map_or(0, |rest| {
        let lines: usize = rest.split_inclusive('\n').take_while(is_key).map(str::len).sum();
        if lines == 0 { 0 } else { 1 + rest[..lines].trim_end_matches('\n').len() }
    });
    Some(at..line_end + more)
}

/// Returns the value that belongs to the name or option at `at`.
fn named_value(text: &str, at: usize, before: Option<char>) -> Option<Range<usize>> {
    let length = text[at..].find(|c| !is_in_name(c)).unwrap_or(text.len() - at);
    let (name, end) = (&text[at..at + length], at + length);
    if name.is_empty() {
        return None;
    }
    if name.starts_with('-')
        && let Some(value) = user_option(text, name, end)
    {
        return Some(value);
    }
    if !is_secret_name(name) {
        return None;
    }
    let (start, separator) = start_of_value(text, name, end)?;
    // In `"password=a b"`, the value ends at the quote, but in `"password" = a` it does not.
    let around = before.filter(|quote| is_quote(*quote) && !text[end..].trim_start_matches('\\').starts_with(*quote));
    let mut value = if let Some(quoted) = quoted(text, start) {
        quoted
    } else if let Some(quote) = around {
        let line_end = end_of_line(text, start);
        start..text[start..line_end].find(quote).map_or(line_end, |length| start + length)
    } else if name.to_ascii_lowercase().contains(AUTHORIZATION) {
        start..end_of_line(text, start)
    } else {
        bracketed(text, start).unwrap_or_else(|| word(text, start))
    };
    if let Some(first) = text[value.clone()].find(PEM)
        && let Some(key) = private_key(text, value.start + first)
    {
        value.end = value.end.max(key.end);
    }
    let shown = &text[value.clone()];
    let is_plain = shown.trim().is_empty() || PLAIN_VALUES.contains(&shown);
    let is_prose = separator == ':' && is_prose(text, name, &value);
    (!is_plain && !is_prose).then_some(value)
}

/// Returns the password in the value of `-u`, `--user` and similar options. `end` is the end of the option's name.
fn user_option(text: &str, name: &str, end: usize) -> Option<Range<usize>> {
    let value = if USER_OPTIONS.contains(&name) {
        let (start, _) = start_of_value(text, name, end)?;
        quoted(text, start).unwrap_or_else(|| word(text, start))
    } else if name.starts_with("-u") && text[end..].starts_with(':') {
        // `-uUSER:PASSWORD`
        end - name.len() + "-u".len()..word(text, end).end
    } else {
        return None;
    };
    let (user, password) = text[value.clone()].split_once(':')?;
    let are_ids = [user, password].iter().all(|id| id.chars().all(|c| c.is_ascii_digit()));
    let is_pair = !user.is_empty() && !password.is_empty() && !password.starts_with("//") && !are_ids;
    (is_pair && password != SECRET).then(|| value.end - password.len()..value.end)
}

/// Returns whether a match is prose, such as `pass: the job runs`: the name is a short word, and text follows the value.
fn is_prose(text: &str, name: &str, value: &Range<usize>) -> bool {
    let is_short = WORDS.iter().any(|(word, place)| matches!(place, Place::WholePart) && *word == name);
    let is_word = text[value.clone()].chars().all(|c| c.is_ascii_lowercase());
    let continues = text[value.end..].trim_start_matches(is_blank).starts_with(char::is_alphabetic);
    is_short && is_word && continues
}
